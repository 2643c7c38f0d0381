// Host twin of kernels/cupyattn/ptx/cp_async.cuh.
#pragma once

#include "cupyattn/common/types.cuh"
#include "emulator/device.h"
#include "emulator/hopper.h"

namespace cupyattn::ptx {

inline uint32_t shared_address(const void* pointer) { return emulator::shared_address(pointer); }

EMULATOR_INLINE void cp_async_16(uint32_t destination, const void* source, bool valid) {
  emulator::cp_async(destination, source, 16, valid ? 16 : 0);
}

EMULATOR_INLINE void cp_async_part(uint32_t destination, const void* source, uint32_t count) {
  emulator::cp_async(destination, source, 16, static_cast<int>(count));
}

EMULATOR_INLINE void cp_async_4(uint32_t destination, const void* source, bool valid) {
  emulator::cp_async(destination, source, 4, valid ? 4 : 0);
}

EMULATOR_INLINE void store_shared_16(uint32_t destination, const Vector16& value) {
  emulator::store_shared_16(
      destination, emulator::Words4{{value.word[0], value.word[1], value.word[2], value.word[3]}});
}

EMULATOR_INLINE void cp_async_commit() { emulator::cp_async_commit(); }

template <int kPending>
EMULATOR_INLINE void cp_async_wait_group() {
  emulator::cp_async_wait_group(kPending);
}

EMULATOR_INLINE void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  emulator::cp_async_mbarrier_arrive_noinc(barrier);
}

}  // namespace cupyattn::ptx
