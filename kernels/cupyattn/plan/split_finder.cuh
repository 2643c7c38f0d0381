// How a block finds its part of a tile's keys where nothing was planned: each makes the same plan of
// up to 64 requests, two a lane, which takes less than a launch for it would. Keys are split as
// schedule/balance.py splits them for one wave of blocks, or for half of one; all tiles of a request
// have as many parts.
#pragma once

#include "cupyattn/plan/balance.cuh"
#include "cupyattn/plan/item_finder.cuh"

namespace cupyattn {

template <bool kTellsRequest>
struct SplitFinder {
  using Items = ItemFinder<kTellsRequest>;

  const FoundSplits& splits;
  const Items items;

  // The tiles of a request, and the key tiles that one of them visits at most.
  struct Tiles {
    int rows;
    float keys;
  };

  // The item at a place, for all lanes; zeros past the last.
  __device__ __forceinline__ WorkItem find(const AttentionParams& params, int place) const {
    typename Items::Pair own = items.load_own();
    const Tiles first = tiles_of(params, own.first), second = tiles_of(params, own.second);
    const float inverse_size = inverse_of(choose_size(first, second));
    int parts = parts_of(second, inverse_size);
    const int first_parts = parts_of(first, inverse_size), num_second = second.rows * parts;
    int end = sum_up_to_lane(first.rows * first_parts + num_second, items.lane);
    // mutate: found-split-of-another-request
    const int source = sum_of_lanes(end <= place ? 1 : 0);
    if (source >= kWarpSize) return WorkItem{};
    if (place < end - num_second) {
      own.second = own.first;
      parts = first_parts;
      end -= num_second;  // mutate: found-splits-of-the-next-request
    }
    const int num_splits = ptx::shuffle(parts, source);
    const int from_end = ptx::shuffle(end, source) - place;  // items up to the next request
    const float inverse = ptx::rcp_approx(static_cast<float>(num_splits));
    // Tiles from this one on: both numbers are small.
    const int tiles_left = static_cast<int>((static_cast<float>(from_end) - 0.5f) * inverse) + 1;
    WorkItem item = items.item_of(own.second, source, tiles_left - 1);
    item.num_splits = num_splits;
    item.split = tiles_left * num_splits - from_end;  // mutate: found-splits-are-the-first
    // States and counters have a place for each item.
    item.first_state = item.split_tile = place - item.split;
    return item;
  }

  // Lists an item for the launch that merges. All requests have equally many tiles.
  __device__ __forceinline__ void list(const AttentionParams& params, int place,
                                       const WorkItem& item) const {
    if (!splits.lists || item.num_splits == 0 || items.lane != 0) return;
    const_cast<WorkItem*>(params.work)[place] = item;
    if (item.split > 0) return;
    const int rows = items.lengths.qo_len * items.group_size;
    const int each = (rows + items.tile_rows - 1) / items.tile_rows;
    const int tile = item.q_start / items.lengths.qo_len * each + item.first_row / items.tile_rows;
    // mutate: found-tiles-are-merged-whole
    const_cast<int32_t*>(params.merges)[tile] = item.num_splits > 1 ? place : -1;
  }

 private:
  __device__ __forceinline__ Tiles tiles_of(const AttentionParams& params,
                                            const typename Items::Found& found) const {
    int keys = found.kv_len;
    if (params.window_left >= 0) keys = min_of(keys, found.qo_len + params.window_left);
    keys = divide(keys + splits.tile_kv - 1, splits.tile_kv_magic, splits.tile_kv_shift);
    return {found.num_tiles, found.num_tiles > 0 ? static_cast<float>(keys) : 0.0f};
  }
  // A little less than that: what divides evenly is rounded up to no part more.
  static __device__ __forceinline__ float inverse_of(float size) {
    return 0.999996f * ptx::rcp_approx(size);
  }
  // In how many parts the keys of a tile are split after so many tiles, of which this is the inverse.
  static __device__ __forceinline__ int parts_of(const Tiles& tiles, float inverse) {
    return max_of(static_cast<int>(ceilf(tiles.keys * inverse)), 1);
  }
  // The items of all requests.
  static __device__ __forceinline__ int count_items(const Tiles& first, const Tiles& second,
                                                    float inverse) {
    return sum_of_lanes(first.rows * parts_of(first, inverse) +
                        second.rows * parts_of(second, inverse));
  }

  // The most key tiles of one part, for all lanes.
  __device__ __forceinline__ float choose_size(const Tiles& first, const Tiles& second) const {
    const int keys = static_cast<int>(first.keys), more_keys = static_cast<int>(second.keys);
    const int longest = max_of(ptx::warp_max(max_of(keys, more_keys)), 1);
    float best = static_cast<float>(longest), limit = 0.0f;
    if (!splits.may_split) return best;
    const float total = static_cast<float>(sum_of_lanes(first.rows * keys + second.rows * more_keys));
    const float cost = static_cast<float>(longest) * splits.least_part_cost;
    const int least = max_of(static_cast<int>(ceilf(sqrtf(cost))), 1);
    // Whole tiles, parts for a wave, and for half of one, which is nearly as fast where blocks have
    // room on their SMs.
    const int most_rounds = splits.least_share < 1.0f ? 3 : 2;
    int slots = splits.items_per_wave;
#pragma unroll 1
    for (int round = 0; round < most_rounds; ++round) {
      // The shortest parts, of those worth a merge, that are no more than `slots`.
      int low = round == 0 ? longest : min_of(least, longest), high = longest;
#pragma unroll 1
      while (low < high) {
        const int middle = (low + high) / 2;
        // mutate: found-parts-outgrow-their-wave
        if (count_items(first, second, inverse_of(static_cast<float>(middle))) <= slots) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      const float size = static_cast<float>(low), inverse = inverse_of(size);
      const float num_items = static_cast<float>(count_items(first, second, inverse));
      const float most = fmaxf(ceilf(static_cast<float>(longest) * inverse), 1.0f);
      const float time = time_of(total, static_cast<float>(longest), num_items, most);
      if (round == 0) {
        limit = static_cast<float>(kMinGain) * time;
      } else {
        if (time < limit) best = size;
        limit = fminf(limit, time);
        slots /= 2;
      }
    }
    return best;
  }

  // When the last block would be done, in key tiles: PlanBatch::time_of for one wave of blocks.
  // most: parts of a tile.
  __device__ __forceinline__ float time_of(float total, float longest, float num_items,
                                           float most) const {
    const float busy = (total + num_items * splits.block) * splits.a_wave;
    // The fewer blocks, the faster each.
    const float alone = fmaxf(splits.least_share, fminf(num_items * splits.a_wave, 1.0f));
    const float done = fmaxf(busy, alone * (longest * ptx::rcp_approx(most) + splits.block));
    const float merge = splits.merge + splits.state * num_items * splits.a_wave + splits.part * most;
    return most > 1.0f ? done + merge : done;
  }
};

}  // namespace cupyattn
