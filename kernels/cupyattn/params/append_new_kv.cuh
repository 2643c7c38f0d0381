// The argument of the append_new_kv kernel. launch/attention/append_new_kv.py packs it.
#pragma once

#include "cupyattn/params/page.cuh"
#include "cupyattn/params/plan_batch.cuh"

namespace cupyattn {

struct AppendNewKvParams {
  AppendedRows rows[2];      // of K, of V: [k_rows, num_kv_heads, head_dim]
  const void* q;             // [q_rows, num_qo_heads, head_dim of K], rows to rotate
  void* rotated_q;           // the same, contiguous
  const void* cosines;       // [num_positions, rotary_dim / 2] of Config::DTypeTable
  const void* sines;         // likewise
  const void* lens;          // [batch_size] keys of each request before; negative: no request
  const void* rotary_lens;   // [batch_size] where rotation begins to count
  const void* q_offsets;     // [batch_size + 1]; nullptr: q_len rows each
  const void* k_offsets;     // [batch_size + 1]; nullptr: k_len rows each
  int32_t* lens_after;       // [batch_size] keys of each request with the new ones; 0: no request
  const int32_t* table;      // [batch_size, max_pages]
  IndexFormat lens_format, rotary_format, q_offsets_format, k_offsets_format;
  int64_t q_stride_n, q_stride_h;
  int64_t cosine_stride, sine_stride;  // from position to position
  int64_t table_stride;                // from request to request
  int64_t num_pages;                   // in the pool
  int64_t q_rows, k_rows;
  int32_t batch_size, max_pages, page_size;
  int32_t q_len, k_len;
  int32_t num_qo_heads, num_kv_heads;
  int32_t rotary_dim;  // leading elements that rotate
  int32_t num_positions;
  int32_t is_interleaved;  // pairs are neighbours; else element i and i + rotary_dim / 2
  int32_t q_moves;         // row i of q is i positions on; else all are where rotation begins
  int32_t lane_bits;       // 2^lane_bits threads take one head of one token
};

static_assert(sizeof(AppendNewKvParams) == 2 * 64 + 80 + 64 + 64 + 48,
              "AppendNewKvParams and its mirror in launch/attention/append_new_kv.py must agree");

}  // namespace cupyattn
