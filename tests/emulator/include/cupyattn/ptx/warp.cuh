// Host twin of kernels/cupyattn/ptx/warp.cuh.
#pragma once

#include "cupyattn/common/types.cuh"
#include "emulator/device.h"

namespace cupyattn::ptx {

using emulator::Where;

constexpr uint32_t kFullWarp = 0xffffffffu;

EMULATOR_INLINE float shuffle_xor(float value, int lane_mask, Where where = Where::current()) {
  return emulator::shuffle_xor(value, lane_mask, where);
}

EMULATOR_INLINE float shuffle(float value, int source_lane, Where where = Where::current()) {
  return emulator::shuffle(value, source_lane, where);
}

EMULATOR_INLINE int shuffle(int value, int source_lane, Where where = Where::current()) {
  return emulator::shuffle_int(value, source_lane, where);
}

EMULATOR_INLINE int shuffle_in_eight(int value, int source, Where where = Where::current()) {
  const int first = static_cast<int>(threadIdx.x) % 32 / 8 * 8;
  return emulator::shuffle_int(value, first + source, where);
}

EMULATOR_INLINE uint32_t warp_sum(uint32_t value, Where where = Where::current()) {
  return emulator::warp_sum(value, where);
}

EMULATOR_INLINE uint32_t warp_max(uint32_t value, Where where = Where::current()) {
  return emulator::warp_max(value, where);
}

EMULATOR_INLINE int warp_max(int value, Where where = Where::current()) {
  constexpr uint32_t kSign = 0x80000000u;
  return static_cast<int>(emulator::warp_max(static_cast<uint32_t>(value) ^ kSign, where) ^ kSign);
}

EMULATOR_INLINE int warp_min(int value, Where where = Where::current()) {
  return ~warp_max(~value, where);
}

EMULATOR_INLINE void end_basic_block(uint32_t) {}
EMULATOR_INLINE int warp_uniform(int value, Where where = Where::current()) {
  return emulator::shuffle_int(value, 0, where);
}

EMULATOR_INLINE bool warp_any(bool predicate, Where where = Where::current()) {
  return emulator::warp_any(predicate, where);
}

EMULATOR_INLINE uint32_t warp_ballot(bool predicate, Where where = Where::current()) {
  return emulator::warp_sum(predicate ? 1u << (threadIdx.x % 32) : 0u, where);
}

EMULATOR_INLINE void warp_sync(Where where = Where::current()) { emulator::warp_sync(where); }

EMULATOR_INLINE void block_sync(Where where = Where::current()) { emulator::block_sync(where); }

EMULATOR_INLINE bool block_any(bool predicate, Where where = Where::current()) {
  return emulator::block_any(predicate, where);
}

}  // namespace cupyattn::ptx
