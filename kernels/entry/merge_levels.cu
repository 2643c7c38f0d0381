// Merges the states that a cascade leaves for each row of q, one or more a level: one warp a row.
#include "cupyattn/attention/levels.cuh"
#include "cupyattn/ptx/grid_dependency.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DTypeO = bfloat16_t;
  static constexpr int kHeadDimVO = 128;
  static constexpr int kWarps = 4;
  static constexpr bool kAligned = true;
};
#endif

// Six blocks an SM: else registers are saved for more, by waiting for each load.
extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 6)
    cupyattn_merge_levels(const __grid_constant__ cupyattn::AttentionParams params) {
  using namespace cupyattn;
  ptx::grid_dependency_wait();
  const int num_heads = params.num_kv_heads * params.group_size;
  const int head = blockIdx.y * Config::kWarps + threadIdx.x / kWarpSize;
  if (head >= num_heads) return;  // mutate: absent-head-merged
  merge_levels<typename Config::DTypeO, Config::kHeadDimVO, Config::kAligned>(
      params, blockIdx.x, head, threadIdx.x % kWarpSize);
}
