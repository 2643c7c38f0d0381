// How a warp finds an item of work by lengths in device memory, where no list was planned. The host
// knows how many tiles there may be; places past the last tile have no work.
//
// Up to 32 requests are a lane each, and up to 64 two. Their items come in the order of their keys,
// the longest first, as in a list: a level is what a tile sees in whole tiles, and a search finds the
// level of a place. Many requests balance by themselves. Each then has places from its first row on, rounded down, and
// one more, so that they follow from one offset.
//
// Lengths are not trusted: rows and keys are cut to what the arrays hold. All code stands once,
// because a kernel is slow where it is long.
#pragma once

#include "cupyattn/params/device_lengths.cuh"
#include "cupyattn/shared/key_share.cuh"
#include "cupyattn/shared/work.cuh"

namespace cupyattn {

// Whether the blocks of a kernel find their items. Few kernels say so.
template <typename Config, typename = void>
struct FindsItems {
  enum : bool { kValue = false };
};
template <typename Config>
struct FindsItems<Config, typename AnyValue<Config::kFindsItems>::type> {
  enum : bool { kValue = Config::kFindsItems };
};

// The sum of the lanes' values.
__device__ __forceinline__ int sum_of_lanes(int value) {
  return static_cast<int>(ptx::warp_sum(static_cast<uint32_t>(value)));
}
// The sum of the values of this lane and all before it.
__device__ __forceinline__ int sum_up_to_lane(int value, int lane) {
#pragma unroll 1
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int below = ptx::shuffle(value, lane - step);
    if (lane >= step) value += below;
  }
  return value;
}

// kTellsRequest: items say their request's place in the batch too, where scales have effect.
template <bool kTellsRequest, typename Lengths = DeviceLengths>
struct ItemFinder {
  const Lengths& lengths;
  const int group_size, tile_rows, lane;

  // A request, its place in the batch, its tiles of rows, and the level of the last, which is the
  // highest: each tile is one above that of the rows before it.
  struct Found {
    int q_start, qo_len, kv_start, kv_len, num_tiles, level, index;
  };

  // The requests of a lane, one behind the other. A lane of one request has no tiles in `first`.
  struct Pair {
    Found first, second;
  };
  // The most requests that the lanes hold.
  enum : int { kMostTogether = 2 * kWarpSize };

  // The item at a place, for all lanes; zeros past the last.
  __device__ __forceinline__ WorkItem find(int place) const {
    int from_end = place, source = 0;
    int are_two = lengths.num_requests > kWarpSize ? 1 : 0, index = lane << are_two;
    if (lengths.num_requests > kMostTogether) index = find_request(from_end), are_two = 0;
    Pair own = load_pair(index, are_two);
    // The shuffle keeps the compiler from making two copies of all, one for each order.
    if (ptx::warp_uniform(lengths.num_requests) <= kMostTogether) source = find_tile(own, from_end);
    if (source < 0) return WorkItem{};
    const Found& found = own.second;
    // Offsets that do not grow name tiles ahead of the last too.
    const uint32_t num_tiles = ptx::shuffle(found.num_tiles, source);
    // mutate: found-tiles-past-the-last
    if (static_cast<uint32_t>(from_end) >= num_tiles) return WorkItem{};
    return item_of(found, source, from_end);
  }

  // The requests of each lane, where lanes hold all.
  __device__ __forceinline__ Pair load_own() const {
    const int are_two = lengths.num_requests > kWarpSize ? 1 : 0;
    return load_pair(lane << are_two, are_two);
  }

  // Zeros past the last request.
  __device__ __forceinline__ Found load(int index) const {
    Found found{};
    if (index >= lengths.num_requests) return found;
    if constexpr (kTellsRequest) found.index = index;
    found.q_start = q_start_of(index);
    found.qo_len = lengths.qo_len;
    if (lengths.qo_lens != nullptr) {
      found.qo_len = lengths.qo_lens[index];
    } else if (lengths.qo_len < 0) {
      found.qo_len = clamp(lengths.qo_offsets[index + 1], lengths.num_rows) - found.q_start;
    }
    found.qo_len = clamp(found.qo_len, lengths.num_rows - found.q_start);
    int room = lengths.max_kv_len;
    found.kv_start = index * lengths.kv_step;
    if (lengths.kv_offsets != nullptr) {
      found.kv_start = clamp(lengths.kv_offsets[index], lengths.kv_room);
      room = min_of(room, lengths.kv_room - found.kv_start);
    }
    // Offsets may be anything, and differences of unsigned numbers are.
    uint32_t kv_len = lengths.kv_lens[index];
    // mutate: found-key-offsets-as-lengths
    if (lengths.kv_lens_are_steps) kv_len = lengths.kv_lens[index + 1] - kv_len;
    found.kv_len = clamp(static_cast<int>(kv_len), room);
    found.num_tiles = divide_rows(found.qo_len * group_size + tile_rows - 1);
    const int ahead = lengths.is_causal ? max_of(found.kv_len - found.qo_len, 0) : found.kv_len;
    found.level = static_cast<int>(static_cast<float>(ahead) * lengths.tiles_a_key);
    // All tiles have a level of those that are looked at.
    found.level = min_of(found.level + found.num_tiles, 2 * lengths.level_step) - 1;
    return found;
  }

