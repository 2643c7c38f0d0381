// Scores of blocks of index rows, for a selection of blocks.
#include "cupyattn/select/scores.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DTypeQ = bfloat16_t;
  using DTypeK = bfloat16_t;
  using DTypeW = float;
  static constexpr bool kSum = false, kSoftmax = false, kRowScales = false, kCandidates = false;
  static constexpr bool kWarpgroup = false;
  static constexpr int kHeadDim = 128, kHeads = 4, kGroups = 4, kBlockRows = 128;
  static constexpr int kTiles = 1, kWarps = 4, kEights = 4, kAhead = 1, kSharing = 1, kBlocksPerSm = 4;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kWarps* cupyattn::kWarpSize,
                                             Config::kBlocksPerSm)
    cupyattn_select_scores(const __grid_constant__ cupyattn::SelectScoresParams params) {
  cupyattn::select_scores<Config>(params);
}
