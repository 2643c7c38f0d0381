// Rows of bf16 that become f16, to meet keys of fp8: fp8 converts to f16 in one instruction and to
// bf16 in several. f16 holds what bf16 does where elements are neither large nor tiny. A row whose
// largest element lies outside of that range is multiplied by a power of two, which its logits give
// back. All kernels choose the same power, so that a row's products have the same bits in each.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/ptx/convert.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

// The exponent of a row's power, given the biased exponent of its largest element. An f16 is below
// 2^16, and its last bit weighs 2^-24 at least. A largest element from 2^-6 to 2^16 stays: then no
// element is rounded by more than 2^-19 of it. Any other becomes 2^14 and more. Rows of zeros, and rows
// with an infinity, stay too.
__device__ __forceinline__ int half_power_of_row(int exponent) {
  constexpr int kBias = 127, kTop = 14, kLeast = -6;
  const bool stays = exponent >= kBias + kLeast && exponent < kBias + 16;
  if (exponent == 0 || exponent == 255 || stays) return 0;
  return min_of(kBias + kTop - exponent, 126);
}

// 2^power, which is a normal float.
__device__ __forceinline__ float power_of_two(int power) {
  return __uint_as_float(static_cast<uint32_t>(127 + power) << 23);
}

// The larger of `largest` and the magnitudes of a pair that are numbers.
__device__ __forceinline__ float larger_of_pair(float largest, uint32_t pair) {
  float low, high;
  ptx::unpack_pair<bfloat16_t>(pair, low, high);
  return fmaxf(largest, fmaxf(fabsf(low), fabsf(high)));
}

__device__ __forceinline__ uint32_t half_pair_of(uint32_t pair, float factor) {
  float low, high;
  ptx::unpack_pair<bfloat16_t>(pair, low, high);
  return ptx::pack_pair<half_t>(low * factor, high * factor);
}

// Converts a warp's 16 rows of a tile of panels in place, from `first_row` on. Returns the powers of
// the two rows of whose products this thread has accumulators, lane / 4 and 8 further, as two signed
// bytes at bits 0 and 16.
template <typename Tile>
__device__ __forceinline__ uint32_t convert_rows_to_half(unsigned char* tile, int first_row,
                                                         int lane) {
  // Eight lanes have a row, and a chunk of it in each panel; a step takes four rows.
  uint32_t powers = 0;  // of the lane's row of each step, in a byte
  unsigned char* const own = tile + (first_row + lane / 8) * Tile::kRowBytes + lane % 8 * 16;
#pragma unroll(Tile::kPanels > 2 ? 1 : 2)
  for (int step = 0; step < 4; ++step) {
    const int column = (lane ^ (4 * step + lane / 8)) & 7;  // in units of chunks
    Vector16* chunks[Tile::kPanels];
    Vector16 pairs[Tile::kPanels];
    float largest = 0.0f;
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      chunks[panel] = reinterpret_cast<Vector16*>(own + panel * Tile::kPanelBytes +
                                                  4 * step * Tile::kRowBytes);
      // Nobody has written, or multiplies, chunks past the last.
      pairs[panel] = Vector16{};
      if (8 * panel + column >= Tile::kChunks) continue;
      pairs[panel] = *chunks[panel];
#pragma unroll
      for (int w = 0; w < 4; ++w) largest = larger_of_pair(largest, pairs[panel].word[w]);
    }
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) {
      largest = fmaxf(largest, ptx::shuffle_xor(largest, mask));
    }
    const int power = half_power_of_row(static_cast<int>(__float_as_uint(largest) >> 23));
    powers |= (static_cast<uint32_t>(power) & 0xffu) << (8 * step);
    const float factor = power_of_two(power);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      if (8 * panel + column >= Tile::kChunks) continue;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        pairs[panel].word[w] = half_pair_of(pairs[panel].word[w], factor);
      }
      *chunks[panel] = pairs[panel];
    }
  }
  const int row = lane / 4;
  const auto found = static_cast<uint32_t>(
      ptx::shuffle(static_cast<int>(powers), row % 4 * 8));
  return (found >> (row / 4 * 8)) & 0x00ff00ffu;  // mutate: power-of-another-row
}

// Gives back the powers of a thread's two rows of products.
template <int kTiles>
__device__ __forceinline__ void undo_powers(float (&s)[1][kTiles][4], uint32_t powers) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // mutate: hopper-row-power-not-undone
    const float factor = power_of_two(-static_cast<int8_t>(powers >> (16 * h)));
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      s[0][n][2 * h] *= factor;
      s[0][n][2 * h + 1] *= factor;
    }
  }
}

}  // namespace cupyattn
