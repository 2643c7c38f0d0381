// One warp, one instruction of ptx/: registers in, registers out.
#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/ldmatrix.cuh"
#include "cupyattn/ptx/mma.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace {

struct Params {
  const uint32_t* in;  // [32, 12]
  uint32_t* out;       // [32, 4]
  int which;
};

}  // namespace

extern "C" __global__ void cupyattn_warps(const __grid_constant__ Params params) {
  using namespace cupyattn;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const uint32_t* in = params.in + 12 * threadIdx.x;
  uint32_t out[4] = {};
  const float x = __uint_as_float(in[0]);
  const int other = static_cast<int>(in[1]);
  if (params.which <= 3) {
    const uint32_t a[4] = {in[0], in[1], in[2], in[3]};
    float c[4];
    for (int i = 0; i < 4; ++i) c[i] = __uint_as_float(in[6 + i]);
    if (params.which == 0) ptx::mma_m16n8k16<half_t>(c, a, in[4], in[5]);
    if (params.which == 1) ptx::mma_m16n8k16<bfloat16_t>(c, a, in[4], in[5]);
    if (params.which == 2) ptx::mma_m16n8k16<half_t>(c, a, in[4], in[5], true);
    if (params.which == 3) ptx::mma_m16n8k16<bfloat16_t>(c, a, in[4], in[5], true);
    for (int i = 0; i < 4; ++i) out[i] = __float_as_uint(c[i]);
  } else if (params.which <= 5) {
    // 16 bytes a lane, at the row the lane then asks for.
    const uint32_t row = ptx::shared_address(shared_bytes) + 16 * in[4];
    ptx::store_shared_16(row, Vector16{{in[0], in[1], in[2], in[3]}});
    ptx::warp_sync();
    if (params.which == 4) {
      ptx::ldmatrix_x4(out, row);
    } else {
      ptx::ldmatrix_x4_trans(out, row);
    }
  } else if (params.which == 7 || params.which == 8) {
    const uint32_t fragment[4] = {in[0], in[1], in[2], in[3]};
    const uint32_t row = ptx::shared_address(shared_bytes) + 16 * in[4];
    if (params.which == 7) {
      ptx::stmatrix_x4(row, fragment);
    } else {
      ptx::stmatrix_x4_trans(row, fragment);
    }
    ptx::warp_sync();
    const uint32_t* words = reinterpret_cast<const uint32_t*>(shared_bytes + 16 * in[4]);
    for (int i = 0; i < 4; ++i) out[i] = words[i];
  } else {
    out[0] = __float_as_uint(ptx::shuffle(x, other));
    out[1] = __float_as_uint(ptx::shuffle_xor(x, 5));
    out[2] = ptx::warp_max(in[2]) + static_cast<uint32_t>(ptx::warp_uniform(other));
    out[3] = ptx::warp_any(in[3] != 0) + 2u * ptx::block_any(in[4] != 0);
  }
  for (int i = 0; i < 4; ++i) params.out[4 * threadIdx.x + i] = out[i];
}
