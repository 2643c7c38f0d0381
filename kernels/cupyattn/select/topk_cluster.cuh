// The greatest scores of a row, found by the blocks of a cluster: a threshold, digit by digit from
// histograms of all scores, and what is above it. Each warp has a run of the row, and keeps as much
// of it in shared memory as has room, so that long rows are read once.
#pragma once

#include "cupyattn/plan/block_scan.cuh"
#include "cupyattn/ptx/cluster.cuh"
#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/grid_dependency.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/select/topk_row.cuh"

namespace cupyattn {

template <typename Config>
struct ClusterTopk {
  static constexpr int kThreads = Config::kThreads, kWarps = kThreads / kWarpSize;
  static constexpr int kStep = 4 * kWarpSize;  // keys that a warp looks at at a time
  static constexpr int kAhead = Config::kAligned ? 4 : 2;  // times it has loads of under way
  static constexpr int kDigits = 3, kBinBits = 11, kBins = 1 << kBinBits;
  static_assert(kBins == 4 * kThreads, "a thread looks at four bins");

  struct alignas(16) Shared {
    uint32_t bins[kDigits][kBins];      // how often each digit occurs in this block's runs
    uint32_t sums[kDigits][kBins / 2];  // of a part of the bins, in the whole cluster
    uint32_t totals[kDigits + 1][2];    // of those sums; at last, of keys above and at the threshold
    int warp_sums[2 * kDigits + 2][kWarps];
    int found[kDigits][3];  // the digit, the rank of the threshold among its keys, their number
  };
  static_assert(sizeof(Shared) == Config::kSharedBytes, "the launch makes room for it");

  // The threshold's digit; rank 0: fewer keys compete than are wanted.
  struct Digit {
    uint32_t digit;
    int rank, count;
  };

  // Keys above `key` are chosen, and `wanted` of those that equal it, behind the first `skipped`.
  struct Threshold {
    uint32_t key;
    int wanted, skipped;

    // How many of the first `count` that equal it are chosen.
    __device__ __forceinline__ int chosen_of(int count) const {
      return min_of(max_of(count - skipped, 0), wanted);
    }
  };

  // Chosen keys, and how many of the threshold's.
  struct Count {
    int above, equal;
  };

  Shared& shared;
  uint32_t* kept;  // this warp's keys, of which warp_room have room
  TopkRow<Config> row;
  int cluster, rank, warp, lane;
  int begin, end;  // this warp's run
  int warp_room;

  // Behind `shared` there is room for the keys that warps keep.
  static __device__ __forceinline__ void run(const SelectTopkParams& params, Shared& shared) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    clear(shared);
    ptx::grid_dependency_wait();
    const int cluster = ptx::cluster_size(), rank = ptx::cluster_rank();
    const auto row = TopkRow<Config>::of(params, ptx::cluster_index(), lane);
    const int warps = cluster * kWarps;
    const int run = ceil_div(row.num_blocks, warps * kStep) * kStep;
    const int begin = min_of((rank * kWarps + warp) * run, row.num_blocks);
    auto* kept = reinterpret_cast<uint32_t*>(&shared + 1);
    ClusterTopk(shared, kept + warp * params.warp_room, row, cluster, rank, warp, lane, begin,
                min_of(begin + run, row.num_blocks), params.warp_room)
        .choose();
  }

  __device__ __forceinline__ ClusterTopk(Shared& shared, uint32_t* kept, const TopkRow<Config>& row,
                                         int cluster, int rank, int warp, int lane, int begin,
                                         int end, int warp_room)
      : shared(shared),
        kept(kept),
        row(row),
        cluster(cluster),
        rank(rank),
        warp(warp),
        lane(lane),
        begin(begin),
        end(end),
        warp_room(warp_room) {}

