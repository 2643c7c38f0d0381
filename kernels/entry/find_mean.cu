// Means of the rows of requests and heads: sums of blocks of rows, or the means that they make.
#include "cupyattn/quantize/mean.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = bfloat16_t;
  static constexpr bool kAligned = true, kHadamard = false, kDivides = false;
  static constexpr int kThreads = 256, kLanes = 16;
};
#endif

namespace cupyattn {

struct MeanConfig : Config {
  static constexpr Rotary kRotary = Rotary::kNone;
  static constexpr bool kSwaps = false;
};

}  // namespace cupyattn

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_find_mean(const __grid_constant__ cupyattn::FindMeanParams params) {
  using Finder = cupyattn::MeanFinder<cupyattn::MeanConfig>;
  __shared__ Finder::Shared shared;
  const Finder finder = {params, shared};
  if constexpr (Config::kDivides) {
    finder.divide_sums();
  } else {
    finder.add_rows();
  }
}
