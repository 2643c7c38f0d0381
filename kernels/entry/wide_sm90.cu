// Multi-head latent attention, and heads of 512 columns, for Hopper (sm_90a).
#include "cupyattn/sm90/wide.cuh"

#ifndef CUPYATTN_CONFIG
#include "entry/default_config.cuh"

struct Config : DefaultConfig {
  static constexpr bool kLatent = true, kSparse = false, kTma = false, kPaged = true;
  static constexpr int kHeadDimQK = 576, kHeadDimVO = 512, kHeadDimRope = 64;
  static constexpr int kTileQ = 64, kTileKV = 64, kStages = 2, kKeyScales = 0;
  static constexpr int kFusedSplits = 4;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232, kSharedBytes = 230400;
};
#endif

extern "C" __global__ void __launch_bounds__(cupyattn::WideSm90<Config>::kThreads, 1)
    cupyattn_wide_sm90(const __grid_constant__ cupyattn::WideSm90<Config>::Params params) {
  using Kernel = cupyattn::WideSm90<Config>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Kernel::run(params, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_bytes));
}
