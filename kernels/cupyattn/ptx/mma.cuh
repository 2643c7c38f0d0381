// Warp-level matrix multiply-accumulate, 16x8x16, 16-bit inputs and fp32 accumulators.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

// d += a b, or d = a b if `is_first`, which is a constant after unrolling: the first product needs
// no zeroed accumulators.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1, bool is_first = false) {
  const float c0 = is_first ? 0.0f : d[0], c1 = is_first ? 0.0f : d[1];
  const float c2 = is_first ? 0.0f : d[2], c3 = is_first ? 0.0f : d[3];
  if constexpr (is_same<T, half_t>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2),
          "f"(c3));
  } else {
    static_assert(is_same<T, bfloat16_t>, "inputs are f16 or bf16");
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2),
          "f"(c3));
  }
}

}  // namespace cupyattn::ptx
