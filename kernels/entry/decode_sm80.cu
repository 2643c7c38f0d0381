// Decode attention, portable tier (sm_80 and later).
#include "cupyattn/shared/pdl.cuh"
#include "cupyattn/sm80/decode.cuh"

#ifndef CUPYATTN_CONFIG
#include "entry/default_config.cuh"

struct Config : DefaultConfig {
  static constexpr int kMmaQ = 1, kKeysPerWarp = 32, kStages = 3, kMinBlocks = 1;
  static constexpr bool kQInRegisters = true;
  static constexpr int kSharedBytes = 201600;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, Config::kMinBlocks)
    cupyattn_decode_sm80(const __grid_constant__ cupyattn::DecodeParams<Config> params) {
  using Kernel = cupyattn::DecodeSm80<Config>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  cupyattn::ptx::launch_dependents();
  Kernel(params.attention, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_bytes),
         Kernel::work_of(params), Kernel::lists_of(params))
      .run();
  cupyattn::complete_after_previous_grid();
}
