// The tables of a plan whose lengths are in device memory: one block checks them and writes them to
// memory of the host, which waits for that. Of a decode it also writes the work list, the one that
// schedule/batch.py makes of the same lengths, word for word: the host then has nothing to plan and
// nothing to copy.
//
// Numbers of the estimate are doubles and are rounded where NumPy rounds them, so that both choose
// the same split.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/params/read_tables.cuh"
#include "cupyattn/plan/block_scan.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

template <typename Config>
struct ReadTables {
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kMostPlanned = kThreads;  // requests, one a thread
  static constexpr int64_t kMostLength = 0x7fffffff - 64;  // core/problem.py, MAX_LENGTH
  // Key tiles of a request up to which their sums fit 32 bits.
  static constexpr int kMostTiles = 1 << 21;
  // Sizes of parts that are judged, a warp each; the last leaves all keys whole.
  static constexpr int kSizes = 9;
  static constexpr int kNoSplit = 0x7fffffff;
  static constexpr int kSplitsBits = 20, kSplitsMask = (1 << kSplitsBits) - 1;
  // These equal the constants of schedule/balance.py.
  static constexpr int kMaxWaves = 4;
  static constexpr double kWorthwhile = 0.95, kEven = 1.15;
  static constexpr int kItemWords = sizeof(WorkItem) / 4;

  struct Tile {
    int request, kv_start, kv_len, key_tiles, splits, end, split_tile;
  };

  struct SharedMemory {
    TablesHead head;
    int64_t rank[kMostPlanned];  // rises in the order of the list
    Tile tile[kMostPlanned];     // in that order
    double longest_part[kSizes][kWarpSize];
    double time[kSizes];
    int size[kSizes];
    int warp_sum[kWarps];
    uint32_t least[kWarps], most[kWarps], sum[kWarps];
  };

  static_assert(kWarps >= kSizes, "a warp judges one size");

  // A request as the tables have it.
  struct Request {
    int64_t q_begin, q_end, kv_begin, kv_end, length, keys;
    bool is_good;
  };

  const ReadTablesParams& params;
  SharedMemory& shared;
  const int thread, warp, lane;

  __device__ __forceinline__ ReadTables(const ReadTablesParams& params, SharedMemory& shared)
      : params(params),
        shared(shared),
        thread(threadIdx.x),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ void run() {
    const bool is_bad = read_requests();
    if (!is_bad && params.words != nullptr) plan();
    ptx::block_sync();
    publish(is_bad);
  }

 private:
  // --- the tables ---

  // Zeros, and not good, if offsets are not.
  __device__ __forceinline__ Request read(int index) const {
    Request found{};
    found.q_end = params.qo_len;
    if (params.qo_indptr.data != nullptr) {
      found.q_begin = params.qo_indptr[index];
      found.q_end = params.qo_indptr[index + 1];
    }
    found.kv_begin = params.kv_indptr[index];
    found.kv_end = params.kv_indptr[index + 1];
    if (!are_offsets(found.q_begin, found.q_end) || (index == 0 && found.q_begin > 0) ||
        !are_offsets(found.kv_begin, found.kv_end)) {
      return Request{};
    }
    const int64_t pages = found.kv_end - found.kv_begin, room = pages * params.page_size;
    found.keys = room;
    if (params.kind != LengthKind::kNone) found.length = params.lengths[index];
    if (params.kind == LengthKind::kKeys) {
      found.keys = found.length;
      found.is_good = found.length >= 0 && found.length <= room;
    } else if (params.kind == LengthKind::kLastPage && pages > 0) {
      found.is_good = found.length >= 1 && found.length <= params.page_size;
      if (found.is_good) found.keys = room - params.page_size + found.length;
    } else {
      found.is_good = true;
    }
    found.is_good = found.is_good && found.keys <= kMostLength;  // mutate: too-many-keys
    return found;
  }

  static __device__ __forceinline__ bool are_offsets(int64_t begin, int64_t end) {
    return begin >= 0 && begin <= end && end <= kMostLength;
  }

