// The merge of few splits by two warpgroups of the last block of a tile. It ends sooner than a
// launch, which begins when every block has ended. Many splits are too much for one block: a launch
// merges them (merge_splits). Its time is that of round trips to L2, so a thread asks for all states
// of several rows at once, and rows are weighed while the first are under way.
#pragma once

#include "cupyattn/sm90/wide/traits.cuh"

namespace cupyattn {

template <typename Traits>
struct WideMergeSm90 {
  using DTypeO = typename Traits::DTypeO;
  static constexpr int kMost = Traits::kFusedSplits;  // splits that are merged here
  static constexpr int kTileQ = Traits::kTileQ, kHeadDimVO = Traits::kHeadDimVO;
  // Both warpgroups of a block, or both consumers of three.
  static constexpr int kThreads = 2 * Traits::kWarpgroup, kFirst = Traits::kThreads - kThreads;
  static constexpr int kBarrier = 4;
  static constexpr int kThreadsOfRow = kHeadDimVO / 4;  // four columns a thread
  static constexpr int kRowsAtOnce = kThreads / kThreadsOfRow;
  static constexpr int kParts = 32;  // vectors that a thread has under way
  static_assert(kWarpSize % kMost == 0, "lanes weigh the splits of a row");
  static_assert(kTileQ % (kParts / 4 * kRowsAtOnce) == 0, "rows are read in whole batches");

  const WideSm90Block<Traits>& block;
  const AttentionParams& params;
  typename Traits::SharedMemory& shared;
  const BlockWork& work;
  // A copy that the loop over items does not look through: places of all rows would be kept from
  // item to item.
  const int thread = static_cast<int>(ptx::opaque_copy(threadIdx.x)) - kFirst;

  // The compiler may give each of the two warpgroups a copy of what follows.
  __device__ __forceinline__ void sync() const {
    ptx::named_barrier_sync_unaligned(kBarrier, kThreads);
  }

  // place: of the item.
  __device__ __forceinline__ explicit WideMergeSm90(const WideSm90Block<Traits>& block,
                                                    int place = 0)
      : block(block),
        params(block.params),
        shared(block.shared),
        work(block.shared.items[place].work) {}

  __device__ __forceinline__ void run() const {
    const TileWork& tile = work.tile;
    // Plans that must launch a merge leave it all tiles: it waits for every block.
    if (params.counters == nullptr) return;
    if (tile.num_splits == 1 || tile.num_splits > kMost || tile.split_tile < 0) return;
    if (!arrive_last()) return;
    if constexpr (kMost > 4) {
      if (tile.num_splits > 4) return merge<kMost>();
    }
    merge<4>();
    // The next item's P takes the place of what was known of rows.
    if (Traits::kLinked) sync();  // mutate: wide-merged-rows-overwritten
  }

  // Announces the states of this block's split; true in the last block of its tile only. As in
  // state.cuh, for the threads that merge: a producer may still be at work.
  __device__ __forceinline__ bool arrive_last() const {
    sync();
    if (thread == 0) {
      const uint32_t last = static_cast<uint32_t>(work.tile.num_splits - 1);
      uint32_t* const counter = params.counters + work.tile.counter(params);
      shared.is_last = ptx::atomic_inc_wrap_acq_rel(counter, last) == last;
    }
    sync();  // mutate: wide-decode-flag-read-early
    return shared.is_last != 0;
  }

  // Merges up to kSplits splits of all rows, four columns of some rows a thread.
  template <int kSplits>
  __device__ __forceinline__ void merge() const {
    constexpr int kRows = kParts / kSplits, kStep = kRows * kRowsAtOnce;
    const int column = thread % kThreadsOfRow * 4;
    int first = thread / kThreadsOfRow, row = thread / kMost;
    float4 part[kRows][kSplits];
    float lse = lse_of(row);
    bool is_first = true;
    do {
      load(part, first, column);
      if (is_first) {
        for (; row < kTileQ; row += kThreads / kMost) {
          weigh(row, lse);
          lse = lse_of(row + kThreads / kMost);
        }
        sync();  // mutate: wide-decode-weights-read-early
        is_first = false;
      }
      write(part, first, column);
    } while ((first += kStep) < work.tile.num_rows);
  }

