// Host twin of kernels/cupyattn/ptx/cluster.cuh. A thread that has arrived goes on alone until it
// waits, as on a GPU; the cluster meets once all wait.
#pragma once

#include "cupyattn/common/types.cuh"
#include "emulator/device.h"

namespace cupyattn::ptx {

using emulator::Where;

#if __CUDA_ARCH__ >= 900
inline int cluster_size() { return emulator::cluster_size(); }
inline int cluster_rank() { return emulator::cluster_rank(); }
inline int cluster_index() { return emulator::cluster_index(); }
#else
inline int cluster_size() { return 1; }
inline int cluster_rank() { return 0; }
inline int cluster_index() { return static_cast<int>(blockIdx.x); }
#endif

inline void cluster_arrive() {}
EMULATOR_INLINE void cluster_wait(Where where = Where::current()) { emulator::cluster_wait(where); }

EMULATOR_INLINE float2 load_cluster_pair(uint32_t address, int rank) {
  const emulator::Floats4 loaded = emulator::load_cluster(address, rank, 8);
  return float2{loaded.value[0], loaded.value[1]};
}

EMULATOR_INLINE float4 load_cluster_vector(uint32_t address, int rank) {
  const emulator::Floats4 loaded = emulator::load_cluster(address, rank, 16);
  return float4{loaded.value[0], loaded.value[1], loaded.value[2], loaded.value[3]};
}

}  // namespace cupyattn::ptx
