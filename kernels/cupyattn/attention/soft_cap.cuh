// The soft cap: tanh by special functions, or by polynomials while logits are small beside it.
#pragma once

#include "cupyattn/attention/logit_forms.cuh"
#include "cupyattn/attention/softmax.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/params/attention.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

// The odd polynomial closest to tanh on |x| < kTanhRange (a float64 minimax fit of what it is of
// tanh): within 1.5e-6 of it.
constexpr float kTanhRange = 0.3125f;
constexpr float kTanh1 = 0.99999852368f;
constexpr float kTanh3 = -0.33306009072f;
constexpr float kTanh5 = 0.12577037189f;

// Such polynomials increase everywhere, and without bound.
struct TanhPolynomial {
  float range, c1, c3, c5;

  __device__ __forceinline__ float at_range() const {
    const float square = range * range;
    return range * fmaf(square, fmaf(square, c5, c3), c1);
  }
};
// Within `error`, as far as that goes: fits of minimax fits of degree 3 and 5, whose errors are
// those of their series.
__device__ __forceinline__ TanhPolynomial widest_cubic(float error) {
  const float range = fminf(kTanhRange, exp2f(0.2f * log2f(120.0f * error)));
  const float square = range * range;
  return {range, 1.0f - square * square * (1.0f / 24.0f - 0.0236f * square),
          -1.0f / 3.0f + square * (1.0f / 6.0f - 0.0708f * square), 0.0f};
}
__device__ __forceinline__ TanhPolynomial widest_quintic(float error) {
  const float range = fminf(0.52f, exp2f(log2f(1250.0f * error) / 7.0f));
  const float square = range * range;
  return {range, 1.0f - square * square * square * (0.0058f - 0.0039f * square),
          -1.0f / 3.0f + square * square * (0.0466f - 0.0278f * square),
          2.0f / 15.0f - square * (0.0938f - 0.0426f * square)};
}

// Logits of `unit` raw products become base-2 logits under a cap: tanh(x) = 1 - 2 / (1 + e^2x).
template <int kMmaQ, int kTilesS>
__device__ __forceinline__ void apply_tanh(float (&s)[kMmaQ][kTilesS][4], float cap, float unit) {
  const float twice = 2.0f * kLog2e * unit;
#pragma unroll
  for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
    for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float power = ptx::ex2_approx(twice * s[m][n][e]);
        s[m][n][e] = cap * fmaf(-2.0f, ptx::rcp_approx(1.0f + power), 1.0f);
      }
    }
  }
}

// x times an even polynomial: the soft cap of small logits, or (1, 0, 0) of base-2 logits.
struct PolynomialForm {
  float c0, c2, c4;
  bool is_settled;

  __device__ __forceinline__ bool keeps_max() const { return is_settled; }
  // Not -inf, of which the polynomial would make NaN; nothing visible is this small. If c4 is large
  // enough, the polynomial makes a large negative number of it.
  static constexpr float kLeastToHide = 1e-30f;
  static __device__ __forceinline__ float hidden() { return -1e18f; }

  __device__ __forceinline__ float factor(float x) const { return factor_of(x * x); }
  __device__ __forceinline__ float factor_of(float square) const {
    return fmaf(square, fmaf(square, c4, c2), c0);
  }
  __device__ __forceinline__ float value(float x) const {
    return x <= hidden() ? -ptx::infinity() : x * factor(x);
  }
  __device__ __forceinline__ float exponent(float x, float c) const {
    return fmaf(x, factor(x), c);
  }
};

// The same of a cubic: an operation a logit less, for scaled products of which those past 1, far
// out of its range, go on with what it makes of 1, so that it increases everywhere.
struct CubicForm {
  float c0, c2;

  static __device__ __forceinline__ float hidden() { return PolynomialForm::hidden(); }
  __device__ __forceinline__ float exponent(float x, float c) const {
    return fmaf(x, fmaf(ptx::square_saturated(x), c2, c0), c);
  }
};

// That all logits of a tile are small beside the cap, or that its sums will tell.
template <typename FormType>
struct CapGuess {
  using Form = FormType;
  static constexpr bool kHasMax = true;  // a row in reach has one
  Form form;
  float most;  // of the sum of a tile

