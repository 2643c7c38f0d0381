// Multi-head latent attention of 16 or 32 packed rows, for Hopper (sm_90a).
#include "cupyattn/sm90/wide_decode.cuh"

#ifndef CUPYATTN_CONFIG
#include "entry/default_config.cuh"

struct Config : DefaultConfig {
  static constexpr bool kLatent = true, kSparse = false, kTma = false, kPaged = true;
  static constexpr int kHeadDimQK = 576, kHeadDimVO = 512, kHeadDimRope = 64;
  static constexpr int kTileQ = 16, kTileKV = 64, kStages = 2, kConsumers = 1;
  static constexpr int kFusedSplits = 8, kKeyScales = 0;
  static constexpr int kSharedBytes = 168960;
};
#endif

extern "C" __global__ void __launch_bounds__(cupyattn::WideDecodeSm90<Config>::kThreads, 1)
    cupyattn_wide_decode_sm90(
        const __grid_constant__ cupyattn::WideDecodeSm90<Config>::Params params) {
  using Kernel = cupyattn::WideDecodeSm90<Config>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Kernel::run(params, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_bytes));
}
