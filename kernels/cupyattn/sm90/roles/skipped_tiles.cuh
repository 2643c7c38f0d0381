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

// The logits of a thread's two rows below which a tile is left out.
struct SkippedTiles {
  float margin[2];  // from a row's maximum, in the units of products; +inf for a row that is none

  // row: the first of the thread's in its item. The logarithm of the factor takes the place of the
  // last number of user-written logits (launch/driver/params.py).
  __device__ __forceinline__ void begin_margins(const AttentionParams& params, int kv_len,
                                                int row, int num_rows) {
    const float factor_log2 = __uint_as_float(params.logits_numbers[kMaxLogitsNumbers - 1]);
    // The largest logit of all is never left out.
    const float least = fminf(factor_log2 - log2f(static_cast<float>(kv_len)), 0.0f);
    const float units = params.softmax_slack / kRescaleThreshold;
#pragma unroll
    // mutate: rows-of-nobody-keep-tiles
    for (int h = 0; h < 2; ++h) margin[h] = row + 8 * h < num_rows ? least * units : ptx::infinity();
  }

  // Whether a logit of this thread's is not below its row's; so is one that is no number.
  template <int kTilesS>
  __device__ __forceinline__ bool exceeds_margins(const float (&s)[kTilesS][4],
                                                  const float (&row_max)[2]) const {
    bool is_light[2] = {true, true};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // mutate: tiles-left-out-too-early
      const float least = margin[h] == ptx::infinity() ? margin[h] : row_max[h] + margin[h];
#pragma unroll
      for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) is_light[h] &= s[n][2 * h + e] < least;
      }
    }
    return !(is_light[0] && is_light[1]);
  }
  bool is_skipped;  // the present tile
};
struct NoSkippedTiles {};

}  // namespace cupyattn
