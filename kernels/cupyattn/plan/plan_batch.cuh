// The plan of a batch whose lengths the host does not know: one block writes the work list that
// schedule/batch.py lays out (planner.cuh). Each warp judges one size of parts, as schedule/balance.py
// does.
//
// Lengths are not trusted: requests are cut to what the arrays hold, and a list that outgrows its
// room ends early.
#pragma once

#include "cupyattn/plan/cuts.cuh"
#include "cupyattn/shared/key_share.cuh"

namespace cupyattn {

// Whether requests may be cut; configurations that do not say are of those that may not.
template <typename Config, typename = void>
struct HasCuts {
  enum : bool { kValue = false };
};
template <typename Config>
struct HasCuts<Config, typename AnyValue<Config::kCuts>::type> {
  enum : bool { kValue = Config::kCuts };
};

template <typename Config>
struct PlanBatch {
  struct Traits {
    using Params = PlanBatchParams;
    static constexpr bool kRagged = Config::kRagged;
    static constexpr int kThreads = Config::kThreads;
  };
  using List = Planner<Traits>;
  using Totals = typename List::Totals;
  // Plain requests have equally many rows, all of which see all keys, and lengths of int32.
  static constexpr bool kRagged = Config::kRagged, kPlain = Config::kPlain;
  // Ranks share the keys, and rows see them by their places in the whole requests.
  enum : bool { kShared = HasKeyShare<Config>::kValue, kCuts = HasCuts<Config>::kValue };
  static constexpr int kThreads = Config::kThreads, kWarps = List::kWarps;
  static constexpr int kNoSplit = List::kNoSplit, kChunks = List::kChunks;
  // Tiles this short, as a part of a block's share, balance by themselves.
  static constexpr float kShort = 0.1f;
  // How many sizes of parts are judged, one by each warp. The last leaves all tiles whole.
  static constexpr int kSizes = 16;

  struct SharedMemory {
    typename List::SharedMemory list;
    float time[kSizes];
    int size[kSizes];
    int requests[1];  // four arrays of num_requests
  };

  static_assert(kWarps == kSizes, "a warp judges one size");
  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/attention/plan_batch.py) must agree");
  static_assert(!kRagged || !kPlain, "plain requests have no lengths of q");
  static_assert(!kCuts || !kRagged, "requests that are cut have equally many rows");

  const PlanBatchParams& params;
  SharedMemory& shared;
  List list;

  __device__ __forceinline__ PlanBatch(const PlanBatchParams& params, SharedMemory& shared)
      : params(params),
        shared(shared),
        list(params, shared.list, shared.requests, params.num_requests) {}

  __device__ __forceinline__ void run() {
    ask_for_params();
    // Half of the warps write what needs no lengths, while lengths are on their way to the others.
    if (list.warp >= kWarps / 2) write_rest(list.thread - kThreads / 2);
    const Totals totals = kPlain ? read_plain_requests() : read_requests();
    float done;
    const int size = choose_size(totals, done);
    if constexpr (kCuts) {
      if (write_cuts(totals, done)) return;
    }
    const bool is_sorted = list.sort_requests(totals, size);
    // Requests of equally many tiles, as all are where q has none of its own lengths.
    const bool is_even = !kRagged || totals.tiles == totals.most_tiles * params.num_requests;
    if (!is_even) list.count_tiles(totals, is_sorted);
    const int tiles = min_of(totals.tiles, params.max_tiles);
    list.write_items(
        tiles, size, is_sorted, is_even ? totals.most_tiles : 0,
        [&](int index, int row_tile) { return item_of(index, row_tile, size); },
        [&](int is_split, int split_tile, int first, int) {
          if (is_split && split_tile < params.num_merges) params.merges[split_tile] = first;
        });
  }

