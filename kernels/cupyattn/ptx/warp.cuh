// Warp-wide and block-wide communication.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-shfl-sync
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

constexpr uint32_t kFullWarp = 0xffffffffu;

__device__ __forceinline__ float shuffle_xor(float value, int lane_mask) {
  return __shfl_xor_sync(kFullWarp, value, lane_mask);
}
__device__ __forceinline__ float shuffle(float value, int source_lane) {
  return __shfl_sync(kFullWarp, value, source_lane);
}
__device__ __forceinline__ int shuffle(int value, int source_lane) {
  return __shfl_sync(kFullWarp, value, source_lane);
}

// The value of lane `source` of the same group of eight lanes.
__device__ __forceinline__ int shuffle_in_eight(int value, int source) {
  return __shfl_sync(kFullWarp, value, source, 8);
}
__device__ __forceinline__ uint32_t warp_sum(uint32_t value) {
  return __reduce_add_sync(kFullWarp, value);
}
__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
  return __reduce_max_sync(kFullWarp, value);
}
__device__ __forceinline__ int warp_max(int value) { return __reduce_max_sync(kFullWarp, value); }
__device__ __forceinline__ int warp_min(int value) { return __reduce_min_sync(kFullWarp, value); }

// Ends a basic block, so that ptxas moves no arithmetic across. value: what the compiler does not
// know, and is not all ones: then a performance monitor's event would be counted.
__device__ __forceinline__ void end_basic_block(uint32_t value) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0xffffffff;\n@p pmevent 1;\n}\n" ::"r"(value));
}

// All lanes have the same value. The shuffle tells the compiler, which then may keep it in a
// uniform register.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(kFullWarp, value, 0); }
__device__ __forceinline__ bool warp_any(bool predicate) {
  return __any_sync(kFullWarp, predicate);
}
// A bit for each lane.
__device__ __forceinline__ uint32_t warp_ballot(bool predicate) {
  return __ballot_sync(kFullWarp, predicate);
}
__device__ __forceinline__ void warp_sync() { __syncwarp(); }
__device__ __forceinline__ void block_sync() { __syncthreads(); }
__device__ __forceinline__ bool block_any(bool predicate) { return __syncthreads_or(predicate); }

}  // namespace cupyattn::ptx
