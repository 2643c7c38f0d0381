// Elements of a row become floats and back: 16 bytes at a time, or one element in unaligned rows.
#pragma once

#include "cupyattn/ptx/fp8.cuh"

namespace cupyattn {

template <typename T, int kCount>
__device__ __forceinline__ void to_floats(const Vector16& vector, float (&value)[kCount]) {
  static_assert(kCount * sizeof(T) == sizeof(Vector16), "a vector is 16 bytes");
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(T) == 4) {
      value[w] = __uint_as_float(vector.word[w]);
    } else {
      ptx::unpack_pair<T>(vector.word[w], value[2 * w], value[2 * w + 1]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void to_floats(const T& element, float (&value)[1]) {
  value[0] = ptx::to_float(element);
}

// kWords words, which one or two instructions store.
template <int kWords>
struct alignas(kWords < 4 ? 4 * kWords : 16) Words {
  uint32_t word[kWords];
};

// Stores floats rounded to T, fp8 saturated. `target` is aligned to all kCount elements.
template <typename T, int kCount>
__device__ __forceinline__ void store_floats(T* target, const float (&value)[kCount]) {
  if constexpr (kCount == 1) {
    if constexpr (sizeof(T) == 4) {
      *target = value[0];
    } else if constexpr (is_fp8<T>) {
      target->bits = static_cast<uint8_t>(ptx::floats_to_fp8_pair<T>(value[0], 0.0f));
    } else {
      target->bits = static_cast<uint16_t>(ptx::pack_pair<T>(value[0], 0.0f) & 0xffffu);
    }
  } else {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    Words<kCount / kPerWord> stored;
#pragma unroll
    for (int w = 0; w < kCount / kPerWord; ++w) {
      if constexpr (kPerWord == 1) {
        stored.word[w] = __float_as_uint(value[w]);
      } else if constexpr (kPerWord == 4) {
        stored.word[w] = ptx::floats_to_fp8_pair<T>(value[4 * w], value[4 * w + 1]) |
                         ptx::floats_to_fp8_pair<T>(value[4 * w + 2], value[4 * w + 3]) << 16;
      } else {
        stored.word[w] = ptx::pack_pair<T>(value[2 * w], value[2 * w + 1]);
      }
    }
    *reinterpret_cast<Words<kCount / kPerWord>*>(target) = stored;
  }
}

}  // namespace cupyattn
