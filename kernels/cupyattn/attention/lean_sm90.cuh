// Prefill on Hopper in lean blocks: one warpgroup, which copies its keys itself, for one item of 64
// rows. No registers go to warps that only copy, so three or four blocks run on an SM and fill each
// other's waits. Softmax and rows are those of prefill_sm90.
//
// Phases of a block. "<-" names what a phase waits for.
//   find_only_item        warp 0; warp 1 makes the barriers
//   copy_first            warp 0: Q, and as many tiles of keys and values as the ring holds
//   process_tile          for every tile of keys, from the last to the first:
//     S = Q K^T           <- K and Q have landed; frees K's slot
//     softmax
//     O += P V            <- V has landed; frees V's slot
//   write                 normalises and stores O, in the place of Q where boxes do
// Warp 0 copies the next tile to a slot that has been freed.
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
  static constexpr int kStages = Base::kStages, kThreads = Base::kWarpgroup;
  static constexpr bool kStagesOutput =
      sizeof(DTypeO) == 2 && Base::kHeadDimQK == Base::kHeadDimVO;

  struct SharedMemory {
    alignas(QTile::kAlign) unsigned char q[1][QTile::kBytes];
    // K and V of one tile after another.
    alignas(KTile::kAlign) unsigned char ring[kStages][KTile::kBytes];
    alignas(16) RowInfo rows[LogitsVariant::kReadsRows ? Base::kTileQ : 1];
    typename LogitsVariant::Constants logits;
    alignas(8) Item items[1];
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
  using DTypeKV = typename Traits::DTypeKV;
  using SharedMemory = typename Traits::SharedMemory;
  using Tile = typename Traits::KTile;
  using QTile = typename Traits::QTile;
  using Item = typename Traits::Item;
  using Softmax = PrefillSm90Softmax<Traits>;
  using Probabilities = typename Softmax::Probabilities;
  static constexpr int kThreads = Traits::kThreads, kTileKV = Traits::kTileKV;
  static constexpr int kHeadDimQK = Traits::kHeadDimQK, kHeadDimVO = Traits::kHeadDimVO;
  static constexpr int kStages = Traits::kStages;

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles/sm90.py) must agree");

  const PrefillSm90Block<Traits>& block;
  const PrefillSm90Params& all_params;
  SharedMemory& shared;
  const int warp, lane;
  // Tiles that have been copied and multiplied: K, then V, of one key tile after another.
  uint32_t copied = 0, multiplied = 0;
  bool has_rows = true;  // of the warp
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
    ptx::prefetch_tensor_map(params.q);
    ptx::prefetch_tensor_map(params.k);
    ptx::prefetch_tensor_map(params.v);
    init(shared.full_q[0], 1);
    init(shared.empty_q[0], 1);
    init(shared.empty_item[0], 4);
    for (int stage = 0; stage < kStages; ++stage) {
      init(shared.full[stage], 1);
      init(shared.empty[stage], 4);
    }
    shared.logits = Traits::LogitsVariant::make_constants(params.attention);
    ptx::fence_mbarrier_init();
  }

  __device__ __forceinline__ void run_item() {
    const Item& item = shared.items[0];
    if (warp == 0) copy_first(item);
    has_rows = softmax.rows.warp_row() < ptx::warp_uniform(item.work.tile.num_rows);
    softmax.begin_item(item);
    const int begin = ptx::warp_uniform(item.tiles.begin);
    int tile = ptx::warp_uniform(item.tiles.end);
    if (tile > begin) {
      await_phase(shared.full_q[0], 0);  // mutate: lean-queries-not-awaited
      process_tile<true>(item, --tile);
      while (tile > begin) process_tile<false>(item, --tile);
      // O takes the place of Q, which no warp of the warpgroup reads any more.
      if (Traits::kStagesOutput) ptx::block_sync();
    } else {
      clear_output();
    }
    softmax.rows.write(softmax.rows.finish_rows(softmax.online, 0, 0), o);
    if (Traits::kStagesOutput && warp == 0) {
      int stored = 0;
      await_phase(shared.empty_item[0], 0);
      PrefillSm90Scheduler<Traits>{block}.store_output(item, stored, lane);
      if (lane == 0) ptx::bulk_wait_read();
    }
  }

  // --- Copies ---

  __device__ __forceinline__ void copy_first(const Item& item) {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      copy_next(item);
      if (i > 0 || !item.has_keys()) continue;
      PipelineState<1> q;
      PrefillSm90Scheduler<Traits>{block}.copy_queries(q, item, lane);
    }
  }

  // Copies the next tile of keys or values to the next slot, once all warps have left it.
  __device__ __forceinline__ void copy_next(const Item& item) {
    const int tile = ptx::warp_uniform(item.tiles.end) - 1 - static_cast<int>(copied / 2);
    if (tile < ptx::warp_uniform(item.tiles.begin)) return;
    const PrefillSm90Producer<Traits> producer{block};
    const uint32_t slot = copied % kStages;
    const bool is_value = copied % 2 != 0;
    int page = -1;
    if constexpr (Traits::kPaged) page = producer.page_of_box(item, tile, lane);
    producer.template copy_boxes<Tile, false>(
        is_value ? all_params.v : all_params.k, is_value ? all_params.v_units : all_params.k_units,
        {shared.ring[slot], shared.empty[slot], shared.full[slot], round_of(copied)}, item,
        KeyTile{tile, 0}, page, lane);
    ++copied;
  }

  static __device__ __forceinline__ uint32_t round_of(uint32_t count) { return count / kStages % 2; }

  __device__ __forceinline__ void await_slot() const {
    await_phase(shared.full[multiplied % kStages], round_of(multiplied));
  }
  __device__ __forceinline__ uint64_t operand_in_slot() const {
    return operand_at<Tile>(ptx::shared_address(shared.ring[multiplied % kStages]));
  }
  // Leaves the slot that was multiplied.
  __device__ __forceinline__ void release_slot(const Item& item) {
    ptx::mbarrier_arrive_if(lane == 0, ptx::shared_address(&shared.empty[multiplied % kStages]));
    ++multiplied;
    if (warp == 0) copy_next(item);  // mutate: lean-slot-not-refilled
  }

  // --- One tile ---

  template <bool kIsFirst>
  __device__ __forceinline__ void process_tile(const Item& item, int tile) {
    const KeyTile key_tile{tile, softmax.needs_mask(tile)};
    float s[1][kTileKV / 8][4];
    Probabilities probabilities;
    await_slot();
    ptx::wgmma_fence();
    const uint32_t rows = ptx::shared_address(shared.q[0]);
    issue_qk<QTile, Tile, kHeadDimQK>(s, operand_at<QTile>(rows), operand_in_slot());
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    take_results(s);
    release_slot(item);
    if (!has_rows) {
      clear(probabilities.p);
    } else if constexpr (kIsFirst) {
      softmax.first_tile(probabilities, s, item, key_tile, {});
    } else {
      softmax.next_tile(probabilities, s, o, item, key_tile, {});
    }
    await_slot();
    if (key_tile.needs_mask && has_nonfinite_values()) {  // mutate: lean-values-not-checked
      if (kIsFirst) clear_output();
      add_values(item, probabilities, softmax.first_key_of(key_tile));
    } else {
      ptx::wgmma_fence();
      issue_pv<Tile, kHeadDimVO>(o, probabilities.p, operand_in_slot(), !kIsFirst);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      take_results(o);
    }
    release_slot(item);
  }

  // A warp of a partial tile may have no rows; it takes part in products alone.
  static __device__ __forceinline__ void clear(uint32_t (&p)[Softmax::kSteps][1][4]) {
#pragma unroll
    for (int i = 0; i < Softmax::kSteps; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) p[i][0][e] = 0;
    }
  }

  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int n = 0; n < kHeadDimVO / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][n][e] = 0.0f;
    }
  }

  // Whether a value of the tile is not finite: a hidden one would give 0 * NaN in the product.
  __device__ __forceinline__ bool has_nonfinite_values() const {
    const Vector16* const chunks =
        reinterpret_cast<const Vector16*>(shared.ring[multiplied % kStages]);
    uint32_t seen[4] = {};
#pragma unroll
    for (int i = 0; i < Tile::kBytes / 16 / kThreads; ++i) {
      const Vector16 values = chunks[threadIdx.x + i * kThreads];
      // Zero times a value that is not finite is NaN, and a sum keeps it.
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        seen[w] = ptx::multiply_add_pair<DTypeKV>(values.word[w], 0u, seen[w]);
      }
    }
    return ptx::block_any(((seen[0] | seen[1] | seen[2] | seen[3]) & 0x7fff7fffu) != 0);
  }

  // O += P V of a tile by hand, for rows that see a key.
  __device__ __forceinline__ void add_values(const Item& item, const Probabilities& probabilities,
                                             int first_key) {
    const auto* values = values_of<DTypeKV>(block.params, item.work.tile.kv_head);
    const int num_keys = min_of(item.range.end - first_key, kTileKV);
#pragma unroll 1
    for (int key = 0; key < num_keys; ++key) {
      const int64_t row =
          value_row<Traits::kPaged>(block.params, item.work.request, first_key + key);
      add_nonfinite_key<typename Traits::DTypeQ, true>(o, probabilities.p, key, values + row, lane);
    }
    ptx::warp_sync();
  }
};

}  // namespace cupyattn
