// Lists of indices that count all ranks' tokens, as a rank reads them: its own first.
#pragma once

#include "cupyattn/page/key_share.cuh"
#include "cupyattn/plan/block_scan.cuh"

namespace cupyattn {

// The slot of a rank's key by the page table of the row's request; -1 where the table ends before.
__device__ __forceinline__ int64_t slot_of_share(const ShareIndicesParams& params, int64_t row,
                                                 int64_t index) {
  if (params.tables.data == nullptr || index < 0) return index;
  const int64_t entry = index / params.page_size;
  if (entry >= params.table_width) return -1;
  // mutate: lists-by-the-first-table
  const int64_t page = params.tables[row / params.rows_of_table * params.table_stride + entry];
  return page < 0 ? -1 : page * params.page_size + index % params.page_size;
}

// One row: indices of the rank in their order, then -1.
template <int kThreads, int kWarps>
__device__ __forceinline__ void share_list(const ShareIndicesParams& params, int64_t row,
                                           int (&warp_sums)[2][kWarps]) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t first = row * params.num_columns;
  int64_t length = params.num_columns;
  if (params.lens.data != nullptr) {
    length = min_of<int64_t>(length, params.lens[row * params.lens_stride]);
  }
  int count = 0, turn = 0;
  for (int64_t column = 0; column < length; column += kThreads, turn ^= 1) {
    const int64_t at = column + threadIdx.x;
    int64_t slot = -1;
    if (at < length) {
      slot = slot_of_share(params, row, index_of_share(params.share, params.given[first + at]));
    }
    int total = 0;
    // Sums lie in turns: warps that are ahead do not write what others read.
    const int before = block_scan(warp_sums[turn], warp, lane, slot >= 0 ? 1 : 0, total);
    // mutate: lists-with-holes
    if (slot >= 0) params.out[first + count + before] = static_cast<int32_t>(slot);
    count += total;
  }
  for (int64_t at = count + threadIdx.x; at < params.num_columns; at += kThreads) {
    params.out[first + at] = -1;
  }
  if (threadIdx.x == 0 && params.counts != nullptr) params.counts[row] = count;
  ptx::block_sync();
}

}  // namespace cupyattn
