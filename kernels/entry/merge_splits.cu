// Merges the partial states that prefill_sm80 leaves where it splits the keys of a tile: one warp
// for each packed row.
#include "cupyattn/attention/state.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DTypeO = bfloat16_t;
  static constexpr int kHeadDimVO = 128;
  static constexpr int kTileQ = 128;
  static constexpr int kWarps = 4;
  static constexpr bool kAligned = true;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32)
    cupyattn_merge_splits(const __grid_constant__ cupyattn::AttentionParams params) {
  using namespace cupyattn;
  const int lane = threadIdx.x % kWarpSize;
  const int kv_head = blockIdx.x;
  const int packed_row = blockIdx.y * Config::kWarps + threadIdx.x / kWarpSize;
  if (packed_row >= params.qo_len * params.group_size) return;
  const int slot = kv_head * params.num_q_tiles + packed_row / Config::kTileQ;
  const int token = packed_row / params.group_size;
  const int head = kv_head * params.group_size + packed_row % params.group_size;
  merge_row<typename Config::DTypeO, Config::kHeadDimVO, Config::kTileQ, Config::kAligned>(
      params, slot, packed_row % Config::kTileQ, kv_head, token, head, lane);
}
