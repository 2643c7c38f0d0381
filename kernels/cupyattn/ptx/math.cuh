// Special-function instructions.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float lg2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sin_approx(float x) {
  float y;
  asm("sin.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float cos_approx(float x) {
  float y;
  asm("cos.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// A product that is rounded before anything is added to it.
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }

// min(x * x, 1), and 0 for a NaN.
__device__ __forceinline__ float square_saturated(float x) {
  float y;
  asm("mul.rn.sat.f32 %0, %1, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
// The larger one; a NaN if either is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float nan() { return __int_as_float(0x7fffffff); }

}  // namespace cupyattn::ptx
