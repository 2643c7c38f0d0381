// Rotary position embedding (arXiv 2104.09864), half-split pairs (i, i + D / 2), applied to tiles
// in shared memory. Angles are kept in turns as 32-bit fractions: position * step wraps exactly at
// a full turn, so there is no range reduction and no loss at long contexts.
#pragma once

#include "cupyattn/params/attention.cuh"
#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/tile/shared_tile.cuh"

namespace cupyattn {

// The rotation by position * step turns / 2^32.
__device__ __forceinline__ void rotation(uint32_t step, uint32_t position, float& cosine,
                                         float& sine) {
  constexpr float kRadians = 6.283185307179586f;
  // Half a turn is added so that the float below, in [1, 2) - 1.5, is centred on the angle.
  const uint32_t turns = position * step + 0x80000000u;
  const float centred = __uint_as_float((turns >> 9) | 0x3f800000u) - 1.5f;
  cosine = ptx::cos_approx(centred * kRadians);
  sine = ptx::sin_approx(centred * kRadians);
}

// The angle steps of a head dim, in shared memory: parameters sit in constant memory, which serves
// one address at a time.
template <int kHeadDim>
struct RopeSteps {
  uint32_t step[kHeadDim / 2];

  __device__ __forceinline__ void fill(const AttentionParams& params, int thread, int threads) {
    for (int i = thread; i < kHeadDim / 2; i += threads) step[i] = params.rope_step[i];
  }
};

// The rotation of two neighbouring pairs.
struct RotationOf2 {
  float cosine[2], sine[2];

  __device__ __forceinline__ RotationOf2(const uint32_t* rope_step, uint32_t position) {
#pragma unroll
    for (int e = 0; e < 2; ++e) rotation(rope_step[e], position, cosine[e], sine[e]);
  }
  // Rotates two elements of a row, `low`, against those half a head dim further on, `high`.
  template <typename T>
  __device__ __forceinline__ void apply(uint32_t& low, uint32_t& high) const {
    float x[2], y[2];
    ptx::unpack_pair<T>(low, x[0], x[1]);
    ptx::unpack_pair<T>(high, y[0], y[1]);
    // mutate: rope-inverted
    low = ptx::pack_pair<T>(x[0] * cosine[0] - y[0] * sine[0], x[1] * cosine[1] - y[1] * sine[1]);
    high = ptx::pack_pair<T>(y[0] * cosine[0] + x[0] * sine[0], y[1] * cosine[1] + x[1] * sine[1]);
  }
};

// Rotates 8 pairs of each of kRows rows at one position: elements [8 c, 8 c + 8) against those half
// a head dim further on.
template <typename T, int kRows>
__device__ __forceinline__ void rotate_chunks(Vector16 (&low)[kRows], Vector16 (&high)[kRows],
                                              const uint32_t* rope_step, uint32_t position) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const RotationOf2 rotation(rope_step + 2 * w, position);
#pragma unroll
    for (int r = 0; r < kRows; ++r) rotation.apply<T>(low[r].word[w], high[r].word[w]);
  }
}

// Rotates kRows rows of a 16-bit tile in place, from `first_row` on; row r is at position
// `position_of(r)`.
template <typename Tile, int kHeadDim, int kRows, int kThreads, typename PositionOf>
__device__ __forceinline__ void rotate_rows(unsigned char* tile, int first_row,
                                            const RopeSteps<kHeadDim>& steps, int thread,
                                            PositionOf&& position_of) {
  static_assert(kHeadDim % 16 == 0, "RoPE rotates whole 16-byte chunks against each other");
  constexpr int kPairs = kHeadDim / 16;
  for (int index = thread; index < kRows * kPairs; index += kThreads) {
    const int row = first_row + index / kPairs;
    const int chunk = index % kPairs;
    Vector16& low_chunk = *reinterpret_cast<Vector16*>(tile + Tile::offset(row, chunk));
    Vector16& high_chunk = *reinterpret_cast<Vector16*>(tile + Tile::offset(row, chunk + kPairs));
    Vector16 low[1] = {low_chunk}, high[1] = {high_chunk};
    rotate_chunks<typename Tile::T>(low, high, steps.step + 8 * chunk,
                                    static_cast<uint32_t>(position_of(row)));
    low_chunk = low[0];
    high_chunk = high[0];
  }
}

// Rotates all rows of a tile.
template <typename Tile, int kHeadDim, int kThreads, typename PositionOf>
__device__ __forceinline__ void rotate_tile(unsigned char* tile, const RopeSteps<kHeadDim>& steps,
                                            int thread, PositionOf&& position_of) {
  rotate_rows<Tile, kHeadDim, Tile::kRows, kThreads>(tile, 0, steps, thread, position_of);
}

// Converts a tile of fp8 rows to 16 bits, for keys that are rotated before the product.
template <typename Fp8Tile, typename Tile, int kThreads>
__device__ __forceinline__ void convert_tile(const unsigned char* source, unsigned char* tile,
                                             int thread) {
  using Fp8 = typename Fp8Tile::T;
  using T = typename Tile::T;
  constexpr int kGroups = Tile::kColumns / 8;
  for (int index = thread; index < Tile::kRows * kGroups; index += kThreads) {
    const int row = index / kGroups;
    const int group = index % kGroups;
    const uint32_t* bytes =
        reinterpret_cast<const uint32_t*>(source + Fp8Tile::offset(row, group / 2) + group % 2 * 8);
    Vector16 out;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      out.word[2 * w] = ptx::fp8_to_pair<T, Fp8, 0, 1>(bytes[w]);
      out.word[2 * w + 1] = ptx::fp8_to_pair<T, Fp8, 2, 3>(bytes[w]);
    }
    *reinterpret_cast<Vector16*>(tile + Tile::offset(row, group)) = out;
  }
}

}  // namespace cupyattn
