// Prefill on Hopper in lean blocks: one warpgroup that multiplies, for items of 64 rows. No registers
// go to a warpgroup that only copies, so three or four blocks run on an SM and fill each other's
// waits. Softmax and rows are those of prefill_sm90.
//
// A block of one item copies for itself. A persistent block has a fifth warp that copies: it is one
// item ahead, so Q and keys of the next item arrive while the present one is multiplied.
//
// Phases of an item. "<-" names what a phase waits for.
//   find_item             the copying warp
//   copy_item             the copying warp: Q, and the keys and values of one tile after another
//                         <- free slots
//   process_tile          for every tile of keys, from the last to the first:
//     S = Q K^T           <- K and Q have landed; frees K's slot
//     softmax
//     O += P V            <- V has landed; frees V's slot
//   write                 normalises O, in the place of Q where boxes store it
//   store                 warp 0: boxes of O
#pragma once

#include "cupyattn/shared/hidden_values.cuh"
#include "cupyattn/shared/key_rows.cuh"
#include "cupyattn/sm90/roles/producer.cuh"
#include "cupyattn/sm90/roles/scheduler.cuh"
#include "cupyattn/sm90/roles/softmax.cuh"

namespace cupyattn {

template <typename Config>
struct LeanSm90Traits : PrefillSm90Traits<Config> {
  using Base = PrefillSm90Traits<Config>;
  using typename Base::DTypeO;
  using typename Base::Item;
  using typename Base::KTile;
  using typename Base::QTile;
  using typename Base::VTile;
  using Base::kItems, Base::kSlots, Base::kStages, Base::kWarpgroup;
  // A short item has few tiles that a fast path could serve.
  using AnyLogits = typename Base::AnyLogits;
  using LogitsVariant = conditional<is_same<AnyLogits, CappedLogits>, CappedInPlace, AnyLogits>;
  static constexpr bool kRowsAreAlone = !LogitsVariant::kReadsRows;
  static constexpr int kThreads = kWarpgroup + (Base::kPersistent ? kWarpSize : 0);
  // O has the place of the first panels of Q.
  static constexpr bool kStagesOutput =
      sizeof(DTypeO) == 2 && Base::kHeadDimVO <= Base::kHeadDimQK;
  static constexpr int kSlotBytes = max_of(KTile::kBytes, VTile::kBytes);

  struct SharedMemory {
    alignas(QTile::kAlign) unsigned char q[kSlots][QTile::kBytes];
    // K and V of one tile after another.
    alignas(KTile::kAlign) unsigned char ring[kStages][kSlotBytes];
    alignas(16) RowInfo rows[LogitsVariant::kReadsRows ? Base::kTileQ : 1];
    typename LogitsVariant::Constants logits;
    alignas(8) Item items[kItems];
    alignas(8) uint64_t full_item[kItems], empty_item[kItems];
    uint64_t full_q[kSlots], empty_q[kSlots];
    uint64_t full[kStages], empty[kStages];
  };

  // Barriers of the warps that multiply.
  enum NamedBarrier { kQueriesRead = 1, kOutputStaged, kNonFinite };

  static_assert(Base::kConsumers == 1 && !Base::kOverlap, "a tile is over when the next begins");
  static_assert(kSlots == kItems, "an item ahead has its rows of Q");
};

// The warp that finds items and copies their rows of Q, and their keys and values.
template <typename Traits>
struct LeanSm90Copier {
  using Item = typename Traits::Item;
  using ItemFacts = typename Traits::ItemFacts;
  using Maps = typename PrefillSm90Producer<Traits>::Maps;
  static constexpr int kStages = Traits::kStages;
  // Tiles of K or V that are left to copy when a block takes its next item.
  static constexpr int kClaimTiles = 6;

  const PrefillSm90Block<Traits>& block;
  typename Traits::SharedMemory& shared = block.shared;
  const int lane = threadIdx.x % kWarpSize;
  uint32_t copied = 0;  // tiles: K, then V, of one key tile after another
  PipelineState<Traits::kSlots> q{};

