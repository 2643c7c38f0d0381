// mbarriers, which count arrivals and bytes in shared memory, and named barriers of some warps.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

// A phase ends when `count` threads have arrived and all expected bytes have been copied.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, int count = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(count)
               : "memory");
}

// Arrives if `arrives`. A predicate, because a warp would have to reconverge after a branch.
__device__ __forceinline__ void mbarrier_arrive_if(bool arrives, uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(static_cast<uint32_t>(arrives))
      : "memory");
}

// Adds `num_bytes` to the bytes that the phase waits for.
__device__ __forceinline__ void mbarrier_expect_tx(uint32_t barrier, int num_bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

// Returns once the phase of this parity is over; the first phase has parity 0.
__device__ __forceinline__ void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Barriers 1 to 15 of `num_threads` threads in whole warps: wait, or arrive without waiting. All
// that wait must wait at the same instruction.
__device__ __forceinline__ void named_barrier_sync(int barrier, int num_threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(num_threads) : "memory");
}
// The same for warps that wait at different instructions, each in its role.
__device__ __forceinline__ void named_barrier_sync_unaligned(int barrier, int num_threads) {
  asm volatile("barrier.sync %0, %1;\n" ::"r"(barrier), "r"(num_threads) : "memory");
}

// The same as named_barrier_sync; returns whether any of the threads has `predicate`.
__device__ __forceinline__ bool named_barrier_any(int barrier, int num_threads, bool predicate) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "bar.red.or.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(any)
      : "r"(barrier), "r"(num_threads), "r"(static_cast<uint32_t>(predicate))
      : "memory");
  return any != 0;
}

__device__ __forceinline__ void named_barrier_arrive(int barrier, int num_threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(num_threads) : "memory");
}

}  // namespace cupyattn::ptx
