// The plan of a batch whose lengths the host does not know: one block writes the work list that
// schedule/batch.py lays out. Each warp judges one size of parts, as schedule/balance.py does.
// Tiles are then ordered by the length of their parts, longest first, in buckets.
//
// The kernel runs one block alone, so its latency counts. Loops are not unrolled, because fetching
// instructions costs most; a batch of few requests takes few barriers. Lengths are not trusted:
// requests are cut to what the arrays hold, and a list that outgrows its room ends early.
#pragma once

#include "cupyattn/plan/block_scan.cuh"
#include "cupyattn/plan/planned_request.cuh"
#include "cupyattn/ptx/memory.cuh"

namespace cupyattn {

template <typename Config>
struct PlanBatch {
  // Plain requests have equally many rows, all of which see all keys, and lengths of int32.
  static constexpr bool kRagged = Config::kRagged, kPlain = Config::kPlain;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kBuckets = 64;
  // Requests of one bucket count on different words, so that their atomics do not collide.
  static constexpr int kLanesApart = 8;
  // These equal the constants of schedule/balance.py.
  static constexpr int kMaxWaves = 4;
  static constexpr float kWorthwhile = 0.95f, kEven = 1.15f;
  // Tiles this short, as a part of a block's share, balance by themselves.
  static constexpr float kShort = 0.1f;
  // How many sizes of parts are judged, one by each warp. The last leaves all tiles whole.
  static constexpr int kSizes = 16;
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
    float time[kSizes];
    int size[kSizes];
    // Four arrays of num_requests. lengths: a request's tiles, or its keys if all requests have as
    // many tiles. both_ends: the key tiles of its first and its last tile together. order: the
    // requests, longest parts first. tiles_end: where the tiles of each place in the order end.
    int requests[1];
  };

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/attention/plan_batch.py) must agree");
  static_assert(kWarps == kSizes, "a warp judges one size");
  static_assert(!kRagged || !kPlain, "plain requests have no lengths of q");
  static_assert(kBuckets * kLanesApart == kThreads, "a thread scans one bucket");

  const PlanBatchParams& params;
  SharedMemory& shared;
  const int thread, warp, lane;
  int *const lengths, *const both_ends, *const order, *const tiles_end;

  // Facts about the batch, which all threads know.
  struct Totals {
    int tiles, most_tiles;    // tiles of rows: of all requests, of one request
    int longest2, shortest2;  // twice a request's mean number of key tiles a tile
    float key_tiles;          // key tiles of all tiles
    float bound;              // key_tiles if all tiles of a request were its longest

    __device__ __forceinline__ bool is_even() const {
      return 0.5f * longest2 * tiles <= kEven * key_tiles;
    }
  };

  __device__ __forceinline__ PlanBatch(const PlanBatchParams& params, SharedMemory& shared)
      : params(params),
        shared(shared),
        thread(threadIdx.x),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize),
        lengths(shared.requests),
        both_ends(lengths + params.num_requests),
        order(both_ends + params.num_requests),
        tiles_end(order + params.num_requests) {}

  __device__ __forceinline__ void run() {
    ask_for_params();
    // Half of the warps write what needs no lengths, while lengths are on their way to the others.
    if (warp >= kWarps / 2) write_rest(thread - kThreads / 2);
    const Totals totals = kPlain ? read_plain_requests() : read_requests();
    const int size = choose_size(totals);
    const bool is_sorted = totals.longest2 > totals.shortest2;
    if (is_sorted && params.num_requests <= kFewRequests) {
      sort_few(totals, size);
    } else if (is_sorted) {
      sort(totals, size);
    }
    // Requests of equally many tiles, as all are where q has none of its own lengths.
    const bool is_even = !kRagged || totals.tiles == totals.most_tiles * params.num_requests;
    if (!is_even) count_tiles(totals, is_sorted);
    const int tiles = min_of(totals.tiles, params.max_tiles);
    write_items(tiles, size, is_sorted, is_even ? totals.most_tiles : 0);
  }

 private:
  // The arguments come from memory a line at a time. Each warp asks for one, before any is needed.
  __device__ __forceinline__ void ask_for_params() {
    constexpr int kLine = 16, kWords = sizeof(PlanBatchParams) / 4;
    const int word = min_of(kLine * warp, kWords - 1);
    if (lane == 0) shared.warp_sum[warp] = reinterpret_cast<const int*>(&params)[word];
  }

  // Writes spare items and merges, where the plan will not, and all that needs no lengths.
  __device__ __forceinline__ void write_rest(int first) {
    constexpr int kStep = kThreads / 2;
    // Each tile of rows has an item. How many there are is known where q has no lengths of its own.
    const int tiles = kRagged ? 0 : params.num_requests * tiles_of_uniform();
    const Vector16 zeros{};
    Vector16* chunks = reinterpret_cast<Vector16*>(params.items);
#pragma unroll 1
    for (int i = kChunks * tiles + first; i < kChunks * params.max_items; i += kStep) {
      chunks[i] = zeros;  // mutate: spare-items-kept
    }
#pragma unroll 1
    // mutate: spare-merges-kept
    for (int i = first; i < params.num_merges; i += kStep) params.merges[i] = -1;
#pragma unroll 1
    // mutate: counters-kept
    for (int i = first; i < params.num_counters; i += kStep) params.counters[i] = 0;
    const int num_qo_heads = params.num_kv_heads * params.group_size;
    repeat(params.scale_q, params.scales, num_qo_heads, first);
    repeat(params.scale_k, params.scales + num_qo_heads, params.num_kv_heads, first);
    repeat(params.scale_v, params.scales + num_qo_heads + params.num_kv_heads, params.num_kv_heads,
           first);
  }

  __device__ __forceinline__ void repeat(const float* scale, float* out, int count, int first) {
    if (scale == nullptr) return;
#pragma unroll 1
    for (int i = first; i < count; i += kThreads / 2) out[i] = *scale;
  }

  __device__ __forceinline__ Totals read_requests() {
    uint32_t tiles = 0, twice = 0, bound = 0;
    uint32_t most_tiles = 0, longest2 = 0, inverse = 0;
    shared.bucket[thread] = 0;
#pragma unroll 1
    for (int index = thread; index < params.num_requests; index += kThreads) {
      const PlannedRequest request = PlannedRequest::of<kRagged>(params, index);
      const int count = request.num_tiles(params);
      uint32_t ends = 0;
      if (count > 0) {
        const uint32_t last = request.key_tiles(params, (count - 1) * params.tile_q);
        const uint32_t first = count == 1 ? last : request.key_tiles(params, 0);
        ends = first + last;
        inverse = max_of(inverse, kNoSplit - ends);
        // Under a window the tiles in the middle may see more than either end.
        const bool is_bounded = count == 1 || params.window_left < 0;
        bound += count * (is_bounded ? max_of(first, last) : longest_tile(request));
        twice += count * ends;
      }
      lengths[index] = kRagged ? count : request.kv_len;
      both_ends[index] = static_cast<int>(ends);
      tiles += count;
      most_tiles = max_of(most_tiles, static_cast<uint32_t>(count));
      longest2 = max_of(longest2, ends);
    }
    uint32_t sums[3] = {tiles, twice, bound}, maxima[3] = {most_tiles, longest2, inverse};
    reduce(sums, maxima);
    return Totals{static_cast<int>(sums[0]),          static_cast<int>(maxima[0]),
                  static_cast<int>(maxima[1]),        static_cast<int>(kNoSplit - maxima[2]),
                  0.5f * static_cast<float>(sums[1]), static_cast<float>(sums[2])};
  }

  __device__ __forceinline__ Totals read_plain_requests() {
    const int32_t* const kv_lens = static_cast<const int32_t*>(params.kv_lens);
    uint32_t sums[1] = {0}, maxima[2] = {0, 0};
    shared.bucket[thread] = 0;
#pragma unroll 1
    for (int index = thread; index < params.num_requests; index += kThreads) {
      const int kv_len = max_of(min_of(kv_lens[index], params.max_kv_len), 0);
      const int keys = PlannedRequest::divide_up(params, kv_len);
      lengths[index] = kv_len;
      both_ends[index] = 2 * keys;
      sums[0] += keys;
      maxima[0] = max_of(maxima[0], static_cast<uint32_t>(keys));
      maxima[1] = max_of(maxima[1], static_cast<uint32_t>(kNoSplit - 2 * keys));
    }
    const int tiles = tiles_of_uniform();
    reduce(sums, maxima);
    const float key_tiles = static_cast<float>(tiles * sums[0]);
    return Totals{tiles * params.num_requests,
                  tiles,
                  static_cast<int>(2 * maxima[0]),
                  static_cast<int>(kNoSplit - maxima[1]),
                  key_tiles,
                  key_tiles};
  }

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

  // The tiles of rows of each request, where q has no lengths of its own.
  __device__ __forceinline__ int tiles_of_uniform() const {
    return PlannedRequest::by_steps(params, 0, 0).num_tiles(params);
  }

  // The tiles of rows of a request.
  __device__ __forceinline__ int num_tiles(const Totals& totals, int index) const {
    return kRagged ? lengths[index] : totals.most_tiles;
  }

  // The most key tiles that any tile of rows can visit under a window.
  __device__ __forceinline__ uint32_t longest_tile(const PlannedRequest& request) const {
    const int64_t tokens = params.window_right >= 0
                               ? static_cast<int64_t>(params.tile_q) + 1 + params.window_right
                               : request.qo_len;
    const int64_t keys = min_of(tokens, static_cast<int64_t>(request.qo_len)) + params.window_left;
    return PlannedRequest::divide_up(params, clamp(keys, request.kv_len));
  }

  // Chooses the most key tiles of one part, by an estimate of when the last block is done.
  __device__ __forceinline__ int choose_size(const Totals& totals) {
    const int longest = (totals.longest2 + 1) / 2;
    const float a_wave = params.a_wave, share = totals.key_tiles * a_wave;
    if (params.max_more == 0 || longest <= 1 || longest <= kShort * share) return kNoSplit;
    // Rounded up, because sums of floats are not exact and parts must not outgrow the list.
    int least = static_cast<int>(totals.bound * 1.0001f * params.a_more) + 1;
    if (params.least_part_cost > 0.0f) {
      const float cost = static_cast<float>(longest) * params.least_part_cost;
      least = max_of(least, static_cast<int>(ceilf(sqrtf(cost))));
    }
    const int size = size_to_judge(totals, longest, least);
    const float time = time_of(totals, size, size < longest, a_wave);
    if (lane == 0) {
      shared.time[warp] = time;
      shared.size[warp] = size;
    }
    ptx::block_sync();
    // Each warp finds the first of the best. Times are positive, so their bits compare.
    const float whole = shared.time[kSizes - 1] * kWorthwhile;
    if (whole <= share + params.least_share * params.block) return kNoSplit;
    const int index = lane % kSizes;
    const uint32_t bits = __float_as_uint(index == kSizes - 1 ? whole : shared.time[index]);
    const uint32_t best = ~ptx::warp_max(~bits);
    const uint32_t place = ptx::warp_max(bits == best ? kSizes - 1 - index : 0);
    // Whole tiles, whose place is 0, come last among equal times.
    return place == 0 ? kNoSplit : shared.size[kSizes - 1 - place];
  }

  // Sizes that fill whole waves. Kind 0 takes all tiles as equal; kinds 1 to 3 leave room for
  // no, half a or a whole part at the end of each tile. The last of kind 0 is half a wave where that
  // is nearly as fast.
  __device__ __forceinline__ int size_to_judge(const Totals& totals, int longest, int least) const {
    if (warp == kSizes - 1) return longest;
    const int kind = warp / kMaxWaves;
    const bool is_half = warp == kMaxWaves - 1 && params.least_share < 1.0f;
    const int slots = is_half ? params.items_per_wave / 2
                              : params.items_per_wave * (warp % kMaxWaves + 1);
    const float rest = slots - 0.5f * (kind - 1) * totals.tiles;
    int size = longest;
    if (kind == 0) {
      const float parts = floorf(slots * ptx::rcp_approx(static_cast<float>(totals.tiles)) + 1e-3f);
      if (parts > 1.0f) size = static_cast<int>(ceilf(longest * ptx::rcp_approx(parts)));
    } else if (rest > 0.0f) {
      size = static_cast<int>(fminf(totals.key_tiles * ptx::rcp_approx(rest), longest)) + 1;
    }
    return min_of(max_of(size, least), longest);
  }

  // When the last block would be done, in key tiles, if keys were split after `size` tiles.
  __device__ __forceinline__ float time_of(const Totals& totals, int size, bool is_split,
                                           float a_wave) const {
    const float inverse = ptx::rcp_approx(static_cast<float>(size));
    uint32_t items = 0, long_items = 0, long_twice = 0;
#pragma unroll 1
    for (int index = lane; index < params.num_requests; index += kWarpSize) {
      const uint32_t count = num_tiles(totals, index), twice = both_ends[index];
      const float parts_of_tile = fmaxf(ceilf(0.5f * twice * inverse), 1.0f);
      const uint32_t parts = count * static_cast<uint32_t>(parts_of_tile);
      // Short parts fill gaps, but long ones come in whole waves.
      const bool is_long = twice > static_cast<uint32_t>(size);
      items += parts;
      long_items += is_long ? parts : 0;
      long_twice += is_long ? count * twice : 0;
    }
    const float num_items = static_cast<float>(ptx::warp_sum(items));
    const float num_long = static_cast<float>(ptx::warp_sum(long_items));
    const float long_tiles = 0.5f * static_cast<float>(ptx::warp_sum(long_twice));
    const float busy = (totals.key_tiles + num_items * params.block) * a_wave;
    const float mean = num_long > 0.0f ? long_tiles * ptx::rcp_approx(num_long) : 0.0f;
    float waves = ceilf(num_long * a_wave);
    // The fewer blocks of one wave, the faster each.
    if (waves <= 1.0f && totals.is_even()) waves = fmaxf(params.least_share, num_long * a_wave);
    const float done = fmaxf(busy, waves * (mean + params.block));
    const float merge = params.merge + params.state * num_items * a_wave +
                        params.part * ceilf(0.5f * totals.longest2 * inverse);
    return is_split ? done + merge : done;
  }

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

  __device__ __forceinline__ int scan(int value, int& total) {
    return block_scan(shared.warp_sum, warp, lane, value, total);
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

  // tiles_each: of every request, or 0 where they differ.
  __device__ __forceinline__ void write_items(int tiles, int size, bool is_sorted,
                                              int tiles_each) {
    int items = 0, split_tiles = 0;
#pragma unroll 1
    for (int base = 0; base < tiles; base += kThreads) {
      const int tile = base + thread;
      WorkItem item{};
      if (tile < tiles) item = item_of(tile, size, is_sorted, tiles_each);
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
        if (is_split && split_tile < params.num_merges) params.merges[split_tile] = items + start;
        split_tiles += total >> kSplitsBits;
      }
      ptx::block_sync();  // mutate: tiles-read-early
      spread(items, total & kSplitsMask, count);
      items += total & kSplitsMask;
      ptx::block_sync();  // mutate: tile-rounds-overlap
    }
  }

  // The first part of a tile of rows. A request's last tile, which sees the most keys, comes first.
  __device__ __forceinline__ WorkItem item_of(int tile, int size, bool is_sorted,
                                              int tiles_each) const {
    int place = tile, row_tile = 0;
    if (tiles_each == 0) {
      place = find(tiles_end, params.num_requests, tile);
      row_tile = tiles_end[place] - 1 - tile;
    } else if (tiles_each > 1) {
      place = tile / tiles_each;
      row_tile = (place + 1) * tiles_each - 1 - tile;
    }
    const int index = is_sorted ? order[place] : place;
    PlannedRequest request;
    if constexpr (kRagged) {
      request = PlannedRequest::of<true>(params, index);
    } else {
      request = PlannedRequest::by_steps(params, index, lengths[index]);
    }
    WorkItem item{};
    item.q_start = request.q_start;
    item.qo_len = request.qo_len;
    item.kv_start = request.kv_start;
    item.kv_len = request.kv_len;
    item.key_offset = request.kv_begin;  // mutate: first-key-not-listed
    item.mask_start = index / params.sharers;
    item.first_row = row_tile * params.tile_q;
    item.num_splits = 1;
    if (size != kNoSplit) {
      const int keys = kPlain ? both_ends[index] / 2 : request.key_tiles(params, item.first_row);
      item.num_splits = max_of(ceil_div(keys, size), 1);
    }
    return item;
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
};

}  // namespace cupyattn
