// Copies new keys and values into their slots of a paged cache; converts them to an fp8 cache.
#include "cupyattn/page/append.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = bfloat16_t;
  using DTypeCache = e4m3_t;
  static constexpr bool kAligned = true;
  static constexpr int kThreads = 256;
};
#endif

// Grid: blocks of rows × {K, V}; a row is one head of one token.
extern "C" __global__ void __launch_bounds__(Config::kThreads) cupyattn_append_paged_kv_cache(
    const __grid_constant__ cupyattn::AppendPagedKvCacheParams params) {
  cupyattn::append_rows<Config>(params, params.rows[blockIdx.y]);
}