  // Writes all requests to the landing, and those of a plan to shared memory. Returns whether the
  // tables are bad.
  __device__ __forceinline__ bool read_requests() {
    const int count = params.num_requests;
    int64_t* kv_indptr = params.landing + sizeof(TablesHead) / 8;
    int64_t* keys = kv_indptr + count + 1;
    int64_t* lengths = keys + count;
    int64_t* qo_indptr = lengths + count;
    int64_t* rows = qo_indptr + count + 1;
    bool is_bad = false;
    int least = 0x7fffffff, most = 0;
#pragma unroll 1
    for (int index = thread; index < count; index += kThreads) {
      const Request found = read(index);
      is_bad = is_bad || !found.is_good;
      kv_indptr[index] = found.kv_begin;
      keys[index] = found.keys;
      lengths[index] = found.length;
      const bool is_last = index == count - 1;
      if (is_last) kv_indptr[count] = found.kv_end;
      if (params.qo_indptr.data != nullptr) {
        const int64_t own = found.q_end - found.q_begin;
        qo_indptr[index] = found.q_begin;
        rows[index] = own;
        if (is_last) qo_indptr[count] = found.q_end;
        least = min_of(least, static_cast<int>(own));
        most = max_of(most, static_cast<int>(own));
      }
      if (params.words != nullptr) {
        shared.tile[index].request = static_cast<int>(found.kv_begin);
        // mutate: longest-last
        shared.rank[index] = index - (found.is_good ? found.keys << 32 : 0);
      }
    }
    least = ptx::warp_min(least);
    most = ptx::warp_max(most);
    if (lane == 0) {
      shared.least[warp] = static_cast<uint32_t>(least);
      shared.most[warp] = static_cast<uint32_t>(most);
    }
    if (thread == 0) shared.head = TablesHead{};
    return ptx::block_any(is_bad);
  }

  // Tells the host that all is there.
  __device__ __forceinline__ void publish(bool is_bad) {
    if (warp > 0) return;
    const int least = ptx::warp_min(static_cast<int>(lane < kWarps ? shared.least[lane] : kNoSplit));
    const int most = ptx::warp_max(static_cast<int>(lane < kWarps ? shared.most[lane] : 0));
    if (lane > 0) return;
    TablesHead head = shared.head;
    head.is_bad = is_bad ? 1 : 0;
    head.least_rows = least;
    head.most_rows = most;
    int64_t* landing = params.landing;
    const int64_t* words = reinterpret_cast<const int64_t*>(&head);
#pragma unroll
    for (int i = 1; i < static_cast<int>(sizeof(TablesHead) / 8); ++i) landing[i] = words[i];
    ptx::store_release_system(landing, params.ticket);  // mutate: ticket-not-written
  }

  // --- the plan of a decode: a tile of rows each request ---

  __device__ __forceinline__ void plan() {
    const uint32_t total = sort();
    const int longest = shared.tile[0].key_tiles;
    // Ranks are read by all before tiles are; sums of longer requests would not fit.
    if (longest > kMostTiles) return;
    const int size = choose_size(longest, total);
    write_list(size);
  }

  // Puts the requests in the order of the list, those with the most keys first. Returns the key tiles
  // of all.
  __device__ __forceinline__ uint32_t sort() {
    const int count = params.num_requests;
    const bool exists = thread < count;
    int place = 0, kv_start = 0;
    int64_t own = 0;
    if (exists) {
      own = shared.rank[thread];
      kv_start = shared.tile[thread].request;
#pragma unroll 4
      for (int other = 0; other < count; ++other) place += shared.rank[other] < own ? 1 : 0;
    }
    ptx::block_sync();  // mutate: ranks-read-late
    uint32_t key_tiles = 0;
    if (exists) {
      const int keys = static_cast<int>((thread - own) >> 32);
      key_tiles = static_cast<uint32_t>(keys + params.tile_kv - 1) / params.tile_kv;
      shared.tile[place] =
          Tile{thread, kv_start, keys, static_cast<int>(key_tiles), 1, place + 1, 0};
    }
    const uint32_t sum = ptx::warp_sum(key_tiles < kMostTiles ? key_tiles : kMostTiles);
    if (lane == 0) shared.sum[warp] = sum;
    ptx::block_sync();
    return ptx::warp_sum(lane < kWarps ? shared.sum[lane] : 0);
  }

