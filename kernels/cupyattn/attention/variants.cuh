// What happens to a logit between Q K^T and the softmax. A variant turns the raw product into
// base-2 logits; `softmax.cuh` then needs no knowledge of scales, caps or biases.
//
// PlainLogits leaves the product unscaled and lets the softmax fold the scale into its one FFMA;
// that is exact only for one positive scale, so everything else goes through TransformedLogits.
#pragma once

#include "cupyattn/attention/softmax.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/params/attention.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

// What a variant remembers of a query row.
struct RowInfo {
  int token, position, head;
  float scale;  // of the raw product
  float slope;  // ALiBi, in the units of the scaled product
};

// What a variant needs of a call, in shared memory: constants of a loop would cost registers.
struct alignas(16) LogitConstants {
  float scale;  // of the raw product, where all rows share it
  float cap;
  float c0, c2, c4;  // the soft cap's polynomial, times the cap
  float limit;       // raw products up to here are within the polynomial's range
  float inverse;     // a bound of a base-2 logit, times this, bounds the raw product
  float reach;       // the base-2 logit at the end of that range, if keys can be hidden by it
};

// Press, Smith, Lewis 2021 (arXiv 2108.12409), section 3, for any number of heads.
__device__ __forceinline__ float alibi_slope(int head, int num_heads) {
  int power_of_two_heads = 1;
  while (2 * power_of_two_heads <= num_heads) power_of_two_heads *= 2;
  const float n = static_cast<float>(power_of_two_heads);
  const float exponent = head < power_of_two_heads
                             ? -8.0f * (head + 1) / n
                             : -4.0f * (2 * (head - power_of_two_heads) + 1) / n;
  return exp2f(exponent);
}

// A variant leaves logits in some form and says, as a "form", how they become base-2 logits:
//   value(x)         increases with x; maxima are kept in its units, which a scale turns to base 2
//   exponent(x, c)   value(x) times that scale, plus c
//   hidden()         the logit of a key that is not seen: value -inf
//   keeps_max()      whether no maximum can move, because the variant has looked already
// so that the softmax can take a row's maximum early and do the rest beside matrix products.
struct ScaledForm {
  float scale;

  static __device__ __forceinline__ float hidden() { return -ptx::infinity(); }
  static constexpr __device__ __forceinline__ bool keeps_max() { return false; }
  __device__ __forceinline__ float value(float x) const { return x; }
  __device__ __forceinline__ float exponent(float x, float c) const { return fmaf(x, scale, c); }
};

// The odd polynomial closest to tanh on |x| < kTanhRange (a float64 minimax fit of what it is of
// tanh): within 1.5e-6 of it. It increases everywhere, and without bound.
constexpr float kTanhRange = 0.3125f;
constexpr float kTanh1 = 0.99999852368f;
constexpr float kTanh3 = -0.33306009072f;
constexpr float kTanh5 = 0.12577037189f;
constexpr float kTanhAtRange = 0.30271018f;

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

// Of a variant that keeps nothing in registers.
struct Nothing {};

struct PlainLogits {
  using Kept = Nothing;
  static constexpr bool kReadsRows = false;
  static constexpr int kSlackBits = 8;
  static constexpr bool kGuesses = false;
  static constexpr bool kGuessesAll = false;
  static __device__ __forceinline__ RowInfo make_row(const AttentionParams&, int token,
                                                     int position, int head, int) {
    return RowInfo{token, position, head, 1.0f, 0.0f};
  }
  static __device__ __forceinline__ LogitConstants make_constants(const AttentionParams&) {
    return LogitConstants{};
  }
  static __device__ __forceinline__ Kept keep(const LogitConstants&) { return Kept{}; }
  // Turns a maximum into base 2; 8 / scale, how far a logit may pass the running maximum.
  static __device__ __forceinline__ float softmax_scale(const AttentionParams& params) {
    return params.softmax_scale;
  }
  static __device__ __forceinline__ float softmax_slack(const AttentionParams& params) {
    return params.softmax_slack;
  }
  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ ScaledForm apply(float (&)[kMmaQ][kTilesS][4],
                                                     const float (&)[kMmaQ][2], const RowInfo*,
                                                     const LogitConstants&,
                                                     const AttentionParams& params, int, int,
                                                     bool) {
    return ScaledForm{params.softmax_scale};
  }
};

// Scale (with the per-head scales of q and k), ALiBi, then the soft cap: the bias is added to the
// scaled logit, so nothing is ever scaled twice. Maxima are in base 2.
template <bool kAlibi, bool kSoftCap, bool kRowScales>
struct TransformedLogits {
  using Kept = Nothing;
  // Without a cap, base-2 logits. With one, kTanhUnit times the argument of tanh: a unit in which
  // 2, the largest argument of the polynomial, is the first number with the top exponent bit.
  static constexpr float kTanhUnit = 2.0f / kTanhRange;
  static constexpr bool kReadsRows = true;
  static constexpr int kSlackBits = 8;
  // A bias is a sum: where no maximum moves and no key is hidden, it goes into the exponent at
  // once.
  static constexpr bool kGuesses = kAlibi && !kSoftCap;
  static constexpr bool kGuessesAll = false;

