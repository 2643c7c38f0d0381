// Prepares Q in shared memory for keys of fp8. fp8 converts to f16 in one instruction and to bf16
// in several, so bf16 rows of Q become f16. A power of two puts the largest element of a row at the
// top of f16's range, which keeps the row's large elements exact; the row's logit scale undoes it.
#pragma once

#include "cupyattn/shared/logits.cuh"
#include "cupyattn/tile/shared_tile.cuh"

namespace cupyattn {

// Converts a tile of bf16 rows to f16 in place; each warp takes rows. Rows from num_rows on are
// zeros in both types.
template <typename Tile, int kWarps>
__device__ __forceinline__ void scale_rows_to_half(unsigned char* tile, RowInfo* rows, int num_rows,
                                                   int warp, int lane) {
  constexpr int kWords = Tile::kColumns / 2;
  constexpr int kTopExponent = 127 + 14;  // of 2^14, biased
  for (int row = warp; row < num_rows; row += kWarps) {
    uint32_t* words = reinterpret_cast<uint32_t*>(tile + row * Tile::kRowBytes);
    uint32_t largest = 0;
    for (int w = lane; w < kWords; w += kWarpSize) {
      const uint32_t magnitude = words[w] & 0x7fff7fffu;
      largest = max_of(largest, max_of(magnitude & 0xffffu, magnitude >> 16));
    }
    const int exponent = static_cast<int>(ptx::warp_max(largest) >> 7);
    // Rows of zeros, and rows with a NaN or infinity, stay as they are.
    const int shift = exponent == 0 || exponent == 255 ? 0 : min_of(kTopExponent - exponent, 126);
    const float factor = __uint_as_float(static_cast<uint32_t>(127 + shift) << 23);
    for (int w = lane; w < kWords; w += kWarpSize) {
      float low, high;
      ptx::unpack_pair<bfloat16_t>(words[w], low, high);
      words[w] = ptx::pack_pair<half_t>(low * factor, high * factor);
    }
    // mutate: row-power-not-undone
    if (lane == 0) rows[row].scale *= __uint_as_float(static_cast<uint32_t>(127 - shift) << 23);
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