  // The item of the request that lane `source` holds: its tile `from_end`, counted from the last.
  __device__ __forceinline__ WorkItem item_of(const Found& found, int source, int from_end) const {
    WorkItem item{};
    item.q_start = ptx::shuffle(found.q_start, source);
    item.qo_len = ptx::shuffle(found.qo_len, source);
    item.kv_start = ptx::shuffle(found.kv_start, source);
    item.kv_len = ptx::shuffle(found.kv_len, source);
    item.first_row = (ptx::shuffle(found.num_tiles, source) - 1 - from_end) * tile_rows;
    item.num_splits = 1;
    // mutate: found-scales-of-first-request
    if constexpr (kTellsRequest) item.mask_start = ptx::shuffle(found.index, source);
    return item;
  }

 private:
  static __device__ __forceinline__ int clamp(int x, int most) {
    return min_of(max_of(x, 0), most);
  }
  __device__ __forceinline__ int divide_rows(int rows) const {
    return divide(rows, lengths.tile_magic, lengths.tile_shift);
  }
  __device__ __forceinline__ int q_start_of(int index) const {
    const int start = lengths.qo_offsets != nullptr ? lengths.qo_offsets[index]
                                                    : index * max_of(lengths.qo_len, 0);
    return clamp(start, lengths.num_rows);
  }
  // Where the places of a request begin, if it has places by its offset: no fewer than it has tiles.
  __device__ __forceinline__ int place_of(int index) const {
    return divide_rows(q_start_of(index) * group_size) + index;
  }

  // A request as `second`, or two as both.
  __device__ __forceinline__ Pair load_pair(int index, int are_two) const {
    Pair pair{};
#pragma unroll 1
    for (int i = 0; i <= are_two; ++i) {
      pair.first = pair.second;
      pair.second = load(index + i);  // mutate: found-requests-twice
    }
    return pair;
  }

  // The lane of the request of a place by levels, or -1; the request is its `second` then. `place`
  // becomes its tile, counted from the last.
  __device__ __forceinline__ int find_tile(Pair& own, int& place) const {
    Found &first = own.first, &second = own.second;
    // The lowest level that no more than `place` tiles are above of.
    int level = 0, rank = place;
#pragma unroll 1
    for (int step = lengths.level_step; step > 0; step /= 2) {
      const int above = sum_of_lanes(clamp(first.level - level - step + 1, first.num_tiles) +
                                     clamp(second.level - level - step + 1, second.num_tiles));
      if (above > place) {
        level += step;  // mutate: found-level-too-high
      } else {
        rank = place - above;
      }
    }
    // A request has one tile of the level or none. They come by request.
    const bool has_first = has_tile(first, level), has_second = has_tile(second, level);
    const uint32_t bit = 1u << lane;
    const uint32_t firsts = ptx::warp_sum(has_first ? bit : 0);
    const uint32_t seconds = ptx::warp_sum(has_second ? bit : 0);
    // mutate: found-request-of-another-rank
    const int before = __popc(firsts & (bit - 1)) + __popc(seconds & (bit - 1));
    const bool is_first = has_first && before == rank;
    const bool is_second = has_second && before + has_first == rank;
    if (is_first) second = first;
    place = second.level - level;
    const int source = sum_of_lanes(is_first || is_second ? lane + 1 : 0) - 1;
    place = ptx::shuffle(place, source & (kWarpSize - 1));
    return source;
  }

  static __device__ __forceinline__ bool has_tile(const Found& found, int level) {
    return static_cast<uint32_t>(found.level - level) < static_cast<uint32_t>(found.num_tiles);
  }

  // The last request whose places begin at this one or before, of which 32 are looked at at a time.
  // `place` becomes one of its own.
  __device__ __forceinline__ int find_request(int& place) const {
    int first = 0, step = lengths.num_requests;
    int begin = 0;
#pragma unroll 1
    while (step > 1) {
      step = (step + kWarpSize - 1) / kWarpSize;
      const int index = first + lane * step;
      const int own = index < lengths.num_requests ? place_of(index) : 0x7fffffff;
      const int last = max_of(sum_of_lanes(own <= place ? 1 : 0), 1) - 1;
      first += last * step;
      begin = ptx::shuffle(own, last);
    }
    place -= begin;  // mutate: found-places-of-all-requests
    return first;
  }
};

}  // namespace cupyattn
