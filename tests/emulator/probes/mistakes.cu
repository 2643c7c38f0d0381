// What a kernel can do wrong, one mistake a function: the emulator must name each. Those called
// fine_* do the same thing right. Blocks of 128 threads, 4 KB of shared memory.
#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/ldmatrix.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/ptx/warp.cuh"
#include "emulator/device.h"

namespace {

using namespace cupyattn;

struct Params {
  const float* in;  // [256]
  float* out;       // [256]
  int which, zero;
};

struct Block {
  const Params& params;
  float* shared;  // [1024]
  int thread, lane;

  float& neighbour(int distance) { return shared[(thread + distance) % 128]; }
  Vector16* vectors() { return reinterpret_cast<Vector16*>(shared); }
  void copy(int chunk) {
    ptx::cp_async_16(ptx::shared_address(vectors() + chunk), params.in + 4 * (chunk % 64), true);
  }
};

void fine_exchange(Block& b) {
  b.shared[b.thread] = b.params.in[b.thread];
  ptx::block_sync();
  b.params.out[b.thread] = b.neighbour(32);
  ptx::block_sync();
  b.shared[b.thread] = 0.0f;
}
void missing_block_barrier(Block& b) {
  b.shared[b.thread] = 1.0f;
  b.params.out[b.thread] = b.neighbour(32);
}
void fine_exchange_in_a_warp(Block& b) {
  b.shared[b.thread] = b.params.in[b.thread];
  ptx::warp_sync();
  b.params.out[b.thread] = b.shared[b.thread ^ 1];
}
void missing_warp_barrier(Block& b) {
  b.shared[b.thread] = 1.0f;
  b.params.out[b.thread] = b.shared[b.thread ^ 1];
}
void warp_barrier_for_a_block(Block& b) {
  b.shared[b.thread] = 1.0f;
  ptx::warp_sync();
  b.params.out[b.thread] = b.neighbour(32);
}
void shuffle_for_a_barrier(Block& b) {
  b.shared[b.thread] = 1.0f;
  ptx::shuffle_xor(1.0f, 1);
  b.params.out[b.thread] = b.shared[b.thread ^ 1];
}
void overwritten_while_read(Block& b) {
  b.shared[b.thread] = 1.0f;
  ptx::block_sync();
  b.params.out[b.thread] = b.neighbour(32);
  b.shared[b.thread] = 2.0f;
}
void overwritten_while_read_in_a_warp(Block& b) {
  b.shared[b.thread] = 1.0f;
  ptx::block_sync();
  b.params.out[b.thread] = b.shared[b.thread ^ 1];
  b.shared[b.thread] = 2.0f;
}
void written_by_two(Block& b) { b.shared[b.thread / 64] = 1.0f; }
void fine_atomics(Block& b) {
  uint32_t* words = reinterpret_cast<uint32_t*>(b.shared);
  if (b.thread == 0) words[0] = 0;
  ptx::block_sync();
  ptx::atomic_or_shared(words, 1u << b.lane);
  ptx::block_sync();
  b.params.out[b.thread] = words[0] == 0xffffffffu ? 1.0f : 0.0f;
}
void atomic_and_plain_read(Block& b) {
  uint32_t* words = reinterpret_cast<uint32_t*>(b.shared);
  if (b.thread == 0) words[0] = 0;
  ptx::block_sync();
  ptx::atomic_or_shared(words, 1u << b.lane);
  b.params.out[b.thread] = static_cast<float>(words[0]);
}
void never_written(Block& b) { b.params.out[b.thread] = b.shared[512 + b.thread]; }
void fine_copy(Block& b) {
  b.copy(b.thread);
  ptx::cp_async_commit();
  ptx::cp_async_wait_group<0>();
  ptx::block_sync();
  b.params.out[b.thread] = b.shared[b.thread];
}
void copy_without_wait(Block& b) {
  b.copy(b.thread);
  ptx::cp_async_commit();
  ptx::block_sync();
  b.params.out[b.thread] = b.shared[4 * b.thread];
}
void copy_waits_for_the_wrong_group(Block& b) {
  b.copy(b.thread);
  ptx::cp_async_commit();
  b.copy(b.thread + 128);
  ptx::cp_async_commit();
  ptx::cp_async_wait_group<1>();
  ptx::block_sync();
  b.params.out[b.thread] = b.shared[4 * b.thread] + b.shared[512 + 4 * b.thread];
}
void copy_without_commit(Block& b) {
  b.copy(b.thread);
  ptx::cp_async_wait_group<0>();
  b.params.out[b.thread] = b.shared[4 * b.thread];
}
void copy_of_another_thread(Block& b) {
  b.copy(b.thread);
  ptx::cp_async_commit();
  ptx::cp_async_wait_group<0>();
  b.params.out[b.thread] = b.shared[(4 * b.thread + 128) % 512];
}
void copy_over_what_is_read(Block& b) {
  b.shared[b.thread] = 1.0f;
  ptx::block_sync();
  b.params.out[b.thread] = b.neighbour(64);
  b.copy(b.thread % 32);
}
void ldmatrix_of_a_copy_in_flight(Block& b) {
  b.copy(b.lane);
  ptx::cp_async_commit();
  uint32_t fragment[4];
  ptx::ldmatrix_x4(fragment, ptx::shared_address(b.vectors() + b.lane));
}
void barrier_some_do_not_reach(Block& b) {
  if (b.thread < 64) ptx::block_sync();
}
void barrier_half_a_warp_does_not_reach(Block& b) {
  if (b.lane < 16) ptx::warp_sync();
  ptx::block_sync();
}
void parted_lanes(Block& b) {
  if (b.lane < 16) {
    ptx::warp_sync();
  } else {
    ptx::warp_any(true);
  }
}
void lanes_at_two_barriers(Block& b) {
  if (b.lane < 16) {
    ptx::block_sync();
  } else {
    ptx::block_sync();
  }
}
void fine_named_barriers(Block& b) {
  b.shared[b.thread] = b.params.in[b.thread];
  const auto here = emulator::Where::current();
  emulator::named_barrier_sync(1 + b.thread / 64, 64, here);
  b.params.out[b.thread] = b.shared[b.thread ^ 32];
}
void named_barrier_of_others(Block& b) {
  b.shared[b.thread] = 1.0f;
  const auto here = emulator::Where::current();
  emulator::named_barrier_sync(1 + b.thread / 64, 64, here);
  b.params.out[b.thread] = b.neighbour(64);
}
void warps_at_two_barriers(Block& b) {
  const auto here = emulator::Where::current();
  if (b.thread < 64) {
    emulator::named_barrier_sync(1, 128, here);
  } else {
    emulator::named_barrier_sync(1, 128, emulator::Where::current());
  }
}
void fine_barriers_of_roles(Block& b) {
  b.shared[b.thread] = b.params.in[b.thread];
  const auto here = emulator::Where::current();
  if (b.thread < 64) {
    emulator::named_barrier_sync_unaligned(1, 128, here);
  } else {
    emulator::named_barrier_sync_unaligned(1, 128, emulator::Where::current());
  }
  b.params.out[b.thread] = b.shared[b.thread ^ 64];
}
void misaligned_shared_vector(Block& b) {
  float4* vector = reinterpret_cast<float4*>(b.shared + 4 * b.thread + 1);
  *vector = make_float4(1.0f, 2.0f, 3.0f, 4.0f);
}
void misaligned_copy(Block& b) {
  ptx::cp_async_16(ptx::shared_address(b.shared + 4 * b.thread + 2), b.params.in, true);
}
void misaligned_copy_source(Block& b) {
  ptx::cp_async_16(ptx::shared_address(b.shared + 4 * b.thread), b.params.in + 1, true);
}
void misaligned_matrix(Block& b) {
  uint32_t fragment[4];
  ptx::ldmatrix_x4(fragment, ptx::shared_address(b.shared + 4 * b.lane + 2));
}
void misaligned_global_vector(Block& b) {
  const float2 pair = *reinterpret_cast<const float2*>(b.params.in + 1 + 2 * (b.thread % 32));
  b.params.out[b.thread] = pair.x + pair.y;
}
void past_the_array(Block& b) { b.params.out[b.thread] = b.params.in[b.thread + 129]; }
void before_the_array(Block& b) { b.params.out[b.thread] = b.params.in[b.thread - 1]; }
void writes_past_the_array(Block& b) { b.params.out[b.thread + 129] = 1.0f; }
void copies_past_the_array(Block& b) {
  ptx::cp_async_16(ptx::shared_address(b.vectors() + b.thread), b.params.in + 4 * b.thread, true);
}
void fine_copy_of_nothing(Block& b) {
  ptx::cp_async_16(ptx::shared_address(b.vectors() + b.thread), b.params.in + 4000, false);
  ptx::cp_async_commit();
  ptx::cp_async_wait_group<0>();
  b.params.out[b.thread] = b.shared[4 * b.thread];
}
void writes_an_input(Block& b) { const_cast<float*>(b.params.in)[b.thread] = 1.0f; }
void past_shared_memory(Block& b) { b.shared[1024 + b.thread] = 1.0f; }
void stack_of_another_thread(Block& b) {
  float own = b.params.in[b.thread];
  float** addresses = reinterpret_cast<float**>(b.shared);
  addresses[b.thread] = &own;
  ptx::block_sync();
  b.params.out[b.thread] = *addresses[b.thread ^ 1];
  ptx::block_sync();
}
void shift_too_far(Block& b) {
  b.params.out[b.thread] = static_cast<float>(1u << (b.thread + b.params.zero));
}
void overflowing_sum(Block& b) {
  b.params.out[b.thread] = static_cast<float>(0x7fffffff + b.thread + b.params.zero);
}
void index_past_a_local_array(Block& b) {
  int table[4] = {};
  table[b.params.zero + b.thread % 8] = 1;
  b.params.out[b.thread] = static_cast<float>(table[b.params.zero]);
}

}  // namespace

