// Host twin of kernels/cupyattn/ptx/ldmatrix.cuh.
#pragma once

#include "cupyattn/common/types.cuh"
#include "emulator/device.h"

namespace cupyattn::ptx {

EMULATOR_INLINE void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t address,
                                 emulator::Where where = emulator::Where::current()) {
  const emulator::Words4 loaded = emulator::ldmatrix_x4(address, false, where);
  for (int i = 0; i < 4; ++i) fragment[i] = loaded.word[i];
}

EMULATOR_INLINE void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t address,
                                       emulator::Where where = emulator::Where::current()) {
  const emulator::Words4 loaded = emulator::ldmatrix_x4(address, true, where);
  for (int i = 0; i < 4; ++i) fragment[i] = loaded.word[i];
}

EMULATOR_INLINE void stmatrix_x4(uint32_t address, const uint32_t (&fragment)[4],
                                 emulator::Where where = emulator::Where::current()) {
  emulator::stmatrix_x4(address, {fragment[0], fragment[1], fragment[2], fragment[3]}, false,
                        where);
}

EMULATOR_INLINE void stmatrix_x4_trans(uint32_t address, const uint32_t (&fragment)[4],
                                       emulator::Where where = emulator::Where::current()) {
  emulator::stmatrix_x4(address, {fragment[0], fragment[1], fragment[2], fragment[3]}, true, where);
}

}  // namespace cupyattn::ptx
