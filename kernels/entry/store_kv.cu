// Copies keys and values into the slots that the caller names; converts them to an fp8 cache.
#include "cupyattn/page/store.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = bfloat16_t;
  using DTypeCache = e4m3_t;
  static constexpr bool kAligned = true;
  static constexpr int kThreads = 256;
};
#endif

// Grid: blocks of tokens × {K, V} × heads. With four blocks an SM asked for, ptxas spills nothing
// around the division of large slots.
extern "C" __global__ void __launch_bounds__(Config::kThreads, 4)
    cupyattn_store_kv(const __grid_constant__ cupyattn::StoreKvParams params) {
  cupyattn::store_rows<Config>(params, blockIdx.y);
}
