// What happens to a logit between Q K^T and the softmax. A variant turns the raw product into
// base-2 logits, so `softmax.cuh` knows nothing of scales, caps or biases.
//
// PlainLogits leaves the product unscaled, and the softmax folds the scale into its one FFMA. That
// is exact only for one positive scale; other calls without a cap take TransformedLogits.
#pragma once

#include "cupyattn/shared/relative_logits.cuh"
#include "cupyattn/shared/soft_cap.cuh"

namespace cupyattn {

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

struct PlainLogits : LogitsDefaults {
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
                                                     const AttentionParams& params, const Request&,
                                                     int, int, bool) {
    return ScaledForm{params.softmax_scale};
  }
};

// Scale (with the per-head scales of q and k), ALiBi, then the soft cap: the bias is added to the
// scaled logit, so nothing is ever scaled twice. Maxima are in base 2.
template <bool kAlibi, bool kSoftCap, bool kRowScales>
struct TransformedLogits : LogitsDefaults {
  // The unit of scaled logits: base 2 without a cap. With one, kTanhUnit times the argument of
  // tanh: 2, the largest argument of the polynomial, is the first number with the top exponent bit.
  static constexpr float kTanhUnit = 2.0f / kTanhRange;
  static constexpr bool kReadsRows = true;
  static constexpr bool kHasRowScales = kRowScales;
  // In tiles that move no maximum and hide no key, the bias goes into the exponent.
  static constexpr bool kFoldsBias = kAlibi && !kSoftCap;

  struct FastPath {
    static constexpr bool kHasMax = false, kHasFarMax = false;
    float scale[2], slope[2], bias[2];  // of the row of half h; the bias is the first key's

