// Thread block clusters: blocks that run at the same time and read each other's shared memory. A
// launch without clusters, and every launch before sm_90, has clusters of one block.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#cluster-of-cooperative-thread-arrays
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

// The number of blocks of a cluster, along x.
__device__ __forceinline__ int cluster_size() {
#if __CUDA_ARCH__ >= 900
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctaid.x;\n" : "=r"(size));
  return static_cast<int>(size);
#else
  return 1;
#endif
}
// This block's place in its cluster.
__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctaid.x;\n" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}
// The place of this block's cluster in the grid, along x.
__device__ __forceinline__ int cluster_index() {
#if __CUDA_ARCH__ >= 900
  uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;\n" : "=r"(index));
  return static_cast<int>(index);
#else
  return static_cast<int>(blockIdx.x);
#endif
}

// A barrier of all threads of the cluster, in two halves: what a thread has written before it
// arrives, all see after they have waited.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}

// Loads from the shared memory of block `rank`, where `address` is in this block's. Volatile, so
// that the compiler keeps several loads together ahead of the first use.
__device__ __forceinline__ float2 load_cluster_pair(uint32_t address, int rank) {
  float2 x = make_float2(0.0f, 0.0f);
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %2, %3;\n"
      "ld.shared::cluster.v2.f32 {%0, %1}, [remote];\n"
      "}\n"
      : "=f"(x.x), "=f"(x.y)
      : "r"(address), "r"(rank));
#endif
  return x;
}
__device__ __forceinline__ float4 load_cluster_vector(uint32_t address, int rank) {
  float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
      "}\n"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "r"(address), "r"(rank));
#endif
  return x;
}

}  // namespace cupyattn::ptx
