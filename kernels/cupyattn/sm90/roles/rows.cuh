// The rows of a consumer warp of prefill_sm90: which rows of an item they are, and how their O is
// normalised and stored.
#pragma once

#include "cupyattn/ptx/ldmatrix.cuh"
#include "cupyattn/ptx/tensor_copy.cuh"
#include "cupyattn/shared/block_scales.cuh"
#include "cupyattn/shared/state.cuh"
#include "cupyattn/sm90/roles/traits.cuh"

namespace cupyattn {

template <typename Traits>
struct PrefillSm90Rows {
  using QTile = typename Traits::QTile;
  using DTypeO = typename Traits::DTypeO;
  using LogitsVariant = typename Traits::LogitsVariant;
  using Item = typename Traits::Item;
  static constexpr int kHeadDimVO = Traits::kHeadDimVO;
  static constexpr int kTileQ = Traits::kTileQ;
  using Accumulators = float[1][kHeadDimVO / 8][4];

  // What remains to be done for an item once its softmax is finished.
  struct Output {
    int place, slot;   // of the item, and of its rows of Q
    float factors[2];  // the normalisers of a thread's two rows
  };

  const AttentionParams& params;
  typename Traits::SharedMemory& shared;
  const int group;
  const int warp = ptx::warp_uniform(threadIdx.x % Traits::kWarpgroup / kWarpSize);
  const int lane = threadIdx.x % kWarpSize;

  // The warp's first row of an item's tile.
  __device__ __forceinline__ int warp_row() const { return 64 * group + 16 * warp; }
  // The row of a thread's accumulators of half h, in an item's tile.
  __device__ __forceinline__ int own_row(int h) const { return warp_row() + 8 * h + (lane >> 2); }
  // The token and head of a row; rows past the last repeat it.
  __device__ __forceinline__ PackGqaRow token_of(const Item& item, int row) const {
    const TileWork& work = item.work.tile;
    return PackGqaRow::of(params, work.first_row + min_of(row, work.num_rows - 1));
  }

  // What the logits of this warp's rows depend on. Folded scales are there with their item.
  __device__ __forceinline__ const typename LogitsVariant::Row* rows_of(int item_place) const {
    return shared.rows + (LogitsVariant::kFoldsScales ? item_place * kTileQ : 0) + warp_row();
  }
  // Writes what the logits of this warp's rows depend on to `shared.rows`.
  __device__ __forceinline__ void describe(const Item& item) const {
    const int r = warp_row() + (lane & 15), kv_head = item.work.tile.kv_head;
    const PackGqaRow row = token_of(item, r);
    ptx::warp_sync();
    if (lane < 16) {
      const Request& request = item.work.request;
      shared.rows[r] =
          LogitsVariant::make_row(params, request, row.token,
                                  request.position<Traits::Mask::kKeyShare>(params, row.token),
                                  kv_head * params.group_size + row.group_head, kv_head);
      if constexpr (HasBlockScales<Traits>::kValue) {
        const BlockScales scales = BlockScales::of(params, BlockScales::kQueries);
        shared.rows[r].scale *= scales.of_row(request, request.q_start, row.token,
                                              kv_head * params.group_size + row.group_head);
      }
    }
    ptx::warp_sync();
  }

  // Where a row of an item lies in q and o, and among the states if the item leaves one.
  struct RowPlace {
    bool exists;
    int head;
    int64_t token;
    int64_t state;
  };
  __device__ __forceinline__ RowPlace row_place(const Item& item, int h) const {
    const TileWork& work = item.work.tile;
    const int r = own_row(h);
    const PackGqaRow row = PackGqaRow::of(params, work.first_row + r);
    return RowPlace{r < work.num_rows, work.kv_head * params.group_size + row.group_head,
                    item.work.request.q_start + row.token,
                    (work.state(params) + work.split) * kTileQ + r};
  }

