// Host twin of kernels/cupyattn/ptx/mma.cuh.
#pragma once

#include "cupyattn/common/types.cuh"
#include "emulator/device.h"

namespace cupyattn::ptx {

template <typename T>
EMULATOR_INLINE void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                  bool is_first = false,
                                  emulator::Where where = emulator::Where::current()) {
  constexpr bool kIsBfloat16 = is_same<T, bfloat16_t>;
  static_assert(kIsBfloat16 || is_same<T, half_t>, "inputs are f16 or bf16");
  for (int i = 0; i < 4 && is_first; ++i) c[i] = 0.0f;
  const emulator::Floats4 sum = emulator::mma_m16n8k16(emulator::Floats4{{c[0], c[1], c[2], c[3]}},
                                                       emulator::Words4{{a[0], a[1], a[2], a[3]}},
                                                       b0, b1, kIsBfloat16, where);
  for (int i = 0; i < 4; ++i) c[i] = sum.value[i];
}

}  // namespace cupyattn::ptx
