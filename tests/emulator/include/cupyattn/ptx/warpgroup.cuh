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
template <int kCount>
inline void wgmma_results(int32_t (&)[kCount]) {}

inline uint32_t opaque_copy(uint32_t value) { return value; }
inline uint64_t opaque_copy(uint64_t value) { return value; }

template <typename T>
constexpr emulator::Operands kOperands = is_same<T, bfloat16_t> ? emulator::Operands::bfloat16
                                         : is_same<T, e4m3_t>   ? emulator::Operands::e4m3
                                         : is_same<T, int8_t>   ? emulator::Operands::int8
                                                                : emulator::Operands::half;

template <int kN>
struct Wgmma {
  static_assert(kN % 8 == 0 && kN <= 256, "what wgmma takes");

  template <typename T>
  static EMULATOR_INLINE void multiply_ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int adds,
                                          Where where = Where::current()) {
    emulator::warpgroup_multiply({.n = kN,
                                  .d = d,
                                  .a_descriptor = a,
                                  .a = nullptr,
                                  .b_descriptor = b,
                                  .operands = kOperands<T>,
                                  .is_first = adds == 0,
                                  .is_a_k_major = true,
                                  .is_b_k_major = true},
                                 where);
  }

  template <typename T>
  static EMULATOR_INLINE void multiply_ss_transposed(float (&d)[kN / 2], uint64_t a, uint64_t b,
                                                     int adds, Where where = Where::current()) {
    emulator::warpgroup_multiply({.n = kN,
                                  .d = d,
                                  .a_descriptor = a,
                                  .a = nullptr,
                                  .b_descriptor = b,
                                  .operands = kOperands<T>,
                                  .is_first = adds == 0,
                                  .is_a_k_major = true,
                                  .is_b_k_major = false},
                                 where);
  }

  template <typename T>
  static EMULATOR_INLINE void multiply_transposed_ss(float (&d)[kN / 2], uint64_t a, uint64_t b,
                                                     int adds, Where where = Where::current()) {
    emulator::warpgroup_multiply({.n = kN,
                                  .d = d,
                                  .a_descriptor = a,
                                  .a = nullptr,
                                  .b_descriptor = b,
                                  .operands = kOperands<T>,
                                  .is_first = adds == 0,
                                  .is_a_k_major = false,
                                  .is_b_k_major = true},
                                 where);
  }

  template <typename T>
  static EMULATOR_INLINE void multiply_rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b,
                                          int adds, Where where = Where::current()) {
    emulator::warpgroup_multiply({.n = kN,
                                  .d = d,
                                  .a_descriptor = 0,
                                  .a = a,
                                  .b_descriptor = b,
                                  .operands = kOperands<T>,
                                  .is_first = adds == 0,
                                  .is_a_k_major = true,
                                  .is_b_k_major = false},
                                 where);
  }

  template <typename T>
  static EMULATOR_INLINE void multiply_rs_k_major(float (&d)[kN / 2], const uint32_t (&a)[4],
                                                  uint64_t b, int adds,
                                                  Where where = Where::current()) {
    emulator::warpgroup_multiply({.n = kN,
                                  .d = d,
                                  .a_descriptor = 0,
                                  .a = a,
                                  .b_descriptor = b,
                                  .operands = kOperands<T>,
                                  .is_first = adds == 0,
                                  .is_a_k_major = true,
                                  .is_b_k_major = true},
                                 where);
  }

  template <typename T, typename Sum>
  static EMULATOR_INLINE void multiply_ss_8(Sum (&d)[kN / 2], uint64_t a, uint64_t b, int adds,
                                            Where where = Where::current()) {
    static_assert(is_same<Sum, conditional<is_same<T, int8_t>, int32_t, float>>, "sums of T");
    emulator::warpgroup_multiply({.n = kN,
                                  .d = d,
                                  .a_descriptor = a,
                                  .a = nullptr,
                                  .b_descriptor = b,
                                  .operands = kOperands<T>,
                                  .is_first = adds == 0,
                                  .is_a_k_major = true,
                                  .is_b_k_major = true},
                                 where);
  }

  template <typename T, typename Sum>
  static EMULATOR_INLINE void multiply_rs_8(Sum (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b,
                                            int adds, Where where = Where::current()) {
    static_assert(is_same<Sum, conditional<is_same<T, int8_t>, int32_t, float>>, "sums of T");
    emulator::warpgroup_multiply({.n = kN,
                                  .d = d,
                                  .a_descriptor = 0,
                                  .a = a,
                                  .b_descriptor = b,
                                  .operands = kOperands<T>,
                                  .is_first = adds == 0,
                                  .is_a_k_major = true,
                                  .is_b_k_major = true},
                                 where);
  }
};

}  // namespace cupyattn::ptx
