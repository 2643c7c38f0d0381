// The packed query rows of one block: which token and head each is, and what its logits need. Kept
// in shared memory, so that the loop over keys divides nothing and holds no per-row registers.
#pragma once

#include "cupyattn/attention/variants.cuh"
#include "cupyattn/common/math.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/params/attention.cuh"
#include "cupyattn/tile/shared_tile.cuh"

namespace cupyattn {

// One tile of packed rows and its place in the launch. Row r is query token r / group, head
// r % group of the KV head's group.
struct TileWork {
  int kv_head, q_tile, split, first_row, num_rows;

  __device__ __forceinline__ int slot(const AttentionParams& params) const {
    return kv_head * params.num_q_tiles + q_tile;
  }
};

// Rows past the last repeat it: their logits are computed and never stored.
template <typename LogitsVariant>
__device__ __forceinline__ void fill_rows(RowInfo* rows, int tile_rows,
                                          const AttentionParams& params, const TileWork& work,
                                          int thread, int threads) {
  for (int r = thread; r < tile_rows; r += threads) {
    const int packed = work.first_row + min_of(r, work.num_rows - 1);
    const int token = packed / params.group_size;
    const int head = work.kv_head * params.group_size + packed % params.group_size;
    rows[r] = LogitsVariant::make_row(params, token, head, work.kv_head);
  }
}

// Copies the rows of Q; rows past the last become zeros.
template <typename Tile, int kHeadDim, bool kAligned, int kThreads>
__device__ __forceinline__ void copy_query_rows(uint32_t tile, const AttentionParams& params,
                                                const RowInfo* rows, int num_rows, int thread) {
  using T = typename Tile::T;
  for (int index = thread; index < Tile::kRows * Tile::kChunks; index += kThreads) {
    const int row = index / Tile::kChunks;
    const int chunk = index % Tile::kChunks;
    const T* source = static_cast<const T*>(params.q) + rows[row].token * params.q_stride_n +
                      rows[row].head * params.q_stride_h +
                      chunk * Tile::kElementsPerChunk;
    copy_chunk<Tile, kHeadDim, kAligned>(Tile::address(tile, row, chunk), chunk, source,
                                         row < num_rows);
  }
}

}  // namespace cupyattn
