// Online softmax of the rows that one thread has in accumulator fragments: two rows (lane / 4
// and lane / 4 + 8) for each m-tile of 16.
//
// decode_sm80, and wide_sm90 of ordinary heads, take every maximum. prefill_sm80 and prefill_sm90 are
// lazy, so O is rarely rescaled.
// prefill_sm80 moves the maximum when a logit exceeds it by more than kRescaleThreshold (base 2),
// prefill_sm90 when the sum of a tile's probabilities is large compared with the row's sum. The
// result is the same up to rounding, because numerator and denominator share the maximum. P of
// float16 stays below 2^kRescaleThreshold, far from its limit.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/params/attention.cuh"
#include "cupyattn/ptx/convert.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, ptx::shuffle_xor(x, 1));
  return fmaxf(x, ptx::shuffle_xor(x, 2));  // mutate: maximum-of-half-a-quad
}

__device__ __forceinline__ float quad_sum(float x) {
  x += ptx::shuffle_xor(x, 1);
  return x + ptx::shuffle_xor(x, 2);  // mutate: sum-of-half-a-quad
}

__device__ __forceinline__ bool quad_any(bool predicate) {
  return quad_max(predicate ? 1.0f : 0.0f) > 0.0f;
}

// The largest of a thread's logits of one of its rows.
template <int kTilesS>
__device__ __forceinline__ float largest_of(const float (&s)[kTilesS][4], int h) {
  float largest = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
  for (int n = 1; n < kTilesS; ++n) {
    largest = fmaxf(largest, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
  }
  return largest;
}

template <int kMmaQ, int kTilesO>
__device__ __forceinline__ void multiply_rows(float (&o)[kMmaQ][kTilesO][4],
                                              const float (&factors)[kMmaQ][2]) {
#pragma unroll
  for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
    for (int n = 0; n < kTilesO; ++n) {
#pragma unroll
      // mutate: hopper-output-not-rescaled
      for (int e = 0; e < 4; ++e) o[m][n][e] *= factors[m][e / 2];
    }
  }
}

// Logits come in a form (logit_forms.cuh). `scale` turns its values into base 2, and `slack` is
// kRescaleThreshold in their units. Both are arguments, not members: parameters and constants cost
// no registers.
constexpr float kRescaleThreshold = 8.0f;

// In prefill_sm90 a thread's sum of a tile's probabilities may reach 2^kTileSumBits before the
// thread asks for a larger maximum.
template <int kMmaQ, int kTileSumBits = 8>
struct OnlineSoftmax {
  static constexpr float kMostOfTile = 1 << kTileSumBits;
  // Beyond this base-2 maximum the rounding of a sum with it exceeds that of 16-bit probabilities.
  static constexpr float kFarthestFast = 1 << 16;

  float row_max[kMmaQ][2];  // in the units of the logits; -inf while a row has seen no key
  float row_sum[kMmaQ][2];  // this thread's part

