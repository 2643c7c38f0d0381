// What variants of logits share: what they know of rows and calls, and the forms that they leave.
#pragma once

#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/math.cuh"

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
// The same where queries come scaled: what by, and a cubic of a shorter range.
struct NearConstants : LogitConstants {
  float query_scale;
  float near_c0, near_c2, near_top, near_most, near_evidence;
  float far_top, far_most;
};

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

}  // namespace cupyattn
