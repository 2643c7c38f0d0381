// Plans a batch whose lengths are in device memory. One block writes the work list.
#include "cupyattn/plan/plan_batch.cuh"
#include "cupyattn/ptx/grid_dependency.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  static constexpr bool kRagged = true, kPlain = false;
  static constexpr int kThreads = 512, kSharedBytes = 29264;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    cupyattn_plan_batch(const __grid_constant__ cupyattn::PlanBatchParams params) {
  using Kernel = cupyattn::PlanBatch<Config>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  // Blocks of a kernel that waits for the plan may begin meanwhile.
  cupyattn::ptx::launch_dependents();
  Kernel(params, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_bytes)).run();
}
