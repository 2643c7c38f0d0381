// Puts the keys that tokens list side by side, from one or two caches, in 16 bits.
#include "cupyattn/page/gather_keys.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  static constexpr int kForm = 2;
  static constexpr int kThreads = 256;
};
#endif

// Grid: blocks of entries × tokens.
extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_gather_keys(const __grid_constant__ cupyattn::GatherKeysParams params) {
  cupyattn::gather_keys<Config>(params);
}
