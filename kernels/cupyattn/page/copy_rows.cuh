// Copies rows to memory of another layout, type or number of columns: a group of threads takes one.
#pragma once

#include "cupyattn/page/append.cuh"
#include "cupyattn/params/copy_rows.cuh"

namespace cupyattn {

// 16 bytes of fp8 as two vectors of 16-bit elements, or any vector as it is.
template <typename From, typename To>
__device__ __forceinline__ void copy_vector(To* target, const From* source) {
  const Vector16 loaded = *reinterpret_cast<const Vector16*>(source);
  Vector16* stored = reinterpret_cast<Vector16*>(target);
  if constexpr (is_same<From, To>) {
    *stored = loaded;
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vector16 wide;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const uint32_t bytes = loaded.word[2 * half + w];
        wide.word[2 * w] = ptx::fp8_to_pair<To, From, 0, 1>(bytes);
        wide.word[2 * w + 1] = ptx::fp8_to_pair<To, From, 2, 3>(bytes);
      }
      stored[half] = wide;  // mutate: upper-half-of-a-vector
    }
  }
}

template <typename From, typename To>
__device__ __forceinline__ void copy_element(To* target, const From* source) {
  if constexpr (is_same<From, To>) {
    *target = *source;
  } else {
    const uint8_t bits = *reinterpret_cast<const uint8_t*>(source);
    const uint32_t pair = ptx::fp8_to_pair<To, From, 0, 1>(bits);
    target->bits = static_cast<uint16_t>(pair);
  }
}

template <typename Config>
__device__ __forceinline__ void copy_rows(const CopiedRows& rows, int lane_bits) {
  using From = typename Config::DType;
  using To = typename Config::DTypeTarget;
  static_assert(is_same<From, To> || (is_fp8<From> && sizeof(To) == 2), "only fp8 is converted");
  constexpr int kCount = Config::kAligned ? 16 / static_cast<int>(sizeof(From)) : 1;
  const int lane = threadIdx.x & ((1 << lane_bits) - 1);
  const int stride = kCount << lane_bits;
  const int64_t rows_per_block = Config::kThreads >> lane_bits;
  // The host takes vectors only where all columns are whole ones, and none is filled.
  int64_t row = blockIdx.x * rows_per_block + (threadIdx.x >> lane_bits);
  for (; row < rows.num_rows; row += gridDim.x * rows_per_block) {
    // Find the row in both arrays.
    const int64_t rest = divide(row, rows.inner);
    const int64_t inner = row - rest * rows.inner;
    const int64_t outer = divide(rest, rows.middle);
    const int64_t middle = rest - outer * rows.middle;
    const From* source = static_cast<const From*>(rows.source) + outer * rows.source_strides[0] +
                         middle * rows.source_strides[1] + inner * rows.source_strides[2];
    To* target = static_cast<To*>(rows.target) + outer * rows.target_strides[0] +
                 middle * rows.target_strides[1] + inner * rows.target_strides[2];

    for (int i = kCount * lane; i < rows.filled; i += stride) {
      if constexpr (kCount > 1) {
        copy_vector(target + i, source + i);
      } else if (i < rows.columns) {
        copy_element(target + i, source + i);
      } else {
        target[i] = To{};  // mutate: columns-of-zeros-lost
      }
    }
  }
}

}  // namespace cupyattn