  // Finishes what does not need O of an item whose keys have all been seen: the rows' normalisers
  // and, where the call wants them, their log-sum-exps.
  template <typename Softmax>
  __device__ __forceinline__ Output finish_rows(const Softmax& softmax, int place, int slot) const {
    const Item& item = shared.items[place];
    const bool leaves_state = item.work.tile.leaves_state();
    Output output{place, slot, {}};
    if (!leaves_state && params.sinks == nullptr && params.lse == nullptr) {
      const float output_scale = scale_of(item);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = quad_sum(softmax.row_sum[0][h]);
        // A row that has seen no key has the sum 0.
        output.factors[h] = sum == 0.0f ? 0.0f : ptx::rcp_approx(sum) * output_scale;
      }
      return output;
    }
    // Rolled, because many launches have nothing of this.
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      const RowPlace row = row_place(item, h);
      const float old_max = Softmax::template base2_of<LogitsVariant>(
          h == 0 ? softmax.row_max[0][0] : softmax.row_max[0][1], params);
      RowState state{old_max, quad_sum(h == 0 ? softmax.row_sum[0][0] : softmax.row_sum[0][1])};
      [[maybe_unused]] const RowState keys = state;
      if (!leaves_state && row.exists) state.add_sink(sink_of(params, row.head));
      const float factor = state.normaliser(old_max) * scale_of(item);
      output.factors[0] = h == 0 ? factor : output.factors[0];
      output.factors[1] = factor;
      if (row.exists && (lane & 3) == 0) store_lse_of(item, row, keys, state);
    }
    return output;
  }

  __device__ __forceinline__ void store_lse_of(const Item& item, const RowPlace& row,
                                               const RowState& keys,
                                               const RowState& state) const {
    if (item.work.tile.leaves_state()) {
      params.partial_lse[row.state] = state.lse();
    } else if (params.lse != nullptr) {
      if constexpr (Traits::kLatent) {
        store_lse(params, row.token, row.head, keys, state);
      } else {
        store_lse(params, row.token, row.head, state.lse());
      }
    }
  }
  // What all rows of an item are multiplied by besides their normalisers.
  __device__ __forceinline__ float scale_of(const Item& item) const {
    const int kv_head = item.work.tile.kv_head;
    return (item.work.tile.leaves_state() ? 1.0f : output_scale_of(params, kv_head)) *
           request_scale_of<LogitsVariant>(params, item.work.request, kv_head);
  }

  // Multiplies the columns of O that start with `first_column` by the gates of the output.
  template <int kColumns>
  __device__ __forceinline__ void gate(const Item& item, float (&o)[1][kColumns / 8][4],
                                       int first_column) const {
    if (!has_output_gate<Traits>) return;
    if (item.work.tile.leaves_state()) return;  // mutate: states-are-gated
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowPlace row = row_place(item, h);
      if (!row.exists) continue;
      gate_row<Traits, kColumns, false, true>(o[0], h, params, row.token, row.head, lane,
                                              first_column);
    }
  }

  // Normalises and stores this warp's rows of an item, and releases the item.
  __device__ __forceinline__ void write(const Output& output, Accumulators& o) const {
    store(output, o);
    release(output);
  }
  __device__ __forceinline__ void release(const Output& output) const {
    ptx::warp_sync();
    if (lane == 0) arrive(shared.empty_item[output.place]);
  }
  __device__ __forceinline__ void store(const Output& output, Accumulators& o) const {
    const Item& item = shared.items[output.place];
    gate<kHeadDimVO>(item, o, 0);
    // Else O leaves from the place of the rows of Q. What is rare stands last in the code.
    if (item.boxed_rows <= 64 * group) {
      // A thread's second row moves to the place of its first: both share the code.
#pragma unroll 1
      for (int h = 0; h < 2; ++h) {
        store_row(item, h, h == 0 ? output.factors[0] : output.factors[1], o[0]);
#pragma unroll
        for (int n = 0; n < kHeadDimVO / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) o[0][n][e] = o[0][n][2 + e];
        }
      }
    } else {
      stage(output, o);
    }
  }

  // Stores row h of a thread, whose accumulators are the first of each pair of rows.
  __device__ __forceinline__ void store_row(const Item& item, int h, float factor,
                                            const float (&o)[kHeadDimVO / 8][4]) const {
    const RowPlace row = row_place(item, h);
    if (item.work.tile.leaves_state()) {
      float* out = params.partial_o + row.state * kHeadDimVO;
      if (!row.exists) return;
      store_output_row<float, kHeadDimVO, false, true>([&](int column) { return out + column; }, o,
                                                       0, factor, lane);
      return;
    }
    DTypeO* out = static_cast<DTypeO*>(params.o) + row.token * params.o_stride_n +
                  row.head * params.o_stride_h;
    if constexpr (sizeof(DTypeO) == 2) {
      store_output_vectors<DTypeO, kHeadDimVO>(out, o, 0, factor, row.exists, lane);
    } else if (row.exists) {
      store_output_row<DTypeO, kHeadDimVO, false, true>([&](int column) { return out + column; },
                                                        o, 0, factor, lane);
    }
  }

  // Whether this warp's rows of an item leave as one box.
  __device__ __forceinline__ bool fills_box(const PrefillSm90Params& all_params,
                                            const Output& output) const {
    const TileWork& work = shared.items[output.place].work.tile;
    return all_params.output_box_rows == Traits::kBoxOfWarp && !work.leaves_state() &&
           warp_row() + Traits::kBoxOfWarp <= work.num_rows;  // mutate: box-of-missing-rows
  }
  // As write() of such rows, which leave from the place of the warp's sums.
  __device__ __forceinline__ void write_box(const PrefillSm90Params& all_params,
                                            const Output& output, Accumulators& o,
                                            int warp_of_all) const {
    using Tile = typename Traits::BoxTile;
    const Item& item = shared.items[output.place];
    gate<kHeadDimVO>(item, o, 0);
    static_assert(sizeof(shared.totals[0]) >= Tile::kBytes && sizeof(shared.totals[0]) % 1024 == 0,
                  "the place of a warp's sums is that of a box");
    const uint32_t place = ptx::shared_address(shared.totals[warp_of_all]);
    await_box();  // and all lanes have read their sums
    stage_rows<Tile>(place + Tile::offset(lane & 15, lane >> 4), output, o);
    ptx::fence_proxy_async();
    ptx::warp_sync();
    if (lane == 0) {
      const int head = item.work.tile.kv_head * params.group_size;
      const int row = item.work.tile.first_row + warp_row(), token = item.work.request.q_start;
      // mutate: warp-boxes-of-rows-at-tokens
      const int first = all_params.output_box_step == Traits::kBoxOfWarp
                            ? token * params.group_size + row
                            : token + PackGqaRow::of(params, row).token;
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        ptx::tensor_store_4d(all_params.o, Tile::kPanelColumns * panel, head, first, 0,
                             place + panel * Tile::kPanelBytes);
      }
      ptx::bulk_commit();
      arrive(shared.empty_item[output.place]);
    }
    ptx::warp_sync();
  }
  // Waits until the rows that have left last are read.
  __device__ __forceinline__ void await_box() const {
    if (lane == 0) ptx::bulk_wait_read();
    ptx::warp_sync();
  }

  // Writes a thread's rows, normalised, to a tile of panels. first: the address of its row and chunk
  // of the first matrices.
  template <typename Tile>
  __device__ __forceinline__ void stage_rows(uint32_t first, const Output& output,
                                             const Accumulators& o) const {
#pragma unroll
    for (int n = 0; n < 8 * Tile::kPanels; n += 2) {
      uint32_t words[4] = {};  // columns past the head dim leave no box
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (n >= kHeadDimVO / 8) continue;
        const float* pair = o[0][n + i / 2] + i % 2 * 2;
        const float factor = output.factors[i % 2];
        words[i] = ptx::pack_pair<DTypeO>(pair[0] * factor, pair[1] * factor);
      }
      ptx::stmatrix_x4((first ^ (n % 8 * 16)) + n / 8 * Tile::kPanelBytes, words);
    }
  }

  // Writes this warp's rows of O to the place of its rows of Q, in the layout of a box of O. The
  // rows of other warpgroups may still be read.
  __device__ __forceinline__ void stage(const Output& output, const Accumulators& o) const {
    if constexpr (Traits::kStagesOutput) {
      static_assert(QTile::kRowBytes == 128 && QTile::kGroupBytes == 8 * 128, "bits do not carry");
      // The address of a lane's row and chunk of the first matrices; two n-tiles further is a bit
      // of it. The copy keeps the compiler from computing all addresses at once, which would spill.
      const int own = static_cast<int>(ptx::opaque_copy(static_cast<uint32_t>(lane)));
      const uint32_t first = ptx::opaque_copy(ptx::shared_address(shared.q[output.slot]) +
                                              QTile::offset(warp_row() + (own & 15), own >> 4));
#pragma unroll
      for (int n = 0; n < kHeadDimVO / 8; n += 2) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Columns past the head dim are zeros, as in Q, and leave no box.
          words[i] = 0;
          if (n + i / 2 >= kHeadDimVO / 8) continue;
          const float* pair = o[0][n + i / 2] + i % 2 * 2;
          const float factor = output.factors[i % 2];
          words[i] = ptx::pack_pair<DTypeO>(pair[0] * factor, pair[1] * factor);
        }
        ptx::stmatrix_x4((first ^ (n % 8 * 16)) + n / 8 * QTile::kPanelBytes, words);
      }
      ptx::fence_proxy_async();
    }
  }
};

}  // namespace cupyattn
