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

// Copies one 16-byte chunk of a row of kHeadDim elements to shared address `destination`, or zeros
// where the row or the chunk does not exist. Unaligned rows go element by element, synchronously.
template <typename Tile, int kHeadDim, bool kAligned>
__device__ __forceinline__ void copy_chunk(uint32_t destination, int chunk,
                                           const typename Tile::T* source_row, bool row_exists) {
  const int column = chunk * Tile::kElementsPerChunk;
  if constexpr (kAligned && kHeadDim % Tile::kElementsPerChunk == 0) {
    ptx::cp_async_16(destination, source_row + column, row_exists && column < kHeadDim);
  } else {
    alignas(16) typename Tile::T elements[Tile::kElementsPerChunk];
#pragma unroll
    for (int i = 0; i < Tile::kElementsPerChunk; ++i) {
      elements[i].bits = row_exists && column + i < kHeadDim ? source_row[column + i].bits : 0;
    }
    ptx::store_shared_16(destination, *reinterpret_cast<const Vector16*>(elements));
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
__device__ __forceinline__ void copy_rows(uint32_t tile, const typename Tile::T* matrix,
                                          int64_t row_stride, int first_row, RowSpan span,
                                          int thread) {
  if constexpr (kThreads % Tile::kChunks == 0) {
    // A thread keeps its chunk and walks down the rows: one 64-bit product for a whole tile.
    constexpr int kStep = kThreads / Tile::kChunks;
    const int chunk = thread % Tile::kChunks;
    const int row = thread / Tile::kChunks;
    const uint32_t destination = Tile::address(tile, row, chunk);
    const typename Tile::T* source = matrix + (first_row + row) * row_stride;
    // Element-wise copies are long already.
#pragma unroll (kAligned ? Tile::kRows : 1)
    for (int step = 0; step < Tile::kRows; step += kStep) {
      if (Tile::kRows % kStep == 0 || row + step < Tile::kRows) {
        copy_chunk<Tile, kHeadDim, kAligned>(destination + step * Tile::kRowBytes, chunk, source,
                                             span.contains(first_row + row + step));
      }
      source += kStep * row_stride;
    }
  } else {
    for (int index = thread; index < Tile::kRows * Tile::kChunks; index += kThreads) {
      const int row = index / Tile::kChunks;
      const int chunk = index % Tile::kChunks;
      copy_chunk<Tile, kHeadDim, kAligned>(Tile::address(tile, row, chunk), chunk,
                                           matrix + (first_row + row) * row_stride,
                                           span.contains(first_row + row));
    }
  }
}

}  // namespace cupyattn
