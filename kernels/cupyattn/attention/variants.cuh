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
struct alignas(16) RowInfo {
  int token, head;
  float scale;  // of the raw product
  float slope;  // ALiBi, in the units of the scaled product
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

struct PlainLogits {
  static __device__ __forceinline__ RowInfo make_row(const AttentionParams&, int token, int head,
                                                     int) {
    return RowInfo{token, head, 1.0f, 0.0f};
  }
  static __device__ __forceinline__ float softmax_scale(const AttentionParams& params) {
    return params.softmax_scale;
  }
  static __device__ __forceinline__ float softmax_slack(const AttentionParams& params) {
    return params.softmax_slack;
  }
  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ void apply(float (&)[kMmaQ][kTilesS][4], const RowInfo*, int,
                                               const AttentionParams&, int) {}
};

// Scale (with the per-head scales of q and k), ALiBi, then the soft cap: the bias is added to the
// scaled logit, so nothing is ever scaled twice.
template <bool kAlibi, bool kSoftCap>
struct TransformedLogits {
  static __device__ __forceinline__ RowInfo make_row(const AttentionParams& params, int token,
                                                     int head, int kv_head) {
    // Base-2 logits; with a cap, logits over the cap: the argument of tanh.
    const float unit = kSoftCap ? 1.0f / params.logits_soft_cap : kLog2e;
    float scale = params.sm_scale;
    if (params.scale_q != nullptr) scale *= params.scale_q[head];
    if (params.scale_k != nullptr) scale *= params.scale_k[kv_head];
    const float slope = kAlibi ? alibi_slope(head, params.num_kv_heads * params.group_size) : 0.0f;
    return RowInfo{token, head, scale * unit, slope * unit};
  }
  static __device__ __forceinline__ float softmax_scale(const AttentionParams&) { return 1.0f; }
  static __device__ __forceinline__ float softmax_slack(const AttentionParams&) { return kSlack; }

  // The thread's accumulators are rows lane / 4 + 16 m (+ 8) of `rows`, keys first_key + 8 n +
  // 2 (lane % 4) (+ 1).
  template <int kMmaQ, int kTilesS>
  static __device__ __forceinline__ void apply(float (&s)[kMmaQ][kTilesS][4], const RowInfo* rows,
                                               int first_key, const AttentionParams& params,
                                               int lane) {
    float largest = 0.0f;
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowInfo row = rows[16 * m + 8 * h + (lane >> 2)];
        const float bias =
            row.slope * static_cast<float>(first_key + 2 * (lane & 3) - row.token);
#pragma unroll
        for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][n][2 * h + e];
            x = kAlibi ? fmaf(x, row.scale, fmaf(row.slope, 8 * n + e, bias)) : x * row.scale;
            if (kSoftCap) largest = fmaxf(largest, fabsf(x));
          }
        }
      }
    }
    if constexpr (kSoftCap) {
      const float cap = params.logits_soft_cap * kLog2e;
      // Most logits are small beside the cap; special functions are the scarcest unit.
      if (ptx::warp_any(!(largest <= kSmall))) {
        for_each(s, [&](float x) { return cap * tanh_exact(x); });
      } else {
        for_each(s, [&](float x) { return cap * tanh_small(x); });
      }
    }
  }

 private:
  static constexpr float kSmall = 0.4f;

  template <int kMmaQ, int kTilesS, typename Function>
  static __device__ __forceinline__ void for_each(float (&s)[kMmaQ][kTilesS][4],
                                                  Function&& function) {
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] = function(s[m][n][e]);
      }
    }
  }
  static __device__ __forceinline__ float tanh_exact(float x) {
    return fmaf(-2.0f, ptx::rcp_approx(1.0f + ptx::ex2_approx(2.0f * kLog2e * x)), 1.0f);
  }
  // An odd polynomial, within 2e-8 of tanh(x) for |x| <= kSmall (a float64 minimax fit).
  static __device__ __forceinline__ float tanh_small(float x) {
    const float x2 = x * x;
    float p = fmaf(x2, kTanh9, kTanh7);
    p = fmaf(x2, p, kTanh5);
    p = fmaf(x2, p, kTanh3);
    return fmaf(x * x2, p, x);
  }
  static constexpr float kTanh3 = -0.333332986f;
  static constexpr float kTanh5 = 0.133312345f;
  static constexpr float kTanh7 = -0.0535641424f;
  static constexpr float kTanh9 = 0.0187512282f;
};

template <bool kTransformed, bool kAlibi, bool kSoftCap>
struct Logits {
  using type = TransformedLogits<kAlibi, kSoftCap>;
};
template <>
struct Logits<false, false, false> {
  using type = PlainLogits;
};

}  // namespace cupyattn
