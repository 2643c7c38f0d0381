// Programmatic dependent launch (cupyattn/launch/driver/pdl.py): how a kernel that need not wait
// for the grid before it still completes after that grid. In other launches this has no effect.
#pragma once

#include "cupyattn/ptx/grid_dependency.cuh"

namespace cupyattn {

// The last block waits for the previous grid, so that later launches come after both grids. One
// block is enough, and no block of this grid is left to wait for its SM.
__device__ __forceinline__ void complete_after_previous_grid() {
  const bool is_last =
      blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1 && blockIdx.z == gridDim.z - 1;
  if (is_last) ptx::grid_dependency_wait();
}

}  // namespace cupyattn
