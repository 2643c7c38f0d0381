// The rows of a warp of prefill_sm90 that multiplies: which of an item they are, and how they
// leave.
#pragma once

#include "cupyattn/attention/mask.cuh"
#include "cupyattn/attention/mask_sm90.cuh"
#include "cupyattn/attention/ring.cuh"
#include "cupyattn/attention/state.cuh"
#include "cupyattn/attention/work.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/convert.cuh"
#include "cupyattn/ptx/ldmatrix.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/mbarrier.cuh"
#include "cupyattn/ptx/tensor_copy.cuh"
#include "cupyattn/ptx/warp.cuh"
#include "cupyattn/ptx/warpgroup.cuh"

namespace cupyattn {

template <typename Kernel, typename Softmax>
struct PrefillSm90Rows {
  using QTile = typename Kernel::QTile;
  using DTypeO = typename Kernel::DTypeO;
  using LogitsVariant = typename Kernel::LogitsVariant;
  using Item = typename Kernel::Item;
  static constexpr int kHeadDimVO = Kernel::kHeadDimVO;
  static constexpr int kTileQ = Kernel::kTileQ;
  using Accumulators = float[1][kHeadDimVO / 8][4];

  // Of an item that is over but for O: its place, that of its rows of Q, whether O goes there, and
  // what a thread's two rows are multiplied by.
  struct Output {
    int place, slot;
    bool is_staged;
    float factors[2];
  };

  const Kernel& kernel;
  const AttentionParams& params;
  typename Kernel::SharedMemory& shared;
  const int group, warp, lane;

  __device__ __forceinline__ PrefillSm90Rows(const Kernel& kernel, int group)
      : kernel(kernel),
        params(kernel.params),
        shared(kernel.shared),
        group(group),
        warp(ptx::warp_uniform(threadIdx.x % Kernel::kWarpgroup / kWarpSize)),
        lane(threadIdx.x % kWarpSize) {}

  // The first of an item's tile.
  __device__ __forceinline__ int warp_row() const { return 64 * group + 16 * warp; }
  // The row of an item's tile that a thread's accumulators of either half are.
  __device__ __forceinline__ int own_row(int h) const { return warp_row() + 8 * h + (lane >> 2); }
  // Rows past the last repeat it.
  __device__ __forceinline__ PackGqaRow token_of(const Item& item, int row) const {
    const TileWork& work = item.work.tile;
    return PackGqaRow::of(params, work.first_row + min_of(row, work.num_rows - 1));
  }

  // Hides the keys of a tile, from `first_key` on, that rows do not see. position: of the thread's
  // rows, where `shared.rows` does not tell.
  template <typename Form>
  __device__ __forceinline__ void hide_keys(float (&s)[1][Kernel::kTileKV / 8][4], const Item& item,
                                            int first_key, const RingPlace<Kernel::kStages>& values,
                                            const int (&position)[2]) const {
    if constexpr (Kernel::kMasked) {
      Kernel::wait(shared.row_bits.full[values.stage], values.parity);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int token = token_of(item, own_row(h)).token - item.range.first_token;
        hide_by_bits<Form>(s[0], h, shared.row_bits.of[values.stage][token], lane);
      }
      return;
    }
    const Request& request = item.work.request;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int its_position =
          LogitsVariant::kReadsRows ? shared.rows[own_row(h)].position : position[h];
      const KeyLimits limits = KeyLimits::of(params, request, its_position);
      hide_by_limits<Form>(s[0], h, limits.begin - first_key, limits.end - first_key, lane);
    }
  }

  // Where a row of an item is: in q and o, and, if it leaves a state, among the states.
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

  // Settles what does not need O of the present item, whose keys have all been seen: the rows'
  // normalisers and, if anybody wants them, their log-sum-exps.
  __device__ __forceinline__ Output conclude(const Softmax& softmax, int place, int slot) const {
    const Item& item = shared.items[place];
    float sums[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) sums[h] = quad_sum(softmax.row_sum[0][h]);
    const bool leaves_state = item.work.tile.leaves_state();
    const float output_scale =
        leaves_state ? 1.0f : output_scale_of(params, item.work.tile.kv_head);
    Output output{place, slot, item.boxed_rows >= 64 * (group + 1), {}};
    if (!leaves_state && params.sinks == nullptr && params.lse == nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // A row that has seen no key has the sum 0.
        output.factors[h] = sums[h] == 0.0f ? 0.0f : ptx::rcp_approx(sums[h]) * output_scale;
      }
      return output;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowPlace row = row_place(item, h);
      const float old_max = softmax.base2_max(0, h, LogitsVariant::softmax_scale(params));
      RowState state{old_max, sums[h]};
      if (!leaves_state && row.exists) state.add_sink(sink_of(params, row.head));
      output.factors[h] = state.normaliser(old_max) * output_scale;
      if (!row.exists || (lane & 3) != 0) continue;
      if (leaves_state) {
        params.partial_lse[row.state] = state.lse();
      } else if (params.lse != nullptr) {
        params.lse[row.token * params.lse_stride_n + row.head * params.lse_stride_h] = state.lse();
      }
    }
    return output;
  }

  // Normalises and writes this warp's rows of an item, and is done with it.
  __device__ __forceinline__ void write(const Output& output, const Accumulators& o) const {
    const Item& item = shared.items[output.place];
    if (output.is_staged) {
      stage(output, o);
    } else if (item.work.tile.leaves_state()) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowPlace row = row_place(item, h);
        float* out = params.partial_o + row.state * kHeadDimVO;
        if (!row.exists) continue;
        store_output_row<float, kHeadDimVO, false, true>([&](int column) { return out + column; },
                                                         o[0], h, output.factors[h], lane);
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowPlace row = row_place(item, h);
        DTypeO* out = static_cast<DTypeO*>(params.o) + row.token * params.o_stride_n +
                      row.head * params.o_stride_h;
        if constexpr (sizeof(DTypeO) == 2) {
          store_output_vectors<DTypeO, kHeadDimVO>(out, o[0], h, output.factors[h], row.exists,
                                                   lane);
        } else if (row.exists) {
          store_output_row<DTypeO, kHeadDimVO, false, true>(
              [&](int column) { return out + column; }, o[0], h, output.factors[h], lane);
        }
      }
    }
    ptx::warp_sync();
    if (lane == 0) Kernel::arrive(shared.empty_item[output.place]);
  }

  // Leaves this warp's rows in the place of theirs of Q, as a box of O lies there. The other
  // groups' rows may still be read.
  __device__ __forceinline__ void stage(const Output& output, const Accumulators& o) const {
    if constexpr (Kernel::kStagesOutput) {
      static_assert(QTile::kRowBytes == 128 && QTile::kGroupBytes == 8 * 128, "bits do not carry");
      // A lane's row and chunk of the first of all matrices; two n-tiles further is a bit of the
      // address. All addresses at once would be kept, and spill.
      const uint32_t first = ptx::opaque_copy(ptx::shared_address(shared.q[output.slot]) +
                                              QTile::offset(warp_row() + (lane & 15), lane >> 4));
#pragma unroll
      for (int n = 0; n < kHeadDimVO / 8; n += 2) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
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
