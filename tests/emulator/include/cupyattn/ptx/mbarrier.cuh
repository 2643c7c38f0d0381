// Host twin of kernels/cupyattn/ptx/mbarrier.cuh.
#pragma once

#include "cupyattn/common/types.cuh"
#include "emulator/hopper.h"

namespace cupyattn::ptx {

using emulator::Where;

EMULATOR_INLINE void mbarrier_init(uint32_t barrier, int count) {
  emulator::mbarrier_init(barrier, count);
}

inline void fence_mbarrier_init() {}

EMULATOR_INLINE void mbarrier_arrive(uint32_t barrier, int count = 1) {
  for (int i = 0; i < count; ++i) emulator::mbarrier_arrive(barrier);
}

EMULATOR_INLINE void mbarrier_arrive_if(bool arrives, uint32_t barrier) {
  if (arrives) emulator::mbarrier_arrive(barrier);
}

EMULATOR_INLINE void mbarrier_expect_tx(uint32_t barrier, int num_bytes) {
  emulator::mbarrier_expect_tx(barrier, num_bytes);
}

EMULATOR_INLINE void mbarrier_arrive_expect_tx(uint32_t barrier, int num_bytes) {
  emulator::mbarrier_arrive_expect_tx(barrier, num_bytes);
}

EMULATOR_INLINE void mbarrier_wait_parity(uint32_t barrier, uint32_t parity,
                                          Where where = Where::current()) {
  emulator::mbarrier_wait_parity(barrier, static_cast<int>(parity), where);
}

EMULATOR_INLINE void named_barrier_sync(int barrier, int num_threads,
                                        Where where = Where::current()) {
  emulator::named_barrier_sync(barrier, num_threads, where);
}

EMULATOR_INLINE void named_barrier_sync_unaligned(int barrier, int num_threads,
                                                  Where where = Where::current()) {
  emulator::named_barrier_sync_unaligned(barrier, num_threads, where);
}

EMULATOR_INLINE bool named_barrier_any(int barrier, int num_threads, bool predicate,
                                       Where where = Where::current()) {
  return emulator::named_barrier_any(barrier, num_threads, predicate, where);
}

EMULATOR_INLINE void named_barrier_arrive(int barrier, int num_threads,
                                          Where where = Where::current()) {
  emulator::named_barrier_arrive(barrier, num_threads, where);
}

}  // namespace cupyattn::ptx
