// Widens the pages of requests from 8 bits to 16, ahead of attention whose products are of 16 bits.
#include "cupyattn/page/widen_pages.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = cupyattn::e4m3_t;
  using DTypeTo = cupyattn::half_t;
  static constexpr int kThreads = 256;
};
#endif

// Grid: pages of a request, requests, keys and values.
extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_widen_pages(const __grid_constant__ cupyattn::WidenPagesParams params) {
  cupyattn::widen_page<Config>(params);
}
