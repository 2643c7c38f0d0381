// Tiles that the copy engine writes and a warpgroup multiplies, and the two products. A tile is
// panels of 64 columns, or of 128 of 8 bits: 128-byte lines whose chunks are swizzled in patterns of
// eight lines. A head dim may be any multiple of 8: products take its columns and, if their steps do,
// a few more, which are zeros.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/ptx/ldmatrix.cuh"
#include "cupyattn/ptx/warpgroup.cuh"

namespace cupyattn {

// Panels follow each other whole, or eight lines at a time (kByPatterns): rows of a page are then
// one piece of memory.
template <typename Element, int kRowsInTile, int kHeadDim, bool kByPatterns = false>
struct PanelTile {
  using T = Element;
  static constexpr int kRows = kRowsInTile, kRowBytes = 128, kPatternBytes = 8 * kRowBytes;
  static constexpr int kPanelColumns = kRowBytes / sizeof(Element);
  static constexpr int kPanels = ceil_div(kHeadDim, kPanelColumns);
  static constexpr int kBytes = kPanels * kRows * kRowBytes;
  static constexpr int kChunks = kHeadDim * sizeof(Element) / 16;
  static constexpr int kBytesOfLastChunk = 16;
  // Copies bring no more columns of the last panel than products take. The rest of it is never
  // written.
  static constexpr int kTailColumns = round_up(kHeadDim - (kPanels - 1) * kPanelColumns,
                                               32 / static_cast<int>(sizeof(Element)));
  static constexpr bool kHasTail = kTailColumns < kPanelColumns;
  // Chunks of a row, with the one of them that it may lack.
  static constexpr int kPlaces = ((kPanels - 1) * kPanelColumns + kTailColumns) *
                                 static_cast<int>(sizeof(Element)) / 16;
  static constexpr int kCopiedBytes =
      kBytes - (kPanelColumns - kTailColumns) * static_cast<int>(sizeof(Element)) * kRows;
  static constexpr int kAlign = kPatternBytes;
  // Steps from a panel to the next, and from eight rows to the next eight.
  static constexpr int kPanelBytes = kByPatterns ? kPatternBytes : kRows * kRowBytes;
  // mutate: row-groups-without-panels
  static constexpr int kGroupBytes = kByPatterns ? kPanels * kPatternBytes : kPatternBytes;
  static constexpr bool kIsByPatterns = kByPatterns;
  static_assert(kRows % 8 == 0, "a panel has whole patterns");
  static_assert(kHeadDim * sizeof(Element) % 16 == 0, "rows are whole chunks");

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row / 8 * kGroupBytes + chunk / 8 * kPanelBytes + row % 8 * kRowBytes +
           ((chunk ^ row) & 7) * 16;
  }
  // The place of the same chunk `rows` further down, if `rows` and the row share no bit.
  static __device__ __forceinline__ uint32_t further(uint32_t place, int rows) {
    return (place ^ (rows * 16)) + rows * kRowBytes;
  }
  // Whether a copy brings the 16 bytes at this index.
  static __device__ __forceinline__ bool is_copied(int index) {
    constexpr int kTailPlace = (kPanels - 1) * kRows * 8;
    if constexpr (!kHasTail) return true;
    return index < kTailPlace || ((index ^ (index >> 3)) & 7) <
                                     kTailColumns * static_cast<int>(sizeof(Element)) / 16;
  }
  // The row of the byte at `offset`.
  static __device__ __forceinline__ int row_at(int offset) {
    if constexpr (kByPatterns) return offset / kGroupBytes * 8 + offset / kRowBytes % 8;
    return offset / kRowBytes % kRows;
  }
};

