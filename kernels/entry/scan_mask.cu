// Finds the key tiles of each item of prefill_sm90 in which a custom mask leaves a key (sm_90a).
#include "cupyattn/sm90/scan_mask.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  static constexpr int kTileQ = 192, kTileKV = 80, kMaskForm = 0, kThreads = 512;
  struct LogitsExpression {};
};
#endif

extern "C" __global__ void
    __launch_bounds__(Config::kThreads, cupyattn::MaskScan<Config>::kMinBlocks)
    cupyattn_scan_mask(const __grid_constant__ cupyattn::PrefillSm90Params params) {
  __shared__ cupyattn::MaskMap map;
  cupyattn::MaskScan<Config>{params.attention, map}.run(params.mask_maps);
}
