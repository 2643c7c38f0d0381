// Helpers that mean the same on the host and on the device.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

template <typename T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <typename T>
__host__ __device__ constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

template <typename T>
__host__ __device__ constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

template <typename T>
__host__ __device__ constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

// The condition of a branch that is hardly ever taken; the compiler moves its code out of the way.
__host__ __device__ constexpr bool unlikely(bool condition) {
  return __builtin_expect(condition, false);
}

}  // namespace cupyattn
