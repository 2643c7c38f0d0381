// What variants of logits share: what they know of rows and calls, the forms of their logits, and
// defaults.
#pragma once

#include "cupyattn/shared/softmax.cuh"
#include "cupyattn/shared/work.cuh"

namespace cupyattn {

// What a variant stores for a query row.
struct RowInfo {
  int token, position, head;
  float scale;  // multiplies the raw product
  float slope;  // ALiBi, in the units of the scaled product; of an expression its row value
};

// What a variant stores for a call, in shared memory: constants of a loop would cost registers.
struct alignas(16) LogitConstants {
  float scale;  // multiplies the raw product, if all rows share the scale
  float cap;
  float c0, c2, c4;  // the soft cap's polynomial, times the cap
  float limit;       // the largest raw product within the polynomial's range
  float inverse;     // turns a bound of base-2 logits into a bound of raw products
};

// A variant leaves logits in some form. The form says how they become base-2 logits, so that the
// softmax can take a row's maximum early and do the rest beside matrix products:
//   value(x)         increases with x; maxima are kept in its units, which a scale turns to base 2
//   shift(max, scale)  c of a row with this maximum, in the units of value(): finite, as no logit of
//                    a row that has seen nothing is
//   exponent(x, c)   value(x) times that scale, less the maximum
//   hidden()         the logit of a hidden key: its value is -inf
//   keeps_max()      whether the variant already knows that no maximum can move
struct ScaledForm {
  float scale;

  static __device__ __forceinline__ float hidden() { return -ptx::infinity(); }
  static constexpr __device__ __forceinline__ bool keeps_max() { return false; }
  __device__ __forceinline__ float value(float x) const { return x; }
  static __device__ __forceinline__ float shift(float max, float scale) {
    return max == -ptx::infinity() ? 0.0f : -max * scale;
  }
  __device__ __forceinline__ float exponent(float x, float c) const { return fmaf(x, scale, c); }
};

// Natural logits of any finite size, which biases may make as large as float32 has numbers. The
// rounding of a maximum to base 2, which ScaledForm has in all exponents of a row, would exceed
// their range. A difference is small where it counts, and it is exact.
struct NaturalForm {
  static __device__ __forceinline__ float hidden() { return -ptx::infinity(); }
  static constexpr __device__ __forceinline__ bool keeps_max() { return false; }
  __device__ __forceinline__ float value(float x) const { return x; }
  static __device__ __forceinline__ float shift(float max, float) {
    return -fmaxf(max, -0x1.fffffep127f);
  }
  // mutate: far-logits-in-one-sum
  __device__ __forceinline__ float exponent(float x, float c) const { return (x + c) * kLog2e; }
};

struct Nothing {};

// The parts of a variant that most variants have.
struct LogitsDefaults {
  using Constants = LogitConstants;
  using Kept = Nothing;  // what a thread keeps in registers
  using Row = RowInfo;   // what apply() reads of a row
  static constexpr int kTileSumBits = 8;
  static constexpr bool kReadsRows = false;      // apply() reads each Row
  static constexpr bool kHasRowScales = false;   // heads and requests may have scales of their own
  static constexpr bool kFoldsScales = false;    // these go into the exponent
  static constexpr bool kFoldsBias = false;      // a bias can be folded into the exponent
  static constexpr bool kHasFastPath = false;    // most tiles take a fast path
  static constexpr bool kScalesQueries = false;  // Q is multiplied by a power of two
  static constexpr bool kHasFirstMax = false;    // rows may begin with a maximum
  static constexpr bool kHasAnyLogits = false;   // logits are whatever a caller makes of them

  static __device__ __forceinline__ RowInfo make_row(const AttentionParams&, const Request&,
                                                     int token, int position, int head, int) {
    return RowInfo{token, position, head, 1.0f, 0.0f};
  }
  static __device__ __forceinline__ LogitConstants make_constants(const AttentionParams&) {
    return LogitConstants{};
  }
  static __device__ __forceinline__ Kept keep(const LogitConstants&) { return Kept{}; }
  // Turns a maximum into base 2.
  static __device__ __forceinline__ float softmax_scale(const AttentionParams&) { return 1.0f; }
  // How far a logit may pass the running maximum, in units of the maximum.
  static __device__ __forceinline__ float softmax_slack(const AttentionParams&) {
    return kRescaleThreshold;
  }
};

}  // namespace cupyattn
