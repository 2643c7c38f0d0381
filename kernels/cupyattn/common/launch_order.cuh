// Launches of one run that overlap (cupyattn/launch/early.py). A launch that is made to begin early
// starts on SMs that the one before it leaves free; otherwise none of this has an effect.
#pragma once

#include "cupyattn/ptx/grid_dependency.cuh"

namespace cupyattn {

// At the start of a kernel that others may follow closely.
__device__ __forceinline__ void let_next_launch_begin() { ptx::launch_dependents(); }

// At the start of a kernel that reads what the one before it writes.
__device__ __forceinline__ void await_previous_launch() { ptx::grid_dependency_wait(); }

// At the end of a kernel that has nothing to do with the one before it: what comes after this one
// comes after both. One block stays for it, the last, so that none waits for its place.
__device__ __forceinline__ void end_after_previous_launch() {
  const bool is_last = blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1 &&
                       blockIdx.z == gridDim.z - 1;
  if (is_last) ptx::grid_dependency_wait();
}

}  // namespace cupyattn
