// Merges the attention states of each row: pairs, [n, m] states, or as many as an indptr says.
#include "cupyattn/merge/merge_states.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = bfloat16_t;
  using DTypeS = float;
  using DTypeO = bfloat16_t;
  static constexpr bool kPairs = true, kOneChunk = true, kAligned = true;
  static constexpr int kThreads = 256;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_merge_states(const __grid_constant__ cupyattn::MergeStatesParams params) {
  cupyattn::StateMerger<Config>{params}.run();
}
