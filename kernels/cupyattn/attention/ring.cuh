// Where a warp is in a ring of stages that others fill or empty.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

// A place in a ring of stages, and the parity of the round.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace cupyattn
