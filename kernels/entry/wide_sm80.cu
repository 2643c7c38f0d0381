// Attention with head dims beyond 256, and latent attention, portable tier (sm_80 and later).
#include "cupyattn/ptx/grid_dependency.cuh"
#include "cupyattn/sm80/wide.cuh"

#ifndef CUPYATTN_CONFIG
#include "entry/default_config.cuh"

struct Config : DefaultConfig {
  static constexpr int kHeadDimQK = 576, kHeadDimVO = 512, kHeadDimRope = 64, kWarps = 8;
  static constexpr bool kPaged = true, kLatent = true, kSparse = false, kFusedMerge = true;
  static constexpr int kMmaQ = 1, kTileKV = 64, kStages = 2, kMinBlocks = 1;
  static constexpr int kSharedBytes = 170880;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, Config::kMinBlocks)
    cupyattn_wide_sm80(const __grid_constant__ cupyattn::WideParams<Config> params) {
  using Kernel = cupyattn::WideSm80<Config>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  // The launch ahead may write the work list, which a merge behind reads too.
  cupyattn::ptx::grid_dependency_wait();
  cupyattn::ptx::launch_dependents();
  Kernel(params, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_bytes)).run();
}
