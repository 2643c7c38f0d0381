// Copies of boxes of a tensor by the copy engine, and their order with other memory accesses.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}

// Copies a box to shared memory; `barrier` counts its bytes. Elements outside the tensor are zeros.
__device__ __forceinline__ void tensor_copy_4d(uint32_t destination, const TensorMap& map, int x,
                                               int y, int z, int w, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];\n" ::"r"(destination),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// Which lines leave L2 first: those of copies with this policy.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-createpolicy
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void tensor_copy_4d(uint32_t destination, const TensorMap& map, int x,
                                               int y, int z, int w, uint32_t barrier,
                                               uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;\n" ::"r"(destination),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(policy)
      : "memory");
}

// Fetches a box into L2.
__device__ __forceinline__ void tensor_prefetch_4d(const TensorMap& map, int x, int y, int z,
                                                   int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];\n" ::"l"(&map),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

__device__ __forceinline__ void tensor_copy_5d(uint32_t destination, const TensorMap& map, int x,
                                               int y, int z, int w, int u, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];\n" ::"r"(destination),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(u), "r"(barrier)
      : "memory");
}

// Copies a box to global memory; elements outside the tensor are not written.
__device__ __forceinline__ void tensor_store_4d(const TensorMap& map, int x, int y, int z, int w,
                                                uint32_t source) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n" ::"l"(
          &map),
      "r"(x), "r"(y), "r"(z), "r"(w), "r"(source)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
// Waits until all of this thread's stores have read shared memory.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}

// Orders this thread's writes to shared memory before later accesses by the copy engine and the
// matrix units.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

}  // namespace cupyattn::ptx
