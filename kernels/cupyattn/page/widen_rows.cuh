// Widens rows of 8 bits to 16: a thread takes vectors of 8 elements, whose neighbours' stores
// fill whole lines, or elements of rows that are not aligned.
#pragma once

#include "cupyattn/page/copy_rows.cuh"
#include "cupyattn/params/widen_rows.cuh"

namespace cupyattn {

template <typename Config, typename From>
struct RowWidener {
  using Wide = typename Config::DTypeWide;
  static constexpr int kCount = Config::kAligned ? 8 : 1;
  static constexpr int kTogether = 4;  // loads of a thread under way
  // Memory has fewer vectors than 32 bits count.
  using Index = conditional<Config::kAligned, uint32_t, int64_t>;

  const From* const source;
  Wide* const target;
  const int64_t row_stride, head_stride;
  const Index heads, vectors, count;
  const bool is_gapless;

  __device__ __forceinline__ RowWidener(const WidenRowsParams& params, int array, int num_rows)
      : source(static_cast<const From*>(params.source[array])),
        target(static_cast<Wide*>(params.target[array])),
        row_stride(params.row_stride[array]),
        head_stride(params.head_stride[array]),
        heads(params.heads[array]),
        vectors(params.columns[array] / kCount),
        count(num_rows * heads * vectors),
        is_gapless(head_stride == params.columns[array] && row_stride == heads * head_stride) {}

  __device__ __forceinline__ const From* source_of(Index index) const {
    if (is_gapless) return source + static_cast<int64_t>(index) * kCount;
    const Index row_and_head = index / vectors, column = index % vectors;
    const Index row = row_and_head / heads, head = row_and_head % heads;
    return source + row * row_stride + head * head_stride + column * kCount;
  }

  __device__ __forceinline__ Wide* target_of(Index index) const {
    return target + static_cast<int64_t>(index) * kCount;  // mutate: widened-into-another-vector
  }

  __device__ __forceinline__ void run(Index index, Index step) const {
    if constexpr (kCount == 1) {
      for (; index < count; index += step) copy_element(target_of(index), source_of(index));
    } else {
      for (; index < count; index += kTogether * step) {
        uint64_t loaded[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const Index at = index + i * step;
          if (at < count) loaded[i] = *reinterpret_cast<const uint64_t*>(source_of(at));
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const Index at = index + i * step;
          if (at >= count) continue;
          *reinterpret_cast<Vector16*>(target_of(at)) = ptx::fp8_to_vector<Wide, From>(loaded[i]);
        }
      }
    }
  }
};

// The grid has a layer for each array.
template <typename Config>
__device__ __forceinline__ void widen_rows(const WidenRowsParams& params) {
  const int array = blockIdx.y;
  int num_rows = params.num_rows[array];
  // A captured graph is replayed with other rows than it was captured with.
  if (array == 0 && params.row_count != nullptr) num_rows = *params.row_count;
  const uint32_t step = gridDim.x * Config::kThreads;
  const uint32_t index = blockIdx.x * Config::kThreads + threadIdx.x;
  using DType = typename Config::DType;
  using DTypeV = typename Config::DTypeV;
  if (is_same<DType, DTypeV> || array < 2) {
    RowWidener<Config, DType>(params, array, num_rows).run(index, step);
  } else {
    RowWidener<Config, DTypeV>(params, array, num_rows).run(index, step);
  }
}

}  // namespace cupyattn
