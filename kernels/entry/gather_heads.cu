// Gathers the heads of all ranks whose memory is written directly.
#include "cupyattn/exchange/gather_heads.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  static constexpr int kVectors = 16, kGroups = 8, kBatch = 1, kThreads = 128;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    cupyattn_gather_heads(const __grid_constant__ cupyattn::GatherHeadsParams params) {
  cupyattn::HeadGatherer<Config>(params).run();
}
