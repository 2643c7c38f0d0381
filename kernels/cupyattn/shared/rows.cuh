// The packed query rows of one block: the token and head of each, and what its logits need. They
// are kept in shared memory, so the loop over keys divides nothing and keeps no row in registers.
#pragma once

#include "cupyattn/shared/logits.cuh"
#include "cupyattn/shared/work.cuh"
#include "cupyattn/tile/shared_tile.cuh"

namespace cupyattn {

// Describes the rows of a tile. Rows past the last repeat it; their logits are never stored. A scale
// of keys is that of `scale_head`, if it is given, and else that of the key head.
template <typename LogitsVariant, bool kKeyShare = false>
__device__ __forceinline__ void fill_rows(RowInfo* rows, int64_t* q_offset, int tile_rows,
                                          const AttentionParams& params, const Request& request,
                                          const TileWork& work, int thread, int threads,
                                          int scale_head = -1) {
  if (scale_head < 0) scale_head = work.kv_head;
  for (int r = thread; r < tile_rows; r += threads) {
    const PackGqaRow row = PackGqaRow::of(params, work.first_row + min_of(r, work.num_rows - 1));
    const int token = row.token;
    const int head = work.kv_head * params.group_size + row.group_head;
    const int position = request.position<kKeyShare>(params, token);
    rows[r] = LogitsVariant::make_row(params, request, token, position, head, scale_head);
    q_offset[r] = (static_cast<int64_t>(request.q_start) + token) * params.q_stride_n +
                  head * params.q_stride_h;
  }
}

// Copies the rows of Q, which lie at q_offset; rows past the last become zeros.
template <typename Tile, int kHeadDim, bool kAligned, int kThreads>
__device__ __forceinline__ void copy_query_rows(uint32_t tile, const AttentionParams& params,
                                                const int64_t* q_offset, int num_rows, int thread) {
  const typename Tile::T* q = static_cast<const typename Tile::T*>(params.q);
#pragma unroll 4
  for (int index = thread; index < Tile::kRows * Tile::kChunks; index += kThreads) {
    const int row = index / Tile::kChunks;
    const int chunk = index % Tile::kChunks;
    copy_chunk<Tile, kHeadDim, kAligned>(Tile::address(tile, row, chunk), chunk,
                                         q + q_offset[row] + chunk * Tile::kElementsPerChunk,
                                         row < num_rows);
  }
}

}  // namespace cupyattn
