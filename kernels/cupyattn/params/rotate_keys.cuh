// The argument of the rotate_keys kernel. launch/driver/params.py mirrors it.
#pragma once

#include "cupyattn/params/attention.cuh"

namespace cupyattn {

struct RotateKeysParams {
  const void* k;  // [rows, num_kv_heads, head_dim] or pages of such rows, on 16-byte boundaries
  const WorkItem* work;  // nullptr: one request, of which each block takes an equal share
  const int32_t* kv_indices;
  void* rotated;  // the rotated keys, contiguous; pages in the order of kv_indices
  int64_t k_stride_n, k_stride_h, k_stride_page;
  int32_t kv_len;  // of the one request
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t tile_rows;  // packed rows of an item
  int32_t page_size;
  uint32_t page_magic;  // as in AttentionParams
  int32_t page_shift;
  int32_t padding;
  uint32_t rope_step[kMaxRopePairs];  // as in AttentionParams
};

static_assert(sizeof(RotateKeysParams) == 88 + 4 * kMaxRopePairs,
              "RotateKeysParams and its mirror in launch/driver/params.py must agree");

}  // namespace cupyattn
