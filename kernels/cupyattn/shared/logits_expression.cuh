// User-written logits: what an expression may read and call. core/expression_cuda.py writes the
// expressions of a call as functions of a LogitAt, the members of Config::LogitsExpression:
//   row_value  the part of the transform that no key changes, once a row
//   transform  the logit in place of a scaled product
//   exponent   the transform to base 2, plus a shift, of a transform that is linear in the logit
//   sees       whether a row sees a key
//   NearBias   the type of the biases that are all that the transform adds, if it is so
//              (relative_logits.cuh)
// Reals are float32; integers have 32 bits and wrap.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/shared/work.cuh"

namespace cupyattn {

// A logit, and its place: the row, and key kv_first + kv_step. The step is a constant of the loop
// over a thread's logits.
struct LogitAt {
  const AttentionParams& params;
  int q_idx, q_row, q_token, head, kv_head, batch, q_len, kv_len;
  int kv_first, kv_step;
  float product, scale;  // the logit is the one times the other
  float base2_scale;     // the scale to base 2
  float logit, row_value;

  // The place of a row, without a key. `batch` is read only where the plan numbers its requests.
  static __device__ __forceinline__ LogitAt of(const AttentionParams& params,
                                               const Request& request, int token, int position,
                                               int head) {
    return LogitAt{params,
                   position,
                   token,
                   request.q_start + token,  // mutate: tokens-counted-by-request
                   head,
                   divide(head, params.group_magic, params.group_shift),
                   static_cast<int>(request.mask_start),
                   request.qo_len,
                   request.kv_len,
                   0,
                   0,
                   0.0f,
                   0.0f,
                   0.0f,
                   0.0f,
                   0.0f};
  }
  // A key further, with its product.
  __device__ __forceinline__ LogitAt key(int step, float key_product) const {
    LogitAt here = *this;
    here.kv_step = step;
    here.product = key_product;
    here.logit = key_product * scale;
    return here;
  }

  __device__ __forceinline__ int kv_idx() const { return kv_first + kv_step; }

  // --- Parameters, by slot ---

  __device__ __forceinline__ float real(int slot) const {
    return __uint_as_float(params.logits_numbers[slot]);
  }
  __device__ __forceinline__ int integer(int slot) const {
    return static_cast<int>(params.logits_numbers[slot]);
  }
  // An index within an axis of an array. Keys that do not exist have logits too.
  __device__ __forceinline__ int inside(int slot, int axis, int index) const {
    // mutate: index-past-array
    return max_of(min_of(index, params.logits_arrays[slot].extent[axis] - 1), 0);
  }
  template <typename T, typename... Rest>
  __device__ __forceinline__ auto element(int slot, int first, Rest... rest) const {
    const LogitsArray& array = params.logits_arrays[slot];
    int64_t index = first;
    int axis = 0;
    // mutate: array-axes-swapped
    ((index = index * array.extent[++axis] + rest), ...);
    return element_at<T>(slot, index);
  }
  template <typename T>
  __device__ __forceinline__ auto element_at(int slot, int64_t index) const {
    using Bits = conditional<sizeof(T) == 4, uint32_t,
                             conditional<sizeof(T) == 2, uint16_t, uint8_t>>;
    const void* data = params.logits_arrays[slot].data;
    return value_of(T{}, ptx::load_constant(static_cast<const Bits*>(data) + index));
  }

  // The same of near keys: 0 where the last axis has no such distance.
  template <typename T>
  __device__ __forceinline__ float near(int slot, int token, int head, int distance) const {
    const bool has_bias = distance >= 0 && distance < params.logits_arrays[slot].extent[2];
    return has_bias ? element<T>(slot, token, head, distance) : 0.0f;
  }

  // --- Integers ---

  static __device__ __forceinline__ int add(int a, int b) {
    return static_cast<int>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  }
  static __device__ __forceinline__ int subtract(int a, int b) {
    return static_cast<int>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
  }
  static __device__ __forceinline__ int multiply(int a, int b) {
    return static_cast<int>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
  }
  // The divisor is positive. A remainder below zero means that the quotient was rounded up.
  static __device__ __forceinline__ int floor_divide(int a, int b) {
    return a / b - static_cast<int>(a % b < 0);  // mutate: quotient-toward-zero
  }
  static __device__ __forceinline__ int floor_modulo(int a, int b) {
    const int rest = a % b;
    return rest < 0 ? rest + b : rest;
  }
  static __device__ __forceinline__ int absolute(int x) { return x < 0 ? subtract(0, x) : x; }
  static __device__ __forceinline__ int least(int a, int b) { return min_of(a, b); }
  static __device__ __forceinline__ int greatest(int a, int b) { return max_of(a, b); }

  // --- Reals ---

  static __device__ __forceinline__ float absolute(float x) { return fabsf(x); }
  static __device__ __forceinline__ float least(float a, float b) { return fminf(a, b); }
  static __device__ __forceinline__ float greatest(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float divide_reals(float a, float b) {
    return a * ptx::rcp_approx(b);
  }
  static __device__ __forceinline__ float floor(float x) { return floorf(x); }
  static __device__ __forceinline__ float sqrt(float x) { return ptx::sqrt_approx(x); }
  static __device__ __forceinline__ float exp2(float x) { return ptx::ex2_approx(x); }
  static __device__ __forceinline__ float exp(float x) { return ptx::ex2_approx(x * kLog2e); }
  static __device__ __forceinline__ float log2(float x) { return ptx::lg2_approx(x); }
  static __device__ __forceinline__ float log(float x) { return kLn2 * ptx::lg2_approx(x); }
  // Within a few ulps of 1: enough where the result is a part of a logit.
  static __device__ __forceinline__ float tanh(float x) {
    return fmaf(-2.0f, ptx::rcp_approx(1.0f + exp(2.0f * x)), 1.0f);
  }
  static __device__ __forceinline__ float sigmoid(float x) {
    return ptx::rcp_approx(1.0f + exp(-x));
  }
  static __device__ __forceinline__ float log_sigmoid(float x) {
    return fminf(x, 0.0f) - log(1.0f + exp(-fabsf(x)));
  }

 private:

  // The value of an element of the first argument's type with these bits.
  static __device__ __forceinline__ float value_of(float, uint32_t x) { return __uint_as_float(x); }
  static __device__ __forceinline__ float value_of(half_t, uint16_t x) {
    return ptx::to_float(half_t{x});
  }
  static __device__ __forceinline__ float value_of(bfloat16_t, uint16_t x) {
    return ptx::to_float(bfloat16_t{x});
  }
  static __device__ __forceinline__ int value_of(int32_t, uint32_t x) {
    return static_cast<int>(x);
  }
  static __device__ __forceinline__ int value_of(uint8_t, uint8_t x) { return x; }
  static __device__ __forceinline__ bool value_of(bool, uint8_t x) { return x != 0; }
};

}  // namespace cupyattn
