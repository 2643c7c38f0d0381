// Merges the states that the levels of a cascade leave for each row of q. A warp merges one row.
#include "cupyattn/merge/levels.cuh"
#include "cupyattn/ptx/grid_dependency.cuh"

#ifndef CUPYATTN_CONFIG
#include "entry/default_config.cuh"

struct Config : DefaultConfig {};
#endif

// Six blocks an SM: for more blocks ptxas saves registers by waiting for each load. Gates take some.
constexpr int kMinBlocks = cupyattn::has_output_gate<Config> ? 5 : 6;

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, kMinBlocks)
    cupyattn_merge_levels(const __grid_constant__ cupyattn::AttentionParams params) {
  using namespace cupyattn;
  ptx::grid_dependency_wait();
  const int num_heads = params.num_kv_heads * params.group_size;
  const int head = blockIdx.y * Config::kWarps + threadIdx.x / kWarpSize;
  if (head >= num_heads) return;  // mutate: absent-head-merged
  merge_levels<Config, Config::kHeadDimVO>(params, blockIdx.x, head, threadIdx.x % kWarpSize);
}