  static __device__ __forceinline__ void clear(Shared& shared) {
#pragma unroll
    for (int digit = 0; digit < kDigits; ++digit) {
      *reinterpret_cast<Vector16*>(&shared.bins[digit][4 * threadIdx.x]) = Vector16{};
    }
    if (threadIdx.x < 3 * kDigits) shared.found[threadIdx.x / 3][threadIdx.x % 3] = 0;
  }

  __device__ __forceinline__ void choose() {
    const int topk = row.params.topk;
    if (!Config::kCandidates && row.num_blocks <= topk) {
      if (rank == 0) choose_all();
      return;
    }
    ptx::block_sync();
    count_first_digits();
    write_list(find_threshold(topk));
  }

  __device__ __forceinline__ void choose_all() {
    for (int block = threadIdx.x; block < row.num_blocks; block += kThreads) row.put(block, block);
    row.finish(row.num_blocks, threadIdx.x, kThreads);
  }

  // --- the threshold ---

  __device__ __forceinline__ Threshold find_threshold(int topk) {
    const Digit high = find_digit(0, topk);
    if (high.rank == 0) return Threshold{kAbsentKey, 0, 0};
    uint32_t prefix = high.digit;
    // A digit whose keys are all chosen settles it.
    if (high.rank == high.count) return Threshold{(prefix << 21) - 1u, 0, 0};
    count_digits(1, 21, 10, prefix);
    const Digit middle = find_digit(1, high.rank);
    prefix = prefix << 11 | middle.digit;
    if (middle.rank == middle.count) return Threshold{(prefix << 10) - 1u, 0, 0};
    count_digits(2, 10, 0, prefix);
    const Digit low = find_digit(2, middle.rank);
    return Threshold{prefix << 10 | low.digit, low.rank, 0};
  }

