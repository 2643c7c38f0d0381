// A tile of rows in shared memory, in 16-byte chunks. Eight consecutive rows must start in eight
// different bank groups, or ldmatrix has conflicts. Rows of whole 128-byte lines are swizzled: an
// XOR with the row swaps chunks within a line. (Under padding each line of global memory would
// straddle two lines here, and L2 would send half of its sectors twice.) Other rows are padded to
// an odd number of chunks.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/ptx/cp_async.cuh"

namespace cupyattn {

template <typename Element, int kRowsInTile, int kHeadDim>
struct SharedTile {
  using T = Element;
  static constexpr int kRows = kRowsInTile, kElementsPerChunk = 16 / sizeof(T);
  // Fragments take 16 elements of 16 bits, or two 16-byte chunks of fp8, at a time.
  static constexpr int kColumns = round_up(kHeadDim, is_fp8<T> ? 32 : 16);
  static constexpr int kChunks = kColumns / kElementsPerChunk;
  static constexpr bool kSwizzled = kChunks % 8 == 0;
  static constexpr int kAlign = kSwizzled ? 128 : 16;
  static constexpr int kRowBytes = (kSwizzled ? kChunks : kChunks | 1) * 16;
  static constexpr int kBytes = kRows * kRowBytes;

  // Bytes from the start of the tile, which is aligned to kAlign.
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kRowBytes + (kSwizzled ? chunk ^ (row & 7) : chunk) * 16;
  }
  static __device__ __forceinline__ uint32_t address(uint32_t base, int row, int chunk) {
    return base + offset(row, chunk);
  }
  // `address` is that of chunk 0 or 1 of a row; returns the address `chunks` (even) further on and
  // `rows` (a multiple of 8) further down. Both are constants: an immediate, and a XOR if swizzled.
  static __device__ __forceinline__ uint32_t advance(uint32_t address, int rows, int chunks) {
    if constexpr (kSwizzled) {
      return (address ^ ((chunks & 7) * 16)) + (chunks / 8) * 128 + rows * kRowBytes;
    }
    return address + chunks * 16 + rows * kRowBytes;
  }
  // The address of the same chunk `rows` further down, if `rows` and the row share no bit.
  static __device__ __forceinline__ uint32_t descend(uint32_t address, int rows) {
    return (kSwizzled ? address ^ ((rows & 7) * 16) : address) + rows * kRowBytes;
  }
};

// Copies 16-byte chunk number `chunk` of a row of kHeadDim elements, found at `source`, to shared
// address `destination`; zeros if the row or the chunk does not exist. Unaligned rows are copied
// element by element, synchronously.
template <typename Tile, int kHeadDim, bool kAligned>
__device__ __forceinline__ void copy_chunk(uint32_t destination, int chunk,
                                           const typename Tile::T* source, bool row_exists) {
  const int column = chunk * Tile::kElementsPerChunk;
  if constexpr (kAligned && kHeadDim % Tile::kElementsPerChunk == 0) {
    const bool exists = Tile::kColumns == kHeadDim || column < kHeadDim;
    ptx::cp_async_16(destination, source, row_exists && exists);  // mutate: absent-row-read
  } else {
    alignas(16) typename Tile::T elements[Tile::kElementsPerChunk];
#pragma unroll
    for (int i = 0; i < Tile::kElementsPerChunk; ++i) {
      elements[i] = row_exists && column + i < kHeadDim ? source[i] : typename Tile::T{};
    }
    ptx::store_shared_16(destination, *reinterpret_cast<const Vector16*>(elements));
  }
}

// One thread's part of copying tile after tile of rows of a matrix. If the number of threads is a
// multiple of the chunks of a row, a thread keeps its chunk and walks down the rows. Rows that are
// a stride apart are walked by the pointer, which ends where the next tile begins: one 64-bit
// addition a row. Gathered rows are found by their offsets.
template <typename Tile, int kHeadDim, bool kAligned, int kThreads, bool kGathered = false>
struct RowCopier {
  using T = typename Tile::T;
  static constexpr bool kWalks =
      kThreads % Tile::kChunks == 0 && Tile::kRows % (kThreads / Tile::kChunks) == 0;
  static constexpr int kStep = kWalks ? kThreads / Tile::kChunks : Tile::kRows;
  static_assert(!kWalks || (kStep & (kStep - 1)) == 0, "Tile::descend needs bits of its own");

  // Where the next copy starts: the thread's first chunk if it walks, else a whole row. That row is
  // the next tile's first, or the one at offset 0 if rows are gathered.
  const T* source;
  int64_t row_stride;
  uint32_t destination;
  int thread;

