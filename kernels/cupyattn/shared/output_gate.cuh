// Gates of the output: a row is multiplied by the sigmoids of gates, one for all its columns or one
// for each, in float32 and ahead of the rounding. Only the result is, and no state, so that rows whose
// keys are split are gated once, by the merge. A Config that names a type of gates (DTypeGate) has
// them; kernels of others have no code of them.
#pragma once

#include "cupyattn/params/attention.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/tile/elements.cuh"

namespace cupyattn {

template <typename T>
struct AnyType {
  using type = void;
};
template <typename Config, typename = void>
constexpr bool has_output_gate = false;
template <typename Config>
constexpr bool has_output_gate<Config, typename AnyType<typename Config::DTypeGate>::type> = true;

__device__ __forceinline__ float sigmoid(float x) {
  return ptx::rcp_approx(1.0f + ptx::ex2_approx(-kLog2e * x));  // mutate: gate-upside-down
}

// The gates of a row of the output. `kAligned` says that they start on a 16-byte boundary.
template <typename Config, bool kAligned>
struct GateRow {
  using T = typename Config::DTypeGate;
  const T* gates;

  static __device__ __forceinline__ GateRow of(const AttentionParams& params, int64_t token,
                                               int head) {
    const OutputGate& gate =
        reinterpret_cast<const OutputGate&>(params.logits_arrays[kMaxLogitsArrays - 1]);
    return GateRow{static_cast<const T*>(gate.data) + token * gate.stride_n +
                   head * gate.stride_h};  // mutate: gate-of-another-head
  }

  // What multiplies the columns from `column` on.
  template <int kCount>
  __device__ __forceinline__ void factors(int column, float (&factor)[kCount]) const {
    if constexpr (!Config::kGatesElements) {
      const float all = sigmoid(ptx::to_float(*gates));
#pragma unroll
      for (int i = 0; i < kCount; ++i) factor[i] = all;
    } else if constexpr (kAligned) {
      using Loaded = Words<kCount * static_cast<int>(sizeof(T)) / 4>;
      const Loaded loaded = *reinterpret_cast<const Loaded*>(gates + column);
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        if constexpr (sizeof(T) == 4) {
          factor[i] = __uint_as_float(loaded.word[i]);
          factor[i + 1] = __uint_as_float(loaded.word[i + 1]);
        } else {
          ptx::unpack_pair<T>(loaded.word[i / 2], factor[i], factor[i + 1]);
        }
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) factor[i] = sigmoid(factor[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) factor[i] = sigmoid(ptx::to_float(gates[column + i]));
    }
  }
};

// Calls f(column, element, next element) for the pairs of a row of accumulators. With fp8 values the
// columns of two neighbouring n-tiles interleave (see fragments.cuh).
template <int kHeadDim, bool kFp8Values, typename Accumulators, typename F>
__device__ __forceinline__ void for_output_pairs(Accumulators& o, int h, int lane, F&& f) {
  constexpr int kTilesO = sizeof(Accumulators) / sizeof(o[0]);
  const int t = lane & 3;
#pragma unroll
  for (int n = 0; n < kTilesO; ++n) {
    const int pair = n & 1;
    const int column = kFp8Values ? 8 * (n - pair) + 4 * t + 2 * pair : 8 * n + 2 * t;
    if (kHeadDim % 16 != 0 && column >= kHeadDim) continue;
    if constexpr (kFp8Values) {
      f(column, o[n - pair][2 * h + pair], o[n - pair + 1][2 * h + pair]);
    } else {
      f(column, o[n][2 * h], o[n][2 * h + 1]);
    }
  }
}

// Multiplies a row of accumulators, whose columns start with `first_column`.
template <typename Config, int kHeadDim, bool kFp8Values, bool kAligned, int kTilesO>
__device__ __forceinline__ void gate_row(float (&o)[kTilesO][4], int h,
                                         const AttentionParams& params, int64_t token, int head,
                                         int lane, int first_column = 0) {
  if constexpr (has_output_gate<Config>) {
    const auto row = GateRow<Config, kAligned>::of(params, token, head);
    for_output_pairs<kHeadDim, kFp8Values>(o, h, lane, [&](int column, float& first,
                                                           float& second) {
      float factor[2];
      row.factors(first_column + column, factor);  // mutate: gates-of-first-columns
      first *= factor[0];
      second *= factor[1];
    });
  }
}

// Multiplies four columns of a row, from `column` on.
template <typename Config, bool kAligned>
__device__ __forceinline__ void gate_columns(float4& x, const AttentionParams& params,
                                             int64_t token, int head, int column) {
  if constexpr (has_output_gate<Config>) {
    float factor[4];
    GateRow<Config, kAligned>::of(params, token, head).factors(column, factor);
    x = make_float4(x.x * factor[0], x.y * factor[1], x.z * factor[2], x.w * factor[3]);
  }
}

}  // namespace cupyattn
