// Copies new keys and values into their slots of a paged cache, converted to fp8 if the cache is.
#include "cupyattn/page/append.cuh"
#include "cupyattn/params/append_paged_kv_cache.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = bfloat16_t;
  using DTypeCache = e4m3_t;
  static constexpr bool kAligned = true;
  static constexpr int kThreads = 256;
};
#endif

// Grid: blocks of rows (a head of a token each) × {K, V}.
extern "C" __global__ void __launch_bounds__(Config::kThreads) cupyattn_append_paged_kv_cache(
    const __grid_constant__ cupyattn::AppendPagedKvCacheParams params) {
  cupyattn::append_rows<Config>(params, params.rows[blockIdx.y]);
}
