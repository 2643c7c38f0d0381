// A tensor as the copy engine sees it: the driver's CUtensorMap, made by launch/tensor_map.py.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

}  // namespace cupyattn