    // The exponents of a pair of keys of n-tile n.
    __device__ __forceinline__ float2 exponents(int h, int n, float x, float y, float shift) const {
      const float first = bias[h] + shift;
      return make_float2(fmaf(x, scale[h], fmaf(slope[h], 8 * n, first)),
                         // mutate: pair-shares-alibi-bias
                         fmaf(y, scale[h], fmaf(slope[h], 8 * n + 1, first)));
    }
  };
  static __device__ __forceinline__ FastPath fast_path(const RowInfo* rows,
                                                       const AttentionParams& params,
                                                       const Request&, int first_key, int lane) {
    FastPath fast_path;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowInfo& row = rows[8 * h + (lane >> 2)];
      fast_path.scale[h] = kRowScales ? row.scale : params.softmax_scale;
      fast_path.slope[h] = row.slope;
      fast_path.bias[h] = bias_of(row, first_key, lane);
    }
    return fast_path;
  }
  // The bias of a thread's first key of the tile.
  static __device__ __forceinline__ float bias_of(const RowInfo& row, int first_key, int lane) {
    // mutate: alibi-from-row-index
    return row.slope * static_cast<float>(first_key + 2 * (lane & 3) - row.position);
  }

  static __device__ __forceinline__ float unit(const AttentionParams& params) {
    return kSoftCap ? kTanhUnit * ptx::rcp_approx(params.logits_soft_cap) : kLog2e;
  }

  static __device__ __forceinline__ RowInfo make_row(const AttentionParams& params,
                                                     const Request& request, int token,
                                                     int position, int head, int kv_head) {
    const float scale = row_scale(params, request, head, kv_head);
    const int num_heads = params.num_kv_heads * params.group_size;
    float slope = 0.0f;
    if constexpr (kAlibi) {
      const int64_t place = request.mask_start * params.steps.slopes;
      slope = params.alibi_slopes == nullptr ? alibi_slope(head, num_heads)
                                             // mutate: slopes-of-first-request
                                             : params.alibi_slopes[place + head];
    }
    return RowInfo{token, position, head, scale * unit(params), slope * unit(params)};
  }
  static __device__ __forceinline__ LogitConstants make_constants(const AttentionParams& params) {
    const float cap = params.logits_soft_cap * kLog2e;
    constexpr float kInverse = 1.0f / kTanhUnit;
    return LogitConstants{params.sm_scale * unit(params), cap, cap * kInverse * kTanh1,
                          cap * kInverse * kInverse * kInverse * kTanh3,
                          cap * kInverse * kInverse * kInverse * kInverse * kInverse * kTanh5};
  }

  // The thread's accumulators are rows lane / 4 + 16 m (+ 8) of `rows`, keys first_key + 8 n +
  // 2 (lane % 4) (+ 1). `is_masked`: some of the logits will be hidden.
  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ auto apply(float (&s)[kMmaQ][kTilesS][4],
                                               const float (&)[kMmaQ][2], const RowInfo* rows,
                                               const LogitConstants& constants,
                                               const AttentionParams& params, const Request&,
                                               int first_key, int lane, bool is_masked) {
    uint32_t all_bits = 0;
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowInfo& row = rows[16 * m + 8 * h + (lane >> 2)];
        const float scale = kRowScales ? row.scale : constants.scale;
        const float slope = kAlibi ? row.slope : 0.0f;
        const float bias = kAlibi ? bias_of(row, first_key, lane) : 0.0f;
#pragma unroll
        for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][n][2 * h + e];
            // mutate: alibi-of-the-pair
            x = kAlibi ? fmaf(x, scale, fmaf(slope, 8 * n + e, bias)) : x * scale;
            if (kSoftCap) all_bits |= __float_as_uint(x);
          }
        }
      }
    }
    if constexpr (kSoftCap) {
      // Most logits are small compared with the cap, and special functions are the scarcest unit.
      constexpr uint32_t kTwoOrMore = 0x40000000u;  // mutate: soft-cap-of-alibi-too-wide
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

// The caller's expression, which takes the place of each scaled logit (Config::kTransform).
// Logits and maxima are natural.
template <typename Expression, bool kRowScales>
struct ExpressionLogits : LogitsDefaults {
  static constexpr bool kReadsRows = true;
  static constexpr bool kHasRowScales = kRowScales;
  static constexpr bool kFoldsBias = Expression::kIsLinear;
  static constexpr bool kHasAnyLogits = true;

  // In tiles that move no maximum and hide no key, a linear transform goes into the exponent.
  struct FastPath {
    static constexpr bool kHasMax = false, kHasFarMax = true;
    LogitAt rows[2];  // of half h

    __device__ __forceinline__ float2 exponents(int h, int n, float x, float y, float shift) const {
      return make_float2(Expression::exponent(rows[h].key(8 * n, x), shift),
                         // mutate: pair-shares-expression
                         Expression::exponent(rows[h].key(8 * n + 1, y), shift));
    }
  };
  static __device__ __forceinline__ FastPath fast_path(const RowInfo* rows,
                                                       const AttentionParams& params,
                                                       const Request& request, int first_key,
                                                       int lane) {
    return FastPath{{at_row(rows[lane >> 2], params, request, first_key, lane),
                     at_row(rows[8 + (lane >> 2)], params, request, first_key, lane)}};
  }
  // A row, and the first of the thread's keys.
  static __device__ __forceinline__ LogitAt at_row(const RowInfo& row,
                                                   const AttentionParams& params,
                                                   const Request& request, int first_key,
                                                   int lane) {
    LogitAt at = LogitAt::of(params, request, row.token, row.position, row.head);
    at.scale = kRowScales ? row.scale : params.sm_scale;
    at.base2_scale = kRowScales ? row.scale * kLog2e : params.softmax_scale;
    at.row_value = row.slope;
    at.kv_first = first_key + 2 * (lane & 3);
    return at;
  }

  static __device__ __forceinline__ float softmax_scale(const AttentionParams&) { return kLog2e; }
  static __device__ __forceinline__ float softmax_slack(const AttentionParams&) {
    return kRescaleThreshold / kLog2e;
  }
  static __device__ __forceinline__ RowInfo make_row(const AttentionParams& params,
                                                     const Request& request, int token,
                                                     int position, int head, int kv_head) {
    const LogitAt at = LogitAt::of(params, request, token, position, head);
    return RowInfo{token, position, head, row_scale(params, request, head, kv_head),
                   Expression::row_value(at)};
  }
  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ NaturalForm apply(float (&s)[kMmaQ][kTilesS][4],
                                                      const float (&)[kMmaQ][2],
                                                      const RowInfo* rows, const LogitConstants&,
                                                      const AttentionParams& params,
                                                      const Request& request, int first_key,
                                                      int lane, bool) {
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowInfo& row = rows[16 * m + 8 * h + (lane >> 2)];
        const LogitAt at = at_row(row, params, request, first_key, lane);
#pragma unroll
        for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][n][2 * h + e];
            x = Expression::transform(at.key(8 * n + e, x));  // mutate: expression-of-another-key
          }
        }
      }
    }
    return NaturalForm{};
  }
};

// What the expression of a Config makes of logits.
template <typename Expression, bool kRowScales>
using TransformOf = conditional<AddsNearBiases<Expression>::kValue,
                                RelativeLogits<Expression, kRowScales>,
                                ExpressionLogits<Expression, kRowScales>>;

template <bool kAlibi, bool kSoftCap, bool kRowScales>
using BuiltInLogits =
    conditional<kAlibi || kRowScales, TransformedLogits<kAlibi, kSoftCap, kRowScales>,
                conditional<kSoftCap, CappedLogits, PlainLogits>>;

// The variant that a Config asks for.
template <typename Config>
using Logits =
    conditional<Config::kTransform,
                TransformOf<typename Config::LogitsExpression, Config::kRowScales>,
                BuiltInLogits<Config::kAlibi, Config::kSoftCap, Config::kRowScales>>;

}  // namespace cupyattn
