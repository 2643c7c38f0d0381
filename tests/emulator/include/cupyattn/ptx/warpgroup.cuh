// Host twin of kernels/cupyattn/ptx/warpgroup.cuh: a product is over when it is issued.
#pragma once

#include "cupyattn/common/types.cuh"
#include "emulator/hopper.h"

namespace cupyattn::ptx {

using emulator::Where;

template <int kCount>
EMULATOR_INLINE void set_max_registers_down(Where where = Where::current()) {
  emulator::set_max_registers(kCount, where);
}

template <int kCount>
EMULATOR_INLINE void set_max_registers_up(Where where = Where::current()) {
  emulator::set_max_registers(kCount, where);
}

inline void wgmma_fence() {}

inline void wgmma_commit() {}

// All lanes of a warp meet here, and all warps of the warpgroup wait at the same place.
template <int kPending>
EMULATOR_INLINE void wgmma_wait(Where where = Where::current()) {
  emulator::warpgroup_wait(where);
}

template <int kCount>
inline void wgmma_results(float (&)[kCount]) {}

inline uint32_t opaque_copy(uint32_t value) { return value; }
inline uint64_t opaque_copy(uint64_t value) { return value; }

template <int kN>
struct Wgmma {
  static_assert(kN % 8 == 0 && kN <= 256, "what wgmma takes");

  template <typename T>
  static EMULATOR_INLINE void multiply_ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int adds,
                                          Where where = Where::current()) {
    constexpr bool kIsBfloat16 = is_same<T, bfloat16_t>;
    emulator::warpgroup_multiply({.n = kN,
                                  .d = d,
                                  .a_descriptor = a,
                                  .a = nullptr,
                                  .b_descriptor = b,
                                  .is_bfloat16 = kIsBfloat16,
                                  .is_first = adds == 0,
                                  .is_a_k_major = true,
                                  .is_b_k_major = true},
                                 where);
  }

  template <typename T>
  static EMULATOR_INLINE void multiply_ss_transposed(float (&d)[kN / 2], uint64_t a, uint64_t b,
                                                     int adds, Where where = Where::current()) {
    constexpr bool kIsBfloat16 = is_same<T, bfloat16_t>;
    emulator::warpgroup_multiply({.n = kN,
                                  .d = d,
                                  .a_descriptor = a,
                                  .a = nullptr,
                                  .b_descriptor = b,
                                  .is_bfloat16 = kIsBfloat16,
                                  .is_first = adds == 0,
                                  .is_a_k_major = true,
                                  .is_b_k_major = false},
                                 where);
  }

  template <typename T>
  static EMULATOR_INLINE void multiply_transposed_ss(float (&d)[kN / 2], uint64_t a, uint64_t b,
                                                     int adds, Where where = Where::current()) {
    constexpr bool kIsBfloat16 = is_same<T, bfloat16_t>;
    emulator::warpgroup_multiply({.n = kN,
                                  .d = d,
                                  .a_descriptor = a,
                                  .a = nullptr,
                                  .b_descriptor = b,
                                  .is_bfloat16 = kIsBfloat16,
                                  .is_first = adds == 0,
                                  .is_a_k_major = false,
                                  .is_b_k_major = true},
                                 where);
  }

  template <typename T>
  static EMULATOR_INLINE void multiply_rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b,
                                          int adds, Where where = Where::current()) {
    constexpr bool kIsBfloat16 = is_same<T, bfloat16_t>;
    emulator::warpgroup_multiply({.n = kN,
                                  .d = d,
                                  .a_descriptor = 0,
                                  .a = a,
                                  .b_descriptor = b,
                                  .is_bfloat16 = kIsBfloat16,
                                  .is_first = adds == 0,
                                  .is_a_k_major = true,
                                  .is_b_k_major = false},
                                 where);
  }

  template <typename T>
  static EMULATOR_INLINE void multiply_rs_k_major(float (&d)[kN / 2], const uint32_t (&a)[4],
                                                  uint64_t b, int adds,
                                                  Where where = Where::current()) {
    constexpr bool kIsBfloat16 = is_same<T, bfloat16_t>;
    emulator::warpgroup_multiply({.n = kN,
                                  .d = d,
                                  .a_descriptor = 0,
                                  .a = a,
                                  .b_descriptor = b,
                                  .is_bfloat16 = kIsBfloat16,
                                  .is_first = adds == 0,
                                  .is_a_k_major = true,
                                  .is_b_k_major = true},
                                 where);
  }
};

}  // namespace cupyattn::ptx
