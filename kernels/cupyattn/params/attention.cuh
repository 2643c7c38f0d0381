// The one argument of the attention kernels, passed by value. launch/params.py mirrors it field by
// field. Strides are in elements and 64-bit: a cache may hold more than 2^31 elements.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

constexpr int kMaxRopePairs = 128;

struct AttentionParams {
  const void* q;         // [qo_len, num_qo_heads, head_dim_qk]
  const void* k;         // [kv_len, num_kv_heads, head_dim_qk]
  const void* v;         // [kv_len, num_kv_heads, head_dim_vo]
  void* o;               // [qo_len, num_qo_heads, head_dim_vo]
  float* lse;            // [qo_len, num_qo_heads], base 2; may be nullptr
  const uint8_t* mask;   // bit (q * kv_len + k), little endian; read only by custom-mask kernels
  const float* sinks;    // [num_qo_heads], natural-log logits; may be nullptr
  const float* scale_q;  // [num_qo_heads]; may be nullptr, as may the next two
  const float* scale_k;  // [num_kv_heads]
  const float* scale_v;  // [num_kv_heads]
  float* partial_o;      // [num_kv_heads * num_q_tiles, num_splits, rows of a tile, head_dim_vo]
  float* partial_lse;    // [num_kv_heads * num_q_tiles, num_splits, rows of a tile]
  uint32_t* counters;    // [num_kv_heads * num_q_tiles], zero before and after the launch
  int64_t q_stride_n, q_stride_h;
  int64_t k_stride_n, k_stride_h;
  int64_t v_stride_n, v_stride_h;
  int64_t o_stride_n, o_stride_h;
  int64_t lse_stride_n, lse_stride_h;
  int64_t mask_bytes;  // length of `mask`
  int32_t qo_len, kv_len;
  int32_t num_kv_heads, group_size;
  int32_t num_q_tiles, num_splits;
  int32_t causal;         // 0 or 1
  int32_t window_left;    // negative: no window
  float sm_scale;         // whole logit scale but for scale_q, scale_k
  float logits_soft_cap;  // read only by soft-cap kernels
  float output_scale;     // multiplies the output
  float softmax_scale;    // sm_scale to base 2; read only where it is positive and the whole scale
  float softmax_slack;    // 8 / softmax_scale
  int32_t first_q_tile;   // of this launch: grids are limited, requests are not
  uint32_t rope_step[kMaxRopePairs];  // turns per position of each rotated pair, times 2^32
};

static_assert(sizeof(AttentionParams) == 104 + 88 + 56 + 4 * kMaxRopePairs,
              "AttentionParams and its mirror in launch/params.py must agree");

}  // namespace cupyattn
