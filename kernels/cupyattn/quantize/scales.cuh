// Scales of values that are stored in eight bits, and their rounding: real = stored * scale.
#pragma once

#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/ptx/warp.cuh"
#include "cupyattn/tile/elements.cuh"

namespace cupyattn {

// The largest magnitude that is stored, and eight values as stored.
template <typename T>
struct Stored {
  static constexpr bool kIsScaled = false;
  static constexpr float kLargest = 1.0f;
  using Packed = Words<4>;

  static __device__ __forceinline__ Packed pack(const float (&x)[8], float) {
    Packed packed;
#pragma unroll
    for (int w = 0; w < 4; ++w) packed.word[w] = ptx::pack_pair<T>(x[2 * w], x[2 * w + 1]);
    return packed;
  }
};

template <typename Fp8>
struct StoredFp8 {
  static constexpr bool kIsScaled = true;
  static constexpr float kLargest = is_same<Fp8, e4m3_t> ? 448.0f : 57344.0f;
  using Packed = Words<2>;

  static __device__ __forceinline__ Packed pack(const float (&x)[8], float inverse) {
    Packed packed;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      packed.word[w] = ptx::floats_to_fp8_pair<Fp8>(x[4 * w] * inverse, x[4 * w + 1] * inverse) |
                       ptx::floats_to_fp8_pair<Fp8>(x[4 * w + 2] * inverse,
                                                    x[4 * w + 3] * inverse) << 16;
    }
    return packed;
  }

  static __device__ __forceinline__ void unpack(const Packed& packed, float (&x)[8]) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const uint32_t bytes = packed.word[w];
      ptx::unpack_pair<half_t>(ptx::fp8_to_pair<half_t, Fp8, 0, 1>(bytes), x[4 * w], x[4 * w + 1]);
      ptx::unpack_pair<half_t>(ptx::fp8_to_pair<half_t, Fp8, 2, 3>(bytes), x[4 * w + 2],
                               x[4 * w + 3]);
    }
  }
};

template <>
struct Stored<e4m3_t> : StoredFp8<e4m3_t> {};
template <>
struct Stored<e5m2_t> : StoredFp8<e5m2_t> {};

template <>
struct Stored<int8_t> {
  static constexpr bool kIsScaled = true;
  static constexpr float kLargest = 127.0f;
  using Packed = Words<2>;

  // A NaN becomes 0.
  static __device__ __forceinline__ Packed pack(const float (&x)[8], float inverse) {
    Packed packed = {{0u, 0u}};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int nearest = ptx::float_to_int_rn(x[e] * inverse);
      const int byte = max_of(min_of(nearest, 127), -127);
      packed.word[e / 4] |= static_cast<uint32_t>(byte & 0xff) << (e % 4 * 8);
    }
    return packed;
  }

  static __device__ __forceinline__ void unpack(const Packed& packed, float (&x)[8]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      x[e] = static_cast<float>(static_cast<int8_t>(packed.word[e / 4] >> (e % 4 * 8)));
    }
  }
};

constexpr float kSmallestScale = 0x1p-126f;

// The scale for values up to `amax`. Zeros have the scale 1.
__device__ __forceinline__ float scale_for(float amax, float largest) {
  if (amax == 0.0f) return 1.0f;
  return fmaxf(ptx::divide_rn(amax, largest), kSmallestScale);
}

// The power of two by which a scale must grow to be `needed`.
__device__ __forceinline__ float growth(float scale, float needed) {
  const uint32_t ratio = __float_as_uint(ptx::divide_rn(needed, scale));
  // A mantissa rounds the exponent up.
  const uint32_t exponent = (ratio + 0x007fffffu) >> 23;
  return __uint_as_float(min_of(exponent, 254u) << 23);
}

// The larger of a maximum and the magnitudes of a row's elements; those that are not finite do not
// count.
__device__ __forceinline__ float raise_amax(float amax, const float (&x)[8]) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float magnitude = fabsf(x[e]);
    // mutate: infinite-amax
    if (magnitude <= 0x1.fffffep127f) amax = fmaxf(amax, magnitude);
  }
  return amax;
}

// The largest of all threads' numbers, which are not negative. `warps` is free again behind the
// next barrier.
template <int kThreads>
__device__ __forceinline__ float block_max(float value, uint32_t* warps) {
  const uint32_t of_warp = ptx::warp_max(__float_as_uint(value));
  if (threadIdx.x % kWarpSize == 0) warps[threadIdx.x / kWarpSize] = of_warp;
  ptx::block_sync();
  const int warp = static_cast<int>(threadIdx.x) % (kThreads / kWarpSize);
  return __uint_as_float(ptx::warp_max(warps[warp]));
}

}  // namespace cupyattn