  __device__ __forceinline__ float most_of_tile() const { return most; }

  __device__ __forceinline__ float2 exponents(int, int, float x, float y, float shift) const {
    return make_float2(form.exponent(x, shift), form.exponent(y, shift));
  }
};

// For which rows such a guess holds: those of no larger a maximum; and the base-2 logarithm of the
// number of keys at the end of its range, beside a row's sum of 1, whose error is lost in the sum.
struct CapReach {
  float top, evidence;
};

// The soft cap of logits that share one positive scale. The raw product takes the scale, the cap
// and base 2 in one polynomial, which is right while it is small beside the cap. Nobody looks at
// each product for that, where a row is in reach. Past the range
// - a positive product makes more of the polynomial, which increases, than the guess has room for
//   above the row's maximum, and the sum of the probabilities shows it;
// - a negative one weighs less than 2^-reach, of which the polynomial errs by 3.2e-4 at most, for
//   caps from kLeastCap on: little beside a row's sum, if that has grown with the number of keys.
struct CappedLogits {
  static constexpr bool kReadsRows = false;
  static constexpr bool kGuesses = true;
  // Where keys are to be hidden too.
  static constexpr bool kGuessesAll = true;
  static constexpr bool kScalesQueries = false;
  static constexpr int kSlackBits = 6;
  using Constants = LogitConstants;

