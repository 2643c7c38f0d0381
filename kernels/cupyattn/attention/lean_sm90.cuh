// Prefill on Hopper in lean blocks: one warpgroup, which copies its own keys, for one item of 64
// rows. Blocks have no registers of warps that only copy, so three or four of them run on an SM and
// fill each other's waits. Softmax and rows are those of prefill_sm90.
//
// Phases of a block. "<-" names what a phase waits for.
//   find_item             warp 0; warp 1 makes the barriers
//   copy_next             warp 0: Q, and as many tiles of keys and values as the ring holds
//   process_tile          for every tile of keys, from the last to the first:
//     S = Q K^T           <- K and Q have landed; frees K's slot, to which warp 0 copies
//     softmax
//     sweep_values        of tiles that need a mask
//     O += P V            <- V has landed; frees V's slot
//   write                 normalises and stores O, in place of Q where boxes do
#pragma once

#include "cupyattn/attention/hidden_values.cuh"
#include "cupyattn/attention/key_rows.cuh"
#include "cupyattn/attention/producer_sm90.cuh"
#include "cupyattn/attention/scheduler_sm90.cuh"
#include "cupyattn/attention/softmax_sm90.cuh"

namespace cupyattn {

template <typename Config>
struct LeanSm90Traits : PrefillSm90Traits<Config> {
  using Base = PrefillSm90Traits<Config>;
  using typename Base::DTypeO;
  using typename Base::Item;
  using typename Base::KTile;
  using typename Base::LogitsVariant;
  using typename Base::QTile;
  using typename Base::VTile;
  static constexpr int kThreads = Base::kWarpgroup, kStages = Base::kStages;
  static constexpr bool kStagesOutput =
      sizeof(DTypeO) == 2 && Base::kHeadDimQK == Base::kHeadDimVO;

  struct SharedMemory {
    alignas(QTile::kAlign) unsigned char q[1][QTile::kBytes];
    // K and V of one tile after another.
    alignas(KTile::kAlign) unsigned char ring[kStages][KTile::kBytes];
    alignas(16) RowInfo rows[LogitsVariant::kReadsRows ? Base::kTileQ : 1];
    typename LogitsVariant::Constants logits;
    alignas(8) Item items[1];
    // Bits of the keys whose values of the present tile were not finite.
    Vector16 nonfinite_keys;
    alignas(8) uint64_t full_q[1], empty_q[1], empty_item[1];
    uint64_t full[kStages], empty[kStages];
  };

  static_assert(Base::kConsumers == 1 && !Base::kPersistent, "a block is a warpgroup of one item");
  static_assert(Base::kSlots == 1 && !Base::kOverlap, "a tile is over when the next begins");
  static_assert(is_same<KTile, VTile>, "slots hold either");
};

template <typename Config>
struct LeanSm90 {
  using Traits = LeanSm90Traits<Config>;
  using SharedMemory = typename Traits::SharedMemory;
  using Tile = typename Traits::KTile;
  using QTile = typename Traits::QTile;
  using Item = typename Traits::Item;
  using Softmax = PrefillSm90Softmax<Traits>;
  using Probabilities = typename Softmax::Probabilities;
  using Slot = PipelineState<Traits::kStages>;
  static constexpr int kThreads = Traits::kThreads, kTileKV = Traits::kTileKV;
  static constexpr int kHeadDimQK = Traits::kHeadDimQK, kHeadDimVO = Traits::kHeadDimVO;

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles/sm90.py) must agree");

  const PrefillSm90Block<Traits>& block;
  const PrefillSm90Params& all_params;
  SharedMemory& shared;
  const int warp, lane;
  // The slot of the next tile that is multiplied; and, in warp 0, what is copied next, and whereto.
  Slot next, to;
  int copied_tile = 0;
  bool copies_values = false;
  float o[1][kHeadDimVO / 8][4];
  Softmax softmax;

