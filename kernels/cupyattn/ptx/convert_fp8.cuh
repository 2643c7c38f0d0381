// Single elements: floats to float32, and float32 to fp8, by an instruction where there is one. No
// asm here, so that both ways run on a host too.
#pragma once

#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/convert.cuh"

namespace cupyattn::ptx {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(half_t x) { return half_to_float(x.bits); }
__device__ __forceinline__ float to_float(bfloat16_t x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

// The quotient rounded once, whatever fast-math options say.
__device__ __forceinline__ float divide_rn(float a, float b) { return __fdiv_rn(a, b); }

// What rounding to an fp8 format takes. Both have one spare bit pattern of all ones, a NaN.
template <typename Fp8>
struct Fp8Format;

template <>
struct Fp8Format<e4m3_t> {
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr uint32_t kLargest = 0x7eu;  // 448
};

template <>
struct Fp8Format<e5m2_t> {
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr uint32_t kLargest = 0x7bu;  // 57344
};

constexpr uint32_t kFp8NaN = 0x7fu;

// Magnitude bits of a float32, no NaN, to the bits of the nearest fp8; ties to even, saturated.
template <typename Fp8>
__device__ __forceinline__ uint32_t round_to_fp8(uint32_t magnitude) {
  using Format = Fp8Format<Fp8>;
  constexpr int kDropped = 23 - Format::kMantissaBits;
  constexpr uint32_t kSmallestNormal = (127u - Format::kBias + 1u) << 23;
  if (magnitude < kSmallestNormal) {
    // A float whose last bit weighs as much as the smallest subnormal: the sum rounds to it, and
    // its mantissa counts them.
    constexpr uint32_t kUnits = (127u - Format::kBias + 1u + kDropped) << 23;
    return __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(kUnits)) - kUnits;
  }
  const uint32_t is_odd = (magnitude >> kDropped) & 1u;
  const uint32_t rounded = (magnitude + (1u << (kDropped - 1)) - 1u + is_odd) >> kDropped;
  const uint32_t code = rounded - ((127u - Format::kBias) << Format::kMantissaBits);
  return code < Format::kLargest ? code : Format::kLargest;
}

template <typename Fp8>
__device__ __forceinline__ uint32_t float_to_fp8_portable(float x) {
  const uint32_t bits = __float_as_uint(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return kFp8NaN;
  return round_to_fp8<Fp8>(magnitude) | ((bits >> 24) & 0x80u);
}

// Two floats to two fp8, `low` in the low byte: to nearest, ties to even, what is too large to the
// largest finite value of its sign. Every NaN becomes 0x7f, on all architectures.
template <typename Fp8>
__device__ __forceinline__ uint32_t floats_to_fp8_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint32_t pair = cvt_rn_satfinite_fp8x2<Fp8>(high, low);
  if (low != low) pair = (pair & 0xff00u) | kFp8NaN;
  if (high != high) pair = (pair & 0x00ffu) | (kFp8NaN << 8);
  return pair;
#else
  return float_to_fp8_portable<Fp8>(low) | (float_to_fp8_portable<Fp8>(high) << 8);
#endif
}

}  // namespace cupyattn::ptx
