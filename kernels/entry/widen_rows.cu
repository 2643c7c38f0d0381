// Widens rows of 8 bits to 16, which hold all their numbers: queries, or keys and values too, or
// these alone, ahead of attention whose products are of 16 bits.
#include "cupyattn/page/widen_rows.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = e4m3_t;
  using DTypeV = e4m3_t;
  using DTypeWide = half_t;
  static constexpr int kThreads = 256;
  static constexpr bool kAligned = true;
};
#endif

// Grid: blocks of vectors of all rows, a layer for each array.
extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_widen_rows(const __grid_constant__ cupyattn::WidenRowsParams params) {
  cupyattn::widen_rows<Config>(params);
}
