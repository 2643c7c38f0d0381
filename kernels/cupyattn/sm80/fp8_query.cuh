// Prepares Q in shared memory for keys of fp8: bf16 rows become f16, times a power of two that the
// row's logit scale undoes (tile/half_rows.cuh), and rows of 8 bits as they are.
#pragma once

#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/shared/logits.cuh"
#include "cupyattn/tile/half_rows.cuh"
#include "cupyattn/tile/shared_tile.cuh"

namespace cupyattn {

// Converts a tile of bf16 rows to f16 in place; each warp takes rows. Rows from num_rows on are
// zeros in both types.
template <typename Tile, int kWarps>
__device__ __forceinline__ void scale_rows_to_half(unsigned char* tile, RowInfo* rows, int num_rows,
                                                   int warp, int lane) {
  constexpr int kWords = Tile::kColumns / 2;
  for (int row = warp; row < num_rows; row += kWarps) {
    uint32_t* words = reinterpret_cast<uint32_t*>(tile + row * Tile::kRowBytes);
    uint32_t largest = 0;
    for (int w = lane; w < kWords; w += kWarpSize) {
      const uint32_t magnitude = words[w] & 0x7fff7fffu;
      largest = max_of(largest, max_of(magnitude & 0xffffu, magnitude >> 16));
    }
    const int power = half_power_of_row(static_cast<int>(ptx::warp_max(largest) >> 7));
    const float factor = power_of_two(power);
    for (int w = lane; w < kWords; w += kWarpSize) words[w] = half_pair_of(words[w], factor);
    // mutate: row-power-not-undone
    if (lane == 0) rows[row].scale *= power_of_two(-power);
  }
}

// Copies the rows of Q, which lie at q_offset, from 8 bits; rows past the last become zeros.
template <typename From, typename Tile, int kHeadDim, bool kAligned, int kThreads>
__device__ __forceinline__ void widen_query_rows(unsigned char* tile, const AttentionParams& params,
                                                 const int64_t* q_offset, int num_rows,
                                                 int thread) {
  using T = typename Tile::T;
  const From* q = static_cast<const From*>(params.q);
#pragma unroll 2
  for (int index = thread; index < Tile::kRows * Tile::kChunks; index += kThreads) {
    const int row = index / Tile::kChunks, chunk = index % Tile::kChunks;
    const int column = chunk * Tile::kElementsPerChunk;
    const From* source = q + q_offset[row] + column;
    uint64_t bytes = 0;
    if constexpr (kAligned) {
      const bool exists = row < num_rows && (Tile::kColumns == kHeadDim || column < kHeadDim);
      if (exists) bytes = *reinterpret_cast<const uint64_t*>(source);
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kElementsPerChunk; ++i) {
        if (row < num_rows && column + i < kHeadDim) {
          const uint8_t byte = *reinterpret_cast<const uint8_t*>(source + i);
          bytes |= static_cast<uint64_t>(byte) << (8 * i);
        }
      }
    }
    // mutate: widened-row-of-another-half
    *reinterpret_cast<Vector16*>(tile + Tile::offset(row, chunk)) =
        ptx::fp8_to_vector<T, From>(bytes);
  }
}

// Reorders the columns of Q so that fragments of fp8 keys meet the right dims (see fragments.cuh).
template <typename Tile, int kThreads>
__device__ __forceinline__ void permute_for_fp8_keys(unsigned char* tile, int num_rows,
                                                     int thread) {
  constexpr int kGroups = Tile::kColumns / 16;
  for (int index = thread; index < num_rows * kGroups; index += kThreads) {
    const int row = index / kGroups, chunk = index % kGroups * 2;
    Vector16* first = reinterpret_cast<Vector16*>(tile + Tile::offset(row, chunk));
    Vector16* second = reinterpret_cast<Vector16*>(tile + Tile::offset(row, chunk + 1));
    const Vector16 a = *first, b = *second;
    // mutate: fp8-q-columns-swapped
    *first = Vector16{{a.word[0], a.word[2], b.word[0], b.word[2]}};
    *second = Vector16{{a.word[1], a.word[3], b.word[1], b.word[3]}};
  }
}

}  // namespace cupyattn
