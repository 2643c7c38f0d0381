// Biases of near keys: each row of Q has its own, by the distance of a key from it (rel_logits). They
// are the first array of the caller's, [rows of all requests, heads, distances].
//
// Most tiles have no key that is near, and their logits are those of PlainLogits.
#pragma once

#include "cupyattn/shared/logit_forms.cuh"
#include "cupyattn/shared/logits_expression.cuh"

namespace cupyattn {

template <typename>
struct AnyTypeOfBiases {
  using type = void;
};
// Whether such biases are all that an expression adds. An enumerator, as of HasKeyShare.
template <typename Expression, typename = void>
struct AddsNearBiases {
  enum : bool { kValue = false };
};
template <typename Expression>
struct AddsNearBiases<Expression, typename AnyTypeOfBiases<typename Expression::NearBias>::type> {
  enum : bool { kValue = true };
};

// The logit scale of a head of a request, with the scales by head.
__device__ __forceinline__ float row_scale(const AttentionParams& params, const Request& request,
                                           int head, int kv_head) {
  const int64_t place = request.mask_start;  // mutate: scales-of-first-request
  float scale = params.sm_scale;
  if (params.scale_q != nullptr) scale *= params.scale_q[place * params.steps.scale_q + head];
  if (params.scale_k != nullptr) scale *= params.scale_k[place * params.steps.scale_k + kv_head];
  return scale;
}

// Logits are products, whose one scale the softmax folds into its FFMA; if rows have scales of their
// own, they are to base 2.
template <typename Expression, bool kRowScales>
struct RelativeLogits : LogitsDefaults {
  static constexpr bool kReadsRows = true;
  static constexpr bool kHasRowScales = kRowScales;

  static __device__ __forceinline__ float softmax_scale(const AttentionParams& params) {
    return kRowScales ? 1.0f : params.softmax_scale;
  }
  static __device__ __forceinline__ float softmax_slack(const AttentionParams& params) {
    return kRowScales ? kRescaleThreshold : params.softmax_slack;
  }
  static __device__ __forceinline__ RowInfo make_row(const AttentionParams& params,
                                                     const Request& request, int token,
                                                     int position, int head, int kv_head) {
    const float scale = kRowScales ? row_scale(params, request, head, kv_head) * kLog2e : 1.0f;
    return RowInfo{token, position, head, scale, 0.0f};
  }

  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ ScaledForm apply(float (&s)[kMmaQ][kTilesS][4],
                                                     const float (&)[kMmaQ][2],
                                                     const RowInfo* rows, const LogitConstants&,
                                                     const AttentionParams& params,
                                                     const Request& request, int first_key,
                                                     int lane, bool) {
    constexpr int kLastStep = 8 * (kTilesS - 1) + 1;
    const int distances = params.logits_arrays[0].extent[2];
    bool has_near = false;
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowInfo& row = rows[16 * m + 8 * h + (lane >> 2)];
        if constexpr (kRowScales) {
#pragma unroll
          for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) s[m][n][2 * h + e] *= row.scale;
          }
        }
        const int distance = row.position - first_key - 2 * (lane & 3);
        // mutate: last-near-tile-has-no-bias
        has_near |= distance >= 0 && distance - kLastStep < distances;
      }
    }
    if (ptx::warp_any(has_near)) add_biases(s, rows, params, request, first_key, lane);
    return ScaledForm{softmax_scale(params)};
  }

 private:
  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ void add_biases(float (&s)[kMmaQ][kTilesS][4],
                                                    const RowInfo* rows,
                                                    const AttentionParams& params,
                                                    const Request& request, int first_key,
                                                    int lane) {
    using Bias = typename Expression::NearBias;
    const auto& extent = params.logits_arrays[0].extent;
    const float unit = kRowScales ? kLog2e : ptx::rcp_approx(params.sm_scale);
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowInfo& row = rows[16 * m + 8 * h + (lane >> 2)];
        const int distance = row.position - first_key - 2 * (lane & 3);
        const LogitAt at = LogitAt::of(params, request, row.token, row.position, row.head);
        // mutate: near-tokens-counted-by-request
        const int64_t token = at.inside(0, 0, at.q_token);
        const int64_t index = (token * extent[1] + row.head) * extent[2] + distance;
#pragma unroll
        for (int n = 0; n < kTilesS; ++n) {
          // Loads for all keys at once would take as many registers again.
          if (n % 4 == 0) ptx::end_basic_block(static_cast<uint32_t>(lane));
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int step = 8 * n + e;  // mutate: near-pair-shares-bias
            // mutate: near-distance-past-the-last
            const bool is_near = static_cast<uint32_t>(distance - step) < static_cast<uint32_t>(extent[2]);
            const float bias = is_near ? at.template element_at<Bias>(0, index - step) : 0.0f;
            s[m][n][2 * h + e] = fmaf(bias, unit, s[m][n][2 * h + e]);
          }
        }
      }
    }
  }
};

}  // namespace cupyattn
