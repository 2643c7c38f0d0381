// Scores of softmax, of what heads have of blocks of index rows.
#include "cupyattn/select/softmax.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DTypeW = float;
  static constexpr int kThreads = 256, kMaxHeads = 64;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_select_softmax(const __grid_constant__ cupyattn::SelectSoftmaxParams params) {
  cupyattn::select_softmax<Config>(params);
}