 private:
  // The arguments come from memory a line at a time. Each warp asks for one, before any is needed.
  __device__ __forceinline__ void ask_for_params() {
    constexpr int kLine = 16, kWords = sizeof(PlanBatchParams) / 4;
    const int word = min_of(kLine * list.warp, kWords - 1);
    if (list.lane == 0) list.shared.warp_sum[list.warp] = reinterpret_cast<const int*>(&params)[word];
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
    list.shared.bucket[list.thread] = 0;
#pragma unroll 1
    for (int index = list.thread; index < params.num_requests; index += kThreads) {
      const PlannedRequest request = PlannedRequest::of<kRagged, kShared>(params, index);
      const int count = request.num_tiles(params);
      uint32_t ends = 0;
      if (count > 0) {
        const uint32_t last = request.key_tiles<kShared>(params, (count - 1) * params.tile_q);
        const uint32_t first = count == 1 ? last : request.key_tiles<kShared>(params, 0);
        ends = first + last;
        inverse = max_of(inverse, kNoSplit - ends);
        // Under a window the tiles in the middle may see more than either end.
        const bool is_bounded = count == 1 || params.window_left < 0;
        bound += count * (is_bounded ? max_of(first, last) : longest_tile(request));
        twice += count * ends;
      }
      list.lengths[index] = kRagged ? count : request.kv_len;
      list.both_ends[index] = static_cast<int>(ends);
      tiles += count;
      most_tiles = max_of(most_tiles, static_cast<uint32_t>(count));
      longest2 = max_of(longest2, ends);
    }
    uint32_t sums[3] = {tiles, twice, bound}, maxima[3] = {most_tiles, longest2, inverse};
    list.reduce(sums, maxima);
    return Totals{static_cast<int>(sums[0]),          static_cast<int>(maxima[0]),
                  static_cast<int>(maxima[1]),        static_cast<int>(kNoSplit - maxima[2]),
                  0.5f * static_cast<float>(sums[1]), static_cast<float>(sums[2]),
                  static_cast<int>(sums[2])};
  }

  __device__ __forceinline__ Totals read_plain_requests() {
    const int32_t* const kv_lens = static_cast<const int32_t*>(params.kv_lens);
    uint32_t sums[1] = {0}, maxima[2] = {0, 0};
    list.shared.bucket[list.thread] = 0;
#pragma unroll 1
    for (int index = list.thread; index < params.num_requests; index += kThreads) {
      const int kv_len = max_of(min_of(kv_lens[index], params.max_kv_len), 0);
      const int keys = PlannedRequest::divide_up(params, kv_len);
      list.lengths[index] = kv_len;
      list.both_ends[index] = 2 * keys;
      sums[0] += keys;
      maxima[0] = max_of(maxima[0], static_cast<uint32_t>(keys));
      maxima[1] = max_of(maxima[1], static_cast<uint32_t>(kNoSplit - 2 * keys));
    }
    const int tiles = tiles_of_uniform();
    list.reduce(sums, maxima);
    const float key_tiles = static_cast<float>(tiles * sums[0]);
    return Totals{tiles * params.num_requests,
                  tiles,
                  static_cast<int>(2 * maxima[0]),
                  static_cast<int>(kNoSplit - maxima[1]),
                  key_tiles,
                  key_tiles,
                  static_cast<int>(tiles * sums[0])};
  }

  // The tiles of rows of each request, where q has no lengths of its own.
  __device__ __forceinline__ int tiles_of_uniform() const {
    return PlannedRequest::by_steps(params, 0, 0).num_tiles(params);
  }

  // The most key tiles that any tile of rows can visit under a window.
  __device__ __forceinline__ uint32_t longest_tile(const PlannedRequest& request) const {
    const int64_t tokens = params.window_right >= 0
                               ? static_cast<int64_t>(params.tile_q) + 1 + params.window_right
                               : request.qo_len;
    int64_t keys = min_of(tokens, static_cast<int64_t>(request.qo_len)) + params.window_left;
    // Of so many tokens in a row, the most that are this rank's.
    if (kShared) keys = count_in_runs<int64_t>(keys, params.share_run(), params.share_period(), 0);
    return PlannedRequest::divide_up(params, clamp(keys, request.kv_len));
  }

