// A block's work: its request, its tile of packed query rows and its part of the keys. In a batch
// it comes from the work list, for a single request from the block index.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/params/attention.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

// n / d for 0 <= n < 2^31, by numbers that launch/driver/params.py finds for d. A division would be
// dozens of dependent instructions at the start of every block.
__device__ __forceinline__ int divide(int n, uint32_t magic, int shift) {
  // mutate: page-number-halved
  return static_cast<int>(ptx::multiply_high(2u * static_cast<uint32_t>(n), magic) >> shift);
}

// The query token of a packed row, and its head within the KV head's group.
struct PackGqaRow {
  int token, group_head;

  static __device__ __forceinline__ PackGqaRow of(const AttentionParams& params, int row) {
    const int token = divide(row, params.group_magic, params.group_shift);
    return PackGqaRow{token, row - token * params.group_size};
  }
};

// The rows of a tile that have work: whole tokens, which boxes copy, or all rows if more than a
// sixteenth would be left over. Those of one KV head lie one after another, so boxes copy any rows.
// TileConfig.used_rows (launch/tiles/config.py) must agree.
__device__ __forceinline__ int whole_token_rows(const AttentionParams& params, int tile_rows) {
  const int rows = PackGqaRow::of(params, tile_rows).token * params.group_size;
  return params.num_kv_heads > 1 && tile_rows - rows <= tile_rows / 16 ? rows : tile_rows;
}

// The lengths of a request, and where its rows and keys begin (see WorkItem).
struct Request {
  int q_start, qo_len, kv_start, kv_len, key_offset;
  int64_t mask_start;

  // The first key that any row sees.
  template <bool kKeyShare = false>
  __device__ __forceinline__ int first_key(const AttentionParams& params) const {
    if constexpr (kKeyShare) return 0;
    return params.positions == nullptr ? key_offset : 0;
  }

  // The keys of all ranks that share them.
  __device__ __forceinline__ int whole_len() const { return kv_len + key_offset; }

  // The position of a query token among the request's keys; later keys are in its future.
  // kKeyShare: among those of all ranks.
  template <bool kKeyShare = false>
  __device__ __forceinline__ int position(const AttentionParams& params, int token) const {
    if constexpr (kKeyShare) return token + whole_len() - qo_len;  // mutate: key-share-rows-by-own-keys
    if (params.positions == nullptr) return token + kv_len - qo_len;  // mutate: causality-top-left
    return params.positions[q_start + token] - key_offset;  // mutate: level-positions-not-shifted
  }
};

// What a list may say of a part whose request is cut anywhere (plan/cuts.cuh): its key tiles, and
// the item that its block takes next. `end` is 0 where parts are equal, and `next` where there is
// none. schedule/cuts.py packs it in WorkItem::mask_start.
struct ListedPart {
  static constexpr int kTileBits = 25, kNextBits = 14;

  int begin, end, next;

  static __device__ __forceinline__ ListedPart of(const Request& request) {
    const int end = static_cast<int>(request.mask_start >> (kTileBits + kNextBits));
    if (end == 0) return ListedPart{0, 0, 0};
    const int low = static_cast<int>(request.mask_start >> kNextBits);
    return ListedPart{low & ((1 << kTileBits) - 1), end,
                      static_cast<int>(request.mask_start) & ((1 << kNextBits) - 1)};
  }
  __device__ __forceinline__ int64_t pack() const {
    return (static_cast<int64_t>(end) << kTileBits | begin) << kNextBits | next;
  }
};

// One tile of packed rows, and its split. Row r is query token r / group, head r % group of the KV
// head's group.
struct TileWork {
  int kv_head, first_row, num_rows, split, num_splits, first_state, split_tile;

  // Whether the block leaves a state for a later merge instead of the result.
  // mutate: level-writes-output
  __device__ __forceinline__ bool leaves_state() const { return num_splits > 1 || split_tile < 0; }
  // The first partial state of this tile.
  __device__ __forceinline__ int64_t state(const AttentionParams& params) const {
    // mutate: state-of-another-head
    return static_cast<int64_t>(first_state) * params.num_kv_heads + kv_head * num_splits;
  }
  __device__ __forceinline__ int64_t counter(const AttentionParams& params) const {
    return static_cast<int64_t>(split_tile) * params.num_kv_heads + kv_head;
  }
};

