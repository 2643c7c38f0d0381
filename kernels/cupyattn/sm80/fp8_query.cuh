// Prepares Q in shared memory for keys of fp8: bf16 rows become f16, times a power of two that the
// row's logit scale undoes (tile/half_rows.cuh).
#pragma once

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
