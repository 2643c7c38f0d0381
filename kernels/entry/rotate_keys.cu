// Rotates all keys (RoPE) into scratch. Many query tiles would each rotate the same keys again, so
// one pass ahead is far cheaper.
#include "cupyattn/params/rotate_keys.cuh"
#include "cupyattn/ptx/warp.cuh"
#include "cupyattn/shared/rope.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  using DType = bfloat16_t;
  static constexpr int kHeadDim = 128, kThreads = 256, kHeads = 4;
  static constexpr bool kPaged = false;
};
#endif

namespace cupyattn {

// The keys that a block rotates. The keys of a request are shared equally by its tiles of rows,
// times the depth of the grid.
struct KeyShare {
  int kv_start, begin, end;

  static __device__ __forceinline__ KeyShare of(const RotateKeysParams& params) {
    int kv_start = 0, kv_len = params.kv_len, share = blockIdx.x, num_shares = gridDim.x;
    if (params.work != nullptr) {
      const WorkItem item = params.work[blockIdx.x];
      if (item.split != 0 || item.qo_len == 0) return KeyShare{0, 0, 0};
      kv_start = item.kv_start;
      kv_len = item.kv_len;
      share = item.first_row / params.tile_rows;  // mutate: every-tile-rotates-first-share
      num_shares = ceil_div(item.qo_len * params.group_size, params.tile_rows);
    }
    share = share * gridDim.z + blockIdx.z;
    num_shares *= gridDim.z;
    const int64_t product = static_cast<int64_t>(kv_len) * share;
    return KeyShare{kv_start, static_cast<int>(product / num_shares),
                    static_cast<int>((product + kv_len) / num_shares)};
  }
};

}  // namespace cupyattn

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_rotate_keys(const __grid_constant__ cupyattn::RotateKeysParams params) {
  using namespace cupyattn;
  using cupyattn::int64_t;  // a host's <cstdint> has another one
  using DType = typename Config::DType;
  constexpr int kPairs = Config::kHeadDim / 16;  // pairs of chunks of 8 elements
  __shared__ __align__(16) uint32_t step[Config::kHeadDim / 2];
  for (int i = threadIdx.x; i < Config::kHeadDim / 2; i += Config::kThreads) {
    step[i] = params.rope_step[i];
  }
  ptx::block_sync();

  const KeyShare keys = KeyShare::of(params);
  const int first_head = Config::kHeads * blockIdx.y;
  const int64_t num_chunks = static_cast<int64_t>(keys.end - keys.begin) * kPairs;
  for (int64_t index = threadIdx.x; index < num_chunks; index += Config::kThreads) {
    const int key = keys.begin + static_cast<int>(index / kPairs);
    const int chunk = static_cast<int>(index % kPairs);
    int64_t from = (static_cast<int64_t>(keys.kv_start) + key) * params.k_stride_n;
    int64_t to = static_cast<int64_t>(keys.kv_start) + key;
    if constexpr (Config::kPaged) {
      const int page =
          static_cast<int>(ptx::multiply_high(2u * static_cast<uint32_t>(key), params.page_magic) >>
                           params.page_shift);
      const int slot = key - page * params.page_size;
      from =
          params.kv_indices[keys.kv_start + page] * params.k_stride_page + slot * params.k_stride_n;
      to = (static_cast<int64_t>(keys.kv_start) + page) * params.page_size + slot;
    }
    const DType* source = static_cast<const DType*>(params.k) + from;
    DType* target =
        static_cast<DType*>(params.rotated) + to * params.num_kv_heads * Config::kHeadDim;
    Vector16 low[Config::kHeads], high[Config::kHeads];
#pragma unroll
    for (int i = 0; i < Config::kHeads; ++i) {
      const int head = min_of(first_head + i, params.num_kv_heads - 1);
      const Vector16* chunks = reinterpret_cast<const Vector16*>(source + head * params.k_stride_h);
      low[i] = chunks[chunk];
      high[i] = chunks[chunk + kPairs];
    }
    // mutate: keys-rotated-too-far
    rotate_chunks<DType>(low, high, step + 8 * chunk, static_cast<uint32_t>(key));
#pragma unroll
    for (int i = 0; i < Config::kHeads; ++i) {
      const int head = first_head + i;
      if (head == params.num_kv_heads) break;
      Vector16* chunks = reinterpret_cast<Vector16*>(target + head * Config::kHeadDim);
      chunks[chunk] = low[i];
      chunks[chunk + kPairs] = high[i];
    }
  }
}
