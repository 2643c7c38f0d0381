// Merges the partial states of tiles whose keys another kernel has split. A warp merges one packed
// row, or 128 columns of a wide one, so that it has states of many splits under way. Where there are
// few rows (`kSharesRows`), the warps of a block share one; of a wide one, whose columns they share
// anyway, each warp then has more states under way, and fewer warps run.
#include "cupyattn/plan/item_finder.cuh"
#include "cupyattn/ptx/grid_dependency.cuh"
#include "cupyattn/shared/key_lists.cuh"
#include "cupyattn/shared/state.cuh"

#ifndef CUPYATTN_CONFIG
#include "entry/default_config.cuh"

struct Config : DefaultConfig {
  static constexpr int kTileQ = 128, kFusedSplits = 0;
  static constexpr bool kSharesRows = false;
  static constexpr bool kWholeTokens = false;
};
#endif

static_assert(Config::kTileQ % Config::kWarps == 0, "a block merges rows of one tile");

constexpr bool kIsWide = Config::kHeadDimVO > 256;
// Blocks that find their items write the list: it is read no sooner than their states. A planner's
// list is older than the launch that leaves the states, and is looked up beside it.
constexpr bool kWaitsForList = cupyattn::FindsItems<Config>::kValue;

static_assert(!kIsWide || !kWaitsForList, "wide rows have a planner's list");
constexpr int kParts = kIsWide ? Config::kHeadDimVO / 128 : 1;

__device__ __forceinline__ cupyattn::BlockWork of_grid(const cupyattn::AttentionParams& params,
                                                       int tile, int kv_head, int tile_rows) {
  using cupyattn::BlockWork;
  constexpr bool kEqual = kIsWide || cupyattn::HasKeyLists<Config>::kValue;
  if (kEqual) return BlockWork::of_equal(params, tile, kv_head, 0, tile_rows, 0);
  return BlockWork::of_tile(params, tile, kv_head, 0, tile_rows);
}

// Merges the row that `index` counts, with its parts of columns; false past the last tile that is
// split, where entries of `merges` are negative.
__device__ __forceinline__ bool merge_row_at(const cupyattn::AttentionParams& params, int index) {
  using namespace cupyattn;
  if (kWaitsForList) ptx::grid_dependency_wait();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int kv_head = blockIdx.y;
  constexpr int kTileQ = Config::kTileQ;
  const int packed_row = index / kParts;
  // mutate: merged-columns-of-the-first-part
  const int first_column = index % kParts * (Config::kHeadDimVO / kParts);
  const int tile = packed_row / kTileQ, row = packed_row % kTileQ;
  const int item = params.work != nullptr ? params.merges[tile] : 0;
  const int tile_rows = Config::kWholeTokens ? whole_token_rows(params, kTileQ) : kTileQ;
  const BlockWork work = params.work != nullptr
                             ? BlockWork::of_item(params, max_of(item, 0), kv_head, tile_rows)
                             : of_grid(params, tile, kv_head, tile_rows);
  // All blocks wait, because this launch must not be over before that one.
  if (!kIsWide && !kWaitsForList) ptx::grid_dependency_wait();
  if (item < 0) return false;
  // The last block of a tile has merged few splits, if blocks count.
  const bool is_merged =
      work.tile.num_splits <= Config::kFusedSplits && params.counters != nullptr;
  if (row >= work.tile.num_rows || is_merged) return true;
  const PackGqaRow packed = PackGqaRow::of(params, work.tile.first_row + row);
  const int head = kv_head * params.group_size + packed.group_head;
  if (kIsWide) ptx::grid_dependency_wait();
  if constexpr (Config::kSharesRows && !kIsWide) {
    __shared__ SharedMerge<Config::kHeadDimVO, Config::kWarps> shared;
    const int first = static_cast<int>(work.tile.state(params) * kTileQ + row);
    merge_states_together<Config, Config::kHeadDimVO>(
        shared, params, work.request.q_start + packed.token, head, kv_head, work.tile.num_splits,
        warp, lane, [=](int i) { return first + i * kTileQ; });
  } else {
    merge_row<Config, Config::kHeadDimVO, kTileQ, false, kParts>(
        params, work.tile, row, work.request.q_start + packed.token, head, lane, first_column);
  }
  return true;
}

// Six blocks an SM: for more blocks ptxas saves registers by waiting for each load.
constexpr int kBlocks = !kIsWide ? 6 : Config::kSharesRows ? 3 : 8;

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, kBlocks)
    cupyattn_merge_splits(const __grid_constant__ cupyattn::AttentionParams params) {
  constexpr bool kIsShared = Config::kSharesRows && !kIsWide;
  constexpr int kRows = kIsShared ? 1 : Config::kWarps;
  const int warp = kIsShared ? 0 : threadIdx.x / cupyattn::kWarpSize;
  int index = blockIdx.x * kRows + warp;
  if constexpr (kIsWide) {
    // There may be far more rows than are split, so blocks walk on.
    const int tiles = params.work != nullptr ? params.qo_len : params.num_q_tiles;
    const int end = tiles * Config::kTileQ * kParts;
    while (index < end && merge_row_at(params, index)) index += gridDim.x * kRows;
    cupyattn::ptx::grid_dependency_wait();
  } else {
    merge_row_at(params, index);
  }
}
