// Exchanges attention states among ranks whose memory is written directly, and merges them.
#include "cupyattn/exchange/exchange_states.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = float;
  using DTypeO = bfloat16_t;
  static constexpr int kHeadDim = 128, kGroups = 4, kBatch = 1, kThreads = 128;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    cupyattn_exchange_states(const __grid_constant__ cupyattn::ExchangeStatesParams params) {
  cupyattn::StateExchanger<Config>(params).run();
}
