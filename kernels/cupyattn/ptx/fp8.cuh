// Conversions of fp8 and int8: to pairs of 16-bit elements, and from float32. An instruction converts where
// there is one, else arithmetic does. No asm here, so that both ways run on a host too.
#pragma once

#include "cupyattn/ptx/convert.cuh"

namespace cupyattn::ptx {

// Bytes kLow and kHigh of a register of four fp8 values, as an f16 pair; exact, NaN included.
// e5m2 is the upper byte of an f16.
template <typename Fp8, int kLow, int kHigh>
struct Fp8ToHalfPair {
  static __device__ __forceinline__ uint32_t convert(uint32_t bytes) {
    return permute_bytes(bytes, 0u, 0x0404u | (kLow << 4) | (kHigh << 12));
  }
};

template <int kLow, int kHigh>
struct Fp8ToHalfPair<e4m3_t, kLow, kHigh> {
  static __device__ __forceinline__ uint32_t convert(uint32_t bytes) {
#if __CUDA_ARCH__ >= 890
    if constexpr (kLow == 2 && kHigh == 3) return e4m3_high_pair_to_half_pair(bytes);
    const uint32_t packed =
        kLow == 0 && kHigh == 1 ? bytes : permute_bytes(bytes, 0u, 0x4400u | (kHigh << 4) | kLow);
    return e4m3_pair_to_half_pair(packed);
#else
    // e4m3 placed in the f16 exponent field is 2^8 too small. The product restores it exactly, also
    // for subnormals. The NaN (all ones) is put back by hand.
    const uint32_t spread = permute_bytes(bytes, 0u, 0x4040u | (kHigh << 8) | kLow);
    const uint32_t placed = ((spread & 0x00800080u) << 8) | ((spread & 0x007f007fu) << 7);
    uint32_t scaled = multiply_half_pair(placed, 0x5c005c00u);  // mutate: e4m3-power-lost
    if ((spread & 0x7fu) == 0x7fu) scaled |= 0x00007fffu;
    if ((spread & 0x7f0000u) == 0x7f0000u) scaled |= 0x7fff0000u;
    return scaled;
#endif
  }
};

// int8 in the low byte of an f16 of [1024, 2048), from which its offset is taken.
template <int kLow, int kHigh>
struct Fp8ToHalfPair<int8_t, kLow, kHigh> {
  static __device__ __forceinline__ uint32_t convert(uint32_t bytes) {
    const uint32_t placed = permute_bytes(bytes ^ 0x80808080u, 0x64646464u,
                                          0x4040u | (kHigh << 8) | kLow);
    return multiply_add_pair<half_t>(placed, 0x3c003c00u, 0xe480e480u);  // mutate: int8-sign-lost
  }
};

// Bytes kLow and kHigh as a pair of T.
template <typename T, typename Fp8, int kLow, int kHigh>
__device__ __forceinline__ uint32_t fp8_to_pair(uint32_t bytes) {
  const uint32_t half_pair = Fp8ToHalfPair<Fp8, kLow, kHigh>::convert(bytes);
  if constexpr (is_same<T, half_t>) {
    return half_pair;
  } else {
    float low, high;
    unpack_pair<half_t>(half_pair, low, high);
    return pack_pair<T>(low, high);
  }
}

// Eight of them as a vector of T.
template <typename T, typename Fp8>
__device__ __forceinline__ Vector16 fp8_to_vector(uint64_t bytes) {
  const uint32_t low = static_cast<uint32_t>(bytes), high = static_cast<uint32_t>(bytes >> 32);
  return Vector16{{fp8_to_pair<T, Fp8, 0, 1>(low), fp8_to_pair<T, Fp8, 2, 3>(low),
                   fp8_to_pair<T, Fp8, 0, 1>(high), fp8_to_pair<T, Fp8, 2, 3>(high)}};
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(half_t x) { return half_to_float(x.bits); }
__device__ __forceinline__ float to_float(bfloat16_t x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

// The quotient, rounded once under any fast-math option.
__device__ __forceinline__ float divide_rn(float a, float b) { return __fdiv_rn(a, b); }
// a * b + c, rounded once.
__device__ __forceinline__ float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// An fp8 format. All ones is a NaN in both.
template <typename Fp8>
struct Fp8Format;

template <>
struct Fp8Format<e4m3_t> {
  static constexpr int kMantissaBits = 3, kBias = 7;
  static constexpr uint32_t kLargest = 0x7eu;  // 448
};

template <>
struct Fp8Format<e5m2_t> {
  static constexpr int kMantissaBits = 2, kBias = 15;
  static constexpr uint32_t kLargest = 0x7bu;  // 57344
};

constexpr uint32_t kFp8NaN = 0x7fu;

// Rounds the magnitude bits of a float32, not a NaN, to the bits of the nearest fp8; ties to even,
// saturated.
template <typename Fp8>
__device__ __forceinline__ uint32_t round_to_fp8(uint32_t magnitude) {
  using Format = Fp8Format<Fp8>;
  constexpr int kDropped = 23 - Format::kMantissaBits;
  constexpr uint32_t kSmallestNormal = (127u - Format::kBias + 1u) << 23;
  if (magnitude < kSmallestNormal) {
    // kUnits is a float whose last bit weighs as much as the smallest subnormal, so the mantissa of
    // the sum counts subnormals.
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

// Rounds two floats to two fp8, `low` to the low byte: to nearest, ties to even, saturated. Every
// NaN becomes 0x7f on all architectures.
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
