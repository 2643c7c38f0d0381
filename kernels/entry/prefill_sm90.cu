// Prefill and append attention for Hopper (sm_90a).
#include "cupyattn/attention/prefill_sm90.cuh"
#include "cupyattn/ptx/grid_dependency.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DTypeQ = bfloat16_t;
  using DTypeKV = bfloat16_t;
  using DTypeO = bfloat16_t;
  static constexpr int kHeadDimQK = 128;
  static constexpr int kHeadDimVO = 128;
  static constexpr int kConsumers = 2;
  static constexpr int kTileKV = 128;
  static constexpr int kStages = 2;
  static constexpr int kQuerySlots = 2;
  static constexpr int kLandings = 0;
  static constexpr int kConverters = 0;
  static constexpr int kLoadRegisters = 40;
  static constexpr int kMultiplyRegisters = 232;
  static constexpr bool kTakesTurns = true;
  static constexpr bool kOverlaps = true;
  static constexpr bool kTakesMaxima = true;
  static constexpr int kEarlySteps = 2;
  static constexpr bool kRope = false;
  static constexpr bool kAlibi = false;
  static constexpr bool kSoftCap = false;
  static constexpr bool kRowScales = false;
  static constexpr bool kCustomMask = false;
  static constexpr int kMaskForm = 0;
  static constexpr bool kPaged = false;
  static constexpr int kGatherers = 0;
  static constexpr int kSharedBytes = 197632;
};
#endif

extern "C" __global__ void __launch_bounds__(cupyattn::PrefillSm90<Config>::kThreads, 1)
    cupyattn_prefill_sm90(const __grid_constant__ cupyattn::PrefillSm90Params params) {
  using Kernel = cupyattn::PrefillSm90<Config>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  cupyattn::ptx::launch_dependents();
  Kernel(params, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_bytes)).run();
}