  // Serves a persistent block to its end. `item`: its first.
  __device__ __forceinline__ void run(ItemFacts item) {
    const PrefillSm90Scheduler<Traits> scheduler{block};
    const int num_items = block.all_params.num_items * block.params.num_kv_heads;
    PipelineState<Traits::kItems> place;
    for (;;) {
      Item& present = shared.items[place.stage];
      await_phase(shared.empty_item[place.stage], place.parity ^ 1);
      ptx::warp_sync();
      if (lane == 0) {
        static_cast<ItemFacts&>(present) = item;
        arrive(shared.full_item[place.stage]);
      }
      ptx::warp_sync();
      if (!item.exists) return;
      place.advance();
      // The block takes no further item before it needs one. The number of the next, and then its
      // entry of the list, are on their way while the last tiles are copied.
      const int num_tiles = 2 * ptx::warp_uniform(present.tiles.end - present.tiles.begin);
      const int claimed_at = max_of(num_tiles - kClaimTiles, 0);
      const int listed_at = min_of(claimed_at + 2, num_tiles);
      int next = 0, index = num_items;
      typename PrefillSm90Scheduler<Traits>::ListPlace at{};
      WorkItem listed{};
#pragma unroll 1
      for (int tile = 0; tile <= num_tiles; ++tile) {
        if (tile == claimed_at) next = scheduler.take_next(num_items, lane);
        if (tile == listed_at) {
          index = scheduler.index_of(next);
          if (index < num_items) {
            at = scheduler.list_place(index);
            listed = scheduler.load(at.place, at.kv_head);
          }
        }
        if (copy_tile(present, tile) && tile == 0) scheduler.copy_queries(q, present, lane);
      }
      item = index < num_items ? scheduler.facts_of(at, listed) : ItemFacts{};
      if (item.has_keys()) scheduler.prefetch_queries(item, lane);
    }
  }

  // Copies tiles of keys and values from `index` up to `end`, if there are so many, and Q after the
  // first of all; returns the number of those copied so far.
  __device__ __forceinline__ int copy_tiles(const Item& item, int index, int end) {
#pragma unroll 1
    for (; index < end && copy_tile(item, index); ++index) {
      if (index == 0) PrefillSm90Scheduler<Traits>{block}.copy_queries(q, item, lane);
    }
    return index;
  }

  // Copies Q and the tiles that the ring holds, each by a warp of its own: instructions come from
  // memory once a launch, and a single warp would wait for those of one copy after another.
  __device__ __forceinline__ void copy_side_by_side(const Item& item, int warp) {
    static_assert(kStages <= 4, "a warp has one tile of the ring");
    if (!item.has_keys()) return;
    if (warp == 0) PrefillSm90Scheduler<Traits>{block}.copy_queries(q, item, lane);
    const int num_tiles = ptx::warp_uniform(item.tiles.end - item.tiles.begin);
    const uint32_t num_copied = min_of(kStages, 2 * num_tiles);
    copied = (warp + 3) % 4;
    if (copied < num_copied) copy_tile(item, copied);
    copied = num_copied;
  }

  // Copies a tile of an item to the next slot, once all warps have left that: the last keys, their
  // values, the keys ahead of them, and so on. Returns false if there is none.
  __device__ __forceinline__ bool copy_tile(const Item& item, int index) {
    const int tile = ptx::warp_uniform(item.tiles.end) - 1 - index / 2;
    if (tile < ptx::warp_uniform(item.tiles.begin)) return false;
    const auto& params = block.all_params;
    const bool is_key = index % 2 == 0;
    constexpr bool kAreAlike = is_same<typename Traits::KTile, typename Traits::VTile>;
    if constexpr (kAreAlike && !Traits::kPersistent) {  // by the same instructions
      const Maps maps{is_key ? params.k : params.v, is_key ? params.k_tail : params.v_tail};
      copy_boxes<typename Traits::KTile>(maps, is_key ? params.k_units : params.v_units, item, tile,
                                         is_key);
    } else if (is_key) {
      copy_boxes<typename Traits::KTile>({params.k, params.k_tail}, params.k_units, item, tile,
                                         true);
    } else {
      copy_boxes<typename Traits::VTile>({params.v, params.v_tail}, params.v_units, item, tile,
                                         false);
    }
    ++copied;
    return true;
  }