  // Writes the list of equal shares of all keys, if all is done sooner by that.
  __device__ __forceinline__ bool write_cuts(const Totals& totals, float done) {
    const int count = params.num_shares, requests = params.num_requests;
    if (done == 0.0f) return false;
    const int total = totals.longest_tiles / totals.most_tiles + params.share_overhead * requests;
    const KeyShares shares = KeyShares::of(total, count, params.share_overhead);
    const int states = count - 1 + min_of(count - 1, requests);
    const float time = shares.size + shares.overhead + params.merge +
                       kCutState * states * ptx::rcp_approx(static_cast<float>(count));
    if (time >= done) return false;
    return CutPlanner<Traits>{params, list, shares, totals.most_tiles}.run();
  }

  // Chooses the most key tiles of one part, by an estimate of when the last block is done. `done`:
  // when that is, 0 where it need not be known.
  __device__ __forceinline__ int choose_size(const Totals& totals, float& done) {
    done = 0.0f;
    const int longest = (totals.longest2 + 1) / 2;
    const float a_wave = params.a_wave, share = totals.key_tiles * a_wave;
    const bool may_split = kCuts || params.max_more > 0;
    if (!may_split || longest <= 1 || longest <= kShort * share) return kNoSplit;
    // Rounded up, because sums of floats are not exact and parts must not outgrow the list.
    int least = static_cast<int>(totals.bound * 1.0001f * params.a_more) + 1;
    if (params.least_part_cost > 0.0f) {
      const float cost = static_cast<float>(longest) * params.least_part_cost;
      least = max_of(least, static_cast<int>(ceilf(sqrtf(cost))));
    }
    const int size = size_to_judge(totals, longest, least);
    const float time = time_of(totals, size, size < longest, a_wave);
    if (list.lane == 0) {
      shared.time[list.warp] = time;
      shared.size[list.warp] = size;
    }
    ptx::block_sync();
    // Each warp finds the first of the best. Times are positive, so their bits compare.
    const float whole = shared.time[kSizes - 1] * static_cast<float>(kMinGain);
    done = whole;
    if (whole <= share + params.least_share * params.block) return kNoSplit;
    const int index = list.lane % kSizes;
    const uint32_t bits = __float_as_uint(index == kSizes - 1 ? whole : shared.time[index]);
    const uint32_t best = ~ptx::warp_max(~bits);
    done = __uint_as_float(best);
    const uint32_t place = ptx::warp_max(bits == best ? kSizes - 1 - index : 0);
    // Whole tiles, whose place is 0, come last among equal times.
    return place == 0 ? kNoSplit : shared.size[kSizes - 1 - place];
  }

  // Sizes that fill whole waves. Kind 0 takes all tiles as equal; kinds 1 to 3 leave room for
  // no, half a or a whole part at the end of each tile. The last of kind 0 is half a wave where that
  // is nearly as fast.
  __device__ __forceinline__ int size_to_judge(const Totals& totals, int longest, int least) const {
    if (list.warp == kSizes - 1) return longest;
    const int kind = list.warp / kMaxWaves;
    const bool is_half = list.warp == kMaxWaves - 1 && params.least_share < 1.0f;
    const int slots = is_half ? params.items_per_wave / 2
                              : params.items_per_wave * (list.warp % kMaxWaves + 1);
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
    for (int index = list.lane; index < params.num_requests; index += kWarpSize) {
      const uint32_t count = list.num_tiles(totals, index), twice = list.both_ends[index];
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
    float done = fmaxf(busy, waves * (mean + params.block));
    // Where hardly anything else is tried, whole tiles end with the longest.
    if (kCuts && !is_split) done = fmaxf(done, 0.5f * totals.longest2 + params.block);
    const float merge = params.merge + params.state * num_items * a_wave +
                        params.part * ceilf(0.5f * totals.longest2 * inverse);
    return is_split ? done + merge : done;
  }

  // The first part of a tile of rows.
  __device__ __forceinline__ WorkItem item_of(int index, int row_tile, int size) const {
    PlannedRequest request;
    if constexpr (kRagged) {
      request = PlannedRequest::of<true, kShared>(params, index);
    } else {
      request = PlannedRequest::by_steps(params, index, list.lengths[index]);
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
      const int keys =
          kPlain ? list.both_ends[index] / 2 : request.key_tiles<kShared>(params, item.first_row);
      item.num_splits = List::splits_of(keys, size);
    }
    return item;
  }
};

}  // namespace cupyattn
