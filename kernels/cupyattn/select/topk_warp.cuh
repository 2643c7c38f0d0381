// The greatest scores of a short row, of which few are chosen, found by one warp in its registers.
// The greatest score of each lane gives a bound that about as many scores reach as are wanted; of
// those the warp makes a list, and chooses from it.
#pragma once

#include "cupyattn/select/topk_row.cuh"

namespace cupyattn {

template <typename Config>
struct WarpTopk {
  static constexpr int kWarps = Config::kThreads / kWarpSize;
  static constexpr int kKeys = Config::kKeys;  // of a lane

  // Candidates of each warp, in the order of their blocks.
  struct Shared {
    uint32_t keys[kWarps][kWarpSize];
    int blocks[kWarps][kWarpSize];
  };
  static_assert(sizeof(Shared) == Config::kSharedBytes, "the launch makes room for it");

  TopkRow<Config> row;
  uint32_t* list_keys;
  int* list_blocks;
  int lane;

  static __device__ __forceinline__ void run(const SelectTopkParams& params, Shared& shared) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int row = static_cast<int>(blockIdx.x) * kWarps + warp;
    const WarpTopk choice = {TopkRow<Config>::after_launch(params, row, lane), shared.keys[warp],
                             shared.blocks[warp], lane};
    if (row >= params.num_rows) return;
    choice.choose();
  }

  __device__ __forceinline__ void choose() const {
    const int topk = row.params.topk, num_blocks = row.num_blocks;
    if (!Config::kCandidates && num_blocks <= topk) {
      if (lane < num_blocks) row.put(lane, lane);
      row.finish(num_blocks, lane, kWarpSize);
      return;
    }
    uint32_t key[kKeys];
    load(key);
    const uint32_t bound = find_bound(key, topk);
    const int count = list(key, bound);
    ptx::warp_sync();
    if (count <= kWarpSize) {
      choose_from_list(count, topk);
    } else {
      choose_by_bits(key, topk);
    }
  }

  __device__ __forceinline__ void load(uint32_t (&key)[kKeys]) const {
    float score[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int block = i * kWarpSize + lane;
      score[i] = block < row.num_blocks ? row.score(block) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      key[i] = sortable<Config::kCandidates>(score[i]);
      if (!row.are_plain(i * kWarpSize, (i + 1) * kWarpSize)) {
        key[i] = row.key_of_any(i * kWarpSize + lane, key[i]);
      }
    }
  }

  // A key that at least topk keys reach, or the least one that competes.
  __device__ __forceinline__ uint32_t find_bound(const uint32_t (&key)[kKeys], int topk) const {
    uint32_t greatest = kAbsentKey;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) greatest = max_of(greatest, key[i]);
    const uint32_t bound = shuffle(descending(greatest), topk - 1);
    return max_of(bound, kAbsentKey + 1u);
  }

  // Lists keys from `bound` on while there is room; returns how many there are.
  __device__ __forceinline__ int list(const uint32_t (&key)[kKeys], uint32_t bound) const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const bool reaches = key[i] >= bound;
      const uint32_t lanes = ptx::warp_ballot(reaches);
      if (lanes == 0u) continue;
      const int place = count + before(lanes);
      if (reaches && place < kWarpSize) {
        list_keys[place] = key[i];
        list_blocks[place] = i * kWarpSize + lane;
      }
      count += __popc(lanes);
    }
    return count;
  }

  __device__ __forceinline__ void choose_from_list(int count, int topk) const {
    const uint32_t key = lane < count ? list_keys[lane] : kAbsentKey;
    const uint32_t threshold = shuffle(descending(key), topk - 1);
    const uint32_t above = ptx::warp_ballot(key > threshold);
    const uint32_t equal = ptx::warp_ballot(key == threshold && key != kAbsentKey);
    const bool is_first = before(equal) < topk - __popc(above);  // mutate: ties-beyond-the-list
    const bool is_chosen = key > threshold || (key == threshold && key != kAbsentKey && is_first);
    const uint32_t chosen = ptx::warp_ballot(is_chosen);
    if (is_chosen) row.put(before(chosen), list_blocks[lane]);
    row.finish(__popc(chosen), lane, kWarpSize);
  }

  // Of more candidates than have room: the threshold, bit by bit.
  __device__ __forceinline__ void choose_by_bits(const uint32_t (&key)[kKeys], int topk) const {
    uint32_t threshold = 0;
    int wanted = 0;  // of those that equal it
#pragma unroll 1
    for (int bit = 31; bit >= 0; --bit) {
      const uint32_t tried = threshold | 1u << bit;
      const int count = count_from(key, tried);
      if (count >= topk) threshold = tried;
      if (count == topk) {
        threshold -= 1;
        break;
      }
      if (bit == 0) wanted = topk - count_from(key, threshold + 1u);
    }
    if (threshold == kAbsentKey) wanted = 0;
    int chosen = 0;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const uint32_t equal = ptx::warp_ballot(key[i] == threshold);
      const bool is_chosen =
          key[i] > threshold || (key[i] == threshold && before(equal) < wanted);
      const uint32_t lanes = ptx::warp_ballot(is_chosen);
      if (is_chosen) row.put(chosen + before(lanes), i * kWarpSize + lane);
      chosen += __popc(lanes);
      wanted -= min_of(__popc(equal), wanted);
    }
    row.finish(chosen, lane, kWarpSize);
  }

  // How many keys of the row are at least `bound`, which is not 0 unless none is above all.
  static __device__ __forceinline__ int count_from(const uint32_t (&key)[kKeys], uint32_t bound) {
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) count += key[i] >= bound && bound != 0u;
    return static_cast<int>(ptx::warp_sum(count));
  }

  // How many lanes of these come before this one.
  __device__ __forceinline__ int before(uint32_t lanes) const {
    return __popc(lanes & ((1u << lane) - 1u));
  }

  static __device__ __forceinline__ uint32_t shuffle(uint32_t key, int source) {
    return static_cast<uint32_t>(ptx::shuffle(static_cast<int>(key), source));
  }

  // The keys of all lanes in descending order (bitonic sort).
  __device__ __forceinline__ uint32_t descending(uint32_t key) const {
#pragma unroll
    for (int size = 2; size <= kWarpSize; size *= 2) {
#pragma unroll
      for (int distance = size / 2; distance > 0; distance /= 2) {
        const uint32_t other = shuffle(key, lane ^ distance);
        const bool keeps_greater = ((lane & distance) == 0) == ((lane & size) == 0);
        key = keeps_greater ? max_of(key, other) : (key < other ? key : other);
      }
    }
    return key;
  }
};

}  // namespace cupyattn
