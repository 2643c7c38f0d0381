// Conversions between element types. A "pair" is two 16-bit elements in one register, first in the
// low half.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack_pair<half_t>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <>
__device__ __forceinline__ uint32_t pack_pair<bfloat16_t>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float half_to_float(uint32_t bits) {
  float value;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}\n" : "=f"(value) : "r"(bits));
  return value;
}

template <typename T>
__device__ __forceinline__ void unpack_pair(uint32_t pair, float& low, float& high);

template <>
__device__ __forceinline__ void unpack_pair<half_t>(uint32_t pair, float& low, float& high) {
  low = half_to_float(pair & 0xffffu);
  high = half_to_float(pair >> 16);
}

template <>
__device__ __forceinline__ void unpack_pair<bfloat16_t>(uint32_t pair, float& low, float& high) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
}

// a * b + c on pairs.
template <typename T>
__device__ __forceinline__ uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c);

template <>
__device__ __forceinline__ uint32_t multiply_add_pair<half_t>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

template <>
__device__ __forceinline__ uint32_t multiply_add_pair<bfloat16_t>(uint32_t a, uint32_t b,
                                                                  uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

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
    uint32_t pair;
    const uint32_t packed =
        kLow == 0 && kHigh == 1 ? bytes : permute_bytes(bytes, 0u, 0x4400u | (kHigh << 4) | kLow);
    asm("{.reg .b16 p; cvt.u16.u32 p, %1; cvt.rn.f16x2.e4m3x2 %0, p;}\n"
        : "=r"(pair)
        : "r"(packed));
    return pair;
#else
    // e4m3 placed in the f16 exponent field is 2^8 too small; the product restores it exactly, also
    // for subnormals. The one NaN encoding (all ones) is put back by hand.
    const uint32_t spread = permute_bytes(bytes, 0u, 0x4040u | (kHigh << 8) | kLow);
    const uint32_t placed = ((spread & 0x00800080u) << 8) | ((spread & 0x007f007fu) << 7);
    uint32_t scaled;
    asm("mul.rn.f16x2 %0, %1, %2;\n" : "=r"(scaled) : "r"(placed), "r"(0x5c005c00u));
    if ((spread & 0x7fu) == 0x7fu) scaled |= 0x00007fffu;
    if ((spread & 0x7f0000u) == 0x7f0000u) scaled |= 0x7fff0000u;
    return scaled;
#endif
  }
};

// The same as a pair of T.
template <typename T, typename Fp8, int kLow, int kHigh>
__device__ __forceinline__ uint32_t fp8_to_pair(uint32_t bytes) {
  const uint32_t half_pair = Fp8ToHalfPair<Fp8, kLow, kHigh>::convert(bytes);
  if constexpr (is_same<T, half_t>::value) {
    return half_pair;
  } else {
    float low, high;
    unpack_pair<half_t>(half_pair, low, high);
    return pack_pair<T>(low, high);
  }
}

}  // namespace cupyattn::ptx
