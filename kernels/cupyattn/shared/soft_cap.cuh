// The soft cap: tanh by special functions, or by polynomials while logits are small beside it.
#pragma once

#include "cupyattn/shared/logit_forms.cuh"

namespace cupyattn {

// The odd polynomial of degree 5 closest to tanh on |x| < kTanhRange: its relative error, fitted in
// float64, is at most 1.5e-6.
constexpr float kTanhRange = 0.3125f;
constexpr float kTanh1 = 0.99999852368f;
constexpr float kTanh3 = -0.33306009072f;
constexpr float kTanh5 = 0.12577037189f;

// An odd polynomial in place of tanh up to `range`. It increases everywhere.
struct TanhPolynomial {
  float range, c1, c3, c5;

  __device__ __forceinline__ float at_range() const {
    const float square = range * range;
    return range * fmaf(square, fmaf(square, c5, c3), c1);
  }
};

// Turns logits, times `unit` the argument x of tanh, into capped base-2 logits:
// tanh(x) = 1 - 2 / (1 + e^2x).
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

// x times an even polynomial: the soft cap of small logits, or (1, 0, 0) for base-2 logits.
struct PolynomialForm {
  float c0, c2, c4;
  bool is_settled;

  __device__ __forceinline__ bool keeps_max() const { return is_settled; }
  // Not -inf, which the polynomial would turn into NaN; no visible logit is this small.
  static __device__ __forceinline__ float hidden() { return -1e18f; }

  __device__ __forceinline__ float factor(float x) const {
    const float square = x * x;
    return fmaf(square, fmaf(square, c4, c2), c0);
  }
  __device__ __forceinline__ float value(float x) const {
    return x <= hidden() ? -ptx::infinity() : x * factor(x);
  }
  static __device__ __forceinline__ float shift(float max, float scale) {
    return max == -ptx::infinity() ? 0.0f : -max * scale;
  }
  __device__ __forceinline__ float exponent(float x, float c) const {
    return fmaf(x, factor(x), c);
  }
};

// The soft cap of logits that share one positive scale. One polynomial of the raw product contains
// the scale, the cap and base 2. It serves products that are small compared with the cap; tanh
// serves the others.
struct CappedLogits : LogitsDefaults {
  static __device__ __forceinline__ LogitConstants make_constants(const AttentionParams& params) {
    return constants_of(params, TanhPolynomial{kTanhRange, kTanh1, kTanh3, kTanh5},
                        params.sm_scale / params.logits_soft_cap);
  }

  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ PolynomialForm
  apply(float (&s)[kMmaQ][kTilesS][4], const float (&row_max)[kMmaQ][2], const RowInfo*,
        const LogitConstants& constants, const AttentionParams&, const Request&, int, int,
        bool is_masked) {
    // The cap makes logits smaller, so a bound of the product bounds the logit.
    if (!is_masked && !exceeds(s, [&](int m, int h) {
          // mutate: soft-cap-maximum-stays
          return fminf((row_max[m][h] + kRescaleThreshold) * constants.inverse, constants.limit);
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
  // unit: turns a product into the argument of tanh.
  static __device__ __forceinline__ LogitConstants constants_of(const AttentionParams& params,
                                                                const TanhPolynomial& tanh,
                                                                float unit) {
    const float cap = params.logits_soft_cap * kLog2e;
    const float cube = unit * unit * unit;
    LogitConstants constants{};
    constants.scale = unit;
    constants.cap = cap;
    constants.c0 = cap * unit * tanh.c1;
    constants.c2 = cap * cube * tanh.c3;
    constants.c4 = cap * cube * unit * unit * tanh.c5;
    // Under a tiny cap the coefficients exceed float32, and no product takes the polynomial.
    const bool is_finite = constants.c4 < ptx::infinity();
    constants.limit = is_finite ? tanh.range / unit : -1.0f;  // mutate: soft-cap-range-too-wide
    constants.inverse = 1.0f / params.softmax_scale;
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
        // Maxima of rows are independent; comparisons of each logit would wait for one another.
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

}  // namespace cupyattn
