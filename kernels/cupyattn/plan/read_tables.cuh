// The tables of a plan whose lengths are in device memory: one block checks them and writes them to
// memory of the host, which waits for that. Of a decode it also writes the work list (planner.cuh):
// the host then has nothing to plan and nothing to copy.
//
// Keys are split as schedule/balance.py splits them, so that answers have the same bits whoever plans:
// numbers of the estimate are doubles and are rounded where NumPy rounds them.
#pragma once

#include "cupyattn/params/read_tables.cuh"
#include "cupyattn/plan/planner.cuh"
#include "cupyattn/ptx/math.cuh"

namespace cupyattn {

template <typename Config>
struct ReadTables {
  struct Traits {
    using Params = ReadTablesParams;
    static constexpr bool kRagged = false;
    static constexpr int kThreads = Config::kThreads;
  };
  using List = Planner<Traits>;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kMostPlanned = kThreads;            // requests, one a thread
  static constexpr int64_t kMostLength = 0x7fffffff - 64;  // core/problem.py, MAX_LENGTH
  // The most keys of a request that is planned. Sums of their key tiles fit 32 bits.
  static constexpr int kMostKeys = 1 << 25;
  static constexpr uint32_t kTooLong = 0x3fffffff;  // key tiles of a longer one
  // Sizes of parts that are judged, a warp each; the last leaves all keys whole.
  static constexpr int kSizes = 9;

  struct SharedMemory {
    typename List::SharedMemory list;
    double longest_part[kSizes][kWarpSize];
    double time[kSizes];
    int size[kSizes];
    int requests[5 * kMostPlanned];  // four arrays, and where the keys of each begin
  };

  static_assert(List::kWarps >= kSizes, "a warp judges one size");

  // A request as the tables have it.
  struct Request {
    int64_t q_begin, q_end, kv_begin, kv_end, length, keys;
    bool is_good;
  };

  // Whether any request is bad, and the least and the most of their rows, or of their key tiles where
  // a list is planned: its requests have equally many rows.
  struct Facts {
    uint32_t is_bad, key_tiles, least, most;
  };

  const ReadTablesParams& params;
  SharedMemory& shared;
  List list;
  int* const kv_starts;

  __device__ __forceinline__ ReadTables(const ReadTablesParams& params, SharedMemory& shared)
      : params(params),
        shared(shared),
        list(params, shared.list, shared.requests, kMostPlanned),
        kv_starts(list.tiles_end + kMostPlanned) {}

