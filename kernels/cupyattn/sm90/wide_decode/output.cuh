// What a consumer warpgroup of wide_decode_sm90 holds until its last tile, and what becomes of it:
// O^T, and the maximum and the sum of each row. Two consumers are merged in shared memory.
#pragma once

#include "cupyattn/sm90/wide_decode/rows.cuh"

namespace cupyattn {

template <typename Traits>
struct WideDecodeSm90Output {
  using DTypeO = typename Traits::DTypeO;
  using Item = typename Traits::Item;
  static constexpr int kTileQ = Traits::kTileQ, kTilesQ = kTileQ / 8;
  static constexpr int kHeadDimVO = Traits::kHeadDimVO, kPanels = kHeadDimVO / 64;  // of O^T
  static constexpr bool kFp8 = Traits::kFp8, kHasScales = Traits::kKeyScales != kNoScales;
  using Rows = WideDecodeSm90Rows<Traits>;
  using Place = typename Rows::Place;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr int kBarrier = 1;  // of the first consumer, then the second, then of both
  using OfRows = float[kTilesQ][2];   // a thread's rows

  const WideSm90Block<Traits>& block;
  const AttentionParams& params;
  typename Traits::SharedMemory& shared;
  const Rows rows;
  const int index;  // of the consumer
  const int warp = ptx::warp_uniform(threadIdx.x % Traits::kWarpgroup / kWarpSize);
  const int lane = threadIdx.x % kWarpSize;
  float o[kPanels][kTilesQ][4];
  OfRows row_max, row_sum;  // sums of this thread's keys

  __device__ __forceinline__ WideDecodeSm90Output(const WideSm90Block<Traits>& block, int index)
      : block(block),
        params(block.params),
        shared(block.shared),
        rows{params, shared},
        index(index) {}

  // A row of the tile; e: of a pair.
  __device__ __forceinline__ int row_of(int n, int e) const { return 8 * n + 2 * (lane & 3) + e; }
  __device__ __forceinline__ void sync() const {
    ptx::named_barrier_sync(kBarrier + index, Traits::kWarpgroup);
  }
  __device__ __forceinline__ void sync_consumers() const {
    ptx::named_barrier_sync(kBarrier + kConsumers, Traits::kConsumerThreads);
  }

  // What a row's products are multiplied by to be logits in base 2.
  __device__ __forceinline__ float scale_of(int n, int e) const {
    if constexpr (kHasScales) return 1.0f;
    if constexpr (kFp8) return params.softmax_scale * shared.row_scales[row_of(n, e)];
    return params.softmax_scale;
  }

  // The column of O that a thread has in row h of its rows of a panel of O^T.
  __device__ __forceinline__ int column_of(int panel, int h) const {
    if constexpr (kFp8) return 128 * warp + 16 * (lane >> 2) + 2 * panel + h;
    return 64 * panel + 16 * warp + 8 * h + (lane >> 2);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[panel][n][e] = 0.0f;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        row_max[n][e] = -ptx::infinity();
        row_sum[n][e] = 0.0f;
      }
    }
  }

  // --- The end. It runs once an item, from a cold instruction cache: its code is short. ---

  // Normalises the rows and writes them, or the state of a split.
  __device__ __forceinline__ void finish(const Item& item) {
    publish_sums();
    sync_consumers();  // mutate: wide-decode-sums-read-early
    const int thread = threadIdx.x - (Traits::kThreads - Traits::kConsumerThreads);
    if (thread < kTileQ) finish_row(item, thread);
    sync_consumers();  // mutate: wide-decode-factors-read-early
    stage_output();
    sync_consumers();  // mutate: wide-decode-output-read-early
    if (item.work.tile.leaves_state()) {
      rows.write_state(item, thread);
    } else {
      rows.template write<DTypeO>(item, thread, [&](const Place& place) {
        return static_cast<DTypeO*>(params.o) + place.token * params.o_stride_n +
               place.head * params.o_stride_h;
      });
    }
  }

  // Leaves each warp's sums in shared memory, and the maxima in base 2, which all warps have.
  __device__ __forceinline__ void publish_sums() {
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = row_sum[n][e];
#pragma unroll
        for (int mask = 4; mask < kWarpSize; mask *= 2) sum += ptx::shuffle_xor(sum, mask);
        if (lane >= 4) continue;
        const float max = row_max[n][e];
        shared.of_warps[index][row_of(n, e)][warp] = sum;
        if (warp > 0) continue;
        shared.factors[index][row_of(n, e)] =
            max == -ptx::infinity() ? max : max * scale_of(n, e);
      }
    }
  }

  // Writes the log-sum-exp of a row, and leaves what each consumer's O is to be multiplied by.
  __device__ __forceinline__ void finish_row(const Item& item, int r) const {
    const bool leaves_state = item.work.tile.leaves_state();
    const Place place = rows.place_of(item, r);
    float old_max = shared.factors[0][r], weights[kConsumers], sum = 0.0f;
#pragma unroll
    for (int i = 1; i < kConsumers; ++i) old_max = fmaxf(old_max, shared.factors[i][r]);
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
      const float4 sums = *reinterpret_cast<const float4*>(shared.of_warps[i][r]);
      const float max = shared.factors[i][r];
      weights[i] = max == old_max ? 1.0f : ptx::ex2_approx(max - old_max);
      // mutate: wide-decode-sum-of-a-warp
      sum += weights[i] * (sums.x + sums.y + (sums.z + sums.w));
    }
    const RowState keys{old_max, sum};
    RowState state = keys;
    if (!leaves_state && place.exists) state.add_sink(sink_of(params, place.head));
    if (place.exists && leaves_state) {
      params.partial_lse[place.state] = state.lse();
    } else if (place.exists && params.lse != nullptr) {
      store_lse(params, place.token, place.head, keys, state);
    }
    if constexpr (Traits::kSparse) {
      if (place.exists) {
        raise_max_logit(latent_of(block.all_params), place.token, place.head, old_max);
      }
    }
    float factor = state.normaliser(old_max);
    if (!leaves_state) factor *= output_scale_of(params, item.work.tile.kv_head);
#pragma unroll
    // mutate: wide-decode-consumers-weigh-alike
    for (int i = 0; i < kConsumers; ++i) shared.factors[i][r] = weights[i] * factor;
  }

  // Leaves O in shared memory; the second consumer's is there first.
  __device__ __forceinline__ void stage_output() const {
    if constexpr (kConsumers == 1) {
      stage_rows<false>();
    } else {
      if (index > 0) stage_rows<false>();
      sync_consumers();  // mutate: wide-decode-output-added-early
      if (index == 0) stage_rows<true>();
    }
  }
  template <bool kAdds>
  __device__ __forceinline__ void stage_rows() const {
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = shared.factors[index][row_of(n, e)];
        float* const row = rows.staged(row_of(n, e)) + column_of(0, 0);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& to = row[kFp8 ? 2 * panel + h : 64 * panel + 8 * h];
            const float value = o[panel][n][2 * h + e] * factor;
            to = kAdds ? to + value : value;
          }
        }
      }
    }
  }
};

}  // namespace cupyattn