  // Coefficients: to read them again for each tile would be waited for.
  using Kept = PolynomialForm;
  // Of rows in reach, and as far as any goes.
  static __device__ __forceinline__ CapGuess<PolynomialForm> near_guess(const Kept& kept) {
    return {kept, 1 << kSlackBits};
  }
  static __device__ __forceinline__ CapGuess<PolynomialForm> far_guess(const Kept& kept,
                                                                       const LogitConstants&) {
    return {kept, 1 << kSlackBits};
  }
  static __device__ __forceinline__ CapReach reach(const LogitConstants& constants) {
    return CapReach{constants.reach - kSlackBits, constants.reach - kTailOverLost};
  }
  static constexpr float kTailOverLost = 3.5f;  // log2(3.2e-4 / 3e-5)
  // Below, the polynomial errs by more: 0.04 of a weight at a cap of 5.
  static constexpr float kLeastCap = 16.0f;
  // For how many keys of two rows the sums of tiles will tell of logits past the reach.
  static __device__ __forceinline__ int keys_in_reach(const float (&row_max)[2],
                                                      const float (&row_sum)[2],
                                                      const CapReach& reach) {
    float keys = 1 << 24;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool is_low = row_max[h] <= reach.top;
      keys = fminf(keys, is_low ? row_sum[h] * ptx::ex2_approx(row_max[h] + reach.evidence) : 0.0f);
    }
    return static_cast<int>(keys);
  }

  // Whether a tile is known to be in the range of far_guess(), and all rows have a maximum.
  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ bool are_small(const float (&)[kMmaQ][kTilesS][4],
                                                   const float (&)[kMmaQ][2],
                                                   const LogitConstants&) {
    return false;
  }
  // Any logits, to their caps.
  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ ScaledForm settle(float (&s)[kMmaQ][kTilesS][4],
                                                      const LogitConstants& constants) {
    if (exceeds(s, [&](int, int) { return constants.limit; })) {
      apply_tanh(s, constants.cap, constants.scale);
    } else {
      const PolynomialForm form = polynomial(constants);
#pragma unroll
      for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
        for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[m][n][e] *= form.factor(s[m][n][e]);
        }
      }
    }
    return ScaledForm{1.0f};
  }

  static __device__ __forceinline__ RowInfo make_row(const AttentionParams&, int token,
                                                     int position, int head, int) {
    return RowInfo{token, position, head, 1.0f, 0.0f};
  }
  static __device__ __forceinline__ PolynomialForm polynomial(const LogitConstants& constants) {
    return PolynomialForm{constants.c0, constants.c2, constants.c4, false};
  }
  static __device__ __forceinline__ Kept keep(const LogitConstants& constants) {
    return polynomial(constants);
  }
  static __device__ __forceinline__ LogitConstants make_constants(const AttentionParams& params) {
    return constants_of(params, TanhPolynomial{kTanhRange, kTanh1, kTanh3, kTanh5},
                        params.sm_scale / params.logits_soft_cap, 1.0f);
  }
  static __device__ __forceinline__ float softmax_scale(const AttentionParams&) { return 1.0f; }
  static __device__ __forceinline__ float softmax_slack(const AttentionParams&) { return kSlack; }

  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ PolynomialForm
  apply(float (&s)[kMmaQ][kTilesS][4], const float (&row_max)[kMmaQ][2], const RowInfo*,
        const LogitConstants& constants, const AttentionParams&, int, int, bool is_masked) {
    // The cap makes logits smaller, so what bounds the product bounds the logit.
    if (!is_masked && !exceeds(s, [&](int m, int h) {
          // mutate: soft-cap-maximum-stays
          return fminf((row_max[m][h] + kSlack) * constants.inverse, constants.limit);
        })) {
      return PolynomialForm{constants.c0, constants.c2, constants.c4, true};
    }
    if (is_masked || exceeds(s, [&](int, int) { return constants.limit; })) {
      apply_tanh(s, constants.cap, constants.scale);
      return PolynomialForm{1.0f, 0.0f, 0.0f, false};
    }
    return PolynomialForm{constants.c0, constants.c2, constants.c4, false};
  }

 protected:
  // unit: what turns a product, which comes times query_scale, into the argument of tanh.
  static __device__ __forceinline__ LogitConstants constants_of(const AttentionParams& params,
                                                                const TanhPolynomial& tanh,
                                                                float unit, float query_scale) {
    const float cap = params.logits_soft_cap * kLog2e;
    const float cube = unit * unit * unit;
    LogitConstants constants{};
    constants.scale = unit;
    constants.cap = cap;
    constants.c0 = cap * unit * tanh.c1;
    constants.c2 = cap * cube * tanh.c3;
    constants.c4 = cap * cube * unit * unit * tanh.c5;
    // A cap so small that the polynomial leaves float32's range makes no use of it.
    const bool is_finite = constants.c4 < ptx::infinity();
    constants.limit = is_finite ? tanh.range / unit : -1.0f;  // mutate: soft-cap-range-too-wide
    constants.inverse = query_scale / params.softmax_scale;
    const bool hides = is_finite && constants.c4 >= PolynomialForm::kLeastToHide;
    const bool is_large = params.logits_soft_cap >= kLeastCap;
    constants.reach = hides && is_large ? cap * tanh.at_range() : -ptx::infinity();
    return constants;
  }

  // Whether some lane of the warp has a logit whose magnitude exceeds its row's bound.
  template <int kMmaQ, int kTilesS, typename BoundOf>
  static __device__ __forceinline__ bool exceeds(const float (&s)[kMmaQ][kTilesS][4],
                                                 BoundOf&& bound_of) {
    bool found = false;
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Rows of maxima are independent; comparisons of each logit would wait for one another.
        float largest = fmaxf(fabsf(s[m][0][2 * h]), fabsf(s[m][0][2 * h + 1]));
#pragma unroll
        for (int n = 1; n < kTilesS; ++n) {
          largest = fmaxf(largest, fmaxf(fabsf(s[m][n][2 * h]), fabsf(s[m][n][2 * h + 1])));
        }
        found |= largest > bound_of(m, h);
      }
    }
    return ptx::warp_any(found);
  }
};

// The same of queries that come scaled by a power of two, so that a product of 1 is half of the cap
// or more: then a cubic does for most rows. Its range is what keeps it within kMostError of the
// capped logit.
struct NearCappedLogits : CappedLogits {
  static constexpr bool kScalesQueries = true;
  // Exponents of bfloat16 and float32 have room for these, and for values of up to 2^90.
  static constexpr int kSlackBits = 30;
  static constexpr float kMostError = 1.25e-4f;
  using Constants = NearConstants;

  // Logits under a cap need no maximum of their own, if probabilities have the exponents of
  // float32: with one that hardly a row exceeds, none moves.
  static __device__ __forceinline__ float first_max(const LogitConstants& constants) {
    constexpr float kMostRows = 4.0f, kLargestCap = 96.0f;
    return constants.cap <= kLargestCap ? kMostRows : -ptx::infinity();
  }