  // After how many key tiles keys are split: best_chunk of schedule/balance.py.
  __device__ __forceinline__ int choose_size(int longest, uint32_t total) {
    if (longest <= 1) return kNoSplit;
    const int64_t tiles = params.num_requests;
    const bool is_even = static_cast<double>(longest * tiles) <= kEven * total;
    const int size = size_to_judge(longest, total, is_even);
    if (warp < kSizes) {
      const bool is_judged = warp == kSizes - 1 || size < longest;
      if (is_judged && is_even) time_of_even(longest, size);
      if (is_judged && !is_even) time_of_uneven(total, size);
      if (lane == 0) shared.size[warp] = is_judged ? size : kNoSplit;
    }
    ptx::block_sync();
    double best_time = shared.time[kSizes - 1] * kWorthwhile;
    int best = kNoSplit;
    if (best_time <= static_cast<double>(total) / params.items_per_wave + params.least_time) {
      return best;
    }
#pragma unroll 1
    for (int i = 0; i < kSizes - 1; ++i) {
      const int judged = shared.size[i];
      if (judged == kNoSplit) continue;
      const double time = shared.time[i];
      // The shortest parts win among equal times, because the host looks at them first.
      if (time < best_time || (time == best_time && best != kNoSplit && judged < best)) {
        best = judged;
        best_time = time;
      }
    }
    return best;
  }

  // _candidates of schedule/balance.py: the size that this warp judges; `longest` for none.
  __device__ __forceinline__ int size_to_judge(int longest, uint32_t total, bool is_even) const {
    const int64_t tiles = params.num_requests, wave = params.items_per_wave;
    if (warp >= kSizes - 1) return longest;
    int64_t size = longest;
    if (is_even) {
      const int64_t slots = warp < kMaxWaves ? wave * (warp + 1) : wave / 2;
      const bool is_tried = warp < kMaxWaves || (warp == kMaxWaves && params.least_share < 1.0);
      const int64_t parts = slots / tiles;
      if (!is_tried || parts <= 1) return longest;
      size = ceil_div<int64_t>(longest, parts);
    } else {
      const int more = warp - kMaxWaves, half = 1 + more % 2;
      const int64_t room =
          more < 0 ? wave * (warp + 1) : wave * (1 + more / 2) - tiles * half / 2;
      if (room <= 0) return longest;
      size = ceil_div<int64_t>(total, room);
    }
    if (size < ceil_div<int64_t>(total, wave * kMaxWaves)) return longest;
    const double least = ceil(sqrt(longest * params.part_cost));
    return static_cast<int>(max_of(static_cast<double>(size), max_of(least, 1.0)));
  }

  __device__ __forceinline__ void time_of_even(int longest, int size) {
    const int64_t parts = ceil_div(longest, size), items = params.num_requests * parts;
    const double share = static_cast<double>(items) / params.items_per_wave;
    double waves = static_cast<double>(ceil_div<int64_t>(items, params.items_per_wave));
    if (waves == 1.0) waves = max_of(params.least_share, share);
    const double done = waves * (static_cast<double>(longest) / parts + params.block);
    if (lane == 0) shared.time[warp] = with_merge(done, static_cast<double>(items), longest, size);
  }

  __device__ __forceinline__ void time_of_uneven(uint32_t total, int size) {
    const double inverse = 1.0 / size, half = 0.5 * size;
    uint32_t items = 0, num_long = 0, long_tiles = 0;
    double longest_part = 0.0;
#pragma unroll 1
    for (int place = lane; place < params.num_requests; place += kWarpSize) {
      const int key_tiles = shared.tile[place].key_tiles;
      const double parts = max_of(ceil(key_tiles * inverse), 1.0);
      items += static_cast<uint32_t>(parts);
      longest_part = max_of(longest_part, key_tiles / parts);
      if (key_tiles > half) {
        num_long += static_cast<uint32_t>(parts);
        long_tiles += key_tiles;
      }
    }
    shared.longest_part[warp][lane] = longest_part;
    items = ptx::warp_sum(items);
    num_long = ptx::warp_sum(num_long);
    long_tiles = ptx::warp_sum(long_tiles);
    ptx::warp_sync();
    if (lane > 0) return;
#pragma unroll 1
    for (int i = 0; i < kWarpSize; ++i) {
      longest_part = max_of(longest_part, shared.longest_part[warp][i]);
    }
    const double slots = params.items_per_wave;
    const double mean = static_cast<double>(long_tiles) / num_long, waves = ceil(num_long / slots);
    const double busy = (total + ptx::multiply(items, params.block)) / slots;
    const double done = max_of(max_of(busy, waves * (mean + params.block)),
                               longest_part + params.block);
    shared.time[warp] = with_merge(done, items, shared.tile[0].key_tiles, size);
  }

