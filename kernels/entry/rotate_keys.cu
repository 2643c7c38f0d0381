// Rotates all keys of one request (RoPE) into scratch: with many query tiles, each of which would
// rotate them again, one pass over the keys is far cheaper.
#include "cupyattn/attention/rope.cuh"
#include "cupyattn/params/rotate_keys.cuh"
#include "cupyattn/ptx/warp.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = bfloat16_t;
  static constexpr int kHeadDim = 128;
  static constexpr int kThreads = 256;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_rotate_keys(const __grid_constant__ cupyattn::RotateKeysParams params) {
  using namespace cupyattn;
  using cupyattn::int64_t;  // hosts have another one
  using DType = typename Config::DType;
  constexpr int kPairs = Config::kHeadDim / 16;  // chunks of 8 elements against their partners
  __shared__ __align__(16) uint32_t step[Config::kHeadDim / 2];
  for (int i = threadIdx.x; i < Config::kHeadDim / 2; i += Config::kThreads) {
    step[i] = params.rope_step[i];
  }
  ptx::block_sync();

  const int64_t index = static_cast<int64_t>(blockIdx.x) * Config::kThreads + threadIdx.x;
  const int chunk = static_cast<int>(index % kPairs);
  const int64_t row = index / kPairs;
  const int head = static_cast<int>(row % params.num_kv_heads);
  const int64_t token = row / params.num_kv_heads;
  if (token >= params.kv_len) return;
  const Vector16* source = reinterpret_cast<const Vector16*>(
      static_cast<const DType*>(params.k) + token * params.k_stride_n + head * params.k_stride_h);
  Vector16* target =
      reinterpret_cast<Vector16*>(static_cast<DType*>(params.rotated) + row * Config::kHeadDim);
  Vector16 low = source[chunk];
  Vector16 high = source[chunk + kPairs];
  rotate_chunks<DType>(low, high, step + 8 * chunk, static_cast<uint32_t>(token));
  target[chunk] = low;
  target[chunk + kPairs] = high;
}
