// 16-bit and 8-bit floats on the host, rounded to nearest even from the exact value.
#pragma once

#include <stdint.h>

namespace emulator {

// `largest` is the code of the largest finite magnitude; what rounds past it becomes `overflow`.
struct FloatFormat {
  int exponent_bits, mantissa_bits;
  uint32_t largest, overflow, nan;

  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  constexpr int sign_shift() const { return exponent_bits + mantissa_bits; }
};

constexpr FloatFormat kHalf{5, 10, 0x7bff, 0x7c00, 0x7fff};
constexpr FloatFormat kBfloat16{8, 7, 0x7f7f, 0x7f80, 0x7fff};
// As cvt.rn.satfinite: too large a value becomes the largest.
constexpr FloatFormat kE4m3{4, 3, 0x7e, 0x7e, 0x7f};
constexpr FloatFormat kE5m2{5, 2, 0x7b, 0x7b, 0x7f};

// Compiled once, in runtime/numbers.cpp, and not with each kernel.
// Exact for any double, so also for the float32 sums and products that doubles hold exactly.
uint32_t encode(double value, const FloatFormat& format);
float decode(uint32_t bits, const FloatFormat& format);
// a * b + c rounded once.
uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c, const FloatFormat& format);

}  // namespace emulator
