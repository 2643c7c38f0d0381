// Prefill and append attention for Hopper (sm_90a).
#include "cupyattn/ptx/grid_dependency.cuh"
#include "cupyattn/sm90/lean.cuh"
#include "cupyattn/sm90/prefill.cuh"

#ifndef CUPYATTN_CONFIG
#include "entry/default_config.cuh"

struct Config : DefaultConfig {
  static constexpr int kConsumers = 2, kTileKV = 128, kStages = 2, kQuerySlots = 2, kFp8Stages = 0;
  static constexpr int kConverters = 0, kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr bool kIntraWarpgroupOverlap = true;
  static constexpr int kGatherers = 0, kMinBlocks = 1, kSharedBytes = 197632;
  static constexpr int kItems = 2, kBoxRows = 128;
  static constexpr bool kPersistent = true, kLean = false;
};
#endif

using Kernel = cupyattn::conditional<Config::kLean, cupyattn::LeanSm90<Config>,
                                     cupyattn::PrefillSm90<Config>>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Config::kMinBlocks)
    cupyattn_prefill_sm90(const __grid_constant__ cupyattn::PrefillSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  cupyattn::ptx::launch_dependents();
  Kernel::run(params, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_bytes));
}
