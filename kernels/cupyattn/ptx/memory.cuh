// Ordering between blocks, atomics, and loads that bypass the (incoherent) L1.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

__device__ __forceinline__ void device_fence() { __threadfence(); }

// Returns the old value; the counter goes back to 0 after reaching `last`.
__device__ __forceinline__ uint32_t atomic_inc_wrap(uint32_t* counter, uint32_t last) {
  return atomicInc(counter, last);
}
__device__ __forceinline__ void atomic_add(uint32_t* counter, uint32_t addend) {
  atomicAdd(counter, addend);
}

// Returns the old value.
__device__ __forceinline__ uint32_t atomic_add_shared(uint32_t* word, uint32_t addend) {
  return atomicAdd(word, addend);
}
__device__ __forceinline__ void atomic_or_shared(uint32_t* word, uint32_t bits) {
  atomicOr(word, bits);
}
__device__ __forceinline__ float load_l2(const float* pointer) { return __ldcg(pointer); }
__device__ __forceinline__ float4 load_l2(const float4* pointer) { return __ldcg(pointer); }

// Loads without keeping the line in L1. Volatile, so that the compiler keeps several loads together
// ahead of the first use.
__device__ __forceinline__ Vector16 load_no_allocate(const Vector16* pointer) {
  Vector16 x;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "l"(pointer));
  return x;
}
__device__ __forceinline__ uint32_t funnel_shift_right(uint32_t low, uint32_t high,
                                                       uint32_t shift) {
  return __funnelshift_r(low, high, shift);
}

}  // namespace cupyattn::ptx
