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

__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

// Two fp8 values, in the low bytes of the two halves of `spread` (0x00BB00AA), to an f16 pair.
template <typename T>
__device__ __forceinline__ uint32_t fp8_pair_to_half_pair(uint32_t spread);

template <>
__device__ __forceinline__ uint32_t fp8_pair_to_half_pair<e5m2_t>(uint32_t spread) {
  return spread << 8;
}

template <>
__device__ __forceinline__ uint32_t fp8_pair_to_half_pair<e4m3_t>(uint32_t spread) {
#if __CUDA_ARCH__ >= 890
  uint32_t pair;
  const uint32_t packed = permute_bytes(spread, 0u, 0x4420u);
  asm("{.reg .b16 p; cvt.u16.u32 p, %1; cvt.rn.f16x2.e4m3x2 %0, p;}\n" : "=r"(pair) : "r"(packed));
  return pair;
#else
  // e4m3 placed in the f16 exponent field is 2^8 too small; the product restores it exactly, also
  // for subnormals. The one NaN encoding (all ones) is put back by hand.
  uint32_t scaled;
  const uint32_t placed = ((spread & 0x00800080u) << 8) | ((spread & 0x007f007fu) << 7);
  asm("mul.rn.f16x2 %0, %1, %2;\n" : "=r"(scaled) : "r"(placed), "r"(0x5c005c00u));
  if ((spread & 0x7fu) == 0x7fu) scaled |= 0x00007fffu;
  if ((spread & 0x7f0000u) == 0x7f0000u) scaled |= 0x7fff0000u;
  return scaled;
#endif
}

// Bytes `2*kFirst` and `2*kFirst+kStep` ... of a register of four fp8 values, as a pair of T.
template <typename T, typename Fp8>
__device__ __forceinline__ uint32_t fp8_to_pair(uint32_t bytes, uint32_t selector) {
  const uint32_t half_pair = fp8_pair_to_half_pair<Fp8>(permute_bytes(bytes, 0u, selector));
  if constexpr (is_same<T, half_t>::value) {
    return half_pair;
  } else {
    float low, high;
    unpack_pair<half_t>(half_pair, low, high);
    return pack_pair<T>(low, high);
  }
}

// Selectors for fp8_to_pair: which two of the four bytes become the (low, high) halves.
constexpr uint32_t kBytes01 = 0x4140u;
constexpr uint32_t kBytes23 = 0x4342u;
constexpr uint32_t kBytes02 = 0x4240u;
constexpr uint32_t kBytes13 = 0x4341u;

}  // namespace cupyattn::ptx