struct BlockWork {
  Request request;
  TileWork tile;

  static __device__ __forceinline__ BlockWork of_item(const AttentionParams& params, int index,
                                                      int kv_head, int tile_rows) {
    const WorkItem item = params.work[index];  // as a whole, by two loads at once
    return of_listed(params, item, kv_head, tile_rows);
  }

  static __device__ __forceinline__ BlockWork of_listed(const AttentionParams& params,
                                                        const WorkItem& item, int kv_head,
                                                        int tile_rows) {
    const int first_row = ptx::warp_uniform(item.first_row);
    const int qo_len = ptx::warp_uniform(item.qo_len);
    return BlockWork{
        Request{ptx::warp_uniform(item.q_start), qo_len, ptx::warp_uniform(item.kv_start),
                ptx::warp_uniform(item.kv_len), item.key_offset, item.mask_start},
        TileWork{kv_head, first_row, min_of(tile_rows, qo_len * params.group_size - first_row),
                 ptx::warp_uniform(item.split), ptx::warp_uniform(item.num_splits),
                 item.first_state, item.split_tile}};
  }

  static __device__ __forceinline__ BlockWork of_tile(const AttentionParams& params, int q_tile,
                                                      int kv_head, int split, int tile_rows) {
    const int first_row = q_tile * tile_rows;
    return BlockWork{Request{0, params.qo_len, 0, params.kv_len, 0, 0},
                     TileWork{kv_head, first_row,
                              min_of(tile_rows, params.qo_len * params.group_size - first_row),
                              split, params.num_splits, q_tile * params.num_splits, q_tile}};
  }

  // As of_tile, where `params` say the lengths of each of many requests and the grid has the tiles
  // of all. kv_step: from a request's kv_start to the next one's.
  static __device__ __forceinline__ BlockWork of_equal(const AttentionParams& params, int q_tile,
                                                       int kv_head, int split, int tile_rows,
                                                       int kv_step) {
    const int num_tiles = ceil_div(params.qo_len * params.group_size, tile_rows);
    const int request = q_tile / num_tiles;
    BlockWork work = of_tile(params, q_tile - request * num_tiles, kv_head, split, tile_rows);
    work.request.q_start = request * params.qo_len;
    work.request.kv_start = request * kv_step;  // mutate: lists-in-one-place
    work.request.mask_start = request;
    work.tile.first_state = q_tile * params.num_splits;
    work.tile.split_tile = q_tile;
    return work;
  }

  // The work at `place` of the work list, or of the tiles and splits of one request. The longest
  // causal tiles come first. The second form has loaded the list's entry before.
  static __device__ __forceinline__ BlockWork of_index(const AttentionParams& params, int place,
                                                       int kv_head, int tile_rows) {
    return of_index(params, place, load(params, place), kv_head, tile_rows);
  }
  static __device__ __forceinline__ WorkItem load(const AttentionParams& params, int place) {
    return params.work == nullptr ? WorkItem{} : params.work[place];
  }
  static __device__ __forceinline__ BlockWork of_index(const AttentionParams& params, int place,
                                                       const WorkItem& listed, int kv_head,
                                                       int tile_rows) {
    if (params.work != nullptr) return of_listed(params, listed, kv_head, tile_rows);
    const int tile = params.num_splits == 1 ? place : place / params.num_splits;
    return of_tile(params, params.num_q_tiles - 1 - tile, kv_head, place - tile * params.num_splits,
                   tile_rows);
  }

  // The work of this block. Blocks of one item, or tile, are neighbours, because they read
  // neighbouring heads of the same keys. The longest causal tiles come first, so that short ones
  // fill the end of the grid; a work list has its own order.
  static __device__ __forceinline__ BlockWork of(const AttentionParams& params, int tile_rows) {
    return of(params, tile_rows, static_cast<int>(blockIdx.x));
  }
  // The work of this block for one KV head, which all blocks of a cluster have.
  static __device__ __forceinline__ BlockWork of(const AttentionParams& params, int tile_rows,
                                                 int kv_head) {
    const int index = params.first_q_tile + blockIdx.y;
    if (params.work != nullptr) return of_item(params, index, kv_head, tile_rows);
    return of_tile(params, params.num_q_tiles - 1 - index, kv_head, blockIdx.z, tile_rows);
  }
};

}  // namespace cupyattn
