// What the two consumer warpgroups of wide_sm90 have in common: their columns of values and of O.
#pragma once

#include "cupyattn/shared/hidden_values.cuh"
#include "cupyattn/sm90/wide/query_scale.cuh"
#include "cupyattn/sm90/wide/traits.cuh"

namespace cupyattn {

template <typename Traits>
struct WideSm90Output {
  using DTypeO = typename Traits::DTypeO;
  using DTypeMma = typename Traits::DTypeMma;
  using QTile = typename Traits::QTile;
  using VTile = typename Traits::VTile;
  using PTile = typename Traits::PTile;
  using Item = typename Traits::Item;
  using Rows = PrefillSm90Rows<Traits>;
  using Stage = PipelineState<Traits::kStages>;
  using Turn = typename WideSm90Block<Traits>::Turn;
  static constexpr int kColumns = Traits::kColumns, kTileKV = Traits::kTileKV;
  static constexpr int kSteps = kTileKV / MmaTraits<DTypeMma, DTypeMma>::kStep;

  // A product has all columns; or half of them, where four warpgroups share the registers: ptxas
  // compiles none for which the registers of a launch do not suffice.
  static constexpr int kParts = Traits::kProducers, kPart = kColumns / kParts;
  static constexpr int kToPart = kPart / VTile::kPanelColumns * (VTile::kPanelBytes / 16);

  const WideSm90Block<Traits>& block;
  const AttentionParams& params;
  typename Traits::SharedMemory& shared;
  const int piece;  // of the columns
  const Rows rows;
  Turn& turn;
  const Item& item;
  float o[1][kColumns / 8][4];

  __device__ __forceinline__ WideSm90Output(const WideSm90Block<Traits>& block, Turn& turn,
                                            int piece)
      : block(block),
        params(block.params),
        shared(block.shared),
        piece(piece),
        rows{block.params, block.shared, 0},
        turn(turn),
        item(block.shared.items[turn.place()]) {}

