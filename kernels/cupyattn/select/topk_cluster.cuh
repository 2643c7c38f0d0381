// The greatest scores of a row, found by the blocks of a cluster: a threshold, digit by digit from
// histograms of all scores, and what is above it. Each warp has a run of the row. Once the first
// digit is known it lists those of its run that may be chosen, in their order: the row is read twice,
// and short runs once. Where a list has no room for them, the run is read again each time.
#pragma once

#include "cupyattn/plan/block_scan.cuh"
#include "cupyattn/ptx/cluster.cuh"
#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/select/topk_row.cuh"

namespace cupyattn {

template <typename Config>
struct ClusterTopk {
  static constexpr int kThreads = Config::kThreads, kWarps = kThreads / kWarpSize;
  static constexpr int kStep = 4 * kWarpSize;  // keys that a warp looks at at a time
  static constexpr int kAhead = Config::kAligned ? 4 : 2;  // times it has loads of under way
  static constexpr int kListed = 8;            // keys of a lane that it looks at to list some
  static constexpr int kDigits = 3, kBinBits = 11, kBins = 1 << kBinBits;
  static_assert(kBins <= 4 * kThreads, "a thread looks at four bins");
  static constexpr int kNotListed = -1;

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
  uint32_t* list_keys;  // this warp's list, and its blocks; warp_room have room
  int* list_blocks;
  TopkRow<Config> row;
  int cluster, rank, warp, lane;
  int begin, end;  // this warp's run
  int warp_room;
  int num_listed = kNotListed;

  // Behind `shared` there is room for the lists of warps.
  static __device__ __forceinline__ void run(const SelectTopkParams& params, Shared& shared) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    clear(shared);
    const auto row = TopkRow<Config>::after_launch(params, ptx::cluster_index(), lane);
    ClusterTopk(shared, row, params.warp_room, warp, lane).choose();
  }

  __device__ __forceinline__ ClusterTopk(Shared& shared, const TopkRow<Config>& row, int warp_room,
                                         int warp, int lane)
      : shared(shared),
        row(row),
        cluster(ptx::cluster_size()),
        rank(ptx::cluster_rank()),
        warp(warp),
        lane(lane),
        warp_room(warp_room) {
    const int run = ceil_div(row.num_blocks, cluster * kWarps * kStep) * kStep;
    begin = min_of((rank * kWarps + warp) * run, row.num_blocks);
    end = min_of(begin + run, row.num_blocks);
    list_keys = reinterpret_cast<uint32_t*>(&shared + 1) + 2 * warp * warp_room;
    list_blocks = reinterpret_cast<int*>(list_keys + warp_room);
  }

  static __device__ __forceinline__ void clear(Shared& shared) {
    if (threadIdx.x < kBins / 4) {
#pragma unroll
      for (int digit = 0; digit < kDigits; ++digit) {
        *reinterpret_cast<Vector16*>(&shared.bins[digit][4 * threadIdx.x]) = Vector16{};
      }
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

  // Reads the row, and counts the first 11 bits of its keys. Lists a run that has room as it is.
  __device__ __forceinline__ void count_first_digits() {
    const bool has_room = end - begin <= warp_room;
#pragma unroll 1
    for (int step = begin; step < end; step += kAhead * kStep) {
      float score[kAhead][4];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) row.load(step + i * kStep + 4 * lane, end, score[i]);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int first = step + i * kStep, block = first + 4 * lane;
        if (first >= end) break;
        Vector16 keys;
#pragma unroll
        for (int e = 0; e < 4; ++e) keys.word[e] = sortable<Config::kCandidates>(score[i][e]);
        if (!row.are_plain(first, first + kStep)) {
#pragma unroll
          for (int e = 0; e < 4; ++e) keys.word[e] = row.key_of_any(block + e, keys.word[e]);
        }
        if (has_room) {
          *reinterpret_cast<Vector16*>(list_keys + (block - begin)) = keys;
#pragma unroll
          for (int e = 0; e < 4; ++e) list_blocks[block - begin + e] = block + e;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (keys.word[e] != kAbsentKey) {
            ptx::atomic_add_shared(&shared.bins[0][keys.word[e] >> 21], 1u);
          }
        }
      }
    }
    if (has_room) num_listed = end - begin;
    ptx::warp_sync();
  }

