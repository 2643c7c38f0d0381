// Host twin of kernels/cupyattn/ptx/math.cuh. The instructions flush denormals; they are less exact
// than these functions.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

inline float flush_denormal(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

inline float ex2_approx(float x) { return flush_denormal(exp2f(flush_denormal(x))); }

inline float rcp_approx(float x) {
  // Division by zero is what the instruction is asked for at times: infinity, without a complaint.
  const float divisor = flush_denormal(x);
  return divisor == 0.0f ? copysignf(INFINITY, divisor) : flush_denormal(1.0f / divisor);
}

inline float lg2_approx(float x) { return log2f(flush_denormal(x)); }

inline float sqrt_approx(float x) { return sqrtf(flush_denormal(x)); }

inline float sin_approx(float x) { return sinf(flush_denormal(x)); }

inline float cos_approx(float x) { return cosf(flush_denormal(x)); }

inline double multiply(double a, double b) { return a * b; }

inline float square_saturated(float x) {
  const float square = x * x;
  return square > 1.0f ? 1.0f : square >= 0.0f ? square : 0.0f;
}

inline float max_nan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }

inline uint32_t multiply_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}

inline float infinity() { return INFINITY; }

inline float nan() { return NAN; }

}  // namespace cupyattn::ptx
