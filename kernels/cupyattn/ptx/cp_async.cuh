// Asynchronous copies from global to shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes 16 zero bytes when `valid` is false (the source is then never read).
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(destination),
               "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

// Copies the first `count` of 16 bytes, up to all of them, and fills up with zeros.
__device__ __forceinline__ void cp_async_part(uint32_t destination, const void* source,
                                              uint32_t count) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(destination),
               "l"(source), "r"(count)
               : "memory");
}

// Copies 4 bytes, or writes zeros, likewise.
__device__ __forceinline__ void cp_async_4(uint32_t destination, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(destination), "l"(source),
               "r"(valid ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t destination, const Vector16& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(destination), "r"(value.word[0]),
               "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most kPending of this thread's most recent groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  static_assert(kPending >= 0, "the number of pending groups cannot be negative");
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Arrives at an mbarrier once all copies that this thread has started so far have landed. The
// arrival is one of the barrier's count.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}

}  // namespace cupyattn::ptx
