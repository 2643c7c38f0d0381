// What the four warps of a warpgroup do together: products, and the number of their registers.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn::ptx {

template <int kCount>
__device__ __forceinline__ void set_max_registers_down() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256, "what setmaxnreg takes");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void set_max_registers_up() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256, "what setmaxnreg takes");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kCount));
}

// Needed before the first product, and after accumulators or an A fragment have been written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Waits until at most kPending groups of products are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  static_assert(kPending >= 0 && kPending <= 7, "what wgmma.wait_group takes");
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// For the compiler a product is over once it is issued. Called after the wait, this says that its
// accumulators change here.
template <int kCount>
__device__ __forceinline__ void wgmma_results(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void wgmma_results(int32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// A copy that the compiler makes here, not earlier, and does not see through. A product reads its A
// fragment until it is over, so the next fragment must not reach the same registers before.
__device__ __forceinline__ uint32_t opaque_copy(uint32_t value) {
  uint32_t copy;
  asm volatile("mov.b32 %0, %1;\n" : "=r"(copy) : "r"(value));
  return copy;
}
__device__ __forceinline__ uint64_t opaque_copy(uint64_t value) {
  uint64_t copy;
  asm volatile("mov.b64 %0, %1;\n" : "=l"(copy) : "l"(value));
  return copy;
}

// 64 x kN x 16, and 64 x kN x 32 of 8-bit elements. A thread's d[i] is row 16 warp + lane / 4 (+ 8 if
// i % 4 > 1), column 8 (i / 4) + 2 (lane % 4) + i % 2.
template <int kN>
struct Wgmma;
// Products of int8, summed exactly.
template <int kN>
struct IntegerWgmma;

#define CUPYATTN_OUTS4(i) \
  CUPYATTN_SUM(d[4 * (i)]), CUPYATTN_SUM(d[4 * (i) + 1]), CUPYATTN_SUM(d[4 * (i) + 2]), \
      CUPYATTN_SUM(d[4 * (i) + 3])
#define CUPYATTN_NAMES4(a, b, c, d) "%" #a ", %" #b ", %" #c ", %" #d

// The accumulators of a product of 2 COUNT columns: their names in the instruction, and operands.
#define CUPYATTN_NAMES04 CUPYATTN_NAMES4(0, 1, 2, 3)
#define CUPYATTN_NAMES08 CUPYATTN_NAMES04 ", " CUPYATTN_NAMES4(4, 5, 6, 7)
#define CUPYATTN_NAMES12 CUPYATTN_NAMES08 ", " CUPYATTN_NAMES4(8, 9, 10, 11)
#define CUPYATTN_NAMES16 CUPYATTN_NAMES12 ", " CUPYATTN_NAMES4(12, 13, 14, 15)
#define CUPYATTN_NAMES20 CUPYATTN_NAMES16 ", " CUPYATTN_NAMES4(16, 17, 18, 19)
#define CUPYATTN_NAMES24 CUPYATTN_NAMES20 ", " CUPYATTN_NAMES4(20, 21, 22, 23)
#define CUPYATTN_NAMES28 CUPYATTN_NAMES24 ", " CUPYATTN_NAMES4(24, 25, 26, 27)
#define CUPYATTN_NAMES32 CUPYATTN_NAMES28 ", " CUPYATTN_NAMES4(28, 29, 30, 31)
#define CUPYATTN_NAMES36 CUPYATTN_NAMES32 ", " CUPYATTN_NAMES4(32, 33, 34, 35)
#define CUPYATTN_NAMES40 CUPYATTN_NAMES36 ", " CUPYATTN_NAMES4(36, 37, 38, 39)
#define CUPYATTN_NAMES44 CUPYATTN_NAMES40 ", " CUPYATTN_NAMES4(40, 41, 42, 43)
#define CUPYATTN_NAMES48 CUPYATTN_NAMES44 ", " CUPYATTN_NAMES4(44, 45, 46, 47)
#define CUPYATTN_NAMES52 CUPYATTN_NAMES48 ", " CUPYATTN_NAMES4(48, 49, 50, 51)
#define CUPYATTN_NAMES56 CUPYATTN_NAMES52 ", " CUPYATTN_NAMES4(52, 53, 54, 55)
#define CUPYATTN_NAMES60 CUPYATTN_NAMES56 ", " CUPYATTN_NAMES4(56, 57, 58, 59)
#define CUPYATTN_NAMES64 CUPYATTN_NAMES60 ", " CUPYATTN_NAMES4(60, 61, 62, 63)
#define CUPYATTN_NAMES68 CUPYATTN_NAMES64 ", " CUPYATTN_NAMES4(64, 65, 66, 67)
#define CUPYATTN_NAMES72 CUPYATTN_NAMES68 ", " CUPYATTN_NAMES4(68, 69, 70, 71)
#define CUPYATTN_NAMES76 CUPYATTN_NAMES72 ", " CUPYATTN_NAMES4(72, 73, 74, 75)
#define CUPYATTN_NAMES80 CUPYATTN_NAMES76 ", " CUPYATTN_NAMES4(76, 77, 78, 79)
#define CUPYATTN_NAMES84 CUPYATTN_NAMES80 ", " CUPYATTN_NAMES4(80, 81, 82, 83)
#define CUPYATTN_NAMES88 CUPYATTN_NAMES84 ", " CUPYATTN_NAMES4(84, 85, 86, 87)
#define CUPYATTN_NAMES92 CUPYATTN_NAMES88 ", " CUPYATTN_NAMES4(88, 89, 90, 91)
#define CUPYATTN_NAMES96 CUPYATTN_NAMES92 ", " CUPYATTN_NAMES4(92, 93, 94, 95)
#define CUPYATTN_NAMES100 CUPYATTN_NAMES96 ", " CUPYATTN_NAMES4(96, 97, 98, 99)
#define CUPYATTN_NAMES104 CUPYATTN_NAMES100 ", " CUPYATTN_NAMES4(100, 101, 102, 103)
#define CUPYATTN_NAMES108 CUPYATTN_NAMES104 ", " CUPYATTN_NAMES4(104, 105, 106, 107)
#define CUPYATTN_NAMES112 CUPYATTN_NAMES108 ", " CUPYATTN_NAMES4(108, 109, 110, 111)
#define CUPYATTN_NAMES116 CUPYATTN_NAMES112 ", " CUPYATTN_NAMES4(112, 113, 114, 115)
#define CUPYATTN_NAMES120 CUPYATTN_NAMES116 ", " CUPYATTN_NAMES4(116, 117, 118, 119)
#define CUPYATTN_NAMES124 CUPYATTN_NAMES120 ", " CUPYATTN_NAMES4(120, 121, 122, 123)
#define CUPYATTN_NAMES128 CUPYATTN_NAMES124 ", " CUPYATTN_NAMES4(124, 125, 126, 127)

#define CUPYATTN_OUT04 CUPYATTN_OUTS4(0)
#define CUPYATTN_OUT08 CUPYATTN_OUT04, CUPYATTN_OUTS4(1)
#define CUPYATTN_OUT12 CUPYATTN_OUT08, CUPYATTN_OUTS4(2)
#define CUPYATTN_OUT16 CUPYATTN_OUT12, CUPYATTN_OUTS4(3)
#define CUPYATTN_OUT20 CUPYATTN_OUT16, CUPYATTN_OUTS4(4)
#define CUPYATTN_OUT24 CUPYATTN_OUT20, CUPYATTN_OUTS4(5)
#define CUPYATTN_OUT28 CUPYATTN_OUT24, CUPYATTN_OUTS4(6)
#define CUPYATTN_OUT32 CUPYATTN_OUT28, CUPYATTN_OUTS4(7)
#define CUPYATTN_OUT36 CUPYATTN_OUT32, CUPYATTN_OUTS4(8)
#define CUPYATTN_OUT40 CUPYATTN_OUT36, CUPYATTN_OUTS4(9)
#define CUPYATTN_OUT44 CUPYATTN_OUT40, CUPYATTN_OUTS4(10)
#define CUPYATTN_OUT48 CUPYATTN_OUT44, CUPYATTN_OUTS4(11)
#define CUPYATTN_OUT52 CUPYATTN_OUT48, CUPYATTN_OUTS4(12)
#define CUPYATTN_OUT56 CUPYATTN_OUT52, CUPYATTN_OUTS4(13)
#define CUPYATTN_OUT60 CUPYATTN_OUT56, CUPYATTN_OUTS4(14)
#define CUPYATTN_OUT64 CUPYATTN_OUT60, CUPYATTN_OUTS4(15)
#define CUPYATTN_OUT68 CUPYATTN_OUT64, CUPYATTN_OUTS4(16)
#define CUPYATTN_OUT72 CUPYATTN_OUT68, CUPYATTN_OUTS4(17)
#define CUPYATTN_OUT76 CUPYATTN_OUT72, CUPYATTN_OUTS4(18)
#define CUPYATTN_OUT80 CUPYATTN_OUT76, CUPYATTN_OUTS4(19)
#define CUPYATTN_OUT84 CUPYATTN_OUT80, CUPYATTN_OUTS4(20)
#define CUPYATTN_OUT88 CUPYATTN_OUT84, CUPYATTN_OUTS4(21)
#define CUPYATTN_OUT92 CUPYATTN_OUT88, CUPYATTN_OUTS4(22)
#define CUPYATTN_OUT96 CUPYATTN_OUT92, CUPYATTN_OUTS4(23)
#define CUPYATTN_OUT100 CUPYATTN_OUT96, CUPYATTN_OUTS4(24)
#define CUPYATTN_OUT104 CUPYATTN_OUT100, CUPYATTN_OUTS4(25)
#define CUPYATTN_OUT108 CUPYATTN_OUT104, CUPYATTN_OUTS4(26)
#define CUPYATTN_OUT112 CUPYATTN_OUT108, CUPYATTN_OUTS4(27)
#define CUPYATTN_OUT116 CUPYATTN_OUT112, CUPYATTN_OUTS4(28)
#define CUPYATTN_OUT120 CUPYATTN_OUT116, CUPYATTN_OUTS4(29)
#define CUPYATTN_OUT124 CUPYATTN_OUT120, CUPYATTN_OUTS4(30)
#define CUPYATTN_OUT128 CUPYATTN_OUT124, CUPYATTN_OUTS4(31)

// The operands A, B and P are numbered after the COUNT accumulators. TA, TB: A, B are MN-major.
#define CUPYATTN_WGMMA_SS(TYPE, N, COUNT, A, B, P, TA, TB)                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
               "k16.f32." TYPE "." TYPE " {" CUPYATTN_NAMES##COUNT "}, " A ", " B                 \
                                                           ", p, 1, 1, " TA ", " TB ";\n}\n"      \
               : CUPYATTN_OUT##COUNT                                                              \
               : "l"(a), "l"(b), "r"(adds))
#define CUPYATTN_WGMMA_RS(TYPE, N, COUNT, A, B, P, TB)                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
               "k16.f32." TYPE "." TYPE " {" CUPYATTN_NAMES##COUNT "}, {" A "}, " B               \
                                                                   ", p, 1, 1, " TB ";\n}\n"      \
               : CUPYATTN_OUT##COUNT                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))

// 8-bit elements: A and B are K-major.
#define CUPYATTN_WGMMA_SS_8(SUM, TYPE, N, COUNT, A, B, P, FACTORS)                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
               "k32." SUM "." TYPE "." TYPE " {" CUPYATTN_NAMES##COUNT "}, " A ", " B              \
               ", p" FACTORS ";\n}\n"                                                              \
               : CUPYATTN_OUT##COUNT                                                               \
               : "l"(a), "l"(b), "r"(adds))
