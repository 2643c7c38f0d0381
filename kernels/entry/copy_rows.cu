// Copies rows: fp8 becomes 16 bits, and columns of zeros fill a head dim up to a kernel's.
#include "cupyattn/page/copy_rows.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = e4m3_t;
  using DTypeTarget = bfloat16_t;
  static constexpr bool kAligned = true;
  static constexpr int kThreads = 256;
};
#endif

// Grid: blocks of rows × arrays.
extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_copy_rows(const __grid_constant__ cupyattn::CopyRowsParams params) {
  const cupyattn::CopiedRows& rows = params.arrays[blockIdx.y];
  cupyattn::copy_rows<Config>(rows, static_cast<int>(params.lane_bits));
}
