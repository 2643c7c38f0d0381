// Prefill and append attention, portable tier (sm_80 and later).
#include "cupyattn/attention/prefill_sm80.cuh"
#include "cupyattn/common/pdl.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DTypeQ = bfloat16_t;
  using DTypeKV = bfloat16_t;
  using DTypeO = bfloat16_t;
  static constexpr int kHeadDimQK = 128;
  static constexpr int kHeadDimVO = 128;
  static constexpr int kMmaQ = 2;
  static constexpr int kWarps = 4;
  static constexpr int kTileKV = 48;
  static constexpr int kMinBlocks = 2;
  static constexpr bool kQInRegisters = false;
  static constexpr int kKeysPerExp = 48;
  static constexpr int kBuffers = 1;
  static constexpr bool kRope = false;
  static constexpr bool kRotateKeys = false;
  static constexpr bool kAlibi = false;
  static constexpr bool kSoftCap = false;
  static constexpr bool kRowScales = false;
  static constexpr bool kCustomMask = false;
  static constexpr int kMaskForm = 0;
  static constexpr bool kAligned = true;
  static constexpr bool kPaged = false;
  static constexpr int kSharedBytes = 61312;
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
