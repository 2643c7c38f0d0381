// The argument of the rotate_keys kernel. launch/params.py mirrors it.
#pragma once

#include "cupyattn/common/types.cuh"
#include "cupyattn/params/attention.cuh"

namespace cupyattn {

struct RotateKeysParams {
  const void* k;  // [kv_len, num_kv_heads, head_dim], rows on 16-byte boundaries
  void* rotated;  // the same, contiguous
  int64_t k_stride_n, k_stride_h;
  int32_t kv_len, num_kv_heads;
  uint32_t rope_step[kMaxRopePairs];  // as in AttentionParams
};

static_assert(sizeof(RotateKeysParams) == 40 + 4 * kMaxRopePairs,
              "RotateKeysParams and its mirror in launch/params.py must agree");

}  // namespace cupyattn
