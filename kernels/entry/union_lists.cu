// Makes unions of the lists of neighbouring tokens, ahead of prefill_sm90.
#include "cupyattn/plan/union_lists.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  static constexpr int kThreads = 128, kEntries = 512, kUnits = 0, kSharedBytes = 10320;
  static constexpr bool kCuts = false;
};
#endif

// Grid: items, groups of lists.
extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_union_lists(const __grid_constant__ cupyattn::UnionListsParams params) {
  using Kernel = cupyattn::UnionLists<Config>;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Kernel{params, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_bytes)}.run();
}
