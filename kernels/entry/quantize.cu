// Queries, keys and values to eight bits with scales, or to 16 bits: into arrays or pages, behind an
// RMS norm, rotary positions, a Hadamard rotation and a mean that is subtracted, as asked for. Or a
// launch ahead of that, which finds the scales of heads or of whole tensors.
#include "cupyattn/quantize/quantize.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = bfloat16_t;
  using DTypeWeight = bfloat16_t;
  using DTypeTable = float;
  using DTypeQ = e4m3_t;
  using DTypeK = e4m3_t;
  using DTypeV = e4m3_t;
  static constexpr bool kAligned = true, kNorm = false, kHadamard = false, kMean = false;
  static constexpr bool kSwaps = false;  // a Hadamard rotation leaves elements in other lanes
  static constexpr bool kFinds = true, kFindsRuns = false,
                        kCopies = false, kMeasures = false;
  static constexpr int kRope = 0, kThreads = 256, kLanes = 16, kPasses = 4;
};
#endif

namespace cupyattn {

struct QuantizeConfig : Config {
  static constexpr Rotary kRotary = static_cast<Rotary>(Config::kRope);
  // Rows that are found a scale for wait for each other: an SM needs threads of other blocks.
  static constexpr bool kIsPlain = Config::kRope == 0 && !Config::kNorm && !Config::kHadamard &&
                                   !Config::kMean && !Config::kFindsRuns && Config::kAligned;
  // Eight vectors a thread fit 64 registers on Hopper where rows are short, else 80.
  static constexpr bool kFits = Config::kPasses <= 4 || (__CUDA_ARCH__ >= 900 && Config::kLanes < 32);
  static constexpr int kMinThreads = kFits ? 1024 : 768;
  static constexpr int kMinBlocks = kIsPlain ? kMinThreads / Config::kThreads : 1;
};

}  // namespace cupyattn

// Grid: blocks of tokens × heads, of q, then of k, then of v.
extern "C" __global__ void
    __launch_bounds__(Config::kThreads, cupyattn::QuantizeConfig::kMinBlocks)
    cupyattn_quantize(const __grid_constant__ cupyattn::QuantizeParams params) {
  using namespace cupyattn;
  __shared__ Quantizer<QuantizeConfig>::Shared shared;
  Quantizer<QuantizeConfig> quantizer(params, shared);
  if constexpr (Config::kMeasures) {
    using C = Config;
    return quantizer.template find_scales<C::DTypeQ, C::DTypeK, C::DTypeV>();
  }
  const int32_t of_q = params.parts[0].num_tiles * quantizer.blocks_per_tile(params.parts[0]);
  const int32_t of_k = params.parts[1].num_tiles * quantizer.blocks_per_tile(params.parts[1]);
  int32_t index = blockIdx.x;
  if (index < of_q) return quantizer.run<typename Config::DTypeQ, true>(params.parts[0], index);
  index -= of_q;
  if (index < of_k) return quantizer.run<typename Config::DTypeK, true>(params.parts[1], index);
  quantizer.run<typename Config::DTypeV, false>(params.parts[2], index - of_k);
}