  template <typename Tile>
  __device__ __forceinline__ void copy_boxes(const Maps& maps, const PageUnits& units,
                                             const Item& item, int tile, bool is_key) const {
    const PrefillSm90Producer<Traits> producer{block};
    const uint32_t slot = copied % kStages;
    int page = -1;
    if constexpr (Traits::kOwnValuePages) {
      page = producer.page_of_box(item, tile, lane, is_key ? 0 : block.params.value_pages);
    } else if constexpr (Traits::kPaged) {
      page = producer.page_of_box(item, tile, lane);
    }
    producer.template copy_boxes<Tile, false>(
        maps, units, {shared.ring[slot], shared.empty[slot], shared.full[slot], copied / kStages % 2},
        item, KeyTile{tile, 0}, page, lane);
  }
};

template <typename Config>
struct LeanSm90 {
  using Traits = LeanSm90Traits<Config>;
  using DTypeKV = typename Traits::DTypeKV;
  using SharedMemory = typename Traits::SharedMemory;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using QTile = typename Traits::QTile;
  using Item = typename Traits::Item;
  using Softmax = PrefillSm90Softmax<Traits>;
  using Probabilities = typename Softmax::Probabilities;
  static constexpr int kThreads = Traits::kThreads, kWarpgroup = Traits::kWarpgroup;
  static constexpr int kTileKV = Traits::kTileKV, kStages = Traits::kStages;
  static constexpr int kHeadDimQK = Traits::kHeadDimQK, kHeadDimVO = Traits::kHeadDimVO;
  static constexpr bool kPersistent = Traits::kPersistent;

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles/prefill_sm90.py) must agree");

  const PrefillSm90Block<Traits>& block;
  SharedMemory& shared;
  const int warp, lane;
  LeanSm90Copier<Traits> copier;  // of warp 0, in a block of one item
  uint32_t multiplied = 0;        // tiles, likewise
  PipelineState<Traits::kItems> place;
  PipelineState<Traits::kSlots> q;
  bool has_rows = true;     // of the warp
  bool has_stored = false;  // whether an item before left its O in the other place of Q
  float o[1][kHeadDimVO / 8][4];
  Softmax softmax;

  __device__ __forceinline__ explicit LeanSm90(const PrefillSm90Block<Traits>& block)
      : block(block),
        shared(block.shared),
        warp(ptx::warp_uniform(threadIdx.x / kWarpSize)),
        lane(threadIdx.x % kWarpSize),
        copier{block},
        softmax(block, 0) {}

  static __device__ __forceinline__ void run(const PrefillSm90Params& params,
                                             SharedMemory& shared) {
    const PrefillSm90Block<Traits> block(params, shared);
    const PrefillSm90Scheduler<Traits> scheduler{block};
    const int warp = ptx::warp_uniform(threadIdx.x / kWarpSize);
    if (threadIdx.x == kWarpSize) init_barriers(params, shared);
    if constexpr (kPersistent) {
      typename Traits::ItemFacts first;
      if (warp == 4) first = scheduler.item_of(blockIdx.x);
      ptx::block_sync();
      if (warp == 4) return LeanSm90Copier<Traits>{block}.run(first);
    } else {
      if (warp == 0) scheduler.find_only_item();
      ptx::block_sync();
    }
    LeanSm90(block).run_items();
  }

