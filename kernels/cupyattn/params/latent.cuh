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
  // The caller's requests have `request_tokens` tokens each, and with lists of keys each token is a
  // request of its own to the kernel. Between the last token of one and the first of the next are
  // so many elements more than a stride.
  int64_t q_gap, q_rope_gap;
  float* max_logits;  // [qo_len, num_qo_heads] without gaps, the largest natural logit of each row;
                      // -inf before the launch; read with lists; may be nullptr
  const int32_t* list_lens;  // keys of each request: its last token may see so many entries of its
                             // list, each token before one less. Read if there is no work list;
                             // may be nullptr
  int32_t list_lens_stride;  // words
  int32_t request_tokens;
  int32_t list_gap;   // as q_gap, of entries of lists
  int32_t num_slots;  // rows of all pages: an entry of a list beyond them is no key

  // What is added to the place of a token's rows, or of its list, that strides tell.
  __device__ __forceinline__ int64_t gaps_before(int token, int64_t gap) const {
    return gap == 0 ? 0 : token / request_tokens * gap;  // mutate: gaps-between-requests-lost
  }
  // An entry of a list, or -1 where it is no key.
  __device__ __forceinline__ int slot(int entry) const {
    // mutate: entries-beyond-the-cache
    return static_cast<uint32_t>(entry) < static_cast<uint32_t>(num_slots) ? entry : -1;
  }
};

static_assert(sizeof(LatentParams) == sizeof(AttentionParams) + 104,
              "LatentParams and its mirror in launch/driver/params.py must agree");

}  // namespace cupyattn