  struct Guess {
    static constexpr bool kHasMax = false;
    float scale[2], slope[2], bias[2];  // of either half's row; the bias of the tile's first key

    // Those of a pair of the n-tile's keys.
    __device__ __forceinline__ float2 exponents(int h, int n, float x, float y, float shift) const {
      const float first = bias[h] + shift;
      return make_float2(fmaf(x, scale[h], fmaf(slope[h], 8 * n, first)),
                         fmaf(y, scale[h], fmaf(slope[h], 8 * n + 1, first)));
    }
  };
  static __device__ __forceinline__ Guess guess(const RowInfo* rows, Nothing,
                                                const AttentionParams& params, int first_key,
                                                int lane) {
    Guess guess;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowInfo& row = rows[8 * h + (lane >> 2)];
      guess.scale[h] = kRowScales ? row.scale : params.softmax_scale;
      guess.slope[h] = row.slope;
      guess.bias[h] = bias_of(row, params, first_key, lane);
    }
    return guess;
  }
  // Of the first key of a thread's, an n-tile's first.
  static __device__ __forceinline__ float bias_of(const RowInfo& row, const AttentionParams& params,
                                                  int first_key, int lane) {
    // A constant of the row, and the same for all its keys, wherever they are.
    const int origin = params.positions == nullptr ? row.token : row.position;
    return row.slope * static_cast<float>(first_key + 2 * (lane & 3) - origin);
  }

  static __device__ __forceinline__ float unit(const AttentionParams& params) {
    return kSoftCap ? kTanhUnit * ptx::rcp_approx(params.logits_soft_cap) : kLog2e;
  }

  static __device__ __forceinline__ RowInfo make_row(const AttentionParams& params, int token,
                                                     int position, int head, int kv_head) {
    float scale = params.sm_scale;
    if (params.scale_q != nullptr) scale *= params.scale_q[head];
    if (params.scale_k != nullptr) scale *= params.scale_k[kv_head];
    const int num_heads = params.num_kv_heads * params.group_size;
    const float slope = kAlibi ? alibi_slope(head, num_heads) : 0.0f;
    return RowInfo{token, position, head, scale * unit(params), slope * unit(params)};
  }
  static __device__ __forceinline__ LogitConstants make_constants(const AttentionParams& params) {
    const float cap = params.logits_soft_cap * kLog2e;
    constexpr float kInverse = 1.0f / kTanhUnit;
    return LogitConstants{params.sm_scale * unit(params), cap, cap * kInverse * kTanh1,
                          cap * kInverse * kInverse * kInverse * kTanh3,
                          cap * kInverse * kInverse * kInverse * kInverse * kInverse * kTanh5};
  }
  static __device__ __forceinline__ Kept keep(const LogitConstants&) { return Kept{}; }
  static __device__ __forceinline__ float softmax_scale(const AttentionParams&) { return 1.0f; }
  static __device__ __forceinline__ float softmax_slack(const AttentionParams&) { return kSlack; }

  // The thread's accumulators are rows lane / 4 + 16 m (+ 8) of `rows`, keys first_key + 8 n +
  // 2 (lane % 4) (+ 1). `is_masked`: some of the logits will be hidden.
  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ auto apply(float (&s)[kMmaQ][kTilesS][4],
                                               const float (&)[kMmaQ][2], const RowInfo* rows,
                                               const LogitConstants& constants,
                                               const AttentionParams& params, int first_key,
                                               int lane, bool is_masked) {
    uint32_t all_bits = 0;
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowInfo& row = rows[16 * m + 8 * h + (lane >> 2)];
        const float scale = kRowScales ? row.scale : constants.scale;
        const float slope = kAlibi ? row.slope : 0.0f;
        const float bias = kAlibi ? bias_of(row, params, first_key, lane) : 0.0f;
#pragma unroll
        for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][n][2 * h + e];
            x = kAlibi ? fmaf(x, scale, fmaf(slope, 8 * n + e, bias)) : x * scale;
            if (kSoftCap) all_bits |= __float_as_uint(x);
          }
        }
      }
    }
    if constexpr (kSoftCap) {
      // Most logits are small beside the cap, and special functions are the scarcest unit.
      constexpr uint32_t kTwoOrMore = 0x40000000u;
      if (is_masked || ptx::warp_any(all_bits & kTwoOrMore)) {
        apply_tanh(s, constants.cap, 1.0f / kTanhUnit);
        return PolynomialForm{1.0f, 0.0f, 0.0f, false};
      }
      return PolynomialForm{constants.c0, constants.c2, constants.c4, false};
    } else {
      return ScaledForm{1.0f};
    }
  }
};