  __device__ __forceinline__ int64_t state_of(int row, int split) const {
    return (work.tile.state(params) + split) * kTileQ + row;
  }
  // Returns the LSE of the split that a lane weighs.
  __device__ __forceinline__ float lse_of(int row) const {
    const int split = thread % kMost;
    const bool exists = row < work.tile.num_rows && split < work.tile.num_splits;
    return exists ? ptx::load_l2(params.partial_lse + state_of(row, split)) : -ptx::infinity();
  }

  // Weighs the states of a row, one a lane.
  __device__ __forceinline__ void weigh(int row, float lse) const {
    const TileWork& tile = work.tile;
    const int split = thread % kMost;
    float max = lse;
#pragma unroll
    for (int mask = 1; mask < kMost; mask *= 2) max = fmaxf(max, ptx::shuffle_xor(max, mask));
    // An empty state weighs nothing, even if all states are empty.
    const float weight = lse == -ptx::infinity() ? 0.0f : ptx::ex2_approx(lse - max);
    RowState state{max, weight};
#pragma unroll
    // mutate: wide-decode-weights-of-some-splits
    for (int mask = 1; mask < kMost; mask *= 2) state.sum += ptx::shuffle_xor(state.sum, mask);
    const PackGqaRow packed = PackGqaRow::of(params, tile.first_row + min_of(row, tile.num_rows - 1));
    const int head = tile.kv_head * params.group_size + packed.group_head;
    const int64_t token = static_cast<int64_t>(work.request.q_start) + packed.token;
    const RowState keys = state;
    state.add_sink(sink_of(params, head));
    const float factor = state.normaliser(keys.max) * output_scale_of(params, tile.kv_head);
    block.merged_rows().weights[row][split] = weight * factor;
    if (split > 0) return;
    block.merged_rows().offsets[row] = token * params.o_stride_n + head * params.o_stride_h;
    if (row < tile.num_rows && params.lse != nullptr) {
      store_lse(params, token, head, keys, state);
    }
  }

  // Asks for four columns of some rows. What does not exist is read too: rows of a state have room
  // for a tile's, and another split is read in place of one past the last (merge_states).
  template <int kRows, int kSplits>
  __device__ __forceinline__ void load(float4 (&part)[kRows][kSplits], int first_row,
                                       int column) const {
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      const int64_t state = state_of(first_row, min_of(s, work.tile.num_splits - 1));
      const float* const from = params.partial_o + state * kHeadDimVO + column;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        part[i][s] = ptx::load_l2(
            reinterpret_cast<const float4*>(from + i * (kRowsAtOnce * kHeadDimVO)));
      }
    }
  }

  template <int kRows, int kSplits>
  __device__ __forceinline__ void write(const float4 (&part)[kRows][kSplits], int first_row,
                                        int column) const {
    ptx::warp_sync();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row + kRowsAtOnce * i;
      if (row >= work.tile.num_rows) break;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int s = 0; s < kSplits; ++s) {
        const float weight = block.merged_rows().weights[row][s];
        // A split that does not exist has weight 0, and what was read in its place may be NaN.
        if (weight != 0.0f) add_scaled(sum, part[i][s], weight);
      }
      if constexpr (has_output_gate<Traits>) {
        const PackGqaRow packed = PackGqaRow::of(params, work.tile.first_row + row);
        gate_columns<Traits, true>(sum, params, work.request.q_start + packed.token,
                                   work.tile.kv_head * params.group_size + packed.group_head,
                                   column);
      }
      DTypeO* const to =
          static_cast<DTypeO*>(params.o) + block.merged_rows().offsets[row] + column;
      store_pair<DTypeO, true>(to, sum.x, sum.y);
      store_pair<DTypeO, true>(to + 2, sum.z, sum.w);
    }
  }
};

}  // namespace cupyattn
