// Prefill and decode in one launch, portable tier (sm_80 and later). Each block runs the kernel
// that suits the rows of its request. Prefill keeps the matrix units busy and decode the memory, so
// an SM that holds a block of each waits little.
#include "cupyattn/shared/pdl.cuh"
#include "cupyattn/sm80/decode.cuh"
#include "cupyattn/sm80/prefill.cuh"

#ifndef CUPYATTN_CONFIG
#include "entry/default_config.cuh"

struct Config : DefaultConfig {
  static constexpr int kMinBlocks = 2;
  static constexpr bool kPaged = true;
  static constexpr int kPrefillMmaQ = 2, kPrefillTileKV = 48;
  static constexpr bool kPrefillQInRegisters = false;
  static constexpr int kPrefillKeysPerExp = 48, kPrefillBuffers = 1, kPrefillSharedBytes = 63232;
  static constexpr int kDecodeMmaQ = 1, kDecodeKeysPerWarp = 16, kDecodeStages = 3;
  static constexpr bool kDecodeQInRegisters = true;
  static constexpr int kDecodeSharedBytes = 104192;
};
#endif

struct PrefillConfig : Config {
  static constexpr int kMmaQ = Config::kPrefillMmaQ, kTileKV = Config::kPrefillTileKV;
  static constexpr bool kQInRegisters = Config::kPrefillQInRegisters;
  static constexpr int kKeysPerExp = Config::kPrefillKeysPerExp, kBuffers = Config::kPrefillBuffers;
  static constexpr int kSharedBytes = Config::kPrefillSharedBytes;
};

struct DecodeConfig : Config {
  static constexpr int kMmaQ = Config::kDecodeMmaQ, kKeysPerWarp = Config::kDecodeKeysPerWarp;
  static constexpr int kStages = Config::kDecodeStages;
  static constexpr bool kQInRegisters = Config::kDecodeQInRegisters;
  static constexpr int kSharedBytes = Config::kDecodeSharedBytes;
};

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, Config::kMinBlocks)
    cupyattn_mixed_sm80(const __grid_constant__ cupyattn::AttentionParams params) {
  using Prefill = cupyattn::PrefillSm80<PrefillConfig>;
  using Decode = cupyattn::DecodeSm80<DecodeConfig>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  cupyattn::ptx::launch_dependents();
  const int qo_len = params.work[params.first_q_tile + blockIdx.y].qo_len;
  if (qo_len * params.group_size <= Decode::kTileQ) {  // mutate: block-kind-by-tokens
    Decode(params, *reinterpret_cast<typename Decode::SharedMemory*>(shared_bytes)).run();
  } else {
    Prefill(params, *reinterpret_cast<typename Prefill::SharedMemory*>(shared_bytes)).run();
  }
  cupyattn::complete_after_previous_grid();
}
