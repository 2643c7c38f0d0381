// Host twin of kernels/cupyattn/ptx/memory.cuh. Blocks run one after another, so there is nothing to
// order, and L1 is always coherent: a missing order cannot show here.
#pragma once

#include "cupyattn/common/types.cuh"
#include "emulator/device.h"

namespace cupyattn::ptx {

EMULATOR_INLINE uint32_t atomic_inc_wrap(uint32_t* counter, uint32_t last) {
  return emulator::atomic_inc_wrap(counter, last);
}

EMULATOR_INLINE uint32_t atomic_inc_wrap_acq_rel(uint32_t* counter, uint32_t last) {
  return emulator::atomic_inc_wrap(counter, last);
}

inline void prefetch_l2(const void*) {}

EMULATOR_INLINE void atomic_add(uint32_t* counter, uint32_t addend) {
  emulator::atomic_add(counter, addend);
}

// Blocks run in turns, and lanes of one do not raise the same number.
EMULATOR_INLINE void atomic_max(float* place, float value) {
  if (value > *place) *place = value;
}

EMULATOR_INLINE uint32_t atomic_add_shared(uint32_t* word, uint32_t addend) {
  return emulator::atomic_add_shared(word, addend);
}

EMULATOR_INLINE uint32_t atomic_or_shared(uint32_t* word, uint32_t bits) {
  return emulator::atomic_or_shared(word, bits);
}

EMULATOR_INLINE void store_release_system(int64_t* pointer, int64_t value) { *pointer = value; }

EMULATOR_INLINE float load_l2(const float* pointer) { return emulator::load_l2(pointer); }

EMULATOR_INLINE float4 load_l2(const float4* pointer) {
  const emulator::Floats4 loaded = emulator::load_l2_16(pointer);
  return float4{loaded.value[0], loaded.value[1], loaded.value[2], loaded.value[3]};
}

EMULATOR_INLINE Vector16 load_no_allocate(const Vector16* pointer) { return *pointer; }

EMULATOR_INLINE Vector16 load_no_allocate_256(const Vector16* pointer) { return *pointer; }

EMULATOR_INLINE uint32_t load_constant(const uint32_t* pointer) { return *pointer; }

EMULATOR_INLINE uint16_t load_constant(const uint16_t* pointer) { return *pointer; }

EMULATOR_INLINE uint8_t load_constant(const uint8_t* pointer) { return *pointer; }

inline uint32_t funnel_shift_right(uint32_t low, uint32_t high, uint32_t shift) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<uint32_t>(both >> (shift & 31u));
}

}  // namespace cupyattn::ptx
