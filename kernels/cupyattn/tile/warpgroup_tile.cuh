// Tiles as the copy engine leaves them and a warpgroup multiplies them: panels of 64 columns, whose
// rows are 128-byte lines with their chunks swizzled in patterns of eight lines; and the two
// products.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/convert.cuh"
#include "cupyattn/ptx/warpgroup.cuh"

namespace cupyattn {

// Panels follow each other whole, or, where rows come by pages, eight lines at a time: then any
// number of patterns of rows is one piece of memory.
template <typename Element, int kRowsInTile, int kHeadDim, bool kByPatterns = false>
struct PanelTile {
  using T = Element;
  static constexpr int kRows = kRowsInTile;
  static constexpr int kRowBytes = 128;
  static constexpr int kPatternBytes = 8 * kRowBytes;
  static constexpr int kPanels = ceil_div(kHeadDim, 64);
  static constexpr int kBytes = kPanels * kRows * kRowBytes;
  static constexpr int kChunks = kHeadDim / 8;
  // With those that no row has, but the last panel.
  static constexpr int kPlaces = 8 * kPanels;
  static constexpr int kAlign = kPatternBytes;
  // From a panel to the next, and from eight rows to the next eight.
  static constexpr int kPanelBytes = kByPatterns ? kPatternBytes : kRows * kRowBytes;
  // mutate: row-groups-without-panels
  static constexpr int kGroupBytes = kByPatterns ? kPanels * kPatternBytes : kPatternBytes;
  static_assert(kRows % 8 == 0, "a panel holds whole patterns");
  static_assert(kHeadDim % 8 == 0, "rows are whole chunks");

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row / 8 * kGroupBytes + chunk / 8 * kPanelBytes + row % 8 * kRowBytes +
           ((chunk ^ row) & 7) * 16;
  }
  // From the place of a chunk to that of the same one `rows` further, if they are bits that the row
  // lacks.
  static __device__ __forceinline__ uint32_t further(uint32_t place, int rows) {
    return (place ^ (rows * 16)) + rows * kRowBytes;
  }
  // The row that the byte at an offset is of.
  static __device__ __forceinline__ int row_at(int offset) {
    if constexpr (kByPatterns) return offset / kGroupBytes * 8 + offset / kRowBytes % 8;
    return offset / kRowBytes % kRows;
  }
};

// Multiplies 64 rows of a tile, from `first_row` on, by a power of two. Their chunks are looked at
// in the order of memory, which is any.
template <typename Tile, int kThreads>
__device__ __forceinline__ void scale_rows(unsigned char* tile, int first_row, float factor,
                                           int thread) {
  constexpr uint32_t kMinusZeros = 0x80008000u;  // which, added, leaves a zero its sign
  const uint32_t factors = ptx::pack_pair<typename Tile::T>(factor, factor);
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    Vector16* rows = reinterpret_cast<Vector16*>(tile + panel * Tile::kPanelBytes +
                                                 first_row * Tile::kRowBytes);
#pragma unroll
    for (int i = 0; i < 64 * Tile::kRowBytes / 16; i += kThreads) {
      Vector16 chunk = rows[i + thread];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        chunk.word[w] =
            // mutate: queries-not-scaled
            ptx::multiply_add_pair<typename Tile::T>(chunk.word[w], factors, kMinusZeros);
      }
      rows[i + thread] = chunk;
    }
  }
}

// Rows of bytes one after another: what is yet to become elements of panels.
template <typename Element, int kRowsInTile, int kHeadDim>
struct RowTile {
  using T = Element;
  static constexpr int kRows = kRowsInTile;
  static constexpr int kRowBytes = kHeadDim * sizeof(Element);
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kPanels = 1;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kPlaces = kChunks;
  static constexpr int kAlign = 128;
  // From eight chunks of a row to the next, and from eight rows.
  static constexpr int kPanelBytes = 128;
  static constexpr int kGroupBytes = 8 * kRowBytes;
  static_assert(kRows % 8 == 0 && kRowBytes % 16 == 0, "rows come in groups, and in whole chunks");

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kRowBytes + chunk * 16;
  }
  static __device__ __forceinline__ uint32_t further(uint32_t place, int rows) {
    return place + rows * kRowBytes;
  }
};

// How wgmma finds an operand: bytes between groups of eight rows and, where columns are the outer
// dimension, between panels.
template <typename Tile>
__device__ __forceinline__ uint64_t operand_at(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kGroup = static_cast<uint64_t>(Tile::kGroupBytes >> 4) << 32;
  constexpr uint64_t kPanel = static_cast<uint64_t>(Tile::kPanelBytes >> 4) << 16;
  return kSwizzle128 | kGroup | kPanel | ((address & 0x3ffffu) >> 4);
}

// Issues S = Q K^T for 64 rows of Q from the operand's on, and all keys of a tile.
template <typename T, typename QTile, typename KTile, int kHeadDim>
__device__ __forceinline__ void issue_qk(float (&s)[1][KTile::kRows / 8][4], uint64_t q,
                                         uint64_t k) {
  static_assert(kHeadDim % 16 == 0, "products take 16 columns");
  float (&d)[KTile::kRows / 2] = reinterpret_cast<float (&)[KTile::kRows / 2]>(s);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    // In units of 16 bytes.
    const uint64_t a = step / 4 * (QTile::kPanelBytes / 16) + step % 4 * 2;
    const uint64_t b = step / 4 * (KTile::kPanelBytes / 16) + step % 4 * 2;
    ptx::Wgmma<KTile::kRows>::template multiply_ss<T>(d, q + a, k + b, step != 0);
  }
}

// Issues O = P V, or O += P V if `adds`; p[i] are the fragments of keys 16 i and on.
template <typename T, typename VTile, int kHeadDim>
__device__ __forceinline__ void issue_pv(float (&o)[1][kHeadDim / 8][4],
                                         const uint32_t (&p)[VTile::kRows / 16][1][4], uint64_t v,
                                         bool adds) {
  float (&d)[kHeadDim / 2] = reinterpret_cast<float (&)[kHeadDim / 2]>(o);
#pragma unroll
  for (int step = 0; step < VTile::kRows / 16; ++step) {
    ptx::Wgmma<kHeadDim>::template multiply_rs<T>(
        d, p[step][0], v + step * (2 * VTile::kGroupBytes / 16), step != 0 || adds);
  }
}

// After a wait: the accumulators have changed.
template <int kTiles>
__device__ __forceinline__ void take_results(float (&accumulators)[1][kTiles][4]) {
  ptx::wgmma_results(reinterpret_cast<float (&)[4 * kTiles]>(accumulators));
}

}  // namespace cupyattn
