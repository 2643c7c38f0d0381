// Hopper's parts in small: a box, a product, and a ring of both with a producer and consumers.
#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/warp.cuh"
#include "cupyattn/ptx/warpgroup.cuh"
#include "emulator/hopper.h"

namespace {

namespace ptx = cupyattn::ptx;
using emulator::Where;

// First in Params: launch arguments are on 16-byte boundaries only.
struct Params {
  const void* in;
  float* out;
  const emulator::TensorMap* a_map;
  const emulator::TensorMap* b_map;
  int which;
  int a, b, c, d, e;  // whatever the case needs
  int low_a, high_a, low_b, high_b;
};

// Dynamic shared memory of the emulator starts on a multiple of 1024.
struct Ring {
  unsigned char a[2][64 * 128];  // 64 rows of 64 elements of 16 bits
  unsigned char b[2][32 * 128];
  alignas(8) uint64_t full[2], empty[2];
};

uint64_t descriptor(int low, int high) {
  return static_cast<uint32_t>(low) | static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32;
}

// A box lands at the start of shared memory; its bytes go out as they lie.
void box(const Params& params, unsigned char* shared) {
  const uint32_t barrier = ptx::shared_address(shared + 32768);
  if (threadIdx.x == 0) {
    emulator::mbarrier_init(barrier, 1);
    emulator::mbarrier_arrive_expect_tx(barrier, params.e);
    const int at[5] = {params.a, params.b, params.c, 0, 0};
    emulator::tensor_copy(ptx::shared_address(shared), *params.a_map, at, barrier);
  }
  ptx::block_sync();
  emulator::mbarrier_wait_parity(barrier, 0, Where::current());
  for (int i = threadIdx.x; i < params.e / 4; i += 128) {
    params.out[i] = reinterpret_cast<const float*>(shared)[i];
  }
}

// Operands are an image of shared memory; descriptors come from the test.
void product(const Params& params, unsigned char* shared) {
  for (int i = threadIdx.x; i < 32768 / 4; i += 128) {
    reinterpret_cast<uint32_t*>(shared)[i] = static_cast<const uint32_t*>(params.in)[i];
  }
  ptx::block_sync();
  const int n = params.a;
  const uint32_t base = ptx::shared_address(shared) >> 4;
  float d[128];
  for (int i = 0; i < n / 2; ++i) d[i] = 1.0f;
  const emulator::WarpgroupProduct wanted{n,
                                          d,
                                          descriptor(params.low_a, params.high_a) + base,
                                          nullptr,
                                          descriptor(params.low_b, params.high_b) + base,
                                          static_cast<emulator::Operands>(params.b),
                                          params.c != 0,
                                          (params.d & 1) != 0,
                                          (params.d & 2) != 0};
  emulator::warpgroup_multiply(wanted, Where::current());
  for (int i = 0; i < n / 2; ++i) params.out[threadIdx.x * (n / 2) + i] = d[i];
}

// Sums of A B over `a` steps of 32 elements of 8 bits, from `d` on, by the names of ptx/: A is found
// by a descriptor, or its fragments follow the 32 KB of operands. A step is 2 units of 16 bytes.
template <typename T, typename Sum>
void product_of_8_bits(const Params& params, unsigned char* shared) {
  using Wgmma = cupyattn::ptx::Wgmma<64>;
  for (int i = threadIdx.x; i < 32768 / 4; i += 128) {
    reinterpret_cast<uint32_t*>(shared)[i] = static_cast<const uint32_t*>(params.in)[i];
  }
  ptx::block_sync();
  const uint32_t base = ptx::shared_address(shared) >> 4;
  const uint64_t a = descriptor(params.low_a, params.high_a) + base;
  const uint64_t b = descriptor(params.low_b, params.high_b) + base;
  const uint32_t* fragments = static_cast<const uint32_t*>(params.in) + 32768 / 4;
  Sum d[32];
  for (int i = 0; i < 32; ++i) d[i] = static_cast<Sum>(params.d);
  for (int step = 0; step < params.a; ++step) {
    const int adds = step != 0 || params.c != 0;
    if (params.b != 0) {
      uint32_t fragment[4];
      for (int i = 0; i < 4; ++i) fragment[i] = fragments[(step * 128 + threadIdx.x) * 4 + i];
      Wgmma::multiply_rs_8<T>(d, fragment, b + 2 * step, adds);
    } else {
      Wgmma::multiply_ss_8<T>(d, a + 2 * step, b + 2 * step, adds);
    }
  }
  for (int i = 0; i < 32; ++i) params.out[threadIdx.x * 32 + i] = __builtin_bit_cast(float, d[i]);
}

// out[64, 32] = A[64, K] B[32, K]^T: warp 4 loads tiles of 64 columns, warps 0-3 multiply. `a`
// tiles; `b` is a mistake to make.
void pipeline(const Params& params, unsigned char* shared) {
  Ring& ring = *reinterpret_cast<Ring*>(shared);
  const int warp = threadIdx.x / 32;
  uint32_t full[2], empty[2];
  for (int i = 0; i < 2; ++i) {
    full[i] = ptx::shared_address(&ring.full[i]);
    empty[i] = ptx::shared_address(&ring.empty[i]);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      emulator::mbarrier_init(full[i], 1);
      emulator::mbarrier_init(empty[i], 4);
    }
  }
  ptx::block_sync();
  constexpr int kBytes = sizeof ring.a[0] + sizeof ring.b[0];
  if (warp == 4) {
    emulator::set_max_registers(40, Where::current());
    if (threadIdx.x % 32 != 0) return;
    for (int tile = 0; tile < params.a; ++tile) {
      const int stage = tile % 2, round = tile / 2;
      const int parity = params.b == 1 ? round & 1 : (round & 1) ^ 1;
      if (params.b != 5) emulator::mbarrier_wait_parity(empty[stage], parity, Where::current());
      emulator::mbarrier_arrive_expect_tx(full[stage], params.b == 2 ? kBytes + 16 : kBytes);
      const int at[5] = {64 * tile, 0, 0, 0, 0};
      emulator::tensor_copy(ptx::shared_address(ring.a[stage]), *params.a_map, at, full[stage]);
      emulator::tensor_copy(ptx::shared_address(ring.b[stage]), *params.b_map, at, full[stage]);
    }
    return;
  }
  emulator::set_max_registers(232, Where::current());
  float d[16] = {};
  for (int tile = 0; tile < params.a; ++tile) {
    const int stage = tile % 2;
    if (params.b != 3) {
      emulator::mbarrier_wait_parity(full[stage], tile / 2 & 1, Where::current());
    }
    for (int k = 0; k < 64; k += 16) {
      const auto operand = [k](const void* matrix) {
        return (ptx::shared_address(matrix) + 2u * k) >> 4 | 64ull << 32 | 1ull << 62;
      };
      const emulator::WarpgroupProduct wanted{
          16 * 2, d, operand(ring.a[stage]), nullptr, operand(ring.b[stage]),
          emulator::Operands::bfloat16, tile + k == 0,
          true,   true};
      emulator::warpgroup_multiply(wanted, Where::current());
    }
    if (params.b == 4 && tile == 0) continue;
    ptx::warp_sync();
    if (threadIdx.x % 32 == 0) emulator::mbarrier_arrive(empty[stage]);
  }
  for (int i = 0; i < 16; ++i) params.out[threadIdx.x * 16 + i] = d[i];
}

}  // namespace

extern "C" __global__ void cupyattn_hopper(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  if (params.which == 0) box(params, shared_bytes);
  if (params.which == 1) product(params, shared_bytes);
  if (params.which == 2) pipeline(params, shared_bytes);
  if (params.which == 3) product_of_8_bits<cupyattn::e4m3_t, float>(params, shared_bytes);
  if (params.which == 4) product_of_8_bits<cupyattn::int8_t, int>(params, shared_bytes);
}