  struct Kept {
    CubicForm near;
    float near_most;
    PolynomialForm far;
  };
  static __device__ __forceinline__ CapGuess<CubicForm> near_guess(const Kept& kept) {
    return {kept.near, kept.near_most};
  }
  static __device__ __forceinline__ CapGuess<PolynomialForm> far_guess(const Kept& kept,
                                                                       const Constants& constants) {
    return {kept.far, constants.far_most};
  }
  static __device__ __forceinline__ Kept keep(const Constants& constants) {
    return Kept{CubicForm{constants.near_c0, constants.near_c2}, constants.near_most,
                polynomial(constants)};
  }
  static __device__ __forceinline__ CapReach reach(const Constants& constants) {
    return CapReach{constants.near_top, constants.near_evidence};
  }
  static __device__ __forceinline__ CapReach far_reach(const Constants& constants) {
    return CapReach{constants.far_top, constants.reach - kFarTailOverLost};
  }
  static constexpr float kFarTailOverLost = 6.5f;  // log2(2.7e-3 / 3e-5)
  // Rows of more than a tile have a maximum before they see a key.
  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ bool are_small(const float (&s)[kMmaQ][kTilesS][4],
                                                   const float (&row_max)[kMmaQ][2],
                                                   const Constants& constants) {
    return !exceeds(s, [&](int m, int h) {
      return row_max[m][h] == -ptx::infinity() ? -1.0f : constants.limit;
    });
  }
  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ ScaledForm settle(float (&s)[kMmaQ][kTilesS][4],
                                                      const Constants& constants) {
    apply_tanh(s, constants.cap, constants.scale);
    return ScaledForm{1.0f};
  }

  static __device__ __forceinline__ Constants make_constants(const AttentionParams& params) {
    constexpr int kBias = 127, kMostSteps = 32;
    const float unit = params.sm_scale / params.logits_soft_cap;
    // Of unit = fraction * 2^exponent, 1/2 <= fraction < 1.
    const int exponent = static_cast<int>(__float_as_uint(unit) >> 23) - (kBias - 1);
    const bool is_scaled = -kMostSteps <= exponent && exponent <= 0;
    const int power = is_scaled ? exponent : 0;
    const float down = __uint_as_float(static_cast<uint32_t>(kBias + power) << 23);
    const float fraction = unit / down, error = kMostError / params.logits_soft_cap;
    Constants constants{constants_of(params, widest_quintic(error), fraction, down)};
    const TanhPolynomial cubic = widest_cubic(error);
    constants.query_scale = down;
    constants.near_c0 = constants.cap * fraction * cubic.c1;
    constants.near_c2 = constants.cap * fraction * fraction * fraction * cubic.c3;
    const float near = is_scaled ? constants.cap * cubic.at_range() : -ptx::infinity();
    leave_room(constants, near, constants.near_top, constants.near_most);
    leave_room(constants, constants.reach, constants.far_top, constants.far_most);
    // No guess would hold: no logits are small.
    if (constants.far_top == -ptx::infinity()) constants.limit = -1.0f;
    // Past its range it errs by kMostError + 0.3 / cap^2 of a key's weight, for caps from 20 on.
    const float tail = 1.0f + 0.3f / (kMostError * params.logits_soft_cap * params.logits_soft_cap);
    constants.near_evidence = near - log2f(tail);
    return constants;
  }
  // Of a guess that holds up to `reach`: the largest maximum of its rows, and the most that a
  // tile's sum may be. Where rows take the maxima of their first tiles, both take half.
  static __device__ __forceinline__ void leave_room(const Constants& constants, float reach,
                                                    float& top, float& most) {
    constexpr float kLeastBits = 3.0f;
    const float first = first_max(constants);
    top = first == -ptx::infinity() ? 0.5f * reach : first;
    const float bits = fminf(reach - top, kSlackBits);
    if (!(bits >= kLeastBits)) top = -ptx::infinity();
    most = exp2f(bits);
  }
};

}  // namespace cupyattn
