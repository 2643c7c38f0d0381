// The states of rows in a cascade, whose keys lie in several levels, and the tables of tiles that
// hold them. schedule/levels.py lays these tables out.
#pragma once

#include "cupyattn/shared/state.cuh"

namespace cupyattn {

// Where a query token's rows of one level are: the tile of its first head's row, and the row in
// that tile. The group's other rows follow, and may reach into the next tiles.
struct LevelRow {
  static constexpr int kNoKeys = -1;   // the level has no keys for this token
  static constexpr int kNoToken = -2;  // q has no such token
  int32_t tile, row;
};

struct alignas(16) LevelTile {
  int32_t first_state;  // counts states of tile_rows rows of one KV head
  int32_t num_splits, tile_rows, padding;
};

// params.merges: LevelRow [qo_len tokens, kv_len levels], then LevelTile [tiles].
struct LevelTables {
  const LevelRow* rows;
  const LevelTile* tiles;

  static __device__ __forceinline__ LevelTables of(const AttentionParams& params) {
    const LevelRow* rows = reinterpret_cast<const LevelRow*>(params.merges);
    const int64_t num_rows = static_cast<int64_t>(params.qo_len) * params.kv_len;
    return LevelTables{rows,
                       reinterpret_cast<const LevelTile*>(rows + round_up(num_rows, int64_t{2}))};
  }
};

// Merges the states of one row of q over all levels into its result. A whole warp takes part, and a
// lane looks up one level, so there are at most kWarpSize.
template <typename Config, int kHeadDim>
__device__ __forceinline__ void merge_levels(const AttentionParams& params, int token, int head,
                                             int lane) {
  const LevelTables tables = LevelTables::of(params);
  const int num_levels = params.kv_len;
  LevelRow at{LevelRow::kNoKeys, 0};
  if (lane < num_levels) at = tables.rows[static_cast<int64_t>(token) * num_levels + lane];
  if (ptx::shuffle(at.tile, 0) == LevelRow::kNoToken) return;  // mutate: absent-row-merged
  const int kv_head = divide(head, params.group_magic, params.group_shift);
  LevelTile tile{0, 0, 1, 0};
  int row = at.row + head - kv_head * params.group_size;
  if (at.tile >= 0) {
    tile = tables.tiles[at.tile];
    if (row >= tile.tile_rows) {  // mutate: group-stays-in-first-tile
      tile = tables.tiles[at.tile + row / tile.tile_rows];
      row %= tile.tile_rows;
    }
  }
  const int first =
      // mutate: level-state-of-another-head
      (tile.first_state * params.num_kv_heads + kv_head * tile.num_splits) * tile.tile_rows + row;
  int num_states = 0;
  for (int level = 0; level < num_levels; ++level) {
    num_states += ptx::shuffle(tile.num_splits, level);
  }
  merge_states<Config, kHeadDim>(
      params, token, head, kv_head, num_states, lane, [&](int state) {
        int place = 0, begin = 0;
        for (int level = 0; level < num_levels; ++level) {
          const int of_level = state - begin;
          const int count = ptx::shuffle(tile.num_splits, level);
          const int at_level = ptx::shuffle(first, level);
          const int step = ptx::shuffle(tile.tile_rows, level);
          if (of_level >= 0 && of_level < count) place = at_level + of_level * step;
          begin += count;  // mutate: level-states-from-first
        }
        return place;
      });
}

}  // namespace cupyattn