// Multiplies 64 rows of a tile, from `first_row` on, by a power of two, in the order of memory.
template <typename Tile, int kThreads>
__device__ __forceinline__ void scale_rows(unsigned char* tile, int first_row, float factor,
                                           int thread) {
  constexpr uint32_t kMinusZeros = 0x80008000u;  // adding them keeps the sign of a zero
  const uint32_t factors = ptx::pack_pair<typename Tile::T>(factor, factor);
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    // A thread's chunks are all of one column. Nobody has written, or multiplies, those past the last.
    const int chunk_of_row = 8 * panel + ((thread ^ (thread >> 3)) & 7);
    if (Tile::kChunks < 8 * Tile::kPanels && chunk_of_row >= Tile::kChunks) continue;
    Vector16* rows =
        reinterpret_cast<Vector16*>(tile + panel * Tile::kPanelBytes + first_row * Tile::kRowBytes);
#pragma unroll 2
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

// Rows one after another: fp8 tiles as they land, before they are converted to panels. Rows are
// filled up to whole chunks.
template <typename Element, int kRowsInTile, int kHeadDim>
struct RowTile {
  using T = Element;
  static constexpr int kChunks = ceil_div(kHeadDim * static_cast<int>(sizeof(Element)), 16);
  static constexpr int kRows = kRowsInTile, kRowBytes = 16 * kChunks;
  static constexpr int kBytesOfLastChunk = kHeadDim * sizeof(Element) - 16 * (kChunks - 1);
  static constexpr int kBytes = kRows * kRowBytes, kPanelColumns = kHeadDim, kPanels = 1;
  static constexpr int kPlaces = kChunks, kAlign = 128;
  static constexpr int kCopiedBytes = kBytes;
  static constexpr bool kHasTail = false;
  // Steps from eight chunks of a row to the next, and from eight rows to the next eight.
  static constexpr int kPanelBytes = 128, kGroupBytes = 8 * kRowBytes;
  static constexpr bool kIsByPatterns = false;
  static_assert(kRows % 8 == 0, "rows come in groups");

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kRowBytes + chunk * 16;
  }
  static __device__ __forceinline__ uint32_t further(uint32_t place, int rows) {
    return place + rows * kRowBytes;
  }
};

// A tile whose rows a product takes 32 bytes at a time: panels of one step of it, in swizzled lines
// of 32 bytes, kStepBytes apart. So rows may have any multiple of 32 columns.
template <typename Element, int kRowsInTile, int kColumns, int kStepBytes = 32 * kRowsInTile>
struct StepTile {
  using T = Element;
  static constexpr int kRows = kRowsInTile, kRowBytes = 32, kGroupBytes = 8 * kRowBytes;
  static constexpr int kPanelBytes = kStepBytes;
  static constexpr int kPanels = kColumns * sizeof(Element) / kRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes, kAlign = kGroupBytes;
  static_assert(kRows % 8 == 0 && kColumns * sizeof(Element) % kRowBytes == 0 &&
                    kRows * kRowBytes <= kPanelBytes,
                "panels are whole");

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return chunk / 2 * kPanelBytes + row * kRowBytes + ((chunk ^ (row >> 2)) & 1) * 16;
  }
};

// The descriptor by which wgmma finds an operand: its address, the bytes between groups of eight
// rows, and the bytes between panels if columns are the outer dimension.
template <typename Tile>
__device__ __forceinline__ uint64_t operand_at(uint32_t address) {
  static_assert(Tile::kRowBytes == 128 || Tile::kRowBytes == 32, "the swizzles of tiles");
  constexpr uint64_t kSwizzle = (Tile::kRowBytes == 128 ? 1ull : 3ull) << 62;
  constexpr uint64_t kGroup = static_cast<uint64_t>(Tile::kGroupBytes >> 4) << 32;
  constexpr uint64_t kPanel = static_cast<uint64_t>(Tile::kPanelBytes >> 4) << 16;
  return kSwizzle | kGroup | kPanel | ((address & 0x3ffffu) >> 4);
}

// The steps of a product: of Q and K, or of probabilities and V.
template <typename Rows, typename KV>
struct MmaTraits {
  static_assert(is_same<Rows, KV> && sizeof(KV) <= 2, "wgmma of 16-bit and of 8-bit elements");
  static constexpr int kStep = 32 / sizeof(KV);  // columns of Q, or keys, that a product takes
};