  // Lists what of this run reaches `bound`, unless there is a list.
  __device__ __forceinline__ void list(uint32_t bound) {
    if (num_listed != kNotListed) return;
    int count = 0;
#pragma unroll 1
    for (int step = begin; step < end; step += kListed * kWarpSize) {
      float score[kListed];
#pragma unroll
      for (int i = 0; i < kListed; ++i) {
        const int block = step + i * kWarpSize + lane;
        score[i] = block < end ? row.score(block) : 0.0f;
      }
      const bool are_plain = row.are_plain(step, step + kListed * kWarpSize);
#pragma unroll
      for (int i = 0; i < kListed; ++i) {
        const int block = step + i * kWarpSize + lane;
        uint32_t key = sortable<Config::kCandidates>(score[i]);
        if (!are_plain) key = row.key_of_any(block, key);
        const bool reaches = key >= bound && block < end;
        const uint32_t lanes = ptx::warp_ballot(reaches);
        if (lanes == 0u) continue;
        const int place = count + before(lanes);
        if (reaches && place < warp_room) {
          list_keys[place] = key;
          list_blocks[place] = block;
        }
        count += __popc(lanes);
      }
    }
    if (count <= warp_room) num_listed = count;
    ptx::warp_sync();
  }

  // Calls visit(key, place) for all of the list, or of the run, with as many lanes at a time.
  template <typename Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) const {
    if (num_listed != kNotListed) {
#pragma unroll 4
      for (int first = 0; first < num_listed; first += kWarpSize) {
        const int place = first + lane;
        visit(place < num_listed ? list_keys[place] : kAbsentKey, place);
      }
    } else {
#pragma unroll 2
      for (int first = begin; first < end; first += kWarpSize) {
        const int block = first + lane;
        visit(block < end ? row.key(block, row.score(block)) : kAbsentKey, block);
      }
    }
  }

  // The block at such a place.
  __device__ __forceinline__ int block_at(int place) const {
    return num_listed != kNotListed ? list_blocks[place] : place;
  }

  // How many lanes of these come before this one.
  __device__ __forceinline__ int before(uint32_t lanes) const {
    return __popc(lanes & ((1u << lane) - 1u));
  }

  // Counts a digit of the keys whose bits from `above` on are `prefix`.
  __device__ __forceinline__ void count_digits(int digit, int above, int shift, uint32_t prefix) {
    const uint32_t mask = (1u << (above - shift)) - 1u;
    list(prefix << above);
    for_each([&](uint32_t key, int) {
      if (key >> above == prefix) {
        ptx::atomic_add_shared(&shared.bins[digit][key >> shift & mask], 1u);
      }
    });
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

  // Counts the chosen ones of this warp's run.
  __device__ __forceinline__ Count count_chosen(const Threshold& threshold) {
    Count sum{0, 0};
    list(threshold.key + (threshold.wanted == 0));
    for_each([&](uint32_t key, int) {
      sum.above += key > threshold.key;
      sum.equal += threshold.wanted > 0 && key == threshold.key;
    });
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

  // from: what is chosen, or equals the threshold, in the runs before this one.
  __device__ __forceinline__ void write_run(const Threshold& threshold, Count from) const {
    for_each([&](uint32_t key, int place) {
      const bool is_equal = threshold.wanted > 0 && key == threshold.key;
      const uint32_t above = ptx::warp_ballot(key > threshold.key);
      const uint32_t equal = ptx::warp_ballot(is_equal);
      const Count at{from.above + before(above), from.equal + before(equal)};
      // mutate: ties-to-all
      if (key > threshold.key || (is_equal && is_chosen(threshold, at.equal))) {
        row.put(at.above + threshold.chosen_of(at.equal), block_at(place));
      }
      from.above += __popc(above);
      from.equal += __popc(equal);
    });
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
