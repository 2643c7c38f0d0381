// Host twin of kernels/cupyattn/ptx/grid_dependency.cuh: launches follow each other whole, or
// the one before runs when this one waits for it (runtime/machine.cpp).
#pragma once

#include "cupyattn/common/types.cuh"

extern "C" void emulator_await_previous();

namespace cupyattn::ptx {

inline void launch_dependents() {}

inline void grid_dependency_wait() { emulator_await_previous(); }

}  // namespace cupyattn::ptx