  // Keys that are left whole are not merged.
  __device__ __forceinline__ double with_merge(double done, double items, int longest,
                                               int size) const {
    if (warp == kSizes - 1) return done;
    const double time = done + params.merge + params.state * items / params.items_per_wave;
    return time + ptx::multiply(params.part, ceil_div(longest, size));
  }

  // --- the work list: items, then what their merges need ---

  __device__ __forceinline__ void write_list(int size) {
    const int count = params.num_requests;
    int splits = 0, is_split = 0;
    if (thread < count) {
      splits = size == kNoSplit ? 1 : max_of(ceil_div(shared.tile[thread].key_tiles, size), 1);
      is_split = splits > 1 ? 1 : 0;
    }
    int total;
    const int before = scan(splits | is_split << kSplitsBits, total);
    const int start = before & kSplitsMask, split_tile = before >> kSplitsBits;
    const int num_items = total & kSplitsMask, num_split = total >> kSplitsBits;
    const int num_states = num_items - (count - num_split);
    // The first tile has the most parts, because the longest come first.
    const int most = size == kNoSplit ? 1 : ceil_div(shared.tile[0].key_tiles, size);
    const bool is_fused = most <= params.most_fused;
    const int rest = num_split * (is_fused ? params.counters_a_tile : 1);
    if (num_items * kItemWords + rest > params.num_words) return;  // mutate: list-outgrows-its-room
    if (thread < count) {
      shared.tile[thread].splits = splits;
      shared.tile[thread].end = start + splits;
      shared.tile[thread].split_tile = split_tile;
    }
    ptx::block_sync();
    write_items(num_items);
    uint32_t* behind = params.words + num_items * kItemWords;
    if (is_fused) {
#pragma unroll 1
      for (int i = thread; i < rest; i += kThreads) behind[i] = 0;
    } else if (is_split) {
      behind[split_tile] = start;
    }
    if (thread > 0) return;
    shared.head.num_items = num_items;
    shared.head.num_split_tiles = num_split;
    shared.head.num_states = num_states;
    shared.head.most_parts = most;
  }

  __device__ __forceinline__ int scan(int value, int& total) {
    return block_scan(shared.warp_sum, warp, lane, value, total);
  }

  // Threads write neighbouring chunks of 16 bytes, because one block alone is slow to write.
  __device__ __forceinline__ void write_items(int num_items) {
    Vector16* chunks = reinterpret_cast<Vector16*>(params.words);
#pragma unroll 1
    for (int i = thread; i < 3 * num_items; i += kThreads) {
      const int item = i / 3, part = i % 3, place = tile_of(item);
      const Tile& tile = shared.tile[place];
      const int start = tile.end - tile.splits;
      // The words of a WorkItem, four of them.
      uint32_t first = 0, second = 0, third = 0, fourth = 0;
      if (part == 0) {
        first = tile.request * params.qo_len;
        second = params.qo_len;
        third = tile.kv_start;
        fourth = tile.kv_len;
      } else if (part == 1) {
        second = item - start;
        third = tile.splits;
        fourth = start - (place - tile.split_tile);  // mutate: states-of-whole-requests
      } else {
        third = tile.split_tile;
      }
      chunks[i] = Vector16{{first, second, third, fourth}};
    }
  }

  // The first tile whose items end beyond this one.
  __device__ __forceinline__ int tile_of(int item) const {
    int low = 0, high = min_of(item, params.num_requests - 1);
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high) / 2;
      if (shared.tile[middle].end > item) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

}  // namespace cupyattn
