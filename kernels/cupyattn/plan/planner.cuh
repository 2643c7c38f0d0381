// How one block lays out a work list, after schedule/batch.py: what plan_batch.cuh and read_tables.cuh
// share. They read the requests and choose the size of parts. Tiles are then ordered by the length of
// their parts, longest first, in buckets.
//
// The block runs alone, so its latency counts. Loops are not unrolled, because fetching instructions
// costs most; a batch of few requests takes few barriers.
#pragma once

#include "cupyattn/plan/balance.cuh"
#include "cupyattn/plan/block_scan.cuh"
#include "cupyattn/plan/planned_request.cuh"
#include "cupyattn/ptx/memory.cuh"

namespace cupyattn {

// Traits: Params, the kernel's arguments; kThreads; kRagged, whether requests may have several
// numbers of tiles of rows.
template <typename Traits>
struct Planner {
  using Params = typename Traits::Params;
  static constexpr bool kRagged = Traits::kRagged;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kBuckets = 64;
  // Requests of one bucket count on different words, so that their atomics do not collide.
  static constexpr int kLanesApart = 8;
  static constexpr int kNoSplit = 0x7fffffff;
  static constexpr int kSplitsBits = 20;
  static constexpr int kSplitsMask = (1 << kSplitsBits) - 1;
  // Items are written 16 bytes at a time; the last two constants say where `split` lies.
  static constexpr int kChunks = sizeof(WorkItem) / sizeof(Vector16);
  static constexpr int kSplitChunk = 1, kSplitWord = 1;
  // Lanes that place one of a few requests in the order, and how many requests are few.
  static constexpr int kPlacers = 8, kFewRequests = kThreads / kPlacers;

  struct SharedMemory {
    WorkItem tile[kThreads];  // tiles of rows, with their first parts
    int tile_end[kThreads];   // items up to the end of each
    uint32_t bucket[kBuckets * kLanesApart];
    int warp_sum[kWarps];
    uint32_t most[3][kWarps], sum[3][kWarps];
  };

  static_assert(kBuckets * kLanesApart == kThreads, "a thread scans one bucket");

  // Facts about the batch, which all threads know.
  struct Totals {
    int tiles, most_tiles;    // tiles of rows: of all requests, of one request
    int longest2, shortest2;  // twice a request's mean number of key tiles a tile
    float key_tiles;          // key tiles of all tiles
    float bound;              // key_tiles if all tiles of a request were its longest
    int longest_tiles;        // the same, exactly

    __device__ __forceinline__ bool is_even() const {
      return 0.5f * longest2 * tiles <= static_cast<float>(kEven) * key_tiles;
    }
  };

  // What a list has.
  struct Counts {
    int items, split_tiles;
  };

  const Params& params;
  SharedMemory& shared;
  const int thread, warp, lane;
  // Of requests. lengths: tiles, or keys if all requests have as many tiles. both_ends: the key tiles
  // of the first and the last tile together. order: the requests, longest parts first. tiles_end:
  // where the tiles of each place in the order end.
  int *const lengths, *const both_ends, *const order, *const tiles_end;

  // requests: four arrays of `room` numbers
  __device__ __forceinline__ Planner(const Params& params, SharedMemory& shared, int* requests,
                                     int room)
      : params(params),
        shared(shared),
        thread(threadIdx.x),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize),
        lengths(requests),
        both_ends(lengths + room),
        order(both_ends + room),
        tiles_end(order + room) {}

  // The sums and maxima of all threads' values, for all.
  template <int kSums, int kMaxima>
  __device__ __forceinline__ void reduce(uint32_t (&sums)[kSums], uint32_t (&maxima)[kMaxima]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sums[i] = ptx::warp_sum(sums[i]);
      if (lane == 0) shared.sum[i][warp] = sums[i];
    }
#pragma unroll
    for (int i = 0; i < kMaxima; ++i) {
      maxima[i] = ptx::warp_max(maxima[i]);
      if (lane == 0) shared.most[i][warp] = maxima[i];
    }
    ptx::block_sync();
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sums[i] = ptx::warp_sum(lane < kWarps ? shared.sum[i][lane] : 0);
    }
