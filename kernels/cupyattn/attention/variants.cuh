// What happens to a logit between Q K^T and the softmax. A variant turns the raw product into
// base-2 logits; `softmax.cuh` then needs no knowledge of scales, caps or biases.
//
// PlainLogits leaves the product unscaled and lets the softmax fold the scale into its one FFMA;
// that is exact only for a positive scale, so everything else goes through TransformedLogits.
#pragma once

#include "cupyattn/common/types.cuh"
#include "cupyattn/params/attention.cuh"
#include "cupyattn/ptx/math.cuh"

namespace cupyattn {

// Press, Smith, Lewis 2021 (arXiv 2108.12409), section 3, for any number of heads.
__device__ __forceinline__ float alibi_slope(int head, int power_of_two_heads) {
  const float n = static_cast<float>(power_of_two_heads);
  const float exponent = head < power_of_two_heads
                             ? -8.0f * (head + 1) / n
                             : -4.0f * (2 * (head - power_of_two_heads) + 1) / n;
  return exp2f(exponent);
}

struct PlainLogits {
  float scale;  // base-2, positive, the same for every row

  __device__ __forceinline__ PlainLogits(const AttentionParams& params, int, int, int)
      : scale(params.sm_scale * kLog2e) {}
  __device__ __forceinline__ float softmax_scale() const { return scale; }
  __device__ __forceinline__ float operator()(float s, int) const { return s; }
};

// Per row: scale (with the per-head scales of q and k), ALiBi, then the soft cap
// (ALiBi is added to the scaled logit, so it is never scaled twice).
template <bool kAlibi, bool kSoftCap>
struct TransformedLogits {
  float scale;   // of the raw product; without a soft cap this includes log2(e)
  float slope;   // ALiBi, in the same units
  float offset;  // -slope * q_idx
  float cap;     // soft cap in base-2 units

  __device__ __forceinline__ TransformedLogits(const AttentionParams& params, int token, int head,
                                               int kv_head) {
    scale = params.sm_scale;
    if (params.scale_q != nullptr) scale *= params.scale_q[head];
    if (params.scale_k != nullptr) scale *= params.scale_k[kv_head];
    // With a cap the logit is an argument of tanh(x / cap) = 1 - 2 / (1 + 2^(2 log2(e) x / cap)).
    const float unit = kSoftCap ? 2.0f * kLog2e / params.logits_soft_cap : kLog2e;
    scale *= unit;
    slope = kAlibi ? alibi_slope(head, params.alibi_heads) * unit : 0.0f;
    offset = -slope * static_cast<float>(token);
    cap = params.logits_soft_cap * kLog2e;
  }
  __device__ __forceinline__ float softmax_scale() const { return 1.0f; }
  __device__ __forceinline__ float operator()(float s, int key) const {
    float x = kAlibi ? fmaf(s, scale, fmaf(slope, static_cast<float>(key), offset)) : s * scale;
    if constexpr (kSoftCap) {
      x = fmaf(-2.0f * cap, ptx::rcp_approx(1.0f + ptx::ex2_approx(x)), cap);
    }
    return x;
  }
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
