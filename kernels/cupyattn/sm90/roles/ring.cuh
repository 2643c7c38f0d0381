// Rings of stages in shared memory: the position of a warp, and the barriers that guard a stage.
#pragma once

#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/mbarrier.cuh"

namespace cupyattn {

// A stage of a ring, and the parity of the round.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ void init_barrier(uint64_t& barrier, int num_arrivals) {
  ptx::mbarrier_init(ptx::shared_address(&barrier), num_arrivals);
}
__device__ __forceinline__ void await_phase(uint64_t& barrier, uint32_t parity) {
  ptx::mbarrier_wait_parity(ptx::shared_address(&barrier), parity);
}
__device__ __forceinline__ void arrive(uint64_t& barrier) {
  ptx::mbarrier_arrive(ptx::shared_address(&barrier));
}

}  // namespace cupyattn
