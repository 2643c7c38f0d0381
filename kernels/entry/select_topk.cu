// The blocks of the greatest scores of each row, in ascending order.
#include "cupyattn/select/topk_cluster.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = float;
  static constexpr bool kAligned = true, kCandidates = false;
  static constexpr int kThreads = 512, kSharedBytes = 37456;
};
#endif

// Grid: rows × blocks of a cluster.
extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_select_topk(const __grid_constant__ cupyattn::SelectTopkParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  cupyattn::ClusterTopk<Config>::run(params, shared_bytes);
}