// Issues S = Q K^T for 64 rows of Q, from that of operand `q` on, and all keys of a tile. The columns
// of the last step that the head dim lacks are zeros in both tiles.
template <typename QTile, typename KTile, int kHeadDim>
__device__ __forceinline__ void issue_qk(float (&s)[1][KTile::kRows / 8][4], uint64_t q,
                                         uint64_t k) {
  using Mma = MmaTraits<typename QTile::T, typename KTile::T>;
  constexpr int kStepsInPanel = QTile::kPanelColumns / Mma::kStep;
  float (&d)[KTile::kRows / 2] = reinterpret_cast<float (&)[KTile::kRows / 2]>(s);
#pragma unroll
  for (int step = 0; step < ceil_div(kHeadDim, Mma::kStep); ++step) {  // mutate: last-columns-lost
    // Offsets are in units of 16 bytes; a step is two of them.
    const int panel = step / kStepsInPanel, chunk = step % kStepsInPanel * 2;
    const uint64_t a = panel * (QTile::kPanelBytes / 16) + chunk;
    const uint64_t b = panel * (KTile::kPanelBytes / 16) + chunk;
    if constexpr (sizeof(typename QTile::T) == 1) {
      ptx::Wgmma<KTile::kRows>::template multiply_ss_8<typename QTile::T>(d, q + a, k + b,
                                                                          step != 0);
    } else {
      ptx::Wgmma<KTile::kRows>::template multiply_ss<typename QTile::T>(d, q + a, k + b, step != 0);
    }
  }
}

// The rows of Q of a warp, from `first_row` of a tile of 8 bits on, as fragments of the product.
template <typename QTile, int kSteps>
__device__ __forceinline__ void load_fragments_of_bytes(uint32_t (&q)[kSteps][4], uint32_t tile,
                                                        int first_row, int lane) {
  static_assert(QTile::kPanels * QTile::kPanelColumns >= 32 * kSteps && sizeof(typename QTile::T) == 1,
                "a step takes 32 bytes of a row");
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::ldmatrix_x4(q[step],
                     tile + QTile::offset(first_row + (lane & 15), 2 * step + (lane >> 4)));
  }
}

// As issue_qk, of fragments of Q of 8 bits.
template <typename KTile, int kSteps>
__device__ __forceinline__ void issue_qk_of_fragments(float (&s)[1][KTile::kRows / 8][4],
                                                      const uint32_t (&q)[kSteps][4], uint64_t k) {
  constexpr int kStepsInPanel = KTile::kPanelColumns / 32;
  float (&d)[KTile::kRows / 2] = reinterpret_cast<float (&)[KTile::kRows / 2]>(s);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint64_t b =
        step / kStepsInPanel * (KTile::kPanelBytes / 16) + step % kStepsInPanel * 2;
    ptx::Wgmma<KTile::kRows>::template multiply_rs_8<typename KTile::T>(d, q[step], k + b,
                                                                        step != 0);
  }
}

// The operand `step` units of 16 bytes behind another. The upper word stays a constant, so that no
// 64-bit addition stands between two products.
template <typename Tile>
__device__ __forceinline__ uint64_t operand_behind(uint64_t operand, uint32_t step) {
  return operand_at<Tile>(0) & ~0xffffffffull | (static_cast<uint32_t>(operand) + step);
}

// Issues S = Q K^T, or S += Q K^T if `adds`, of some panels of columns.
template <typename QTile, typename KTile, int kFirstPanel, int kEndPanel>
__device__ __forceinline__ void issue_qk_panels(float (&s)[1][KTile::kRows / 8][4], uint64_t q,
                                                uint64_t k, bool adds) {
  constexpr int kSteps =
      QTile::kPanelColumns / MmaTraits<typename QTile::T, typename KTile::T>::kStep;
  float (&d)[KTile::kRows / 2] = reinterpret_cast<float (&)[KTile::kRows / 2]>(s);
#pragma unroll
  for (int panel = kFirstPanel; panel < kEndPanel; ++panel) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool is_first = panel == kFirstPanel && step == 0;
      ptx::Wgmma<KTile::kRows>::template multiply_ss<typename QTile::T>(
          d, operand_behind<QTile>(q, panel * (QTile::kPanelBytes / 16) + 2 * step),
          operand_behind<KTile>(k, panel * (KTile::kPanelBytes / 16) + 2 * step),
          !is_first || adds);
    }
  }
}

