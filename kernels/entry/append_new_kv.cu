// Writes new keys and values behind those that a cache has, and rotates keys and queries on the way.
#include "cupyattn/page/append_new.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = bfloat16_t;
  using DTypeQ = bfloat16_t;
  using DTypeTable = float;
  static constexpr bool kAligned = true, kRotary = true;
  static constexpr int kThreads = 256;
};
#endif

// Grid: blocks of rows × {K, V, Q}; a row is one head of one token.
extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_append_new_kv(const __grid_constant__ cupyattn::AppendNewKvParams params) {
  const cupyattn::AppendNewKv<Config> kernel{params};
  if (blockIdx.y < 2) {
    kernel.append(static_cast<int>(blockIdx.y));
  } else {
    kernel.rotate_queries();
  }
}
