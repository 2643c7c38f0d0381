// Host twin of kernels/cupyattn/ptx/system.cuh. Ranks are threads of the system.
#pragma once

#include "cupyattn/common/types.cuh"
#include "emulator/device.h"

namespace cupyattn::ptx {

EMULATOR_INLINE void store_whole(Vector16* pointer, const Vector16& value) {
  emulator::store_whole(pointer, emulator::Words4{{value.word[0], value.word[1], value.word[2],
                                                   value.word[3]}});
}

EMULATOR_INLINE Vector16 load_whole(const Vector16* pointer) {
  const emulator::Words4 loaded = emulator::load_whole(pointer);
  return Vector16{{loaded.word[0], loaded.word[1], loaded.word[2], loaded.word[3]}};
}

EMULATOR_INLINE void store_system(int32_t* pointer, int32_t value) { *pointer = value; }

EMULATOR_INLINE uint64_t global_timer() { return emulator::global_timer(); }

}  // namespace cupyattn::ptx
