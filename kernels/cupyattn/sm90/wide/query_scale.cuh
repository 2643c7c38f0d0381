// The powers of two by which a row of queries is multiplied, so that float16 holds it, and by which
// its logits are. Queries are float16 where keys of fp8 are.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

struct QueryScale {
  static constexpr uint32_t kBias = 127, kTop = kBias + 14, kInfinite = 255;

  float of_query, of_logits;

  // largest: of the row's magnitudes. The row becomes less than 2^15; what is 2^28 times smaller
  // than the largest loses bits.
  static __device__ __forceinline__ QueryScale of(float largest) {
    constexpr uint32_t kLeast = kTop - kBias + 1;
    const uint32_t exponent = __float_as_uint(largest) >> 23;
    if (exponent == kInfinite) return QueryScale{1.0f, 1.0f};
    const uint32_t kept = exponent < kLeast ? kLeast : exponent;
    return QueryScale{__uint_as_float((kBias + kTop - kept) << 23),
                      __uint_as_float((kBias + kept - kTop) << 23)};
  }

  // The same, but 1 for a row of usual size, whose logits then take no factor: what is 2^13 times
  // smaller than its largest is off by at most 2^-21 of that.
  static __device__ __forceinline__ QueryScale if_needed(float largest) {
    constexpr uint32_t kLeast = kBias - 4;
    const uint32_t exponent = __float_as_uint(largest) >> 23;
    if (exponent >= kLeast && exponent <= kTop) return QueryScale{1.0f, 1.0f};
    return of(largest);
  }
};

}  // namespace cupyattn