  static __device__ __forceinline__ void init_barriers(const PrefillSm90Params& params,
                                                       SharedMemory& shared) {
    ptx::prefetch_tensor_map(params.q);
    ptx::prefetch_tensor_map(params.k);
    ptx::prefetch_tensor_map(params.v);
    if constexpr (KTile::kHasTail) ptx::prefetch_tensor_map(params.k_tail);
    if constexpr (VTile::kHasTail) ptx::prefetch_tensor_map(params.v_tail);
    for (int slot = 0; slot < Traits::kSlots; ++slot) {
      init_barrier(shared.full_q[slot], 1);
      init_barrier(shared.empty_q[slot], 1);
      init_barrier(shared.full_item[slot], 1);
      // Each warp leaves an item when its O is written, warp 0 once more when O is stored.
      init_barrier(shared.empty_item[slot], kPersistent ? 5 : 4);  // mutate: lean-item-released-early
    }
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(shared.full[stage], 1);
      init_barrier(shared.empty[stage], 4);
    }
    shared.logits = Traits::LogitsVariant::make_constants(params.attention);
    ptx::fence_mbarrier_init();
  }

  __device__ __forceinline__ void run_items() {
    if constexpr (kPersistent) {
      for (;;) {
        const Item& item = block.await_item(place);
        if (!item.exists) break;
        run_item(item);
        place.advance();
      }
    } else {
      // Many blocks wait for memory, which should bring first what is multiplied first.
      if (gridDim.x * gridDim.y < block.all_params.many_blocks) {
        copier.copy_side_by_side(shared.items[0], warp);
      } else if (warp == 0) {
        copier.copy_tiles(shared.items[0], 0, kStages);
      }
      run_item(shared.items[0]);
    }
    if (Traits::kStagesOutput && threadIdx.x == 0) ptx::bulk_wait_read();
  }

  __device__ __forceinline__ void run_item(const Item& item) {
    has_rows = softmax.rows.warp_row() < ptx::warp_uniform(item.work.tile.num_rows);
    softmax.begin_item(item);
    const int begin = ptx::warp_uniform(item.tiles.begin);
    int tile = ptx::warp_uniform(item.tiles.end);
    const bool has_keys = tile > begin;
    if (has_keys) {
      await_phase(shared.full_q[q.stage], q.parity);  // mutate: lean-queries-not-awaited
      process_tile<true>(item, --tile);
      while (tile > begin) process_tile<false>(item, --tile);
      // O takes the place of Q, which no warp of the warpgroup reads any more.
      if (Traits::kStagesOutput) ptx::named_barrier_sync(Traits::kQueriesRead, kWarpgroup);
    } else {
      clear_output();
    }
    softmax.rows.write(softmax.rows.finish_rows(softmax.online, place.stage, q.stage), o);
    if (has_keys) store_output(item);
    if constexpr (kPersistent) {
      ptx::warp_sync();
      if (threadIdx.x == 0) arrive(shared.empty_item[place.stage]);
    }
  }

  // Warp 0 stores O once all warps have written it to the place of Q.
  __device__ __forceinline__ void store_output(const Item& item) {
    int stored = q.stage;
    if (warp == 0) {
      ptx::named_barrier_sync(Traits::kOutputStaged, kWarpgroup);
      PrefillSm90Scheduler<Traits>{block}.store_output(item, stored, lane);
    } else {
      ptx::named_barrier_arrive(Traits::kOutputStaged, kWarpgroup);
    }
    q.advance();
    has_stored = true;
  }
  // Lets the copying warp have the other place of Q, once O of the item before has left it.
  __device__ __forceinline__ void release_stored_output() {
    if (!kPersistent || !has_stored || warp != 0) return;
    if (lane == 0) {
      ptx::bulk_wait_read();  // mutate: lean-queries-overwrite-output
      arrive(shared.empty_q[q.stage ^ 1]);
    }
    ptx::warp_sync();
  }

  __device__ __forceinline__ void await_slot() const {
    await_phase(shared.full[multiplied % kStages], multiplied / kStages % 2);
  }
  template <typename Tile>
  __device__ __forceinline__ uint64_t operand_in_slot() const {
    return operand_at<Tile>(ptx::shared_address(shared.ring[multiplied % kStages]));
  }
  // Leaves the slot that was multiplied.
  __device__ __forceinline__ void release_slot(const Item& item) {
    ptx::mbarrier_arrive_if(lane == 0, ptx::shared_address(&shared.empty[multiplied % kStages]));
    ++multiplied;
    if constexpr (kPersistent) return;
    if (warp == 0) copier.copy_tile(item, copier.copied);  // mutate: lean-slot-not-refilled
  }

  // --- One tile ---

  template <bool kIsFirst>
  __device__ __forceinline__ void process_tile(const Item& item, int tile) {
    const KeyTile key_tile{tile, softmax.needs_mask(tile)};
    float s[1][kTileKV / 8][4];
    Probabilities probabilities;
    await_slot();
    ptx::wgmma_fence();
    const uint32_t rows = ptx::shared_address(shared.q[q.stage]);
    issue_qk<QTile, KTile, kHeadDimQK>(s, operand_at<QTile>(rows), operand_in_slot<KTile>());
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    take_results(s);
    if constexpr (!Traits::Base::kRowsAreAlone) clear_missing_rows(s, item);
    release_slot(item);
    if (!has_rows) {
      clear(probabilities.p);
    } else if constexpr (kIsFirst) {
      softmax.first_tile(probabilities, s, item, key_tile, {});
    } else {
      softmax.next_tile(probabilities, s, o, item, key_tile, {});
    }
    if (kIsFirst) release_stored_output();
    await_slot();
    const int num_keys = item.range.end - softmax.first_key_of(key_tile);
    if (key_tile.needs_mask && has_nonfinite_values(num_keys)) {  // mutate: lean-values-not-checked
      if (kIsFirst) clear_output();
      add_values(item, probabilities, softmax.first_key_of(key_tile));
    } else {
      ptx::wgmma_fence();
      issue_pv<VTile, kHeadDimVO>(o, probabilities.p, operand_in_slot<VTile>(), !kIsFirst);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      take_results(o);
    }
    release_slot(item);
  }

  // Clears the logits of rows that the item lacks, where a warp's largest logit decides how all its
  // rows are capped.
  __device__ __forceinline__ void clear_missing_rows(float (&s)[1][kTileKV / 8][4],
                                                     const Item& item) const {
    const int num_rows = ptx::warp_uniform(item.work.tile.num_rows);
    if (softmax.rows.warp_row() + 16 <= num_rows) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (softmax.rows.own_row(h) < num_rows) continue;  // mutate: lean-missing-rows-stay
#pragma unroll
      for (int n = 0; n < kTileKV / 8; ++n) s[0][n][2 * h] = s[0][n][2 * h + 1] = 0.0f;
    }
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

  // Whether a value of the tile's keys is not finite: a hidden one would give 0 * NaN in the
  // product. Values past the last key, the rest of a page or another request's, become zeros.
  __device__ __forceinline__ bool has_nonfinite_values(int num_keys) const {
    Vector16* const chunks = reinterpret_cast<Vector16*>(shared.ring[multiplied % kStages]);
    if (num_keys < kTileKV) {
#pragma unroll 1
      for (int i = threadIdx.x; i < VTile::kBytes / 16; i += kWarpgroup) {
        if (VTile::row_at(16 * i) >= num_keys) chunks[i] = Vector16{};
      }
      ptx::fence_proxy_async();
    }
    uint32_t seen[4] = {};
#pragma unroll
    for (int i = 0; i < VTile::kBytes / 16 / kWarpgroup; ++i) {
      const int index = threadIdx.x + i * kWarpgroup;
      if (!VTile::is_copied(index)) continue;
      const Vector16 values = chunks[index];
      // Zero times a value that is not finite is NaN, and a sum keeps it.
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        seen[w] = ptx::multiply_add_pair<DTypeKV>(values.word[w], 0u, seen[w]);
      }
    }
    const uint32_t any = (seen[0] | seen[1] | seen[2] | seen[3]) & 0x7fff7fffu;
    return ptx::named_barrier_any(Traits::kNonFinite, kWarpgroup, any != 0);
  }

  // O += P V of a tile by hand, for rows that see a key.
  __device__ __forceinline__ void add_values(const Item& item, const Probabilities& probabilities,
                                             int first_key) {
    const auto* values = values_of<DTypeKV>(block.params, item.work.tile.kv_head);
    const int num_keys = min_of(item.range.end - first_key, kTileKV);
#pragma unroll 1
    for (int key = 0; key < num_keys; ++key) {
      const int64_t row =
          value_row<Traits::kPaged, Traits::kOwnValuePages>(block.params, item.work.request,
                                                            first_key + key);
      add_nonfinite_key<typename Traits::DTypeP, true>(o, probabilities.p, key, values + row, lane);
    }
    ptx::warp_sync();
  }
};

}  // namespace cupyattn
