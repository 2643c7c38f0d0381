// Sums over the threads of a block, in their order.
#pragma once

#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

// Returns the sum of all earlier threads' values, and the total. warp_sum: a number of each warp
// has room there. The caller synchronises before the next scan.
template <int kWarps>
__device__ __forceinline__ int block_scan(int (&warp_sum)[kWarps], int warp, int lane, int value,
                                          int& total) {
  int inclusive = value;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int below = ptx::shuffle(inclusive, lane - step);
    if (lane >= step) inclusive += below;
  }
  if (lane == kWarpSize - 1) warp_sum[warp] = inclusive;
  ptx::block_sync();
  const int sum = lane < kWarps ? warp_sum[lane] : 0;
  total = static_cast<int>(ptx::warp_sum(static_cast<uint32_t>(sum)));
  const int before = lane < warp ? sum : 0;
  return static_cast<int>(ptx::warp_sum(static_cast<uint32_t>(before))) + inclusive - value;
}

}  // namespace cupyattn
