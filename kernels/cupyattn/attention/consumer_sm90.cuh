// A warpgroup of prefill_sm90 that multiplies: 64 rows of Q of one item after another, by tiles of
// keys and values that other warps bring. See prefill_sm90.cuh.
#pragma once

#include "cupyattn/attention/hidden_values.cuh"
#include "cupyattn/attention/key_rows.cuh"
#include "cupyattn/attention/mask.cuh"
#include "cupyattn/attention/mask_sm90.cuh"
#include "cupyattn/attention/ring.cuh"
#include "cupyattn/attention/softmax.cuh"
#include "cupyattn/attention/state.cuh"
#include "cupyattn/attention/work.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/mbarrier.cuh"
#include "cupyattn/ptx/warp.cuh"
#include "cupyattn/tile/warpgroup_tile.cuh"

namespace cupyattn {

template <typename Kernel>
struct PrefillSm90Consumer {
  using Config = typename Kernel::ConfigType;
  using DTypeQ = typename Kernel::DTypeQ;
  using DTypeKV = typename Kernel::DTypeKV;
  using DTypeO = typename Kernel::DTypeO;
  using QTile = typename Kernel::QTile;
  using KTile = typename Kernel::KTile;
  using VTile = typename Kernel::VTile;
  using LogitsVariant = typename Kernel::LogitsVariant;
  using Item = typename Kernel::Item;
  using SharedMemory = typename Kernel::SharedMemory;
  using Softmax = OnlineSoftmax<1>;
  static constexpr int kHeadDimQK = Kernel::kHeadDimQK;
  static constexpr int kHeadDimVO = Kernel::kHeadDimVO;
  static constexpr int kConsumers = Kernel::kConsumers;
  static constexpr int kTileQ = Kernel::kTileQ;
  static constexpr int kTileKV = Kernel::kTileKV;
  static constexpr int kTilesS = kTileKV / 8;
  static constexpr int kStages = Kernel::kStages;
  static constexpr int kSlots = Kernel::kSlots;
  static constexpr int kItems = Kernel::kItems;
  static constexpr bool kPaged = Kernel::kPaged;
  static constexpr int kWarpgroup = Kernel::kWarpgroup;

  const Kernel& kernel;
  const AttentionParams& params;
  SharedMemory& shared;
  const int group, warp, lane;
  RingPlace<kStages> k, v;
  RingPlace<kSlots> queries;  // of the next item
  RingPlace<kItems> place;    // of the present item, as is `slot`
  int slot;
  // What is still to be done for the present item: its last values to be multiplied, and, or
  // only, O to be written.
  enum Rest { kNothing, kOutput, kValues } rest = kNothing;
  float o[1][kHeadDimVO / 8][4];
  uint32_t p[kTileKV / 16][1][4];
  Softmax softmax;