  // `matrix`: the first row of the matrix, from which offsets count. `first_row`: the first row to
  // copy. `tile`: the tile's shared address.
  __device__ __forceinline__ RowCopier(const T* matrix, int64_t row_stride, int64_t first_row,
                                       uint32_t tile, int thread)
      : source(kGathered ? matrix : matrix + first_row * row_stride),
        row_stride(row_stride),
        destination(tile),
        thread(thread) {
    if constexpr (kWalks) {
      const int row = thread / Tile::kChunks;
      const int chunk = thread % Tile::kChunks;
      source += (kGathered ? 0 : row * row_stride) + chunk * Tile::kElementsPerChunk;
      destination = Tile::address(tile, row, chunk);
    }
  }

  // The next tile starts `rows` rows further on.
  __device__ __forceinline__ void skip(int rows) {
    if constexpr (!kGathered) source += rows * row_stride;
  }

  // Starts the copy of the next tile, rows [first_row, first_row + kRows), to `tile_offset` bytes
  // behind the constructor's tile. Rows from end_row on become zeros. Gathered rows need `offsets`.
  __device__ __forceinline__ void copy(int first_row, int end_row, uint32_t tile_offset,
                                       const int64_t* offsets = nullptr) {
    if (first_row + Tile::kRows <= end_row) {
      copy_if(tile_offset, offsets, [](int) { return true; });
    } else {
      // mutate: row-past-the-end-read
      copy_if(tile_offset, offsets, [=](int row) { return first_row + row < end_row; });
    }
  }
  // The same of the rows whose bits are set; the others become zeros.
  __device__ __forceinline__ void copy_present(uint32_t present, uint32_t tile_offset,
                                               const int64_t* offsets) {
    copy_if(tile_offset, offsets, [=](int row) { return ((present >> row) & 1) != 0; });
  }

  // As copy_present, by a loop of a few rows: short, for code that is run once comes from memory.
  __device__ __forceinline__ void copy_present_in_loop(uint32_t present, uint32_t tile_offset,
                                                       const int64_t* offsets) {
    if constexpr (!kWalks || !kGathered || !kAligned) {
      return copy_present(present, tile_offset, offsets);
    } else {
      constexpr int kBatch = Tile::kRows / kStep < 4 ? Tile::kRows / kStep : 4;
      const int chunk = thread % Tile::kChunks, row = thread / Tile::kChunks;
#pragma unroll 1
      for (int first = 0; first < Tile::kRows; first += kBatch * kStep) {
        const T* gathered[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) gathered[i] = source + offsets[row + first + i * kStep];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int step = first + i * kStep;
          copy_chunk<Tile, kHeadDim, kAligned>(Tile::descend(destination + tile_offset, step), chunk,
                                               gathered[i], ((present >> (row + step)) & 1) != 0);
        }
      }
    }
  }

 private:
  template <typename Exists>
  __device__ __forceinline__ void copy_if(uint32_t tile_offset, const int64_t* offsets,
                                          Exists&& exists) {
    if constexpr (kWalks) {
      const int chunk = thread % Tile::kChunks;
      const int row = thread / Tile::kChunks;
      // All offsets are read before the first copy: ptxas puts three idle loads between a load from
      // shared memory and a copy into it.
      constexpr int kGatheredRows = kGathered ? Tile::kRows / kStep : 1;
      const T* gathered[kGatheredRows];
      if constexpr (kGathered) {
#pragma unroll
        for (int i = 0; i < kGatheredRows; ++i) gathered[i] = source + offsets[row + i * kStep];
      }
      // Element-wise copies are long and stay rolled.
#pragma unroll(kAligned ? Tile::kRows : 1)
      for (int step = 0; step < Tile::kRows; step += kStep) {
        const T* chunk_source = kGathered ? gathered[step / kStep] : source;
        copy_chunk<Tile, kHeadDim, kAligned>(Tile::descend(destination + tile_offset, step), chunk,
                                             chunk_source, exists(row + step));
        if constexpr (!kGathered) source += kStep * row_stride;
      }
    } else {
      for (int index = thread; index < Tile::kRows * Tile::kChunks; index += kThreads) {
        const int row = index / Tile::kChunks;
        const int chunk = index % Tile::kChunks;
        const T* row_source = source;
        if constexpr (kGathered) {
          row_source += offsets[row];
        } else {
          row_source += row * row_stride;
        }
        copy_chunk<Tile, kHeadDim, kAligned>(Tile::address(destination + tile_offset, row, chunk),
                                             chunk, row_source + chunk * Tile::kElementsPerChunk,
                                             exists(row));
      }
      if constexpr (!kGathered) source += Tile::kRows * row_stride;
    }
  }
};

}  // namespace cupyattn
