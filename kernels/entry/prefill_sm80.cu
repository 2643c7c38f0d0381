// Prefill and append attention, portable tier (sm_80 and later).
#include "cupyattn/shared/pdl.cuh"
#include "cupyattn/sm80/prefill.cuh"

#ifndef CUPYATTN_CONFIG
#include "entry/default_config.cuh"

struct Config : DefaultConfig {
  static constexpr int kMmaQ = 2, kTileKV = 48, kMinBlocks = 2;
  static constexpr bool kQInRegisters = false;
  static constexpr int kKeysPerExp = 48, kBuffers = 1, kSharedBytes = 61312;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, Config::kMinBlocks)
    cupyattn_prefill_sm80(const __grid_constant__ cupyattn::AttentionParams params) {
  using Kernel = cupyattn::PrefillSm80<Config>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  cupyattn::ptx::launch_dependents();
  Kernel(params, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_bytes)).run();
  cupyattn::complete_after_previous_grid();
}
