// Numbers in, numbers out: the conversions of the twins, for tests to compare with other makers'.
#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/convert.cuh"
#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "emulator/numbers.h"

namespace {

struct Params {
  const uint32_t* in;  // [num, 3]
  uint32_t* out;       // [num, 2]
  int num, which;
};

using namespace cupyattn;

constexpr emulator::FloatFormat kFormats[] = {emulator::kHalf, emulator::kBfloat16, emulator::kE4m3,
                                              emulator::kE5m2};

template <typename T>
uint32_t unpacked(uint32_t pair, uint32_t& high) {
  float values[2];
  ptx::unpack_pair<T>(pair, values[0], values[1]);
  high = __float_as_uint(values[1]);
  return __float_as_uint(values[0]);
}

uint32_t answer(int which, const uint32_t* in, uint32_t& second) {
  const float x = __uint_as_float(in[0]), y = __uint_as_float(in[1]);
  switch (which) {
    case 0:
    case 1:
    case 2:
    case 3:
      return emulator::encode(x, kFormats[which]);
    case 4:
    case 5:
    case 6:
    case 7:
      return __float_as_uint(emulator::decode(in[0], kFormats[which - 4]));
    case 8:
      return ptx::pack_pair<half_t>(x, y);
    case 9:
      return ptx::pack_pair<bfloat16_t>(x, y);
    case 10:
      return unpacked<half_t>(in[0], second);
    case 11:
      return unpacked<bfloat16_t>(in[0], second);
    case 12:
      return ptx::multiply_add_pair<half_t>(in[0], in[1], in[2]);
    case 13:
      return ptx::multiply_add_pair<bfloat16_t>(in[0], in[1], in[2]);
    case 14:
      return ptx::permute_bytes(in[0], in[1], in[2]);
    case 15:
      second = ptx::Fp8ToHalfPair<e4m3_t, 1, 3>::convert(in[0]);
      return ptx::Fp8ToHalfPair<e4m3_t, 0, 1>::convert(in[0]);
    case 16:
      second = ptx::Fp8ToHalfPair<e5m2_t, 2, 0>::convert(in[0]);
      return ptx::Fp8ToHalfPair<e5m2_t, 0, 1>::convert(in[0]);
    case 17:
      return ptx::fp8_to_pair<bfloat16_t, e4m3_t, 0, 1>(in[0]);
    case 18:
      return __float_as_uint(ptx::ex2_approx(x));
    case 19:
      return __float_as_uint(ptx::rcp_approx(x));
    case 20:
      return ptx::funnel_shift_right(in[0], in[1], in[2]);
  }
  return 0;
}

}  // namespace

extern "C" __global__ void cupyattn_numbers(const __grid_constant__ Params params) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = index; i < params.num; i += gridDim.x * blockDim.x) {
    uint32_t second = 0;
    params.out[2 * i] = answer(params.which, params.in + 3 * i, second);
    params.out[2 * i + 1] = second;
  }
}
