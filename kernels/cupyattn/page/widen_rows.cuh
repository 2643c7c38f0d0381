// Widens rows of 8 bits to float16: a thread takes a vector of 16 elements, or one of rows that are
// not aligned.
#pragma once

#include "cupyattn/page/copy_rows.cuh"
#include "cupyattn/params/widen_rows.cuh"

namespace cupyattn {

template <typename Config>
__device__ __forceinline__ void widen_rows(const WidenRowsParams& params) {
  using From = typename Config::DType;
  constexpr int kCount = Config::kAligned ? 16 : 1;
  const int vectors = params.columns / kCount;
  const int64_t a_row = static_cast<int64_t>(params.heads) * vectors;
  int num_rows = params.num_rows;
  // A captured graph is replayed with other rows than it was captured with.
  if (params.row_count != nullptr) num_rows = *params.row_count;
  const int64_t count = num_rows * a_row;
  const int64_t step = static_cast<int64_t>(gridDim.x) * Config::kThreads;
  int64_t index = static_cast<int64_t>(blockIdx.x) * Config::kThreads + threadIdx.x;
  for (; index < count; index += step) {
    const int64_t row = index / a_row;
    const int within = static_cast<int>(index - row * a_row);
    const int head = within / vectors, column = within % vectors * kCount;
    const From* source = static_cast<const From*>(params.source) + row * params.row_stride +
                         head * params.head_stride + column;
    half_t* target = params.target + index * kCount;  // mutate: widened-into-another-vector
    if constexpr (kCount > 1) {
      copy_vector(target, source);
    } else {
      copy_element(target, source);
    }
  }
}

}  // namespace cupyattn