// Issues O = P V, or O += P V if `adds`; p[i] holds the fragments of the keys of step i.
template <typename VTile, int kHeadDim, int kSteps>
__device__ __forceinline__ void issue_pv(float (&o)[1][kHeadDim / 8][4],
                                         const uint32_t (&p)[kSteps][1][4], uint64_t v, bool adds) {
  static_assert(kSteps * MmaTraits<typename VTile::T, typename VTile::T>::kStep == VTile::kRows,
                "products take all keys of a tile");
  float (&d)[kHeadDim / 2] = reinterpret_cast<float (&)[kHeadDim / 2]>(o);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::Wgmma<kHeadDim>::template multiply_rs<typename VTile::T>(
        d, p[step][0], v + step * (2 * VTile::kGroupBytes / 16), step != 0 || adds);
  }
}

// The same of 8-bit elements, whose values are transposed: rows of the tile are columns of O.
template <typename VTile, int kHeadDim, int kSteps>
__device__ __forceinline__ void issue_pv_of_bytes(float (&o)[1][kHeadDim / 8][4],
                                                  const uint32_t (&p)[kSteps][1][4], uint64_t v,
                                                  bool adds) {
  static_assert(VTile::kRows == kHeadDim && VTile::kPanels == kSteps, "a step takes a panel");
  float (&d)[kHeadDim / 2] = reinterpret_cast<float (&)[kHeadDim / 2]>(o);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::Wgmma<kHeadDim>::template multiply_rs_8<typename VTile::T>(
        d, p[step][0], v + step * (VTile::kPanelBytes / 16), step != 0 || adds);
  }
}

// The same with probabilities in shared memory.
template <typename PTile, typename VTile, int kHeadDim>
__device__ __forceinline__ void issue_pv_shared(float (&o)[1][kHeadDim / 8][4], uint64_t p,
                                                uint64_t v, bool adds) {
  constexpr int kStep = MmaTraits<typename PTile::T, typename VTile::T>::kStep;
  static_assert(VTile::kRows <= PTile::kPanelColumns, "probabilities have one panel");
  float (&d)[kHeadDim / 2] = reinterpret_cast<float (&)[kHeadDim / 2]>(o);
#pragma unroll
  for (int step = 0; step < VTile::kRows / kStep; ++step) {
    ptx::Wgmma<kHeadDim>::template multiply_ss_transposed<typename VTile::T>(
        d, p + 2 * step, v + step * (2 * VTile::kGroupBytes / 16), step != 0 || adds);
  }
}

// Issues O^T += V^T P^T for some panels of 64 columns of values: columns are the rows of the
// product, and rows of probabilities its columns.
template <typename VTile, typename PTile, int kFirstPanel, int kEndPanel, int kPanels>
__device__ __forceinline__ void issue_pv_transposed(float (&o)[kPanels][PTile::kRows / 8][4],
                                                    uint64_t v, uint64_t p) {
  constexpr int kStep = MmaTraits<typename PTile::T, typename VTile::T>::kStep;
  static_assert(VTile::kRows <= PTile::kPanelColumns && VTile::kPanelColumns == 64,
                "probabilities have one panel, and a product takes one of values");
#pragma unroll
  for (int panel = kFirstPanel; panel < kEndPanel; ++panel) {
    float (&d)[PTile::kRows / 2] = reinterpret_cast<float (&)[PTile::kRows / 2]>(o[panel]);
#pragma unroll
    for (int step = 0; step < VTile::kRows / kStep; ++step) {
      const uint32_t keys = panel * (VTile::kPanelBytes / 16) + step * (2 * VTile::kGroupBytes / 16);
      ptx::Wgmma<PTile::kRows>::template multiply_transposed_ss<typename VTile::T>(
          d, operand_behind<VTile>(v, keys), operand_behind<PTile>(p, 2 * step), true);
    }
  }
}

// Tells the compiler, after a wait, that the accumulators have changed.
template <int kTiles>
__device__ __forceinline__ void take_results(float (&accumulators)[1][kTiles][4]) {
  ptx::wgmma_results(reinterpret_cast<float (&)[4 * kTiles]>(accumulators));
}

}  // namespace cupyattn
