// The arguments of the plan_batch and pad_lse kernels. launch/attention/plan_batch.py and
// launch/attention/pad_lse.py pack them.
#pragma once

#include "cupyattn/params/attention.cuh"

namespace cupyattn {

enum class IndexKind : int32_t { kInt32 = 0, kUint32 = 1, kInt64 = 2 };

// How an array of lengths or offsets lies in device memory.
struct IndexFormat {
  int64_t stride;  // elements
  IndexKind kind;
  int32_t unit;  // what one token counts; negative: minus that, and a length is a step to the next
};

struct PlanBatchParams {
  const void* qo_lens;     // [num_requests]; nullptr: all are `qo_len`, or steps of qo_offsets
  const void* kv_lens;     // [num_requests], or offsets [num_requests + 1] whose steps they are
  const void* qo_offsets;  // [num_requests + 1 where lengths are steps]; nullptr: steps of `qo_len`
  const void* kv_offsets;  // [num_requests]; nullptr: steps of kv_step
  const float* scale_q;    // one number; may be nullptr, as may the next two
  const float* scale_k;
  const float* scale_v;
  const void* kv_begin;  // [num_requests] the first key that rows see; nullptr: all are 0. Where
                         // ranks share keys: keys of the whole request, or with a negative unit
                         // those ahead of its rows
  WorkItem* items;     // [max_items]
  int32_t* merges;     // [num_merges]: the first item of each split tile, then -1
  uint32_t* counters;  // [num_counters], zeroed
  float* scales;       // [num_qo_heads + 2 * num_kv_heads]: scale_q, scale_k, scale_v, repeated
  IndexFormat qo_lens_format, kv_lens_format, qo_offsets_format, kv_offsets_format, kv_begin_format;
  int32_t num_requests;
  int32_t qo_len;      // of every request; negative: steps of qo_offsets
  int32_t num_rows;    // rows of q, which bound every request
  int32_t kv_step;     // from a request's kv_start to the next one's
  int32_t max_kv_len;  // keys a request has room for
  int32_t group_size, num_kv_heads;
  int32_t tile_q, tile_q_shift;
  int32_t tile_kv, tile_kv_shift;
  uint32_t tile_q_magic, tile_kv_magic, group_magic;  // for divisions, see shared/work.cuh
  int32_t group_shift;
  int32_t window_left, window_right;  // as in AttentionParams
  int32_t items_per_wave;             // items that run at a time
  int32_t max_tiles;                  // of rows
  int32_t max_more;                   // items that splitting may add
  int32_t max_items, num_merges, num_counters;
  float least_part_cost;                          // as in schedule/tile_shape.py, cost_of_part
  float block, merge, state, part, least_share;  // as in schedule/balance.py, Costs
  int32_t sharers;     // requests, one after another, that are one of the caller's: its place in
                       // the batch is in WorkItem::mask_start
  int32_t kv_room;     // what kv_offsets may name: rows of k, or keys of a table
  float a_wave, a_more;  // 1 / items_per_wave, 1 / max_more
  // Equal shares of all key tiles (plan/cuts.cuh): how many, where requests may be cut; else 0. What
  // a part costs besides its key tiles.
  int32_t num_shares, share_overhead;
  int32_t fused_splits;  // of a tile that is cut, which the last of its blocks merges
  int32_t num_blocks;    // that begin with the first items of such a list
  // Lists of keys: tokens are requests, and so many of them belong to one of the caller's.
  int32_t request_tokens;  // that share an entry of kv_lens; else 1
  int32_t list_gap;        // added to kv_start between the caller's requests
  int32_t counts_later;    // 1: a token sees one key less for each token of its request behind it

  // Where ranks share keys, which lists have no part in: a rank's tokens, see common/key_share.cuh.
  __device__ __forceinline__ int share_run() const { return request_tokens; }
  __device__ __forceinline__ int share_period() const { return list_gap; }
  __device__ __forceinline__ int share_first() const { return counts_later; }
};

struct PadLseParams {
  PlanBatchParams plan;                        // where the rows of each request are
  const float* rows;                           // [num_rows, num_heads], base 2
  float* padded;                               // [num_requests, max_qo_len, num_heads], natural log
  int64_t stride_request, stride_n, stride_h;  // of `padded`, in elements
  int32_t num_heads, max_qo_len;
};

static_assert(sizeof(PlanBatchParams) == 96 + 80 + 160 &&
                  sizeof(PadLseParams) == sizeof(PlanBatchParams) + 48,
              "the structs and their mirrors in launch/attention must agree");

}  // namespace cupyattn
