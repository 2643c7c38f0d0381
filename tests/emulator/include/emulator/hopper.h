// Hopper's asynchronous parts, so that phases, descriptors and box coordinates can be run: barriers
// in shared memory, tensor copies, products of a warpgroup. Twins of ptx/ for them are one line
// each over these functions.
//
// Not shown: whether fence.proxy.async is where it must be (generic writes are visible to copies
// and products at once), bank conflicts, an operand overwritten between a product and its wait (it
// is read when the product is issued), and races inside a warp whose lanes arrive at a barrier
// apart (time is kept a warp).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "emulator/device.h"

namespace emulator {

// --- mbarrier: 8 bytes of shared memory ---

// A phase ends when `count` arrivals have come and as many bytes as were expected.
void mbarrier_init(uint32_t barrier, int count);
void mbarrier_arrive(uint32_t barrier);
void mbarrier_arrive_expect_tx(uint32_t barrier, int num_bytes);
// Arrives when the copies that this thread has started have landed: when somebody waits, not
// before.
void cp_async_mbarrier_arrive_noinc(uint32_t barrier);
void mbarrier_expect_tx(uint32_t barrier, int num_bytes);
// try_wait in a loop: returns once the phase of this parity (0 for the first) is over. What tensor
// copies bring is in shared memory from then on, and not before.
void mbarrier_wait_parity(uint32_t barrier, int parity, Where where);

// --- tensor copies ---

enum class Swizzle : uint32_t { none = 0, bytes_32 = 1, bytes_64 = 2, bytes_128 = 3 };

// What cuTensorMapEncodeTiled is told, in a place of the same size. Innermost dimension first.
struct alignas(64) TensorMap {
  uint64_t address;
  uint64_t strides[4];  // bytes, of all dimensions but the innermost
  uint32_t dims[5], box[5];
  uint32_t rank, element_bytes;
  Swizzle swizzle;
  uint32_t unused[9];
};
static_assert(sizeof(TensorMap) == 128);

// Where a byte lies under a swizzle: 16-byte chunks change places within rows of the pattern.
constexpr uint32_t swizzled(uint32_t address, Swizzle swizzle) {
  return address ^ ((address >> 3) & ((16u << static_cast<uint32_t>(swizzle)) - 16u));
}

// Starts the copy of the box at `coordinates` (innermost first; outside of the tensor: zeros).
void tensor_copy(uint32_t destination, const TensorMap& map, const int (&coordinates)[5],
                 uint32_t barrier);
// Starts the copy of shared memory to such a box; this thread's are over when it has waited.
void tensor_store(uint32_t source, const TensorMap& map, const int (&coordinates)[5]);
void bulk_wait_read();

// --- wgmma: 128 threads ---

struct MatrixDescriptor {
  uint32_t start, leading, stride;  // bytes
  Swizzle swizzle;

  static MatrixDescriptor decode(uint64_t bits);
  // Bytes from the start of shared memory to an element; `outer` counts along M or N.
  uint32_t element(int outer, int k, bool is_k_major, int element_bytes) const;
};

// What A and B consist of. Sums are float, of int8 int.
enum class Operands : uint32_t { half, bfloat16, e4m3, int8 };

// d += A B of one 64 x kN x 16 product (x 32 of 8 bits); A and B by descriptors, or A's fragment in
// registers. The thread's d[i] is row 16 warp + lane / 4 (+ 8), column 8 (i / 4) + 2 (lane % 4) +
// i % 2.
struct WarpgroupProduct {
  int n;
  void* d;                // [n / 2]
  uint64_t a_descriptor;  // unless `a` is given
  const uint32_t* a;      // [4]
  uint64_t b_descriptor;
  Operands operands;
  bool is_first, is_a_k_major, is_b_k_major;
};
void warpgroup_multiply(const WarpgroupProduct& product, Where where);
// wgmma.wait_group: all warps of a warpgroup must execute the same ones between two products. They
// need not meet.
void warpgroup_wait(Where where);

// What setmaxnreg is given must be a multiple of 8 in 24..256; nothing else can be said here.
void set_max_registers(int count, Where where);

}  // namespace emulator
