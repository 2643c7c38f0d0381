// 16-bit and 8-bit floats on the host.
#include "emulator/numbers.h"

#include <math.h>

namespace emulator {

uint32_t encode(double value, const FloatFormat& format) {
  const uint32_t sign = signbit(value) ? 1u << format.sign_shift() : 0u;
  if (isnan(value)) return format.nan;
  const double magnitude = fabs(value);
  if (isinf(magnitude)) return sign | format.overflow;
  if (magnitude == 0.0) return sign;
  const int smallest = 1 - format.bias();
  const int exponent = ilogb(magnitude) < smallest ? smallest : ilogb(magnitude);
  // Units in the last place; a carry out of the mantissa moves the exponent up by itself.
  const double units = nearbyint(ldexp(magnitude, format.mantissa_bits - exponent));
  const double code = units + ldexp(exponent - smallest, format.mantissa_bits);
  return sign | (code > format.largest ? format.overflow : static_cast<uint32_t>(code));
}

float decode(uint32_t bits, const FloatFormat& format) {
  const bool is_negative = (bits >> format.sign_shift()) & 1;
  const uint32_t code = bits & ((1u << format.sign_shift()) - 1);
  const uint32_t infinity = format.overflow > format.largest ? format.overflow : 0;
  float magnitude;
  if (infinity != 0 && code >= infinity) {
    magnitude = code == infinity ? INFINITY : NAN;
  } else if (code > format.largest) {
    // e4m3 has one NaN; e5m2 has infinity, though saturating conversions never make it.
    magnitude = format.exponent_bits == 5 && code == 0x7c ? INFINITY : NAN;
  } else {
    const int exponent = static_cast<int>(code >> format.mantissa_bits);
    const uint32_t mantissa = code & ((1u << format.mantissa_bits) - 1);
    magnitude = exponent == 0
                    ? ldexpf(static_cast<float>(mantissa), 1 - format.bias() - format.mantissa_bits)
                    : __builtin_bit_cast(float, (exponent - format.bias() + 127u) << 23 |
                                                    mantissa << (23 - format.mantissa_bits));
  }
  return is_negative ? -magnitude : magnitude;
}

// The product is exact in a double; the sum is rounded to odd, so that the rounding that follows sees
// on which side of a tie the exact sum lies.
uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c, const FloatFormat& format) {
  const double product = static_cast<double>(decode(a, format)) * decode(b, format);
  const double addend = decode(c, format);
  double sum = product + addend;
  const double rest = sum - product;
  const double error = (product - (sum - rest)) + (addend - rest);
  if (isfinite(sum) && error != 0.0) {
    uint64_t bits = __builtin_bit_cast(uint64_t, sum);
    if ((bits & 1) == 0) bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
    sum = __builtin_bit_cast(double, bits);
  }
  return encode(sum, format);
}

}  // namespace emulator
