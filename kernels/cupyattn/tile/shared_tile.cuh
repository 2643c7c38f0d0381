// A tile of rows in shared memory. Rows are padded to an odd number of 16-byte chunks: eight
// consecutive rows then start in eight different bank groups, so ldmatrix has no conflicts and every
// address is a base plus a compile-time offset (a swizzle would need an XOR for each).
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/cp_async.cuh"

namespace cupyattn {

template <typename Element, int kRowsInTile, int kHeadDim>
struct SharedTile {
  using T = Element;
  static constexpr int kRows = kRowsInTile;
  static constexpr int kElementsPerChunk = 16 / sizeof(T);
  // Fragments take 16 elements of 16 bits, or two 16-byte chunks of fp8, at a time.
  static constexpr int kColumns = round_up(kHeadDim, is_fp8<T>::value ? 32 : 16);
  static constexpr int kChunks = kColumns / kElementsPerChunk;
  static constexpr int kRowBytes = (kChunks | 1) * 16;
  static constexpr int kBytes = kRows * kRowBytes;

  static __device__ __forceinline__ uint32_t address(uint32_t base, int row, int chunk) {
    return base + row * kRowBytes + chunk * 16;
  }
};

// Copies one 16-byte chunk of a row of kHeadDim elements, or zeros where the row or the chunk does
// not exist. Unaligned rows go element by element, synchronously.
template <typename Tile, int kHeadDim, bool kAligned>
__device__ __forceinline__ void copy_chunk(unsigned char* tile, int row, int chunk,
                                           const typename Tile::T* source_row, bool row_exists) {
  unsigned char* destination = tile + row * Tile::kRowBytes + chunk * 16;
  const int column = chunk * Tile::kElementsPerChunk;
  if constexpr (kAligned && kHeadDim % Tile::kElementsPerChunk == 0) {
    ptx::cp_async_16(ptx::shared_address(destination), source_row + column,
                     row_exists && column < kHeadDim);
  } else {
    alignas(16) typename Tile::T elements[Tile::kElementsPerChunk];
#pragma unroll
    for (int i = 0; i < Tile::kElementsPerChunk; ++i) {
      elements[i].bits = row_exists && column + i < kHeadDim ? source_row[column + i].bits : 0;
    }
    *reinterpret_cast<Vector16*>(destination) = *reinterpret_cast<const Vector16*>(elements);
  }
}

// Rows of a matrix that may be read: [begin, end).
struct RowSpan {
  int begin, end;

  __device__ __forceinline__ bool contains(int row) const {
    return static_cast<uint32_t>(row - begin) < static_cast<uint32_t>(end - begin);
  }
};

// Copies rows [first_row, first_row + kRows) of a strided matrix; rows outside `span` become zeros.
// The kThreads threads share the work; consecutive threads copy consecutive chunks.
template <typename Tile, int kHeadDim, bool kAligned, int kThreads>
__device__ __forceinline__ void copy_rows(unsigned char* tile, const typename Tile::T* matrix,
                                          int64_t row_stride, int first_row, RowSpan span,
                                          int thread) {
  if constexpr (kThreads % Tile::kChunks == 0) {
    // A thread keeps its chunk and walks down the rows: one 64-bit product for a whole tile.
    constexpr int kStep = kThreads / Tile::kChunks;
    const int chunk = thread % Tile::kChunks;
    int row = thread / Tile::kChunks;
    const typename Tile::T* source = matrix + (first_row + row) * row_stride;
    // Element-wise copies are long already.
#pragma unroll (kAligned ? Tile::kRows : 1)
    for (int i = 0; i < ceil_div(Tile::kRows, kStep); ++i) {
      if (Tile::kRows % kStep == 0 || row < Tile::kRows) {
        copy_chunk<Tile, kHeadDim, kAligned>(tile, row, chunk, source, span.contains(first_row + row));
      }
      row += kStep;
      source += kStep * row_stride;
    }
  } else {
    for (int index = thread; index < Tile::kRows * Tile::kChunks; index += kThreads) {
      const int row = index / Tile::kChunks;
      copy_chunk<Tile, kHeadDim, kAligned>(tile, row, index % Tile::kChunks,
                                           matrix + (first_row + row) * row_stride,
                                           span.contains(first_row + row));
    }
  }
}

// Copies packed query rows: row r is query token r / group, head r % group of one KV head's group.
template <typename Tile, int kHeadDim, bool kAligned, int kThreads>
__device__ __forceinline__ void copy_packed_rows(unsigned char* tile,
                                                 const typename Tile::T* first_head,
                                                 int64_t stride_n, int64_t stride_h, int group,
                                                 int first_row, int num_rows, int thread) {
  for (int index = thread; index < Tile::kRows * Tile::kChunks; index += kThreads) {
    const int row = index / Tile::kChunks;
    const bool exists = row < num_rows;
    const int packed_row = exists ? first_row + row : first_row;
    const typename Tile::T* source =
        first_head + (packed_row / group) * stride_n + (packed_row % group) * stride_h;
    copy_chunk<Tile, kHeadDim, kAligned>(tile, row, index % Tile::kChunks, source, exists);
  }
}

}  // namespace cupyattn
