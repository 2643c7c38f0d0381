// Memory that several GPUs share, and the clock that they go by.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

// Stores 16 bytes as a whole: who loads them, on any GPU, has all of them or none.
__device__ __forceinline__ void store_whole(Vector16* pointer, const Vector16& value) {
  const uint64_t low = static_cast<uint64_t>(value.word[1]) << 32 | value.word[0];
  const uint64_t high = static_cast<uint64_t>(value.word[3]) << 32 | value.word[2];
  asm volatile(
      "{\n"
      ".reg .b128 whole;\n"
      "mov.b128 whole, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], whole;\n"
      "}\n" ::"l"(pointer),
      "l"(low), "l"(high)
      : "memory");
}
// Loads 16 bytes as a whole. Volatile, so that loads stay together ahead of the first use.
__device__ __forceinline__ Vector16 load_whole(const Vector16* pointer) {
  uint64_t low, high;
  asm volatile(
      "{\n"
      ".reg .b128 whole;\n"
      "ld.relaxed.sys.global.b128 whole, [%2];\n"
      "mov.b128 {%0, %1}, whole;\n"
      "}\n"
      : "=l"(low), "=l"(high)
      : "l"(pointer));
  return Vector16{{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                   static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)}};
}
// Writes a number that the host may read at any time.
__device__ __forceinline__ void store_system(int32_t* pointer, int32_t value) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;\n" ::"l"(pointer), "r"(value) : "memory");
}
// Nanoseconds, of one clock for all threads.
__device__ __forceinline__ uint64_t global_timer() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;\n" : "=l"(time));
  return time;
}

}  // namespace cupyattn::ptx
