// The argument of kernels of latent attention: the one of all attention kernels, and the second
// parts of q and k. A row of q, and of k, lies in two parts, which may be parts of one array: the
// latent columns, at AttentionParams::q and k, and the rope columns. The latent columns of a key
// are its value too, so v is not read.
#pragma once

#include "cupyattn/params/attention.cuh"

namespace cupyattn {

struct LatentParams {
  AttentionParams attention;
  const void* q_rope;  // [qo_len, num_qo_heads, kHeadDimRope]
  const void* k_rope;  // pages of page_size rows [kHeadDimRope], of one head
  int64_t q_rope_stride_n, q_rope_stride_h;
  int64_t k_rope_stride_n, k_rope_stride_page;
  float rope_scale;  // multiplies q_rope: what the scale of k_rope is to the scale of k
  int32_t list_step;  // from a token's list of keys to the next one's, if there is no work list
};

static_assert(sizeof(LatentParams) == sizeof(AttentionParams) + 56,
              "LatentParams and its mirror in launch/driver/params.py must agree");

}  // namespace cupyattn