  // first_max: the maximum that all rows begin with.
  __device__ __forceinline__ OnlineSoftmax(float first_max = -ptx::infinity()) {
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_max[m][h] = first_max;
        row_sum[m][h] = 0.0f;
      }
    }
  }

  // Moves the maximum if these logits ask for it, and rescales O to match.
  template <int kTilesS, int kTilesO, typename Form>
  __device__ __forceinline__ void raise_max(const float (&s)[kMmaQ][kTilesS][4],
                                            float (&o)[kMmaQ][kTilesO][4], const Form& form,
                                            float scale, float slack) {
    float tile_max[kMmaQ][2];
    bool moves = false;
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        tile_max[m][h] = form.value(largest_of(s[m], h));
        // Written so that a row that has seen nothing moves exactly when a key is seen.
        moves |= (tile_max[m][h] - slack) > row_max[m][h];
      }
    }
    if (ptx::warp_any(moves)) rescale(tile_max, o, scale);
  }

  // The probabilities of 16 keys (n-tiles 2 k and 2 k + 1 of the logits) under the present maximum,
  // as A fragments of the second product: for 16-bit types the accumulator layout of S is already
  // the layout of A.
  template <typename T, int kTilesS, typename Form>
  __device__ __forceinline__ void exponentiate(uint32_t (&p)[kMmaQ][4],
                                               const float (&s)[kMmaQ][kTilesS][4], int k,
                                               const Form& form, float scale) {
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float shift = shift_of(m, h, form, scale);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float (&pair)[4] = s[m][2 * k + half];
          const float first = ptx::ex2_approx(form.exponent(pair[2 * h], shift));
          const float second = ptx::ex2_approx(form.exponent(pair[2 * h + 1], shift));
          row_sum[m][h] += first + second;
          p[m][2 * half + h] = ptx::pack_pair<T>(first, second);  // mutate: p-fragment-swapped
        }
      }
    }
  }

  // Makes the probabilities of a tile, as fragments, and moves the maximum if they ask for it.
  // Returns whether it has moved; O must then be multiplied by `factors`. Only tiles that take maxima
  // look for those of their logits. In other tiles the sum of the probabilities shows that a row's
  // maximum must move, and the tile is made again from the logits, by a second copy of the code or in
  // a loop (kInLoop), which takes fewer registers and 1 to 5 % more time.
  template <typename T, bool kInLoop, int kSteps, int kTilesS, typename Form>
  __device__ __forceinline__ bool exponentiate_or_raise(uint32_t (&p)[kSteps][kMmaQ][4],
                                                        const float (&s)[kMmaQ][kTilesS][4],
                                                        float (&factors)[kMmaQ][2],
                                                        const Form& form, float scale, float room,
                                                        bool takes_maxima) {
    float tile_sum[kMmaQ][2] = {};
    bool raises = takes_maxima;
#pragma unroll 1
    do {
      if (raises) raise_where_asked(s, factors, tile_sum, form, scale, room, takes_maxima);
      exponentiate_all<T>(p, s, form, scale, tile_sum);
      if (raises || !warp_asks_for_more(tile_sum, room)) break;
      raises = true;
      if constexpr (!kInLoop) {
        raise_where_asked(s, factors, tile_sum, form, scale, room, false);
        exponentiate_all<T>(p, s, form, scale, tile_sum);
      }
    } while (kInLoop);
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) row_sum[m][h] += tile_sum[m][h];
    }
    return raises;
  }
  // Whether a thread of the warp asks for a larger maximum.
  __device__ __forceinline__ bool warp_asks_for_more(const float (&tile_sum)[kMmaQ][2],
                                                     float room) const {
    bool asks = false;
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) asks |= asks_for_more(m, h, tile_sum[m][h], room);
    }
    return ptx::warp_any(asks);
  }

  // Makes the probabilities of a tile under the maxima of all logits so far. Returns whether a
  // maximum has moved; O must then be multiplied by `factors`. The largest probabilities of a row are
  // 1, or were when they were made, and 1 is not rounded.
  template <typename T, int kSteps, int kTilesS, typename Form>
  __device__ __forceinline__ bool raise_and_exponentiate(uint32_t (&p)[kSteps][kMmaQ][4],
                                                         const float (&s)[kMmaQ][kTilesS][4],
                                                         float (&factors)[kMmaQ][2],
                                                         const Form& form, float scale) {
    float tile_sum[kMmaQ][2];
    raise_where_asked(s, factors, tile_sum, form, scale, 0.0f, true);
    bool moves = false;
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      // mutate: wide-raised-maxima-not-told
      for (int h = 0; h < 2; ++h) moves |= factors[m][h] != 1.0f;
    }
    exponentiate_all<T>(p, s, form, scale, tile_sum);
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) row_sum[m][h] += tile_sum[m][h];
    }
    return ptx::warp_any(moves);
  }

  // Raises each row by its own logits alone: its bits do not depend on the rows beside it.
  // all: all rows are, and none is asked.
  template <int kTilesS, typename Form>
  __device__ __forceinline__ void raise_where_asked(const float (&s)[kMmaQ][kTilesS][4],
                                                    float (&factors)[kMmaQ][2],
                                                    const float (&tile_sum)[kMmaQ][2],
                                                    const Form& form, float scale, float room,
                                                    bool all) {
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float largest = largest_of(s[m], h);
        const bool row_moves = all || quad_any(asks_for_more(m, h, tile_sum[m][h], room));
        const float value = row_moves ? form.value(largest) : -ptx::infinity();
        factors[m][h] = raise_row(m, h, value, scale);
      }
    }
  }

  // Whether this thread asks for a larger maximum of a row: its sum of a tile exceeds twice its sum
  // of the earlier tiles by more than `room`, or the row has no maximum yet. A probability that
  // dominates its row must be 1, which 16 bits hold exactly; the rounding of any other value would
  // be the error of the answer.
  __device__ __forceinline__ bool asks_for_more(int m, int h, float tile_sum, float room) const {
    // mutate: dominating-probability-rounded
    const float most = fminf(fmaf(2.0f, row_sum[m][h], room), kMostOfTile);
    return tile_sum > most || row_max[m][h] == -ptx::infinity();  // mutate: maximum-never-moves
  }

  template <typename T, int kSteps, int kTilesS, typename Form>
  __device__ __forceinline__ void exponentiate_all(uint32_t (&p)[kSteps][kMmaQ][4],
                                                   const float (&s)[kMmaQ][kTilesS][4],
                                                   const Form& form, float scale,
                                                   float (&tile_sum)[kMmaQ][2]) const {
    static_assert(kTilesS == 2 * kSteps, "fragments take two n-tiles");
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float shift = shift_of(m, h, form, scale);
        tile_sum[m][h] = 0.0f;
#pragma unroll
        for (int n = 0; n < kTilesS; ++n) {
          const float first = ptx::ex2_approx(form.exponent(s[m][n][2 * h], shift));
          const float second = ptx::ex2_approx(form.exponent(s[m][n][2 * h + 1], shift));
          tile_sum[m][h] += first + second;
          p[n / 2][m][2 * (n % 2) + h] = ptx::pack_pair<T>(first, second);
        }
      }
    }
  }

  // Makes the probabilities of a tile by a fast path from products to exponents. Returns false, and
  // changes nothing, if the path does not hold for the tile or a maximum must move. To look at all
  // logits ahead would cost too much.
  template <typename T, int kSteps, int kTilesS, typename Path>
  __device__ __forceinline__ bool exponentiate_fast(uint32_t (&p)[kSteps][kMmaQ][4],
                                                    const float (&s)[kMmaQ][kTilesS][4],
                                                    const Path& path, float scale, float room) {
    static_assert(kMmaQ == 1 && kTilesS == 2 * kSteps, "fragments take two n-tiles");
    float tile_sum[2];
    bool fails = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool has_max = Path::kHasMax || row_max[0][h] != -ptx::infinity();
      const float shift = has_max ? -row_max[0][h] * scale : 0.0f;
      tile_sum[h] = 0.0f;
#pragma unroll
      for (int n = 0; n < kTilesS; ++n) {
        const float2 x = path.exponents(h, n, s[0][n][2 * h], s[0][n][2 * h + 1], shift);
        const float first = ptx::ex2_approx(x.x), second = ptx::ex2_approx(x.y);
        tile_sum[h] += first + second;
        p[n / 2][0][2 * (n % 2) + h] = ptx::pack_pair<T>(first, second);
      }
      if constexpr (Path::kHasMax) {
        fails |= tile_sum[h] > path.most_of_tile();  // mutate: sums-never-fail
      } else {
        // mutate: far-maximum-takes-the-fast-path
        if constexpr (Path::kHasFarMax) fails |= fabsf(shift) > kFarthestFast;
        fails |= asks_for_more(0, h, tile_sum[h], room);
      }
    }
    if (unlikely(ptx::warp_any(fails))) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) row_sum[0][h] += tile_sum[h];
    return true;
  }

  // One probability under the present maximum.
  template <typename Form>
  __device__ __forceinline__ float probability(int m, int h, float logit, const Form& form,
                                               float scale) const {
    return ptx::ex2_approx(form.exponent(logit, shift_of(m, h, form, scale)));
  }

  template <int kTilesO>
  __device__ __forceinline__ void rescale(const float (&tile_max)[kMmaQ][2],
                                          float (&o)[kMmaQ][kTilesO][4], float scale) {
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = raise_row(m, h, tile_max[m][h], scale);
#pragma unroll
        for (int n = 0; n < kTilesO; ++n) {
          o[m][n][2 * h] *= factor;
          o[m][n][2 * h + 1] *= factor;  // mutate: output-not-rescaled
        }
      }
    }
  }

  // Raises one row's maximum and rescales its sum; returns the factor for its O.
  __device__ __forceinline__ float raise_row(int m, int h, float tile_max, float scale) {
    const float old_max = row_max[m][h];
    const float new_max = fmaxf(old_max, quad_max(tile_max));
    const float factor =
        new_max == -ptx::infinity() ? 1.0f : ptx::ex2_approx((old_max - new_max) * scale);
    row_max[m][h] = new_max;
    row_sum[m][h] *= factor;  // mutate: sum-not-rescaled
    return factor;
  }

  // What the form adds on the way to a row's exponents.
  template <typename Form>
  __device__ __forceinline__ float shift_of(int m, int h, const Form& form, float scale) const {
    return form.shift(row_max[m][h], scale);
  }
  // The base-2 maximum of a row, -inf if it saw no key.
  template <typename LogitsVariant>
  __device__ __forceinline__ float base2_max(int m, int h, const AttentionParams& params) const {
    return base2_of<LogitsVariant>(row_max[m][h], params);
  }
  template <typename LogitsVariant>
  static __device__ __forceinline__ float base2_of(float row_max, const AttentionParams& params) {
    const float max = row_max * LogitsVariant::softmax_scale(params);
    if constexpr (LogitsVariant::kHasAnyLogits) {
      // A row whose logits are finite has seen keys, however far its maximum is from 0.
      constexpr float kMost = 0x1.fffffep127f;
      // mutate: far-maximum-becomes-infinite
      return row_max == -ptx::infinity() ? row_max : fminf(fmaxf(max, -kMost), kMost);
    }
    return row_max == -ptx::infinity() ? row_max : max;
  }
};

}  // namespace cupyattn
