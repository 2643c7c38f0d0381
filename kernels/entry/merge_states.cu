// Merges attention states into one a row: pairs, states [n, m], or as many a row as offsets say.
#include "cupyattn/attention/merge_states.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = bfloat16_t;
  using DTypeS = float;
  using DTypeO = bfloat16_t;
  static constexpr bool kPairs = true;
  static constexpr bool kOneChunk = true;
  static constexpr bool kAligned = true;
  static constexpr int kThreads = 256;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_merge_states(const __grid_constant__ cupyattn::MergeStatesParams params) {
  cupyattn::StateMerger<Config>{params}.run();
}