  __device__ __forceinline__ PrefillSm90Consumer(const Kernel& kernel, int group)
      : kernel(kernel),
        params(kernel.params),
        shared(kernel.shared),
        group(group),
        warp(ptx::warp_uniform(threadIdx.x % kWarpgroup / kWarpSize)),
        lane(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ int warp_row() const { return 64 * group + 16 * warp; }

  __device__ __forceinline__ void run() {
    // The first turn is the first group's.
    if (group == kConsumers - 1) pass_turn();
    ptx::warp_sync();
    RingPlace<kItems> next;
    for (;;) {
      const Item& item = kernel.await_item(next);
      const bool has_keys = item.exists && item.tiles.begin < item.tiles.end;
      if (!has_keys || rest == kOutput) complete();
      if (!item.exists) return;
      if (has_keys) {
        int tile = item.tiles.end - 1;
        visit_first(item, tile, next);
        while ((tile = item.before(tile)) >= item.tiles.begin) visit(item, tile);
        rest = kValues;
      } else {
        start(item, next);
        rest = kOutput;
      }
      next.advance();
    }
  }

  // Groups take turns at issuing products, so that they are not at their softmax together.
  __device__ __forceinline__ void await_turn() const {
    if constexpr (Config::kTakesTurns)
      ptx::named_barrier_sync(Kernel::kTurn + group, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (Config::kTakesTurns) {
      const int next = group + 1 == kConsumers ? 0 : group + 1;
      ptx::named_barrier_arrive(Kernel::kTurn + next, 2 * kWarpgroup);
    }
  }

  // Does what is left of the present item.
  __device__ __forceinline__ void complete() {
    if (rest == kNothing) return;
    if (rest == kValues) {
      Kernel::wait(shared.full_v[v.stage], v.parity);
      multiply_values();
      ptx::wgmma_wait<0>();
      take_results(o);
      release_values();
    }
    finish();
    rest = kNothing;
  }

  // Turns to an item: describes this warp's rows; those past the last repeat it.
  __device__ __forceinline__ void start(const Item& item, const RingPlace<kItems>& next) {
    place = next;
    softmax = Softmax();
#pragma unroll
    for (int n = 0; n < kHeadDimVO / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][n][e] = 0.0f;
    }
    const TileWork& work = item.work.tile;
    const int r = warp_row() + (lane & 15);
    const PackedRow row = PackedRow::of(params, work.first_row + min_of(r, work.num_rows - 1));
    ptx::warp_sync();
    if (lane < 16) {
      shared.rows[r] =
          LogitsVariant::make_row(params, row.token, item.work.request.position(params, row.token),
                                  work.kv_head * params.group_size + row.group_head, work.kv_head);
    }
    ptx::warp_sync();
  }

  __device__ __forceinline__ void multiply_values() {
    const uint32_t address = ptx::shared_address(shared.v[v.stage]);
    ptx::wgmma_fence();
    issue_pv<DTypeQ, VTile, kHeadDimVO>(o, p, operand_at<VTile>(address));
    ptx::wgmma_commit();
  }

  // After the last keys of an item Q is free too.
  __device__ __forceinline__ void release_keys(bool is_last) {
    if (lane == 0) {
      Kernel::arrive(shared.empty_k[k.stage]);
      if (is_last) Kernel::arrive(shared.empty_q[slot]);
    }
    k.advance();
  }
  __device__ __forceinline__ void release_values() {
    if (lane == 0) Kernel::arrive(shared.empty_v[v.stage]);
    v.advance();
  }

  // Issues S = Q K^T of a tile that has landed.
  __device__ __forceinline__ void multiply_keys(float (&s)[1][kTilesS][4]) {
    const uint32_t rows = ptx::shared_address(shared.q[slot]) + 64 * group * QTile::kRowBytes;
    const uint32_t keys = ptx::shared_address(shared.k[k.stage]);
    Kernel::wait(shared.full_k[k.stage], k.parity);
    await_turn();
    ptx::wgmma_fence();
    issue_qk<DTypeQ, QTile, KTile, kHeadDimQK>(s, operand_at<QTile>(rows), operand_at<KTile>(keys));
    ptx::wgmma_commit();
  }

  // The first tile of an item: its logits beside the last values of the item before.
  __device__ __forceinline__ void visit_first(const Item& item, int tile,
                                              const RingPlace<kItems>& next) {
    float s[1][kTilesS][4];
    Kernel::wait(shared.full_q[queries.stage], queries.parity);
    slot = queries.stage;
    queries.advance();
    if (rest == kValues) {
      multiply_keys(s);
      Kernel::wait(shared.full_v[v.stage], v.parity);
      multiply_values();
      pass_turn();
      ptx::wgmma_wait<1>();
      take_results(s);
      release_keys(tile == item.tiles.begin);
      ptx::wgmma_wait<0>();
      take_results(o);
      release_values();
      finish();
    } else {
      multiply_keys(s);
      pass_turn();
      ptx::wgmma_wait<0>();
      take_results(s);
      release_keys(tile == item.tiles.begin);
    }
    start(item, next);
    exponentiate<true>(s, item, tile);
  }

  // Any other tile: its logits beside the values of the tile before, then its probabilities.
  __device__ __forceinline__ void visit(const Item& item, int tile) {
    float s[1][kTilesS][4];
    multiply_keys(s);
    Kernel::wait(shared.full_v[v.stage], v.parity);
    multiply_values();
    pass_turn();
    ptx::wgmma_wait<1>();
    take_results(s);
    release_keys(tile == item.tiles.begin);
    // A warp gets here when nearly all products have been taken up: little is left to wait for.
    ptx::wgmma_wait<0>();
    take_results(o);
    release_values();
    exponentiate<false>(s, item, tile);
  }

  // Turns products into probabilities, and raises the maximum where they ask for it.
  template <bool kIsFirst>
  __device__ __forceinline__ void exponentiate(float (&s)[1][kTilesS][4], const Item& item,
                                               int tile) {
    const int first_key = item.first_key(tile);
    const float scale = LogitsVariant::softmax_scale(params);
    const RowInfo* rows = shared.rows + warp_row();
    const bool hides = item.hides_keys(tile);
    const auto form = LogitsVariant::apply(s, softmax.row_max, rows, shared.logits, params,
                                           first_key, lane, hides);
    if (hides) hide_keys<decltype(form)>(s, item, rows, first_key);
    softmax.template exponentiate_or_raise<DTypeQ, kIsFirst>(p, s, o, form, scale);
    if (hides) add_bad_keys(item, first_key);
  }

  template <typename Form>
  __device__ __forceinline__ void hide_keys(float (&s)[1][kTilesS][4], const Item& item,
                                            const RowInfo* rows, int first_key) const {
    if constexpr (Kernel::kMasked) {
      Kernel::wait(shared.row_bits.full[v.stage], v.parity);
      hide_by_bits<Form>(s, rows, shared.row_bits.of[v.stage], item.range.first_token, lane);
      return;
    }
    const int first = first_key + 2 * (lane & 3);
    const Request& request = item.work.request;
    if (item.range.cuts_end(first_key, kTileKV)) {
      hide_logits<Form>(s, rows, lane, [&](const RowInfo& row) {
        const int end = KeyLimits::of(params, request, row.position).end - first;
        return [=](int offset) { return offset >= end; };
      });
    }
    if (item.range.cuts_begin(first_key)) {
      hide_logits<Form>(s, rows, lane, [&](const RowInfo& row) {
        const int begin = KeyLimits::of(params, request, row.position).begin - first;
        return [=](int offset) { return offset < begin; };
      });
    }
  }

  // Values that are not finite were taken out of a tile that hides keys: rows that see them get
  // them here.
  __device__ __forceinline__ void add_bad_keys(const Item& item, int first_key) {
    Kernel::wait(shared.full_v[v.stage], v.parity);
    for (int word = 0; word < ceil_div(kTileKV, 32); ++word) {
      for (uint32_t bits = shared.bad_keys[v.stage][word]; bits != 0; bits &= bits - 1) {
        const int key = 32 * word + __ffs(static_cast<int>(bits)) - 1;
        const DTypeKV* values = static_cast<const DTypeKV*>(params.v) +
                                item.work.tile.kv_head * params.v_stride_h +
                                value_row<kPaged>(params, item.work.request, first_key + key);
        add_bad_key<DTypeKV, DTypeQ, kHeadDimVO>(o, p, key, values, lane);
      }
    }
  }

  // Normalises and writes this warp's rows, or, where the keys are split, its partial states, and
  // is done with the present item.
  __device__ __forceinline__ void finish() {
    const Item& item = shared.items[place.stage];
    const TileWork& work = item.work.tile;
    const int q_start = item.work.request.q_start;
    const bool leaves_state = work.leaves_state();
    const float output_scale = output_scale_of(params, work.kv_head);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_row() + 8 * h + (lane >> 2);
      const float old_max = softmax.base2_max(0, h, LogitsVariant::softmax_scale(params));
      RowState state{old_max, quad_sum(softmax.row_sum[0][h])};
      const bool exists = row < work.num_rows;
      if (leaves_state) {
        const int64_t index = (work.state(params) + work.split) * kTileQ + row;
        if (exists) {
          float* out = params.partial_o + index * kHeadDimVO;
          store_output_row<float, kHeadDimVO, false, true>(
              [&](int column) { return out + column; }, o[0], h, state.normaliser(old_max), lane);
          if ((lane & 3) == 0) params.partial_lse[index] = state.lse();
        }
        continue;
      }
      const int head = shared.rows[row].head;
      const int64_t token = q_start + shared.rows[row].token;
      state.add_sink(sink_of(params, head));
      const float factor = state.normaliser(old_max) * output_scale;
      DTypeO* out =
          static_cast<DTypeO*>(params.o) + token * params.o_stride_n + head * params.o_stride_h;
      if constexpr (sizeof(DTypeO) == 2) {
        store_output_vectors<DTypeO, kHeadDimVO>(out, o[0], h, factor, exists, lane);
      } else if (exists) {
        store_output_row<DTypeO, kHeadDimVO, false, true>([&](int column) { return out + column; },
                                                          o[0], h, factor, lane);
      }
      if (exists && params.lse != nullptr && (lane & 3) == 0) {
        params.lse[token * params.lse_stride_n + head * params.lse_stride_h] = state.lse();
      }
    }
    ptx::warp_sync();
    if (lane == 0) Kernel::arrive(shared.empty_item[place.stage]);
  }
};

}  // namespace cupyattn
