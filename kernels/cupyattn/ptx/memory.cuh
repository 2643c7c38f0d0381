// Ordering between blocks, atomics, and loads that bypass the (incoherent) L1.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

// Returns the old value; the counter goes back to 0 after reaching `last`.
__device__ __forceinline__ uint32_t atomic_inc_wrap(uint32_t* counter, uint32_t last) {
  return atomicInc(counter, last);
}
// The same, ordered: a thread sees all that was written by threads that counted before it.
__device__ __forceinline__ uint32_t atomic_inc_wrap_acq_rel(uint32_t* counter, uint32_t last) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;\n"
               : "=r"(old)
               : "l"(counter), "r"(last)
               : "memory");
  return old;
}
// Brings the line of an address to L2.
__device__ __forceinline__ void prefetch_l2(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(pointer));
}
__device__ __forceinline__ void atomic_add(uint32_t* counter, uint32_t addend) {
  atomicAdd(counter, addend);
}
// Raises a number to `value` if that is larger; NaN is not supported.
__device__ __forceinline__ void atomic_max(float* place, float value) {
  // Of equal signs the bits have the order of the numbers, or of their magnitudes.
  const int bits = __float_as_int(value);
  if (bits >= 0) {
    atomicMax(reinterpret_cast<int*>(place), bits);
  } else {
    atomicMin(reinterpret_cast<uint32_t*>(place), static_cast<uint32_t>(bits));
  }
}

// Returns the old value.
__device__ __forceinline__ uint32_t atomic_add_shared(uint32_t* word, uint32_t addend) {
  return atomicAdd(word, addend);
}
__device__ __forceinline__ uint32_t atomic_or_shared(uint32_t* word, uint32_t bits) {
  return atomicOr(word, bits);
}
// Writes a number that the host may read, behind all that this block wrote before its last barrier.
__device__ __forceinline__ void store_release_system(int64_t* pointer, int64_t value) {
  asm volatile("st.release.sys.global.s64 [%0], %1;\n" ::"l"(pointer), "l"(value) : "memory");
}

// Loads from L2. Volatile, so that the compiler keeps several loads together ahead of the first use.
__device__ __forceinline__ float load_l2(const float* pointer) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];\n" : "=f"(x) : "l"(pointer));
  return x;
}
__device__ __forceinline__ float4 load_l2(const float4* pointer) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(pointer));
  return x;
}

// Loads without keeping the line in L1. Volatile, so that the compiler keeps several loads together
// ahead of the first use.
__device__ __forceinline__ Vector16 load_no_allocate(const Vector16* pointer) {
  Vector16 x;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "l"(pointer));
  return x;
}
// The same; L2 gets all 256 bytes around.
__device__ __forceinline__ Vector16 load_no_allocate_256(const Vector16* pointer) {
  Vector16 x;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "l"(pointer));
  return x;
}
// Loads what no thread writes while the kernel runs: the compiler may move such loads anywhere.
__device__ __forceinline__ uint32_t load_constant(const uint32_t* pointer) {
  return __ldg(pointer);
}
__device__ __forceinline__ uint16_t load_constant(const uint16_t* pointer) {
  return __ldg(pointer);
}
__device__ __forceinline__ uint8_t load_constant(const uint8_t* pointer) { return __ldg(pointer); }
__device__ __forceinline__ uint32_t funnel_shift_right(uint32_t low, uint32_t high,
                                                       uint32_t shift) {
  return __funnelshift_r(low, high, shift);
}

}  // namespace cupyattn::ptx