#define CUPYATTN_WGMMA_RS_8(SUM, TYPE, N, COUNT, A, B, P, FACTORS)                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
               "k32." SUM "." TYPE "." TYPE " {" CUPYATTN_NAMES##COUNT "}, {" A "}, " B            \
               ", p" FACTORS ";\n}\n"                                                              \
               : CUPYATTN_OUT##COUNT                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))

// Sums are in integer registers here, and in registers of float below.
#define CUPYATTN_SUM(x) "+r"(x)
#define CUPYATTN_INTEGER_WGMMA(N, COUNT, R0, R1, R2, R3, R4, R5)                                    \
  template <>                                                                                      \
  struct IntegerWgmma<N> {                                                                         \
    static __device__ __forceinline__ void multiply_ss(int32_t (&d)[N / 2], uint64_t a,            \
                                                       uint64_t b, int adds) {                     \
      CUPYATTN_WGMMA_SS_8("s32", "s8", N, COUNT, "%" #R0, "%" #R1, "%" #R2, "");                   \
    }                                                                                              \
    static __device__ __forceinline__ void multiply_rs(                                            \
        int32_t (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int adds) {                       \
      CUPYATTN_WGMMA_RS_8("s32", "s8", N, COUNT, "%" #R0 ", %" #R1 ", %" #R2 ", %" #R3, "%" #R4,   \
                          "%" #R5, "");                                                            \
    }                                                                                              \
  }

// These are all that there are.
CUPYATTN_INTEGER_WGMMA(8, 04, 4, 5, 6, 7, 8, 9);
CUPYATTN_INTEGER_WGMMA(16, 08, 8, 9, 10, 11, 12, 13);
CUPYATTN_INTEGER_WGMMA(24, 12, 12, 13, 14, 15, 16, 17);
CUPYATTN_INTEGER_WGMMA(32, 16, 16, 17, 18, 19, 20, 21);
CUPYATTN_INTEGER_WGMMA(48, 24, 24, 25, 26, 27, 28, 29);
CUPYATTN_INTEGER_WGMMA(64, 32, 32, 33, 34, 35, 36, 37);
CUPYATTN_INTEGER_WGMMA(80, 40, 40, 41, 42, 43, 44, 45);
CUPYATTN_INTEGER_WGMMA(96, 48, 48, 49, 50, 51, 52, 53);
CUPYATTN_INTEGER_WGMMA(112, 56, 56, 57, 58, 59, 60, 61);
CUPYATTN_INTEGER_WGMMA(128, 64, 64, 65, 66, 67, 68, 69);
CUPYATTN_INTEGER_WGMMA(160, 80, 80, 81, 82, 83, 84, 85);
CUPYATTN_INTEGER_WGMMA(192, 96, 96, 97, 98, 99, 100, 101);
CUPYATTN_INTEGER_WGMMA(224, 112, 112, 113, 114, 115, 116, 117);
CUPYATTN_INTEGER_WGMMA(256, 128, 128, 129, 130, 131, 132, 133);

#undef CUPYATTN_SUM
#define CUPYATTN_SUM(x) "+f"(x)

// d = A B, or d += A B if `adds` is 1.
// multiply_ss_8, multiply_rs_8: of 8-bit elements, A and B K-major; int8 has integer sums.
// multiply_ss: A and B are descriptors, K-major. multiply_ss_transposed: B is MN-major.
// multiply_transposed_ss: A is MN-major. multiply_rs_k_major: as multiply_rs, but B is K-major.
// multiply_rs: A is a fragment of 16-bit pairs, B a descriptor, MN-major.
#define CUPYATTN_WGMMA(N, COUNT, R0, R1, R2, R3, R4, R5)                                          \
  template <>                                                                                     \
  struct Wgmma<N> {                                                                               \
    template <typename T>                                                                         \
    static __device__ __forceinline__ void multiply_ss(float (&d)[N / 2], uint64_t a, uint64_t b, \
                                                       int adds) {                                \
      if constexpr (is_same<T, half_t>) {                                                         \
        CUPYATTN_WGMMA_SS("f16", N, COUNT, "%" #R0, "%" #R1, "%" #R2, "0", "0");                       \
      } else {                                                                                    \
        CUPYATTN_WGMMA_SS("bf16", N, COUNT, "%" #R0, "%" #R1, "%" #R2, "0", "0");                      \
      }                                                                                           \
    }                                                                                             \
    template <typename T>                                                                         \
    static __device__ __forceinline__ void multiply_ss_transposed(float (&d)[N / 2], uint64_t a,  \
                                                                  uint64_t b, int adds) {         \
      if constexpr (is_same<T, half_t>) {                                                         \
        CUPYATTN_WGMMA_SS("f16", N, COUNT, "%" #R0, "%" #R1, "%" #R2, "0", "1");                  \
      } else {                                                                                    \
        CUPYATTN_WGMMA_SS("bf16", N, COUNT, "%" #R0, "%" #R1, "%" #R2, "0", "1");                 \
      }                                                                                           \
    }                                                                                             \
    template <typename T>                                                                         \
    static __device__ __forceinline__ void multiply_transposed_ss(float (&d)[N / 2], uint64_t a,  \
                                                                  uint64_t b, int adds) {         \
      if constexpr (is_same<T, half_t>) {                                                         \
        CUPYATTN_WGMMA_SS("f16", N, COUNT, "%" #R0, "%" #R1, "%" #R2, "1", "0");                  \
      } else {                                                                                    \
        CUPYATTN_WGMMA_SS("bf16", N, COUNT, "%" #R0, "%" #R1, "%" #R2, "1", "0");                 \
      }                                                                                           \
    }                                                                                             \
    template <typename T>                                                                         \
    static __device__ __forceinline__ void multiply_rs(float (&d)[N / 2], const uint32_t (&a)[4], \
                                                       uint64_t b, int adds) {                    \
      if constexpr (is_same<T, half_t>) {                                                         \
        CUPYATTN_WGMMA_RS("f16", N, COUNT, "%" #R0 ", %" #R1 ", %" #R2 ", %" #R3, "%" #R4,        \
                          "%" #R5, "1");                                                          \
      } else {                                                                                    \
        CUPYATTN_WGMMA_RS("bf16", N, COUNT, "%" #R0 ", %" #R1 ", %" #R2 ", %" #R3, "%" #R4,       \
                          "%" #R5, "1");                                                          \
      }                                                                                           \
    }                                                                                             \
    template <typename T>                                                                         \
    static __device__ __forceinline__ void multiply_rs_k_major(                                   \
        float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int adds) {                        \
      if constexpr (is_same<T, half_t>) {                                                         \
        CUPYATTN_WGMMA_RS("f16", N, COUNT, "%" #R0 ", %" #R1 ", %" #R2 ", %" #R3, "%" #R4,        \
                          "%" #R5, "0");                                                          \
      } else {                                                                                    \
        CUPYATTN_WGMMA_RS("bf16", N, COUNT, "%" #R0 ", %" #R1 ", %" #R2 ", %" #R3, "%" #R4,       \
                          "%" #R5, "0");                                                          \
      }                                                                                           \
    }                                                                                             \
    template <typename T>                                                                         \
    static __device__ __forceinline__ void multiply_ss_8(float (&d)[N / 2], uint64_t a,           \
                                                         uint64_t b, int adds) {                  \
      static_assert(is_same<T, e4m3_t>, "sums of integers are integers");                         \
      CUPYATTN_WGMMA_SS_8("f32", "e4m3", N, COUNT, "%" #R0, "%" #R1, "%" #R2, ", 1, 1");          \
    }                                                                                             \
    template <typename T>                                                                         \
    static __device__ __forceinline__ void multiply_rs_8(                                         \
        float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int adds) {                        \
      static_assert(is_same<T, e4m3_t>, "sums of integers are integers");                         \
      CUPYATTN_WGMMA_RS_8("f32", "e4m3", N, COUNT, "%" #R0 ", %" #R1 ", %" #R2 ", %" #R3,         \
                          "%" #R4, "%" #R5, ", 1, 1");                                            \
    }                                                                                             \
    template <typename T>                                                                         \
    static __device__ __forceinline__ void multiply_ss_8(int32_t (&d)[N / 2], uint64_t a,         \
                                                         uint64_t b, int adds) {                  \
      static_assert(is_same<T, int8_t>, "sums of floats are floats");                             \
      IntegerWgmma<N>::multiply_ss(d, a, b, adds);                                                \
    }                                                                                             \
    template <typename T>                                                                         \
    static __device__ __forceinline__ void multiply_rs_8(                                         \
        int32_t (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int adds) {                      \
      static_assert(is_same<T, int8_t>, "sums of floats are floats");                             \
      IntegerWgmma<N>::multiply_rs(d, a, b, adds);                                                \
    }                                                                                             \
  }

CUPYATTN_WGMMA(8, 04, 4, 5, 6, 7, 8, 9);
CUPYATTN_WGMMA(16, 08, 8, 9, 10, 11, 12, 13);
CUPYATTN_WGMMA(24, 12, 12, 13, 14, 15, 16, 17);
CUPYATTN_WGMMA(32, 16, 16, 17, 18, 19, 20, 21);
CUPYATTN_WGMMA(40, 20, 20, 21, 22, 23, 24, 25);
CUPYATTN_WGMMA(48, 24, 24, 25, 26, 27, 28, 29);
CUPYATTN_WGMMA(56, 28, 28, 29, 30, 31, 32, 33);
CUPYATTN_WGMMA(64, 32, 32, 33, 34, 35, 36, 37);
CUPYATTN_WGMMA(72, 36, 36, 37, 38, 39, 40, 41);
CUPYATTN_WGMMA(80, 40, 40, 41, 42, 43, 44, 45);
CUPYATTN_WGMMA(88, 44, 44, 45, 46, 47, 48, 49);
CUPYATTN_WGMMA(96, 48, 48, 49, 50, 51, 52, 53);
CUPYATTN_WGMMA(104, 52, 52, 53, 54, 55, 56, 57);
CUPYATTN_WGMMA(112, 56, 56, 57, 58, 59, 60, 61);
CUPYATTN_WGMMA(120, 60, 60, 61, 62, 63, 64, 65);
CUPYATTN_WGMMA(128, 64, 64, 65, 66, 67, 68, 69);
CUPYATTN_WGMMA(136, 68, 68, 69, 70, 71, 72, 73);
CUPYATTN_WGMMA(144, 72, 72, 73, 74, 75, 76, 77);
CUPYATTN_WGMMA(152, 76, 76, 77, 78, 79, 80, 81);
CUPYATTN_WGMMA(160, 80, 80, 81, 82, 83, 84, 85);
CUPYATTN_WGMMA(168, 84, 84, 85, 86, 87, 88, 89);
CUPYATTN_WGMMA(176, 88, 88, 89, 90, 91, 92, 93);
CUPYATTN_WGMMA(184, 92, 92, 93, 94, 95, 96, 97);
CUPYATTN_WGMMA(192, 96, 96, 97, 98, 99, 100, 101);
CUPYATTN_WGMMA(200, 100, 100, 101, 102, 103, 104, 105);
CUPYATTN_WGMMA(208, 104, 104, 105, 106, 107, 108, 109);
CUPYATTN_WGMMA(216, 108, 108, 109, 110, 111, 112, 113);
CUPYATTN_WGMMA(224, 112, 112, 113, 114, 115, 116, 117);
CUPYATTN_WGMMA(232, 116, 116, 117, 118, 119, 120, 121);
CUPYATTN_WGMMA(240, 120, 120, 121, 122, 123, 124, 125);
CUPYATTN_WGMMA(248, 124, 124, 125, 126, 127, 128, 129);
CUPYATTN_WGMMA(256, 128, 128, 129, 130, 131, 132, 133);

}  // namespace cupyattn::ptx
