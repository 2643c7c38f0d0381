// Logits whose rows have scales, folded into the exponent: where products have 8 bits, each query
// head may have a scale, and one more instruction for each logit would show.
#pragma once

#include "cupyattn/shared/logits.cuh"

namespace cupyattn {

// Maxima are in base 2. `scale`: of the thread's rows, positive.
struct RowScaledForm {
  float scale[2];

  static __device__ __forceinline__ float hidden() { return -ptx::infinity(); }
  __device__ __forceinline__ float value(float x, int h) const { return x * scale[h]; }
  static __device__ __forceinline__ float shift(float max, float) {
    return max == -ptx::infinity() ? 0.0f : -max;
  }
  __device__ __forceinline__ float exponent(float x, float c, int h) const {
    return fmaf(x, scale[h], c);
  }
};

// The same of forms that know no rows.
template <typename Form>
__device__ __forceinline__ float value_of(const Form& form, float x, int) {
  return form.value(x);
}
__device__ __forceinline__ float value_of(const RowScaledForm& form, float x, int h) {
  return form.value(x, h);
}
template <typename Form>
__device__ __forceinline__ float exponent_of(const Form& form, float x, float c, int) {
  return form.exponent(x, c);
}
__device__ __forceinline__ float exponent_of(const RowScaledForm& form, float x, float c, int h) {
  return form.exponent(x, c, h);
}

struct RowScaledLogits : LogitsDefaults {
  static constexpr bool kReadsRows = true;
  static constexpr bool kHasRowScales = true;
  static constexpr bool kFoldsScales = true;
  struct Row {
    int position;
    float scale;  // to base 2
  };

  static __device__ __forceinline__ Row make_row(const AttentionParams& params,
                                                 const Request& request, int, int position,
                                                 int head, int kv_head) {
    const float scale = row_scale(params, request, head, kv_head) * kLog2e;
    // Hidden logits are infinite, and times 0 they would be no number.
    constexpr float kLeast = 0x1p-120f;
    // mutate: scale-of-zero-hides-nothing
    return Row{position, fabsf(scale) < kLeast ? kLeast : scale};
  }
  // Rows of Q of a negative scale change their sign, which is exact.
  static __device__ __forceinline__ bool is_negative(const Row& row) { return row.scale < 0.0f; }

  template <int kTilesS>
  static __device__ __forceinline__ RowScaledForm apply(float (&)[1][kTilesS][4],
                                                        const float (&)[1][2], const Row* rows,
                                                        const LogitConstants&,
                                                        const AttentionParams&, const Request&, int,
                                                        int lane, bool) {
    return RowScaledForm{{fabsf(rows[lane >> 2].scale), fabsf(rows[8 + (lane >> 2)].scale)}};
  }
};

}  // namespace cupyattn