  __device__ __forceinline__ void run() {
    const Facts facts = read_requests();
    TablesHead head{};
    head.is_bad = facts.is_bad;
    head.least_rows = facts.least;
    head.most_rows = facts.most;
    if (params.items != nullptr && !facts.is_bad && facts.most < kTooLong) plan(facts, head);
    if (list.thread == 0) publish(head);
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

  // Writes all requests to the landing, and those of a plan to shared memory. Ends with a barrier.
  __device__ __forceinline__ Facts read_requests() {
    const int count = params.num_requests;
    int64_t* kv_indptr = params.landing + sizeof(TablesHead) / 8;
    int64_t* keys = kv_indptr + count + 1;
    int64_t* lengths = keys + count;
    int64_t* qo_indptr = lengths + count;
    int64_t* rows = qo_indptr + count + 1;
    uint32_t sums[1] = {0}, maxima[3] = {0, 0, 0};  // bad, the most, and the least from above
    list.shared.bucket[list.thread] = 0;
#pragma unroll 1
    for (int index = list.thread; index < count; index += kThreads) {
      const Request found = read(index);
      kv_indptr[index] = found.kv_begin;
      keys[index] = found.keys;
      lengths[index] = found.length;
      const bool is_last = index == count - 1;
      if (is_last) kv_indptr[count] = found.kv_end;
      uint32_t size = 0;
      if (params.qo_indptr.data != nullptr) {
        const int64_t own = found.q_end - found.q_begin;
        qo_indptr[index] = found.q_begin;
        rows[index] = own;
        if (is_last) qo_indptr[count] = found.q_end;
        size = static_cast<uint32_t>(own);
      }
      if (params.items != nullptr) size = note(index, found);
      sums[0] += size;
      maxima[0] = found.is_good ? maxima[0] : 1;
      maxima[1] = max_of(maxima[1], size);
      maxima[2] = max_of(maxima[2], List::kNoSplit - size);
    }
    list.reduce(sums, maxima);
    return Facts{maxima[0], sums[0], List::kNoSplit - maxima[2], maxima[1]};
  }

  // Tells the host that all is there.
  __device__ __forceinline__ void publish(const TablesHead& head) {
    const int64_t* words = reinterpret_cast<const int64_t*>(&head);
#pragma unroll
    for (int i = 1; i < static_cast<int>(sizeof(TablesHead) / 8); ++i) params.landing[i] = words[i];
    ptx::store_release_system(params.landing, params.ticket);  // mutate: ticket-not-written
  }

  // --- the plan of a decode: a tile of rows each request ---

  // Returns the key tiles of a request.
  __device__ __forceinline__ uint32_t note(int index, const Request& found) {
    const bool is_long = !found.is_good || found.keys > kMostKeys;  // mutate: longest-are-planned
    const int keys = is_long ? 0 : static_cast<int>(found.keys);
    const int key_tiles = PlannedRequest::divide_up(params, keys);
    kv_starts[index] = static_cast<int>(found.kv_begin);
    list.lengths[index] = keys;
    list.both_ends[index] = 2 * key_tiles;
    return is_long ? kTooLong : static_cast<uint32_t>(key_tiles);
  }

  __device__ __forceinline__ void plan(const Facts& facts, TablesHead& head) {
    const int count = params.num_requests, longest = static_cast<int>(facts.most);
    const float key_tiles = static_cast<float>(facts.key_tiles);
    const typename List::Totals totals{
        count, 1, 2 * longest, static_cast<int>(2 * facts.least), key_tiles, key_tiles};
    const int size = choose_size(longest, facts.key_tiles);
    const bool is_sorted = list.sort_requests(totals, size);
    const int most = List::splits_of(longest, size);
    const auto item_of = [&](int index, int) {
      WorkItem item{};
      item.q_start = index * params.qo_len;
      item.qo_len = params.qo_len;
      item.kv_start = kv_starts[index];
      item.kv_len = list.lengths[index];
      item.num_splits = List::splits_of(list.both_ends[index] / 2, size);
      return item;
    };
    // Behind the items are the counters of split tiles, or the first item of each.
    const auto list_merges = [&](int is_split, int split_tile, int first, int total) {
      const int items = total & List::kSplitsMask;
      if (items > params.max_items) return;  // mutate: merges-outgrow-their-room
      int32_t* behind = reinterpret_cast<int32_t*>(params.items + items);
      if (most > params.most_fused) {
        if (is_split) behind[split_tile] = first;
        return;
      }
      const int counters = (total >> List::kSplitsBits) * params.counters_a_tile;
#pragma unroll 1
      for (int i = list.thread; i < counters; i += kThreads) behind[i] = 0;
    };
    const typename List::Counts made =
        list.write_items(count, size, is_sorted, 1, item_of, list_merges);
    if (made.items > params.max_items) return;  // mutate: list-outgrows-its-room
    head.num_items = made.items;
    head.num_split_tiles = made.split_tiles;
    head.num_states = made.items - (count - made.split_tiles);
    head.most_parts = most;
  }

  // After how many key tiles keys are split: best_chunk of schedule/balance.py.
  __device__ __forceinline__ int choose_size(int longest, uint32_t total) {
    if (longest <= 1) return List::kNoSplit;
    const bool is_even = static_cast<double>(longest * params.num_requests) <= kEven * total;
    const int size = size_to_judge(longest, static_cast<int>(total), is_even);
    if (list.warp < kSizes) {
      const bool is_judged = list.warp == kSizes - 1 || size < longest;
      if (is_judged) {
        const Done done = is_even ? done_even(longest, size) : done_uneven(total, size);
        if (list.lane == 0) shared.time[list.warp] = with_merge(done, longest, size);
      }
      if (list.lane == 0) shared.size[list.warp] = is_judged ? size : List::kNoSplit;
    }
    ptx::block_sync();
    double best_time = shared.time[kSizes - 1] * kMinGain;
    int best = List::kNoSplit;
    if (best_time <= static_cast<double>(total) / params.items_per_wave + params.least_time) {
      return best;
    }
#pragma unroll 1
    for (int i = 0; i < kSizes - 1; ++i) {
      const int judged = shared.size[i];
      if (judged == List::kNoSplit) continue;
      const double time = shared.time[i];
      // The shortest parts win among equal times, because the host looks at them first.
      if (time < best_time || (time == best_time && best != List::kNoSplit && judged < best)) {
        best = judged;
        best_time = time;
      }
    }
    return best;
  }

  // _candidates of schedule/balance.py: the size that this warp judges; `longest` for none.
  __device__ __forceinline__ int size_to_judge(int longest, int total, bool is_even) const {
    const int tiles = params.num_requests, wave = params.items_per_wave, warp = list.warp;
    const bool is_wave = warp < kMaxWaves;
    int dividend = total, divisor = 0;
    if (is_even) {
      const bool is_half = warp == kMaxWaves && params.least_share < 1.0;
      const int parts = (is_wave ? wave * (warp + 1) : is_half ? wave / 2 : 0) / tiles;
      dividend = longest;
      divisor = parts > 1 ? parts : 0;
    } else {
      const int more = warp - kMaxWaves, half = 1 + more % 2;
      divisor = is_wave ? wave * (warp + 1) : wave * (1 + more / 2) - tiles * half / 2;
    }
    if (warp >= kSizes - 1 || divisor <= 0) return longest;
    const int size = ceil_div(dividend, divisor);
    if (size < ceil_div(total, wave * kMaxWaves)) return longest;
    const double least = ceil(sqrt(longest * params.part_cost));
    return max_of(size, max_of(static_cast<int>(least), 1));
  }

  // When all blocks are done, and how many they are.
  struct Done {
    double time, items;
  };

  __device__ __forceinline__ Done done_even(int longest, int size) const {
    const int parts = ceil_div(longest, size), items = params.num_requests * parts;
    const double share = static_cast<double>(items) / params.items_per_wave;
    double waves = static_cast<double>(ceil_div(items, params.items_per_wave));
    if (waves == 1.0) waves = max_of(params.least_share, share);
    return Done{waves * (static_cast<double>(longest) / parts + params.block),
                static_cast<double>(items)};
  }

  __device__ __forceinline__ Done done_uneven(uint32_t total, int size) {
    const double inverse = 1.0 / size, half = 0.5 * size;
    uint32_t items = 0, num_long = 0, long_tiles = 0;
    double longest_part = 0.0;
#pragma unroll 1
    for (int place = list.lane; place < params.num_requests; place += kWarpSize) {
      const int key_tiles = list.both_ends[place] / 2;
      const double parts = max_of(ceil(key_tiles * inverse), 1.0);
      items += static_cast<uint32_t>(parts);
      longest_part = max_of(longest_part, key_tiles / parts);
      if (key_tiles > half) {
        num_long += static_cast<uint32_t>(parts);
        long_tiles += key_tiles;
      }
    }
    shared.longest_part[list.warp][list.lane] = longest_part;
    items = ptx::warp_sum(items);
    num_long = ptx::warp_sum(num_long);
    long_tiles = ptx::warp_sum(long_tiles);
    ptx::warp_sync();
#pragma unroll 1
    for (int i = 0; i < kWarpSize; ++i) {
      longest_part = max_of(longest_part, shared.longest_part[list.warp][i]);
    }
    const double slots = params.items_per_wave;
    const double mean = static_cast<double>(long_tiles) / num_long, waves = ceil(num_long / slots);
    const double busy = (total + ptx::multiply(items, params.block)) / slots;
    // mutate: longest-part-not-weighed
    const double last = max_of(waves * (mean + params.block), longest_part + params.block);
    return Done{max_of(busy, last), static_cast<double>(items)};
  }

  // Keys that are left whole are not merged.
  __device__ __forceinline__ double with_merge(const Done& done, int longest, int size) const {
    if (list.warp == kSizes - 1) return done.time;
    const double time =
        done.time + params.merge + params.state * done.items / params.items_per_wave;
    return time + ptx::multiply(params.part, ceil_div(longest, size));
  }
};

}  // namespace cupyattn
