// Conversions between element types. A "pair" is two 16-bit elements in one register, first in the
// low half.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t pair;
  if constexpr (is_same<T, half_t>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    static_assert(is_same<T, bfloat16_t>, "pairs are of f16 or bf16");
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

__device__ __forceinline__ float half_to_float(uint32_t bits) {
  float value;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}\n" : "=f"(value) : "r"(bits));
  return value;
}

template <typename T>
__device__ __forceinline__ void unpack_pair(uint32_t pair, float& low, float& high) {
  if constexpr (is_same<T, half_t>) {
    low = half_to_float(pair & 0xffffu);
    high = half_to_float(pair >> 16);
  } else {
    static_assert(is_same<T, bfloat16_t>, "pairs are of f16 or bf16");
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
  }
}

// a * b + c on pairs.
template <typename T>
__device__ __forceinline__ uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (is_same<T, half_t>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    static_assert(is_same<T, bfloat16_t>, "pairs are of f16 or bf16");
    asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

__device__ __forceinline__ uint32_t multiply_half_pair(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;\n" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

// The two e4m3 values in the low 16 bits become an f16 pair; exact, NaN included. From sm_89 on.
__device__ __forceinline__ uint32_t e4m3_pair_to_half_pair(uint32_t bytes) {
  uint32_t pair;
  asm("{.reg .b16 p; cvt.u16.u32 p, %1; cvt.rn.f16x2.e4m3x2 %0, p;}\n" : "=r"(pair) : "r"(bytes));
  return pair;
}

// The two e4m3 values in the high 16 bits become an f16 pair likewise.
__device__ __forceinline__ uint32_t e4m3_high_pair_to_half_pair(uint32_t bytes) {
  uint32_t pair;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}\n"
      : "=r"(pair)
      : "r"(bytes));
  return pair;
}

// To nearest, ties to even, saturated; a NaN becomes 0.
__device__ __forceinline__ int float_to_int_rn(float x) { return __float2int_rn(x); }

// Two floats become two fp8, saturated; the sign of a NaN is not specified. From sm_89 on.
#if __CUDA_ARCH__ >= 890
template <typename Fp8>
__device__ __forceinline__ uint16_t cvt_rn_satfinite_fp8x2(float high, float low) {
  uint16_t pair;
  if constexpr (is_same<Fp8, e4m3_t>) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    static_assert(is_same<Fp8, e5m2_t>, "fp8 is e4m3 or e5m2");
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;\n" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// Four floats become four e4m3, the first in the lowest byte. One statement, so that the second
// conversion puts its bytes beside those of the first.
__device__ __forceinline__ uint32_t pack_four_e4m3(float a, float b, float c, float d) {
  uint32_t four;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}
#endif

}  // namespace cupyattn::ptx