extern "C" __global__ void cupyattn_mistakes(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Block b{params, reinterpret_cast<float*>(shared_bytes), static_cast<int>(threadIdx.x),
          static_cast<int>(threadIdx.x % 32)};
  for (int i = b.thread; i < 512; i += 128) b.shared[i] = 0.0f;
  ptx::block_sync();
  // One row a mistake, so that the tests can read the names.
  // clang-format off
  switch (params.which) {
    case 0: return fine_exchange(b);
    case 1: return missing_block_barrier(b);
    case 2: return fine_exchange_in_a_warp(b);
    case 3: return missing_warp_barrier(b);
    case 4: return warp_barrier_for_a_block(b);
    case 5: return shuffle_for_a_barrier(b);
    case 6: return overwritten_while_read(b);
    case 7: return overwritten_while_read_in_a_warp(b);
    case 8: return written_by_two(b);
    case 9: return fine_atomics(b);
    case 10: return atomic_and_plain_read(b);
    case 11: return never_written(b);
    case 12: return fine_copy(b);
    case 13: return copy_without_wait(b);
    case 14: return copy_waits_for_the_wrong_group(b);
    case 15: return copy_without_commit(b);
    case 16: return copy_of_another_thread(b);
    case 17: return copy_over_what_is_read(b);
    case 18: return ldmatrix_of_a_copy_in_flight(b);
    case 19: return barrier_some_do_not_reach(b);
    case 20: return barrier_half_a_warp_does_not_reach(b);
    case 21: return parted_lanes(b);
    case 22: return lanes_at_two_barriers(b);
    case 23: return fine_named_barriers(b);
    case 24: return named_barrier_of_others(b);
    case 25: return misaligned_shared_vector(b);
    case 26: return misaligned_copy(b);
    case 27: return misaligned_copy_source(b);
    case 28: return misaligned_matrix(b);
    case 29: return misaligned_global_vector(b);
    case 30: return past_the_array(b);
    case 31: return before_the_array(b);
    case 32: return writes_past_the_array(b);
    case 33: return copies_past_the_array(b);
    case 34: return fine_copy_of_nothing(b);
    case 35: return writes_an_input(b);
    case 36: return past_shared_memory(b);
    case 37: return stack_of_another_thread(b);
    case 38: return shift_too_far(b);
    case 39: return overflowing_sum(b);
    case 40: return index_past_a_local_array(b);
    case 41: return warps_at_two_barriers(b);
    case 42: return fine_barriers_of_roles(b);
  }
}