  // Waits for Q. Where keys are float16, both warpgroups turn rows into that, each warp a row of
  // eight.
  __device__ __forceinline__ void prepare_queries() {
    await_phase(shared.full_q, turn.q_parity);
    turn.q_parity ^= 1;
    if constexpr (Traits::kHalfQueries) {
      constexpr int kWarps = 2 * Traits::kWarpgroup / kWarpSize, kBarrier = 3;
#pragma unroll(Traits::kLands ? 2 : 1)
      for (int row = kWarps / 2 * piece + rows.warp; row < Traits::kTileQ; row += kWarps) {
        prepare_row(row);
      }
      ptx::fence_proxy_async();
      // Leader and follower wait at instructions of their own.
      // mutate: wide-queries-read-early
      ptx::named_barrier_sync_unaligned(kBarrier, kWarps * kWarpSize);
    } else {
      ptx::fence_proxy_async();
    }
  }
  // A lane has a pair of each panel. The rope columns of keys have a scale, which those of Q take.
  __device__ __forceinline__ void prepare_row(int row) const {
    constexpr int kPanels = QTile::kPanels;
    const auto word_of = [&](int panel) {
      return reinterpret_cast<uint32_t*>(shared.q +
                                         QTile::offset(row, 8 * panel + rows.lane / 4)) +
             rows.lane % 4;
    };
    float pairs[kPanels][2];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      ptx::unpack_pair<typename Traits::DTypeQ>(*word_of(i), pairs[i][0], pairs[i][1]);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        // mutate: wide-rope-of-queries-not-scaled
        if (i == kPanels - 1) pairs[i][e] *= latent_of(block.all_params).rope_scale;
        largest = max_of(largest, __float_as_uint(fabsf(pairs[i][e])));
      }
    }
    const QueryScale scale = QueryScale::if_needed(__uint_as_float(ptx::warp_max(largest)));
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      *word_of(i) =
          ptx::pack_pair<half_t>(pairs[i][0] * scale.of_query, pairs[i][1] * scale.of_query);
    }
    if (rows.lane == 0) shared.row_scales[row] = scale.of_logits;  // mutate: wide-rows-not-scaled
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][n][e] = 0.0f;
    }
  }

  // Products name O as an operand even where they do not add to it: what was there would be kept from
  // item to item.
  __device__ __forceinline__ void clear_first() {
    if constexpr (Traits::kLinked) clear();
  }

  __device__ __forceinline__ float (&part(int i))[1][kPart / 8][4] {
    return reinterpret_cast<float (&)[1][kPart / 8][4]>(o[0][i * (kPart / 8)]);
  }

  // The warpgroup's columns of the values of a stage.
  __device__ __forceinline__ uint64_t values(const Stage& stage) const {
    return operand_at<VTile>(ptx::shared_address(shared.values(stage.stage)) +
                             // mutate: wide-values-of-the-leader
                             piece * Traits::kPanelsOfPiece * VTile::kPanelBytes);
  }

  // Where a lane stores, or loads, its row of the first matrices of P.
  __device__ __forceinline__ uint32_t p_fragment() const {
    return ptx::shared_address(shared.p) +
           PTile::offset(rows.warp_row() + (rows.lane & 15), rows.lane >> 4);
  }

  __device__ __forceinline__ void release(uint64_t& barrier) const {
    ptx::mbarrier_arrive_if(rows.lane == 0, ptx::shared_address(&barrier));
  }

  // --- Non-finite values of keys that causality or a window hides from some rows (see
  // hidden_values.cuh): set to zero before the product, and added afterwards to rows that see them.
  // Tiles with such keys are few, and their values are hardly ever anything but finite. ---

  // Sets them to zero in the warpgroup's piece of a stage whose scores are complete.
  __device__ __forceinline__ void zero_nonfinite_values(const Item& item, int tile,
                                                        const Stage& stage) {
    constexpr int kBytes = Traits::kPanelsOfPiece * VTile::kPanelBytes;
    const int thread = threadIdx.x % Traits::kWarpgroup;
    const int num_keys = item.range.end - item.first_key(tile);
    uint32_t* keys = shared.nonfinite_keys[piece][stage.stage].word;
    // All threads are done with the scores, and with what the stage held before.
    sync();
    if (thread == 0) shared.nonfinite_keys[piece][stage.stage] = NonFiniteKeys{};
    sync();
    Vector16* chunks = reinterpret_cast<Vector16*>(shared.values(stage.stage) + piece * kBytes);
#pragma unroll 1
    for (int i = thread; i < kBytes / 16; i += Traits::kWarpgroup) {
      zero_nonfinite_chunk<DTypeMma>(chunks[i], keys, VTile::row_at(16 * i), num_keys);
    }
    ptx::fence_proxy_async();
    sync();
  }
  __device__ __forceinline__ void sync() const {
    ptx::named_barrier_sync(1 + piece, Traits::kWarpgroup);
  }

  // Adds them, once O of the tile is complete. `p` holds its probabilities.
  __device__ __forceinline__ void add_nonfinite_values(const Item& item, int tile,
                                                       const Stage& stage,
                                                       const uint32_t (&p)[kSteps][1][4]) {
#pragma unroll 1
    for (int word = 0; word < ceil_div(kTileKV, 32); ++word) {
      for (uint32_t bits = shared.nonfinite_keys[piece][stage.stage].word[word]; bits != 0;
           bits &= bits - 1) {
        const int key = 32 * word + __ffs(static_cast<int>(bits)) - 1;
        add_nonfinite_key<DTypeMma>(
            o, p, key, block.value_of(item, item.first_key(tile) + key) + piece * kColumns, rows.lane);
      }
    }
    ptx::warp_sync();
  }

  // Stores the warp's rows of the result, or of a state.
  __device__ __forceinline__ void write(const float (&factors)[2]) {
    const int first_column = piece * kColumns;
    rows.template gate<kColumns>(item, o, first_column);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const typename Rows::RowPlace row = rows.row_place(item, h);
      if (item.work.tile.leaves_state()) {
        // mutate: wide-state-columns-of-the-leader
        float* out = params.partial_o + row.state * Traits::kHeadDimVO + first_column;
        if (!row.exists) continue;
        store_output_row<float, kColumns, false, true>([&](int column) { return out + column; },
                                                       o[0], h, factors[h], rows.lane);
        continue;
      }
      DTypeO* out = static_cast<DTypeO*>(params.o) + row.token * params.o_stride_n +
                    row.head * params.o_stride_h + first_column;
      if constexpr (sizeof(DTypeO) == 2) {
        store_output_vectors<DTypeO, kColumns>(out, o[0], h, factors[h], row.exists, rows.lane);
      } else if (row.exists) {
        store_output_row<DTypeO, kColumns, false, true>([&](int column) { return out + column; },
                                                        o[0], h, factors[h], rows.lane);
      }
    }
  }
};

}  // namespace cupyattn
