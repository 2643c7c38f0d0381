// Writes the metadata of a serving step: lengths, offsets, page tables, masks of draft tokens.
#include "cupyattn/plan/serving_metadata.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  static constexpr int kThreads = 256;
  static constexpr int kMaxRows = 128;
};
#endif

// Grid: requests × parts of the columns of their tables.
extern "C" __global__ void __launch_bounds__(Config::kThreads) cupyattn_serving_metadata(
    const __grid_constant__ cupyattn::ServingMetadataParams params) {
  __shared__ cupyattn::ServingMetadata<Config>::SharedMemory shared;
  cupyattn::ServingMetadata<Config>(params, shared).run();
}
