// Makes lengths and indices that count all ranks' tokens those of one rank's share.
#include "cupyattn/page/share_indices.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  static constexpr int kForm = 2;
  static constexpr int kThreads = 256;
};
#endif

// Grid: blocks of numbers; of lists, rows.
extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_share_indices(const __grid_constant__ cupyattn::ShareIndicesParams params) {
  using namespace cupyattn;
  using cupyattn::int64_t;  // a host's <cstdint> has another one
  if constexpr (Config::kForm == static_cast<int>(ShareForm::kLists)) {
    __shared__ int warp_sums[2][Config::kThreads / kWarpSize];
    for (int64_t row = blockIdx.x; row < params.num_rows; row += gridDim.x) {
      share_list<Config::kThreads>(params, row, warp_sums);
    }
  } else {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * Config::kThreads + threadIdx.x;
    if (at >= params.num_rows * params.num_columns) return;
    const int64_t value = params.given[at];
    const int64_t own = Config::kForm == static_cast<int>(ShareForm::kLengths)
                            ? count_of_share(params.share, value)
                            : index_of_share(params.share, value);
    params.out[at] = static_cast<int32_t>(own);
  }
}
