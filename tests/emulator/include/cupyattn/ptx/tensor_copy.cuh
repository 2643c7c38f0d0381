// Host twin of kernels/cupyattn/ptx/tensor_copy.cuh: a map is what emulator/hopper.h says.
#pragma once

#include "cupyattn/common/types.cuh"
#include "emulator/hopper.h"

namespace cupyattn::ptx {

inline void prefetch_tensor_map(const TensorMap&) {}
inline void tensor_prefetch_4d(const TensorMap&, int, int, int, int) {}

EMULATOR_INLINE void tensor_copy_4d(uint32_t destination, const TensorMap& map, int x, int y, int z,
                                    int w, uint32_t barrier) {
  static_assert(sizeof(TensorMap) == sizeof(emulator::TensorMap));
  emulator::tensor_copy(destination, reinterpret_cast<const emulator::TensorMap&>(map),
                        {x, y, z, w, 0}, barrier);
}

inline uint64_t evict_first_policy() { return 0; }

EMULATOR_INLINE void tensor_copy_4d(uint32_t destination, const TensorMap& map, int x, int y, int z,
                                    int w, uint32_t barrier, uint64_t) {
  tensor_copy_4d(destination, map, x, y, z, w, barrier);
}

EMULATOR_INLINE void tensor_copy_5d(uint32_t destination, const TensorMap& map, int x, int y, int z,
                                    int w, int u, uint32_t barrier) {
  emulator::tensor_copy(destination, reinterpret_cast<const emulator::TensorMap&>(map),
                        {x, y, z, w, u}, barrier);
}

EMULATOR_INLINE void tensor_store_4d(const TensorMap& map, int x, int y, int z, int w,
                                     uint32_t source) {
  emulator::tensor_store(source, reinterpret_cast<const emulator::TensorMap&>(map),
                         {x, y, z, w, 0});
}
inline void bulk_commit() {}
EMULATOR_INLINE void bulk_wait_read() { emulator::bulk_wait_read(); }

inline void fence_proxy_async() {}

}  // namespace cupyattn::ptx