  // Reads the row, and counts the first 11 bits of its keys.
  __device__ __forceinline__ void count_first_digits() {
#pragma unroll 1
    for (int step = begin; step < end; step += kAhead * kStep) {
      float score[kAhead][4];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) row.load(step + i * kStep + 4 * lane, end, score[i]);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int block = step + i * kStep + 4 * lane, offset = block - begin;
        if (step + i * kStep >= end) break;
        const Vector16 keys = row.keys(block, end, score[i]);
        if (offset < warp_room) *reinterpret_cast<Vector16*>(kept + offset) = keys;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (keys.word[e] != kAbsentKey) {
            ptx::atomic_add_shared(&shared.bins[0][keys.word[e] >> 21], 1u);
          }
        }
      }
    }
  }

  // The keys of four blocks of this warp's run.
  __device__ __forceinline__ Vector16 keys_at(int block) const {
    const int offset = block - begin;
    if (offset < warp_room) return *reinterpret_cast<const Vector16*>(kept + offset);
    float score[4];
    row.load(block, end, score);
    return row.keys(block, end, score);
  }

  // Counts a digit of the keys whose bits from `above` on are `prefix`.
  __device__ __forceinline__ void count_digits(int digit, int above, int shift, uint32_t prefix) {
    const uint32_t mask = (1u << (above - shift)) - 1u;
#pragma unroll 4
    for (int step = begin; step < end; step += kStep) {
      const Vector16 keys = keys_at(step + 4 * lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (keys.word[e] >> above == prefix) {
          ptx::atomic_add_shared(&shared.bins[digit][keys.word[e] >> shift & mask], 1u);
        }
      }
    }
  }

  // The digit of the key that has this rank, from the greatest on, among those that were counted.
  __device__ __forceinline__ Digit find_digit(int digit, int wanted) {
    const uint32_t* bins = shared.bins[digit];
    int num_bins = kBins, first_bin = 0, owner = rank, above = 0;
    if (cluster == 1) {
      ptx::block_sync();
    } else {
      num_bins = kBins / cluster;
      add_bins(digit, num_bins);
      owner = find_owner(digit, wanted, above);
      if (owner == cluster) return Digit{0, 0, 0};
      // The first block has the greatest digits.
      first_bin = kBins - (owner + 1) * num_bins;
      bins = shared.sums[digit];
    }
    // Threads go down from the greatest digit, by four.
    const int at = num_bins - 4 - 4 * static_cast<int>(threadIdx.x);
    Vector16 counts{};
    if (at >= 0) counts = load_counts(bins + at, owner);
    const int own = sum_of(counts);
    int total;
    above += block_scan(shared.warp_sums[2 * digit], warp, lane, own, total);
    if (above < wanted && wanted <= above + own) {
      int e = 3;
#pragma unroll
      for (int i = 3; i > 0; --i) {
        if (e == i && wanted > above + static_cast<int>(counts.word[i])) {
          above += counts.word[i];
          e = i - 1;
        }
      }
      shared.found[digit][0] = first_bin + at + e;
      shared.found[digit][1] = wanted - above;
      shared.found[digit][2] = e == 3   ? counts.word[3]
                               : e == 2 ? counts.word[2]
                               : e == 1 ? counts.word[1]
                                        : counts.word[0];
    }
    ptx::block_sync();
    const int* found = shared.found[digit];
    return Digit{static_cast<uint32_t>(found[0]), found[1], found[2]};
  }

  // Each block adds a part of the bins of all.
  __device__ __forceinline__ void add_bins(int digit, int num_bins) {
    sync_cluster();
    Vector16 sum{};
    const int at = 4 * static_cast<int>(threadIdx.x);
    if (at < num_bins) {
      const uint32_t* bins = shared.bins[digit] + kBins - (rank + 1) * num_bins + at;
      for (int other = 0; other < cluster; ++other) {
        const Vector16 counts = load_counts(bins, other);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.word[e] += counts.word[e];
      }
      *reinterpret_cast<Vector16*>(shared.sums[digit] + at) = sum;
    }
    int total;
    block_scan(shared.warp_sums[2 * digit + 1], warp, lane, sum_of(sum), total);
    if (threadIdx.x == 0) shared.totals[digit][0] = total;
    if (threadIdx.x == 0) shared.totals[digit][1] = 0;
    sync_cluster();
  }

  // The block whose bins have the wanted key, `cluster` if none, and the keys above those bins.
  __device__ __forceinline__ int find_owner(int digit, int wanted, int& above) const {
    const int own = lane < cluster ? load_totals(digit, lane).above : 0;
    int owner = cluster;
    int before = 0;
    for (int other = 0; other < cluster; ++other) {
      const int total = ptx::shuffle(own, other);
      if (owner == cluster && wanted <= before + total) {
        owner = other;
        above = before;
      }
      before += total;
    }
    return owner;
  }

  // --- the list ---

  __device__ __forceinline__ void write_list(Threshold threshold) {
    Count before = count_chosen(threshold), of_row = before;
    find_places(before, of_row);
    if (cluster > 1) ptx::cluster_arrive();
    if (rank == 0) {
      row.finish(of_row.above + threshold.wanted, threadIdx.x, kThreads);
    }
    if constexpr (Config::kGiven) {
      if (row.params.given.has_late_ties) threshold.skipped = of_row.equal - threshold.wanted;
    }
    write_run(threshold, before);
    // No block ends while others read its shared memory.
    if (cluster > 1) ptx::cluster_wait();
  }

  static __device__ __forceinline__ Count count_of(const Vector16& keys,
                                                   const Threshold& threshold) {
    Count count{0, 0};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      count.above += keys.word[e] > threshold.key;
      count.equal += threshold.wanted > 0 && keys.word[e] == threshold.key;
    }
    return count;
  }

  // Of this warp's run.
  __device__ __forceinline__ Count count_chosen(const Threshold& threshold) const {
    Count sum{0, 0};
#pragma unroll 4
    for (int step = begin; step < end; step += kStep) {
      const Count count = count_of(keys_at(step + 4 * lane), threshold);
      sum.above += count.above;
      sum.equal += count.equal;
    }
    return Count{static_cast<int>(ptx::warp_sum(sum.above)),
                 static_cast<int>(ptx::warp_sum(sum.equal))};
  }

  // From the counts of this warp's run to those of all runs before it, and of all.
  __device__ __forceinline__ void find_places(Count& own, Count& of_row) {
    Count total;
    const bool is_first = lane == 0;
    const int above = block_scan(shared.warp_sums[2 * kDigits], warp, lane,
                                 is_first ? own.above : 0, total.above);
    const int equal = block_scan(shared.warp_sums[2 * kDigits + 1], warp, lane,
                                 is_first ? own.equal : 0, total.equal);
    own = Count{ptx::shuffle(above, 0), ptx::shuffle(equal, 0)};
    of_row = total;
    if (cluster == 1) return;
    if (threadIdx.x == 0) {
      shared.totals[kDigits][0] = total.above;
      shared.totals[kDigits][1] = total.equal;
    }
    sync_cluster();
    const Count other = lane < cluster ? load_totals(kDigits, lane) : Count{0, 0};
    const bool is_before = lane < rank;
    own.above += ptx::warp_sum(is_before ? other.above : 0);
    own.equal += ptx::warp_sum(is_before ? other.equal : 0);
    of_row.above = ptx::warp_sum(other.above);
    of_row.equal = ptx::warp_sum(other.equal);
  }

  // Whether this one of those that equal the threshold is chosen.
  static __device__ __forceinline__ bool is_chosen(const Threshold& threshold, int place) {
    return place >= threshold.skipped && place < threshold.skipped + threshold.wanted;
  }

  // before: what is chosen, or equals the threshold, in the runs before this one.
  __device__ __forceinline__ void write_run(const Threshold& threshold, Count before) const {
#pragma unroll 1
    for (int step = begin; step < end; step += kStep) {
      const int block = step + 4 * lane;
      const Vector16 keys = keys_at(block);
      const Count own = count_of(keys, threshold);
      const int both = own.above | own.equal << 16;
      if (!ptx::warp_any(both != 0)) continue;
      int inclusive = both;
#pragma unroll
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int below = ptx::shuffle(inclusive, lane - distance);
        if (lane >= distance) inclusive += below;
      }
      const int earlier = inclusive - both, all = ptx::shuffle(inclusive, kWarpSize - 1);
      Count at{before.above + (earlier & 0xffff), before.equal + (earlier >> 16)};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool is_equal = threshold.wanted > 0 && keys.word[e] == threshold.key;
        const bool is_above = keys.word[e] > threshold.key;
        // mutate: ties-to-all
        if (is_above || (is_equal && is_chosen(threshold, at.equal))) {
          row.put(at.above + threshold.chosen_of(at.equal), block + e);
        }
        at.above += is_above;
        at.equal += is_equal;
      }
      before.above += all & 0xffff;
      before.equal += all >> 16;
    }
  }

  // --- the cluster ---

  __device__ __forceinline__ void sync_cluster() const {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }

  static __device__ __forceinline__ int sum_of(const Vector16& counts) {
    return counts.word[0] + counts.word[1] + counts.word[2] + counts.word[3];
  }

  // Four counts of a block of the cluster, at a place in this one's shared memory.
  __device__ __forceinline__ Vector16 load_counts(const uint32_t* counts, int block) const {
    if (cluster == 1) return *reinterpret_cast<const Vector16*>(counts);
    const float4 x = ptx::load_cluster_vector(ptx::shared_address(counts), block);
    return Vector16{{__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z),
                     __float_as_uint(x.w)}};
  }

  __device__ __forceinline__ Count load_totals(int digit, int block) const {
    const float2 x = ptx::load_cluster_pair(ptx::shared_address(shared.totals[digit]), block);
    return Count{static_cast<int>(__float_as_uint(x.x)), static_cast<int>(__float_as_uint(x.y))};
  }
};

}  // namespace cupyattn
