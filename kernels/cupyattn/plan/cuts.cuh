// Equal shares of all key tiles: requests are cut where the share of a block ends. The arithmetic of
// schedule/cuts.py, which says why; here a thread has a request.
//
// Blocks begin with the first parts of shares, the heads of the list, and take the others by links
// (ListedPart), which lie behind the items of all blocks.
#pragma once

#include "cupyattn/plan/planner.cuh"

namespace cupyattn {

// Constants of schedule/cuts.py; tests/unit/schedule/test_cuts.py compares them. No mark cuts off
// fewer key tiles; what a state costs that a block merges.
constexpr int kMinCutTiles = 3;
constexpr float kCutState = 1.0f;

// Shares of the line on which each request takes its key tiles and `overhead`.
struct KeyShares {
  int size, overhead;

  static __device__ __forceinline__ KeyShares of(int total, int count, int overhead) {
    return KeyShares{max_of(ceil_div(total, count), overhead + kMinCutTiles), overhead};
  }
};

// A request on the line.
struct CutRequest {
  int begin, end, least, first_mark, cuts;

  // `least`: where the first mark is that may cut it.
  static __device__ __forceinline__ CutRequest of(const KeyShares& shares, int begin, int tiles) {
    const int end = begin + shares.overhead + tiles;
    const int least = begin + shares.overhead + kMinCutTiles;
    const int first = ceil_div(least, shares.size);
    // mutate: cut-of-a-short-end
    const int cuts = max_of((end - kMinCutTiles) / shares.size - first + 1, 0);
    return CutRequest{begin, end, least, first, cuts};
  }
  // Whether a mark that would cut off too little at either end is there: a share begins with this
  // request, or with the next.
  __device__ __forceinline__ bool begins_share(const KeyShares& shares) const {
    return ceil_div(begin, shares.size) * shares.size < min_of(least, end);
  }
  __device__ __forceinline__ bool ends_share(const KeyShares& shares) const {
    const int last = max_of(end - 1, 0) / shares.size * shares.size;
    return last >= least && end - last < kMinCutTiles;
  }
  // Its key tiles ahead of its `index`-th cut.
  __device__ __forceinline__ int tiles_ahead(const KeyShares& shares, int index) const {
    return (first_mark + index) * shares.size - begin - shares.overhead;
  }
};

template <typename Traits>
struct CutPlanner {
  using List = Planner<Traits>;
  using Params = typename Traits::Params;
  static constexpr int kThreads = List::kThreads, kBits = 10, kMask = (1 << kBits) - 1,
                       kHeadBit = 3 * kBits;

  // What is ahead of a request in the line's order.
  struct Ahead {
    int cuts, heads, splits;  // cuts; requests that begin a share; requests that are cut
    bool is_head;             // whether a share begins with the request itself

    static __device__ __forceinline__ int pack(int cuts, bool is_head) {
      return cuts | (is_head ? 1 : 0) << kBits | (cuts > 0 ? 1 : 0) << 2 * kBits;
    }
    static __device__ __forceinline__ Ahead of(int packed) {
      return Ahead{packed & kMask, packed >> kBits & kMask, packed >> 2 * kBits & kMask,
                   packed >> kHeadBit != 0};
    }
  };

  const Params& params;
  List& list;
  const KeyShares shares;
  const int tiles_each;  // of rows, of each request

