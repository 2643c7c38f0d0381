// The merge of few splits by two warpgroups of the last block of a tile, which load all states at
// once. It ends sooner than a launch, which begins when every block has ended. Many splits are too
// much for one block: a launch merges them (merge_splits).
#pragma once

#include "cupyattn/attention/wide_decode_sm90_traits.cuh"

namespace cupyattn {

template <typename Traits>
struct WideDecodeSm90Merge {
  using DTypeO = typename Traits::DTypeO;
  static constexpr int kMost = Traits::kFusedSplits;  // splits that are merged here
  static constexpr int kTileQ = Traits::kTileQ, kHeadDimVO = Traits::kHeadDimVO;
  // Both warpgroups of a block, or both consumers of three.
  static constexpr int kThreads = 2 * Traits::kWarpgroup, kFirst = Traits::kThreads - kThreads;
  static constexpr int kBarrier = 4;
  static constexpr int kThreadsOfRow = kHeadDimVO / 4;  // four columns a thread
  static constexpr int kRowsAtOnce = kThreads / kThreadsOfRow;
  static_assert(kMost == 8, "eight lanes weigh the splits of a row");

  const WideSm90Block<Traits>& block;
  const AttentionParams& params;
  typename Traits::SharedMemory& shared;
  const BlockWork& work;
  const int thread = threadIdx.x - kFirst;

  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(kBarrier, kThreads); }

  __device__ __forceinline__ explicit WideDecodeSm90Merge(const WideSm90Block<Traits>& block)
      : block(block),
        params(block.params),
        shared(block.shared),
        work(block.shared.items[0].work) {}

  __device__ __forceinline__ void run() const {
    const TileWork& tile = work.tile;
    // Plans that must launch a merge leave it all tiles: it waits for every block.
    if (params.counters == nullptr) return;
    if (tile.num_splits == 1 || tile.num_splits > kMost || tile.split_tile < 0) return;
    if (!arrive_last()) return;
    for (int row = thread / kMost; row < kTileQ; row += kThreads / kMost) weigh(row);
    sync();  // mutate: wide-decode-weights-read-early
    for (int row = thread / kThreadsOfRow; row < tile.num_rows; row += 4 * kRowsAtOnce) {
      tile.num_splits <= 4 ? merge_rows<4>(row) : merge_rows<kMost>(row);
    }
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

  __device__ __forceinline__ int64_t state_of(int row, int split) const {
    return (work.tile.state(params) + split) * kTileQ + row;
  }

  // Weighs the states of a row: eight lanes have one split each.
  __device__ __forceinline__ void weigh(int row) const {
    const TileWork& tile = work.tile;
    const int split = thread % kMost;
    const bool exists = row < tile.num_rows && split < tile.num_splits;
    float lse = -ptx::infinity();
    if (exists) lse = ptx::load_l2(params.partial_lse + state_of(row, split));
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
    const float old_max = state.max;
    state.add_sink(sink_of(params, head));
    const float factor = state.normaliser(old_max) * output_scale_of(params, tile.kv_head);
    shared.weights[row][split] = weight * factor;
    if (split == 0 && row < tile.num_rows && params.lse != nullptr) {
      const int64_t token = static_cast<int64_t>(work.request.q_start) + packed.token;
      store_lse(params, token, head, state.lse());
    }
  }

  // Merges four columns of four rows. All states are asked for before the first is used; what does
  // not exist is read too, from an address that does (merge_states).
  template <int kSplits>
  __device__ __forceinline__ void merge_rows(int first_row) const {
    const TileWork& tile = work.tile;
    const int column = thread % kThreadsOfRow * 4;
    float4 part[4][kSplits];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = min_of(first_row + kRowsAtOnce * i, tile.num_rows - 1);
#pragma unroll
      for (int s = 0; s < kSplits; ++s) {
        const int64_t state = state_of(row, min_of(s, tile.num_splits - 1));
        part[i][s] = ptx::load_l2(reinterpret_cast<const float4*>(params.partial_o +
                                                                  state * kHeadDimVO + column));
      }
    }
    ptx::warp_sync();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + kRowsAtOnce * i;
      if (row >= tile.num_rows) break;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int s = 0; s < kSplits; ++s) {
        const float weight = shared.weights[row][s];
        // A split that does not exist has weight 0, and what was read in its place may be NaN.
        if (weight != 0.0f) add_scaled(sum, part[i][s], weight);
      }
      const PackGqaRow packed = PackGqaRow::of(params, tile.first_row + row);
      const int64_t token = static_cast<int64_t>(work.request.q_start) + packed.token;
      DTypeO* const to = static_cast<DTypeO*>(params.o) + token * params.o_stride_n +
                         (tile.kv_head * params.group_size + packed.group_head) *
                             params.o_stride_h +
                         column;
      store_pair<DTypeO, true>(to, sum.x, sum.y);
      store_pair<DTypeO, true>(to + 2, sum.z, sum.w);
    }
  }
};

}  // namespace cupyattn
