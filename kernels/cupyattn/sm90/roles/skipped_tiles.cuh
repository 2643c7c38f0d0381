// Tiles of keys that weigh so little that prefill_sm90 leaves them out: neither their probabilities
// nor their product with values is made. A Config that has kSkipsTiles does; kernels of others have no
// code of it.
//
// A tile is left out where every probability of every row, taken against the maximum that the row has
// had so far, is less than the caller's factor divided by the request's keys. The maxima are at most
// those of all keys, so what a row loses is less than factor times what it keeps.
#pragma once

#include "cupyattn/shared/key_share.cuh"
#include "cupyattn/shared/softmax.cuh"

namespace cupyattn {

// An enumerator, as of HasKeyShare.
template <typename Config, typename = void>
struct SkipsTiles {
  enum : bool { kValue = false };
};
template <typename Config>
struct SkipsTiles<Config, typename AnyValue<Config::kSkipsTiles>::type> {
  enum : bool { kValue = Config::kSkipsTiles };
};

// Weighing a tile takes time that is lost where it matters. So tiles are weighed one by one while
// they are light, and ever fewer of them while all that are weighed matter.
struct SkippedTiles {
  // Enumerators, as of HasKeyShare.
  enum : int { kFirstHeavy = 3, kMostHeavy = kFirstHeavy + 4 };
  int heavy = 0;  // how many tiles have mattered, one after the other, of those that were weighed
  bool is_skipped;  // the present tile

  // Whether a tile is to be weighed: each behind a few that mattered, then every second, fourth, ...
  __device__ __forceinline__ bool is_weighed(int tile) const {
    // mutate: tiles-weighed-too-seldom
    return (tile & ((1 << max_of(heavy - kFirstHeavy, 0)) - 1)) == 0;
  }
  // All warps of a warpgroup are told the same.
  __device__ __forceinline__ void has_weighed(bool matters) {
    heavy = matters ? min_of(heavy + 1, static_cast<int>(kMostHeavy)) : 0;
  }

  // Whether a logit of this thread's is not below its row's; so is one that is no number. row: the
  // first of the thread's in its item. The logarithm of the factor takes the place of the last number
  // of user-written logits (launch/driver/params.py).
  template <int kTilesS>
  static __device__ __forceinline__ bool exceeds_margins(const AttentionParams& params, int kv_len,
                                                         int row, int num_rows,
                                                         const float (&s)[kTilesS][4],
                                                         const float (&row_max)[2]) {
    const float factor_log2 = __uint_as_float(params.logits_numbers[kMaxLogitsNumbers - 1]);
    // The largest logit of all is never left out.
    const float margin = fminf(factor_log2 - log2f(static_cast<float>(kv_len)), 0.0f);
    const float units = params.softmax_slack / kRescaleThreshold;
    bool is_light[2] = {true, true};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // mutate: tiles-left-out-too-early
      const float own = row_max[h] + margin * units;
      // mutate: rows-of-nobody-keep-tiles
      const float least = row + 8 * h < num_rows ? own : ptx::infinity();
#pragma unroll
      for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) is_light[h] &= s[n][2 * h + e] < least;
      }
    }
    return !(is_light[0] && is_light[1]);
  }
};
struct NoSkippedTiles {};

// What the warps of each warpgroup have found of a tile.
template <int kWarpgroups>
struct TileVotes {
  Vector16 of[kWarpgroups];
};

}  // namespace cupyattn
