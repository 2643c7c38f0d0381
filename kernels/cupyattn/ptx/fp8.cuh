// fp8 bytes become pairs of 16-bit elements: by an instruction where there is one, else by shifts
// and a product. No asm here, so that both ways run on a host too.
#pragma once

#include "cupyattn/common/types.cuh"
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
    // e4m3 placed in the f16 exponent field is 2^8 too small; the product restores it exactly, also
    // for subnormals. The one NaN encoding (all ones) is put back by hand.
    const uint32_t spread = permute_bytes(bytes, 0u, 0x4040u | (kHigh << 8) | kLow);
    const uint32_t placed = ((spread & 0x00800080u) << 8) | ((spread & 0x007f007fu) << 7);
    uint32_t scaled = multiply_half_pair(placed, 0x5c005c00u);  // mutate: e4m3-power-lost
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
