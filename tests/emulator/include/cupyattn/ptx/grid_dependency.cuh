// Host twin of kernels/cupyattn/ptx/grid_dependency.cuh: launches follow each other whole.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

inline void launch_dependents() {}

inline void grid_dependency_wait() {}

}  // namespace cupyattn::ptx
