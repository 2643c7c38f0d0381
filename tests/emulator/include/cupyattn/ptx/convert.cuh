// Host twin of kernels/cupyattn/ptx/convert.cuh: rounding is exact.
#pragma once

#include "cupyattn/common/types.cuh"
#include "emulator/numbers.h"

namespace cupyattn::ptx {

template <typename T>
constexpr const emulator::FloatFormat& format_of() {
  static_assert(sizeof(T) == 2, "pairs are of f16 or bf16");
  return is_same<T, half_t> ? emulator::kHalf : emulator::kBfloat16;
}

template <typename T>
inline uint32_t pack_pair(float low, float high) {
  return emulator::encode(low, format_of<T>()) | emulator::encode(high, format_of<T>()) << 16;
}

inline float half_to_float(uint32_t bits) { return emulator::decode(bits, emulator::kHalf); }

template <typename T>
inline void unpack_pair(uint32_t pair, float& low, float& high) {
  low = emulator::decode(pair & 0xffffu, format_of<T>());
  high = emulator::decode(pair >> 16, format_of<T>());
}

template <typename T>
inline uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
  const emulator::FloatFormat& format = format_of<T>();
  return emulator::multiply_add(a & 0xffffu, b & 0xffffu, c & 0xffffu, format) |
         emulator::multiply_add(a >> 16, b >> 16, c >> 16, format) << 16;
}

// A product that needs no rounding beyond its own: -0 is what leaves a product as it is.
inline uint32_t multiply_half_pair(uint32_t a, uint32_t b) {
  return multiply_add_pair<half_t>(a, b, 0x80008000u);
}

// prmt: nibble i of the selector picks byte i of the result from the eight bytes of b and a; its
// top bit repeats that byte's sign instead.
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = (selector >> (4 * i)) & 0xfu;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7u))) & 0xffu;
    if (nibble & 8u) byte = byte & 0x80u ? 0xffu : 0u;
    result |= byte << (8 * i);
  }
  return result;
}

// Two e4m3 values in the low 16 bits, as an f16 pair.
inline uint32_t e4m3_pair_to_half_pair(uint32_t pair) {
  const auto convert = [](uint32_t byte) {
    // The one NaN comes out without its sign.
    return (byte & 0x7fu) == 0x7fu
               ? 0x7fffu
               : emulator::encode(emulator::decode(byte, emulator::kE4m3), emulator::kHalf);
  };
  return convert(pair & 0xffu) | convert((pair >> 8) & 0xffu) << 16;
}

inline uint32_t e4m3_high_pair_to_half_pair(uint32_t pairs) {
  return e4m3_pair_to_half_pair(pairs >> 16);
}

template <typename Fp8>
inline uint16_t cvt_rn_satfinite_fp8x2(float high, float low) {
  const emulator::FloatFormat& format =
      is_same<Fp8, e4m3_t> ? emulator::kE4m3 : emulator::kE5m2;
  return static_cast<uint16_t>(emulator::encode(high, format) << 8 | emulator::encode(low, format));
}

inline uint32_t pack_four_e4m3(float a, float b, float c, float d) {
  return cvt_rn_satfinite_fp8x2<e4m3_t>(b, a) |
         static_cast<uint32_t>(cvt_rn_satfinite_fp8x2<e4m3_t>(d, c)) << 16;
}

inline int float_to_int_rn(float x) {
  if (x != x) return 0;
  if (x >= 0x1p31f) return 0x7fffffff;
  if (x <= -0x1p31f) return static_cast<int>(0x80000000u);
  return static_cast<int>(__builtin_rintf(x));
}

}  // namespace cupyattn::ptx