  __device__ __forceinline__ explicit LeanSm90(const PrefillSm90Block<Traits>& block)
      : block(block),
        all_params(block.all_params),
        shared(block.shared),
        warp(ptx::warp_uniform(threadIdx.x / kWarpSize)),
        lane(threadIdx.x % kWarpSize),
        softmax(block, 0) {}

  static __device__ __forceinline__ void run(const PrefillSm90Params& params,
                                             SharedMemory& shared) {
    const PrefillSm90Block<Traits> block(params, shared);
    const int warp = ptx::warp_uniform(threadIdx.x / kWarpSize);
    if (warp == 0) PrefillSm90Scheduler<Traits>{block}.find_only_item();
    if (threadIdx.x == kWarpSize) init_barriers(params, shared);
    ptx::block_sync();
    LeanSm90(block).run_item();
  }

  static __device__ __forceinline__ void init_barriers(const PrefillSm90Params& params,
                                                       SharedMemory& shared) {
    const auto init = [](uint64_t& barrier, int count) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), count);
    };
    init(shared.full_q[0], 1);
    init(shared.empty_q[0], 1);
    init(shared.empty_item[0], 4);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      init(shared.full[stage], 1);
      init(shared.empty[stage], 4);
    }
    shared.logits = Traits::LogitsVariant::make_constants(params.attention);
    ptx::fence_mbarrier_init();
  }

  __device__ __forceinline__ void run_item() {
    const Item& item = shared.items[0];
    const bool has_keys = item.has_keys();
    copied_tile = ptx::warp_uniform(item.tiles.end) - 1;
    if (has_keys && warp == 0) copy_first(item);
    softmax.begin_item(item);
    if (has_keys) {
      int tile = ptx::warp_uniform(item.tiles.end) - 1;
      const int last_tile = ptx::warp_uniform(item.tiles.begin);
      await_phase(shared.full_q[0], 0);
      process_tile<true>(item, tile);
      while (tile > last_tile) process_tile<false>(item, --tile);
      // O takes the place of Q, which no warp reads any more.
      if (Traits::kStagesOutput) ptx::block_sync();
    } else {
#pragma unroll
      for (int n = 0; n < kHeadDimVO / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[0][n][e] = 0.0f;
      }
    }
    softmax.rows.write(softmax.rows.finish_rows(softmax.online, 0, 0), o);
    if (Traits::kStagesOutput && warp == 0) {
      int stored = 0;
      await_phase(shared.empty_item[0], 0);
      PrefillSm90Scheduler<Traits>{block}.store_output(item, stored, lane);
      if (lane == 0) ptx::bulk_wait_read();
    }
  }

  __device__ __forceinline__ void copy_first(const Item& item) {
#pragma unroll 1
    for (int i = 0; i < Traits::kStages; ++i) {
      copy_next(item);
      if (i > 0) continue;
      PipelineState<1> q;
      PrefillSm90Scheduler<Traits>{block}.copy_queries(q, item, lane);
    }
  }

  // Copies the next tile of keys or values to the next slot, once all warps have left it.
  __device__ __forceinline__ void copy_next(const Item& item) {
    if (copied_tile < item.tiles.begin) return;
    const PrefillSm90Producer<Traits> producer{block};
    int page = -1;
    if constexpr (Traits::kPaged) page = producer.page_of_box(item, copied_tile, lane);
    producer.template copy_boxes<Tile, false>(
        copies_values ? all_params.v : all_params.k,
        copies_values ? all_params.v_units : all_params.k_units,
        {shared.ring[to.stage], shared.empty[to.stage], shared.full[to.stage], to.parity}, item,
        KeyTile{copied_tile, 0}, page, lane);
    if (copies_values) --copied_tile;
    copies_values = !copies_values;
    to.advance();
  }

  template <bool kIsFirst>
  __device__ __forceinline__ void process_tile(const Item& item, int tile) {
    const KeyTile key_tile{tile, softmax.needs_mask(tile)};
    float s[1][kTileKV / 8][4];
    Probabilities probabilities;
    await_phase(shared.full[next.stage], next.parity);
    ptx::wgmma_fence();
    issue_qk<QTile, Tile, kHeadDimQK>(s, operand_at<QTile>(ptx::shared_address(shared.q[0])),
                                      operand_at<Tile>(slot_address()));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    take_results(s);
    release_slot(item);
    if constexpr (kIsFirst) {
      softmax.first_tile(probabilities, s, item, key_tile, {});
    } else {
      softmax.next_tile(probabilities, s, o, item, key_tile, {});
    }
    await_phase(shared.full[next.stage], next.parity);
    const bool has_nonfinite = probabilities.masked_key >= 0 && sweep_values(item, tile);
    ptx::wgmma_fence();
    issue_pv<Tile, kHeadDimVO>(o, probabilities.p, operand_at<Tile>(slot_address()), !kIsFirst);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    take_results(o);
    if (has_nonfinite) add_nonfinite_keys(item, probabilities);
    release_slot(item);
  }

  __device__ __forceinline__ uint32_t slot_address() const {
    return ptx::shared_address(shared.ring[next.stage]);
  }
  // Leaves the slot that was multiplied; warp 0 copies to it.
  __device__ __forceinline__ void release_slot(const Item& item) {
    ptx::mbarrier_arrive_if(lane == 0, ptx::shared_address(&shared.empty[next.stage]));
    next.advance();
    if (warp == 0) copy_next(item);
  }

  // Sets non-finite values of the tile to zero, because a hidden one would give 0 * NaN, and marks
  // their keys. Returns whether there were any.
  __device__ __forceinline__ bool sweep_values(const Item& item, int tile) const {
    Vector16* const chunks = reinterpret_cast<Vector16*>(shared.ring[next.stage]);
    const int thread = threadIdx.x;
    uint32_t seen[4] = {};
#pragma unroll
    for (int i = 0; i < Tile::kBytes / 16 / kThreads; ++i) {
      const Vector16 values = chunks[thread + i * kThreads];
      // Zero times a value that is not finite is NaN, and a sum keeps it.
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        seen[w] =
            ptx::multiply_add_pair<typename Traits::DTypeKV>(values.word[w], 0u, seen[w]);
      }
    }
    if (!ptx::block_any(((seen[0] | seen[1] | seen[2] | seen[3]) & 0x7fff7fffu) != 0)) return false;
    if (thread == 0) shared.nonfinite_keys = Vector16{};
    ptx::block_sync();
#pragma unroll 1
    for (int index = thread; index < Tile::kBytes / 16; index += kThreads) {
      zero_nonfinite_chunk<typename Traits::DTypeKV>(
          chunks[index], shared.nonfinite_keys.word, Tile::row_at(16 * index),
          item.range.end - item.first_key(tile));
    }
    ptx::fence_proxy_async();
    ptx::block_sync();
    return true;
  }

  // Rows that see a key whose values are not finite get its values here.
  __device__ __forceinline__ void add_nonfinite_keys(const Item& item,
                                                     const Probabilities& probabilities) {
    for (int word = 0; word < ceil_div(kTileKV, 32); ++word) {
      for (uint32_t bits = shared.nonfinite_keys.word[word]; bits != 0; bits &= bits - 1) {
        const int key = 32 * word + __ffs(static_cast<int>(bits)) - 1;
        const auto* values =
            values_of<typename Traits::DTypeKV>(block.params, item.work.tile.kv_head);
        add_nonfinite_key<typename Traits::DTypeQ>(
            o, probabilities.p, key,
            values + value_row<Traits::kPaged>(block.params, item.work.request,
                                               probabilities.masked_key + key),
            lane);
      }
    }
    ptx::warp_sync();
  }
};

}  // namespace cupyattn
