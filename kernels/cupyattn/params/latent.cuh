// The argument of multi-head latent attention in absorbed form: that of all attention kernels, and
// where the rope parts of queries and keys lie. launch/driver/params.py mirrors it.
#pragma once

#include "cupyattn/params/attention.cuh"

namespace cupyattn {

// One latent key head serves all query heads. A key is a latent part, whose columns are also its
// value, and a rope part. Where both are one row of 576, the rope part is `k` + 512 with the
// strides of `k`.
struct LatentParams {
  AttentionParams attention;  // q, k: the latent parts (kHeadDimVO columns); v is not read
  const void* q_rope;         // [qo_len, num_qo_heads, kHeadDimRope]
  const void* k_rope;         // pages of page_size rows of kHeadDimRope, of one head
  int64_t q_rope_stride_n, q_rope_stride_h;
  int64_t k_rope_stride_n, k_rope_stride_page;
  float rope_scale;  // multiplies q_rope; 1 unless the parts of fp8 keys have scales of their own
  int32_t reserved;  // 0
};

static_assert(sizeof(LatentParams) == sizeof(AttentionParams) + 56,
              "LatentParams and its mirror in launch/driver/params.py must agree");

}  // namespace cupyattn
