// Means of the rows of requests and heads, in two launches: sums of blocks of rows, and sums of those
// in their order. In doubles, so that the order does not show in a float.
#pragma once

#include "cupyattn/quantize/rows.cuh"

namespace cupyattn {

// Block b of a request lies at place `start / kBlock + request + b`: offsets tell where.
template <typename Config>
struct MeanFinder {
  using DType = typename Config::DType;
  static constexpr int kThreads = Config::kThreads, kLanes = Config::kLanes;
  static constexpr int kRows = kThreads / kLanes;  // of one pass
  static constexpr int kBlockBits = 8, kBlock = 1 << kBlockBits;
  static constexpr int kColumns = kLanes * kChunk;
  static_assert(kThreads >= kColumns, "a thread adds what all rows have in a column");

  struct Shared {
    double sums[kRows][kColumns];
  };

  const FindMeanParams& params;
  Shared& shared;

  __device__ __forceinline__ int64_t begin_of(int32_t request) const {
    if (params.offsets == nullptr) return static_cast<int64_t>(request) * params.rows_per_request;
    return params.offsets[request];
  }

  // Offsets that leave the rows, or fall, name none.
  __device__ __forceinline__ int64_t end_of(int32_t request) const {
    const int64_t begin = begin_of(request);
    const int64_t end = min_of<int64_t>(begin_of(request + 1), params.num_rows);
    return begin < 0 ? begin : max_of(begin, end);
  }

  __device__ __forceinline__ int64_t place_of(int32_t request) const {
    return (begin_of(request) >> kBlockBits) + request;
  }

  // Grid: places of blocks × heads.
  __device__ __forceinline__ void add_rows() const {
    const int32_t tile = blockIdx.x / params.num_heads;
    const int32_t head = blockIdx.x - tile * params.num_heads;
    int32_t request = 0, high = params.batch_size;
    while (high - request > 1) {
      const int32_t middle = (request + high) / 2;
      (place_of(middle) <= tile ? request : high) = middle;
    }
    const int64_t block = tile - place_of(request);
    const int64_t first = begin_of(request) + (block << kBlockBits);
    const int64_t rest = block < 0 ? 0 : end_of(request) - first;
    if (rest <= 0) return;
    const int32_t count = static_cast<int32_t>(min_of<int64_t>(rest, kBlock));
    const RowLanes<Config, FindMeanParams> lanes(params);
    const int32_t row = threadIdx.x / kLanes;
    const DType* source = static_cast<const DType*>(params.source) +
                          first * params.source_stride_n + head * params.source_stride_h;
    double sum[kChunk] = {};
    for (int32_t start = 0; start < count; start += 4 * kRows) {
      Vector16 raw[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t at = start + i * kRows + row;
        raw[i] = lanes.load(source + at * params.source_stride_n, params.head_dim, at < count);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[kChunk];
        to_floats<DType>(raw[i], x);
        if constexpr (Config::kHadamard) lanes.transform(x, params.head_dim);
#pragma unroll
        for (int e = 0; e < kChunk; ++e) sum[e] += x[e];
      }
    }
#pragma unroll
    for (int e = 0; e < kChunk; ++e) shared.sums[row][lanes.column + e] = sum[e];
    ptx::block_sync();
    const int32_t column = threadIdx.x;
    if (column >= params.head_dim) return;
    double total = 0.0;
    for (int32_t r = 0; r < kRows; ++r) total += shared.sums[r][column];
    params.sums[(static_cast<int64_t>(tile) * params.num_heads + head) * params.head_dim + column] =
        total;
  }

  // Grid: requests × heads. A request of no rows has a mean of zeros.
  __device__ __forceinline__ void divide_sums() const {
    const int32_t request = blockIdx.x / params.num_heads;
    const int32_t head = blockIdx.x - request * params.num_heads;
    const int32_t column = threadIdx.x;
    if (column >= params.head_dim) return;
    const int64_t place = place_of(request);
    const int64_t rows = end_of(request) - begin_of(request);
    const int64_t blocks = min_of<int64_t>(ceil_div<int64_t>(rows, kBlock), params.num_tiles - place);
    double total = 0.0;
    for (int64_t block = 0; block < blocks; ++block) {
      total += params.sums[((place + block) * params.num_heads + head) * params.head_dim + column];
    }
    // mutate: mean-of-one-row-more
    const double mean = rows > 0 ? total / static_cast<double>(rows) : 0.0;
    params.mean[(static_cast<int64_t>(request) * params.num_heads + head) * params.head_dim +
                column] = static_cast<float>(mean);
  }
};

}  // namespace cupyattn
