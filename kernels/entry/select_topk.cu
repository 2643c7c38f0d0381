// The blocks of the greatest scores of each row, in ascending order.
#include "cupyattn/select/topk_cluster.cuh"
#include "cupyattn/select/topk_warp.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = float;
  static constexpr bool kAligned = true, kCandidates = false, kGiven = false;
  static constexpr int kThreads = 512, kKeys = 0, kSharedBytes = 37456;
};
#endif

namespace cupyattn {

template <bool kByWarps>
struct TopkForm {
  template <typename Config>
  using Kernel = WarpTopk<Config>;
};
template <>
struct TopkForm<false> {
  template <typename Config>
  using Kernel = ClusterTopk<Config>;
};

}  // namespace cupyattn

// Grid: rows × blocks of a cluster; where a warp has a row, rows / warps of a block.
extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kKeys > 0 ? 4 : 1024 / Config::kThreads)
    cupyattn_select_topk(const __grid_constant__ cupyattn::SelectTopkParams params) {
  using Kernel = typename cupyattn::TopkForm<(Config::kKeys > 0)>::Kernel<Config>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Kernel::run(params, *reinterpret_cast<typename Kernel::Shared*>(shared_bytes));
}