#pragma unroll
    for (int i = 0; i < kMaxima; ++i) {
      maxima[i] = ptx::warp_max(lane < kWarps ? shared.most[i][lane] : 0);
    }
  }

  // The sum of the values of threads before this one; `total`: of all.
  __device__ __forceinline__ int scan(int value, int& total) {
    return block_scan(shared.warp_sum, warp, lane, value, total);
  }

  // The tiles of rows of a request.
  __device__ __forceinline__ int num_tiles(const Totals& totals, int index) const {
    return kRagged ? lengths[index] : totals.most_tiles;
  }

  // Puts the requests in the order of the list, if their lengths differ. Returns whether they do.
  __device__ __forceinline__ bool sort_requests(const Totals& totals, int size) {
    const bool is_sorted = totals.longest2 > totals.shortest2;
    if (is_sorted && params.num_requests <= kFewRequests) {
      sort_few(totals, size);
    } else if (is_sorted) {
      sort(totals, size);
    }
    return is_sorted;
  }

  // Fills `tiles_end`.
  __device__ __forceinline__ void count_tiles(const Totals& totals, bool is_sorted) {
    int before = 0;
#pragma unroll 1
    for (int base = 0; base < params.num_requests; base += kThreads) {
      const int index = base + thread;
      const bool exists = index < params.num_requests;
      const int count = exists ? num_tiles(totals, is_sorted ? order[index] : index) : 0;
      int total;
      const int start = before + scan(count, total);
      if (exists) tiles_end[index] = start + count;
      before += total;
      ptx::block_sync();
    }
  }

  // In how many parts so many key tiles are split.
  static __device__ __forceinline__ int splits_of(int key_tiles, int size) {
    return size == kNoSplit ? 1 : max_of(ceil_div(key_tiles, size), 1);
  }

  // Writes the list of so many tiles of rows. tiles_each: of every request, or 0 where they differ.
  // item_of(index, row_tile) is the first part of a request's tile. list_merges(is_split, split_tile,
  // first, total) notes where the parts of a tile that is split begin; total: as of a scan.
  template <typename ItemOf, typename ListMerges>
  __device__ __forceinline__ Counts write_items(int tiles, int size, bool is_sorted, int tiles_each,
                                                const ItemOf& item_of,
                                                const ListMerges& list_merges) {
    int items = 0, split_tiles = 0;
#pragma unroll 1
    for (int base = 0; base < tiles; base += kThreads) {
      const int tile = base + thread;
      WorkItem item{};
      if (tile < tiles) {
        const Place place = place_of(tile, is_sorted, tiles_each);
        item = item_of(place.index, place.row_tile);
      }
      shared.tile[thread] = item;
      int count = min_of(tiles - base, kThreads), total = count, start = thread;
      if (size != kNoSplit) {
        const int splits = item.num_splits;
        const int is_split = splits > 1 ? 1 : 0;
        const int before = scan(splits | is_split << kSplitsBits, total);
        start = before & kSplitsMask;
        const int split_tile = split_tiles + (before >> kSplitsBits);
        shared.tile[thread].split_tile = split_tile;
        // Only the items of split tiles before this one have states.
        // mutate: states-of-whole-tiles
        shared.tile[thread].first_state = items + start - (tile - split_tile);
        shared.tile_end[thread] = start + splits;
        list_merges(is_split, split_tile, items + start, total);
        split_tiles += total >> kSplitsBits;
      }
      ptx::block_sync();  // mutate: tiles-read-early
      spread(items, total & kSplitsMask, count);
      items += total & kSplitsMask;
      ptx::block_sync();  // mutate: tile-rounds-overlap
    }
    return Counts{items, split_tiles};
  }

  // Writes all parts of the `tiles` tiles in shared memory: `count` items from `first` on. Threads
  // write neighbouring words, because one block alone is slow to write.
  __device__ __forceinline__ void spread(int first, int count, int tiles) {
    Vector16* chunks = reinterpret_cast<Vector16*>(params.items + first);
    const int room = kChunks * min_of(count, params.max_items - first);
#pragma unroll 1
    for (int i = thread; i < room; i += kThreads) {
      const int item = i / kChunks, part = i % kChunks;
      const int tile = count == tiles ? item : find(shared.tile_end, tiles, item);
      Vector16 chunk = reinterpret_cast<const Vector16*>(shared.tile + tile)[part];
      if (part == kSplitChunk && count != tiles) {
        // mutate: splits-from-round
        chunk.word[kSplitWord] = item - (shared.tile_end[tile] - shared.tile[tile].num_splits);
      }
      chunks[i] = chunk;
    }
  }

 private:
  // The length of a request's parts, which are at most this long. Lengths are twice the number of
  // key tiles.
  __device__ __forceinline__ float part_of(int index, float most) const {
    const float keys = static_cast<float>(both_ends[index]);
    const float parts = ceilf(keys * ptx::rcp_approx(most));
    return most < keys ? keys * ptx::rcp_approx(parts) : keys;
  }

  __device__ __forceinline__ int bucket_of(int index, float most, float scale) const {
    const int place = min_of(static_cast<int>(part_of(index, most) * scale), kBuckets - 1);
    return (kBuckets - 1 - place) * kLanesApart + lane % kLanesApart;
  }

  // Orders requests by the length of their parts, longest first.
  __device__ __forceinline__ void sort(const Totals& totals, int size) {
    const float most = fminf(static_cast<float>(totals.longest2), 2.0f * size);
    const float scale = (kBuckets - 0.5f) * ptx::rcp_approx(most);
    // `tiles_end` holds the place in the bucket for now.
#pragma unroll 1
    for (int index = thread; index < params.num_requests; index += kThreads) {
      const int bucket = bucket_of(index, most, scale);
      tiles_end[index] = static_cast<int>(ptx::atomic_add_shared(&shared.bucket[bucket], 1));
    }
    ptx::block_sync();
    int total;
    const int start = scan(static_cast<int>(shared.bucket[thread]), total);
    shared.bucket[thread] = start;
    ptx::block_sync();  // mutate: buckets-read-early
#pragma unroll 1
    for (int index = thread; index < params.num_requests; index += kThreads) {
      const int bucket = bucket_of(index, most, scale);
      // mutate: bucket-requests-collide
      order[static_cast<int>(shared.bucket[bucket]) + tiles_end[index]] = index;
    }
    ptx::block_sync();
  }

  // The same for few requests: eight lanes count who comes before one of them.
  __device__ __forceinline__ void sort_few(const Totals& totals, int size) {
    const float most = fminf(static_cast<float>(totals.longest2), 2.0f * size);
    // `tiles_end` holds the parts' lengths for now. They are positive, so their bits compare.
    if (thread < params.num_requests) {
      tiles_end[thread] = static_cast<int>(__float_as_uint(part_of(thread, most)));
    }
    ptx::block_sync();
    const int index = thread / kPlacers;
    int before = 0;
    if (index < params.num_requests) {
      const int own = tiles_end[index];
#pragma unroll 1
      for (int other = thread % kPlacers; other < params.num_requests; other += kPlacers) {
        const int part = tiles_end[other];
        // mutate: equal-requests-collide
        before += part > own || (part == own && other < index) ? 1 : 0;
      }
    }
#pragma unroll
    for (int step = 1; step < kPlacers; step *= 2) before += ptx::shuffle(before, lane ^ step);
    if (thread % kPlacers == 0 && index < params.num_requests) order[before] = index;
    ptx::block_sync();
  }

  // The first index whose end is beyond `x`.
  static __device__ __forceinline__ int find(const int* ends, int count, int x) {
    int low = 0, high = count - 1;
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ends[middle] > x) {  // mutate: end-counts-as-inside
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  struct Place {
    int index, row_tile;
  };

  // The request of a tile of rows. A request's last tile, which sees the most keys, comes first.
  __device__ __forceinline__ Place place_of(int tile, bool is_sorted, int tiles_each) const {
    int place = tile, row_tile = 0;
    if (tiles_each == 0) {
      place = find(tiles_end, params.num_requests, tile);
      row_tile = tiles_end[place] - 1 - tile;
    } else if (tiles_each > 1) {
      place = tile / tiles_each;
      row_tile = (place + 1) * tiles_each - 1 - tile;
    }
    return Place{is_sorted ? order[place] : place, row_tile};
  }
};

}  // namespace cupyattn