  // Writes the list. Returns false, and writes nothing, if no mark cuts a request. Each thread has
  // one of at most kThreads requests.
  __device__ __forceinline__ bool run() const {
    const int index = list.thread;
    const bool exists = index < params.num_requests;
    const int tiles = exists ? tiles_of(index) : 0;
    int total;
    const int begin = list.scan(exists ? tiles + shares.overhead : 0, total);
    CutRequest own = CutRequest::of(shares, begin, tiles);
    if (!exists) own.cuts = 0;
    if (exists) {
      list.tiles_end[index] = begin;
      list.order[index] = own.ends_share(shares) ? 1 : 0;
    }
    ptx::block_sync();  // mutate: cut-ends-read-early
    // --- 1. Where shares begin ---
    const bool is_head =
        exists && (index == 0 || own.begins_share(shares) || list.order[index - 1] != 0);
    const int packed = list.scan(Ahead::pack(own.cuts, is_head), total);
    const Ahead ahead = Ahead::of(packed), all = Ahead::of(total);
    ptx::block_sync();
    if (all.cuts == 0) return false;
    // --- 2. Who is where in the list ---
    if (exists) {
      list.both_ends[index] = packed | (is_head ? 1 : 0) << kHeadBit;
      int* const heads = list.shared.tile_end + ahead.cuts + ahead.heads;
#pragma unroll 1
      for (int i = 0; i < own.cuts + (is_head ? 1 : 0); ++i) heads[i] = index;
      if (!is_head) list.order[index - ahead.heads] = index;
    }
    ptx::block_sync();  // mutate: cut-order-read-early
    const int num_blocks = params.num_blocks;
    const int num_heads = (all.cuts + all.heads) * tiles_each;
    write(0, num_heads, true);
    write(num_blocks, (params.num_requests - all.heads) * tiles_each, false);
    Vector16* const chunks = reinterpret_cast<Vector16*>(params.items);
    const int end = min_of(num_blocks, params.max_tiles) * List::kChunks;
#pragma unroll 1
    for (int i = num_heads * List::kChunks + list.thread; i < end; i += kThreads) {
      chunks[i] = Vector16{};  // mutate: blocks-without-a-share
    }
    return true;
  }

 private:
  __device__ __forceinline__ void list_merge(int place) const {
    const int at = static_cast<int>(ptx::atomic_add_shared(list.shared.bucket, 1));
    if (at < params.num_merges) params.merges[at] = place;
  }
  __device__ __forceinline__ int tiles_of(int index) const {
    return PlannedRequest::divide_up(params, list.lengths[index]);
  }

  // Writes some items from `first` on: a thread makes one, all write them.
  __device__ __forceinline__ void write(int first, int count, bool are_heads) const {
#pragma unroll 1
    for (int base = 0; base < count; base += kThreads) {
      const int place = base + list.thread;
      if (place < count) list.shared.tile[list.thread] = item_at(first, place, are_heads);
      ptx::block_sync();  // mutate: cut-items-read-early
      const int made = min_of(count - base, kThreads);
      list.spread(first + base, made, made);
      ptx::block_sync();  // mutate: cut-rounds-overlap
    }
  }

  __device__ __forceinline__ WorkItem item_at(int first, int place, bool are_heads) const {
    const int part = place / tiles_each, tile = place - part * tiles_each;
    const int index = are_heads ? list.shared.tile_end[part] : list.order[part];
    const Ahead ahead = Ahead::of(list.both_ends[index]);
    const int tiles = tiles_of(index);
    const CutRequest own = CutRequest::of(shares, list.tiles_end[index], tiles);
    // A request that begins a share has a head more than it has cuts; the heads of others are behind
    // cuts.
    const int rank = part - ahead.cuts - ahead.heads;
    const int split = are_heads ? rank + (ahead.is_head ? 0 : 1) : 0;

    const PlannedRequest request = PlannedRequest::by_steps(params, index, list.lengths[index]);
    WorkItem item{};
    item.q_start = request.q_start;
    item.qo_len = request.qo_len;
    item.kv_start = request.kv_start;
    item.kv_len = request.kv_len;
    item.first_row = (tiles_each - 1 - tile) * params.tile_q;
    item.split = split;
    item.num_splits = own.cuts + 1;
    // A request that is cut leaves a state more than it has cuts.
    item.first_state = (ahead.cuts + ahead.splits) * tiles_each;
    item.split_tile = ahead.splits * tiles_each;
    if (own.cuts > 0) {
      item.first_state += tile * item.num_splits;
      item.split_tile += tile;
      // The last block merges few parts itself; a launch merges more.
      if (split == 0 && item.num_splits > params.fused_splits) list_merge(first + place);
    }
    ListedPart listed;
    listed.begin = split == 0 ? 0 : own.tiles_ahead(shares, split - 1);
    listed.end = split == own.cuts ? max_of(tiles, 1) : own.tiles_ahead(shares, split);
    listed.next = 0;
    // The next request follows, unless it begins a share.
    if (split == own.cuts && index + 1 < params.num_requests) {
      const Ahead next = Ahead::of(list.both_ends[index + 1]);
      const int other = (index + 1 - next.heads) * tiles_each + tile;
      if (!next.is_head) listed.next = params.num_blocks + other;
    }
    item.mask_start = listed.pack();
    return item;
  }
};

}  // namespace cupyattn
