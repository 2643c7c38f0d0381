// What the scores of a block's index rows come to: the largest, or for softmax their exponentials.
#pragma once

#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

// What rows of a block come to: the largest of their scores.
struct LargestScore {
  float value;

  static __device__ __forceinline__ LargestScore none() { return {-ptx::infinity()}; }

  template <int kCount>
  static __device__ __forceinline__ LargestScore of(const float (&x)[kCount]) {
    LargestScore total = {x[0]};
#pragma unroll
    for (int i = 1; i < kCount; ++i) total.value = ptx::max_nan(total.value, x[i]);
    return total;
  }

  template <int kCount>
  __device__ __forceinline__ void add(const float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value = ptx::max_nan(value, x[i]);
  }

  __device__ __forceinline__ void join_lane(int mask) {
    value = ptx::max_nan(value, ptx::shuffle_xor(value, mask));
  }

  __device__ __forceinline__ float result() const { return value; }
};

// For softmax: the sum of what 2 to their scores is, and the logarithm of that. A NaN stays one.
struct ScoreExponentials {
  float largest, sum;  // of multiples of 2 to the largest

  static __device__ __forceinline__ ScoreExponentials none() { return {-ptx::infinity(), 0.0f}; }

  template <int kCount>
  static __device__ __forceinline__ ScoreExponentials of(const float (&x)[kCount]) {
    ScoreExponentials total = none();
    total.add(x);
    return total;
  }

  // What scores are counted from: any number where there is none yet.
  static __device__ __forceinline__ float origin(float largest) {
    return largest == -ptx::infinity() ? 0.0f : largest;
  }

  template <int kCount>
  __device__ __forceinline__ void add(const float (&x)[kCount]) {
    float next = largest;
#pragma unroll
    for (int i = 0; i < kCount; ++i) next = ptx::max_nan(next, x[i]);
    const float from = origin(next);
    sum *= ptx::ex2_approx(largest - from);  // mutate: exponentials-not-rescaled
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += ptx::ex2_approx(x[i] - from);
    largest = next;
  }

  __device__ __forceinline__ void join(float other_largest, float other_sum) {
    const float next = ptx::max_nan(largest, other_largest), from = origin(next);
    sum = sum * ptx::ex2_approx(largest - from) + other_sum * ptx::ex2_approx(other_largest - from);
    largest = next;
  }

  __device__ __forceinline__ void join_lane(int mask) {
    join(ptx::shuffle_xor(largest, mask), ptx::shuffle_xor(sum, mask));
  }

  __device__ __forceinline__ float result() const { return largest + ptx::lg2_approx(sum); }
};

}  // namespace cupyattn