// The soft cap of logits that share one positive scale. The raw product takes the scale, the cap
// and base 2 in one polynomial, which is right while it is small beside the cap. Nobody looks at
// each product for that, where a row is in reach. Past the range
// - a positive product makes more than 2^kSlackBits of the polynomial, which increases, and the
//   sum of the probabilities shows it, as it shows that the maximum must move;
// - a negative one has less than 2^-kNegligible of what the row has already, and the polynomial,
//   which falls faster than the cap, errs by 2^-27 of that at most.
struct CappedLogits {
  static constexpr bool kReadsRows = false;
  static constexpr bool kGuesses = true;
  // Where keys are to be hidden too.
  static constexpr bool kGuessesAll = true;
  static constexpr int kSlackBits = 6;
  static constexpr float kNegligible = 13.0f;

  // Logits under a cap need no maximum of their own, if probabilities have the exponents of
  // float32: with one that hardly a row exceeds, none moves.
  static __device__ __forceinline__ float first_max(const LogitConstants& constants) {
    constexpr float kMostRows = 4.0f, kLargestCap = 96.0f;
    return constants.cap <= kLargestCap ? kMostRows : -ptx::infinity();
  }

  // That all logits are small, or that the sum will tell.
  struct Guess {
    static constexpr bool kHasMax = true;  // a row in reach has one
    PolynomialForm form;

    __device__ __forceinline__ float2 exponents(int, int, float x, float y, float shift) const {
      return make_float2(form.exponent(x, shift), form.exponent(y, shift));
    }
  };
  // The coefficients: to read them again for each tile would be waited for.
  using Kept = Guess;
  static __device__ __forceinline__ Guess guess(const RowInfo*, const Kept& kept,
                                                const AttentionParams&, int, int) {
    return kept;
  }
  // Whether the sums of a tile will tell, whatever its logits are; of two rows.
  static __device__ __forceinline__ bool is_in_reach(const float (&row_max)[2],
                                                     const float (&row_sum)[2],
                                                     const LogitConstants& constants) {
    bool is_in_reach = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool is_low = row_max[h] + kSlackBits <= constants.reach;
      const float least = ptx::ex2_approx(row_max[h] + constants.reach - kNegligible);
      is_in_reach &= is_low && row_sum[h] * least >= 1.0f;
    }
    return is_in_reach;
  }

  // Any logits, none of which is hidden yet.
  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ ScaledForm settle(float (&s)[kMmaQ][kTilesS][4],
                                                      const LogitConstants& constants) {
    if (exceeds(s, [&](int, int) { return constants.limit; })) {
      apply_tanh(s, constants.cap, constants.scale);
    } else {
      const PolynomialForm form{constants.c0, constants.c2, constants.c4, false};
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
  static __device__ __forceinline__ Kept keep(const LogitConstants& constants) {
    return Guess{PolynomialForm{constants.c0, constants.c2, constants.c4, false}};
  }
  static __device__ __forceinline__ LogitConstants make_constants(const AttentionParams& params) {
    const float cap = params.logits_soft_cap * kLog2e;
    const float unit = params.sm_scale / params.logits_soft_cap;
    const float cube = unit * unit * unit;
    const float c4 = cap * cube * unit * unit * kTanh5;
    // A cap so small that the polynomial leaves float32's range makes no use of it.
    const float limit = c4 < ptx::infinity() ? kTanhRange / unit : -1.0f;
    const bool hides = c4 >= PolynomialForm::kLeastToHide && c4 < ptx::infinity();
    const float reach = hides ? cap * kTanhAtRange : -ptx::infinity();
    return LogitConstants{unit, cap,   cap * unit * kTanh1,         cap * cube * kTanh3,
                          c4,   limit, 1.0f / params.softmax_scale, reach};
  }
  static __device__ __forceinline__ float softmax_scale(const AttentionParams&) { return 1.0f; }
  static __device__ __forceinline__ float softmax_slack(const AttentionParams&) { return kSlack; }

  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ PolynomialForm
  apply(float (&s)[kMmaQ][kTilesS][4], const float (&row_max)[kMmaQ][2], const RowInfo*,
        const LogitConstants& constants, const AttentionParams&, int, int, bool is_masked) {
    // The cap makes logits smaller, so what bounds the product bounds the logit.
    if (!is_masked && !exceeds(s, [&](int m, int h) {
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

 private:
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

template <bool kAlibi, bool kSoftCap, bool kRowScales>
struct Logits {
  using type = TransformedLogits<kAlibi, kSoftCap, kRowScales>;
};
template <>
struct Logits<false, false, false> {
  using type = PlainLogits;
};
template <>
struct Logits<false, true, false> {
  using type = CappedLogits;
};

}  // namespace cupyattn
