// The scheduler warp of prefill_sm90: fetches work items, publishes each one ahead, copies its rows
// of Q, and stores O of finished items.
#pragma once

#include "cupyattn/ptx/tensor_copy.cuh"
#include "cupyattn/plan/split_finder.cuh"
#include "cupyattn/sm90/roles/traits.cuh"

namespace cupyattn {

template <typename Traits>
struct PrefillSm90Scheduler {
  using DTypeQ = typename Traits::DTypeQ;
  using QTile = typename Traits::QTile;
  using Item = typename Traits::Item;
  using ItemFacts = typename Traits::ItemFacts;
  static constexpr int kTileKV = Traits::kTileKV, kItems = Traits::kItems, kSlots = Traits::kSlots;
  static constexpr bool kPaged = Traits::kPaged, kMasked = Traits::kMasked;
  using Mask = typename Traits::Mask;
  static constexpr bool kFindsItems = FindsItems<Traits>::kValue;
  // Of the kernels that find their items, those of bytes alone have scales of requests.
  using Finder = ItemFinder<Traits::kMultipliesBytes>;
  static constexpr bool kStagesOutput = Traits::kStagesOutput;
  static constexpr int kOutputPanels = ceil_div(Traits::kHeadDimVO, QTile::kPanelColumns);

  const PrefillSm90Block<Traits>& block;
  const PrefillSm90Params& all_params = block.all_params;
  const AttentionParams& params = block.params;
  typename Traits::SharedMemory& shared = block.shared;

  // Finds the only item of a block, for all roles. The grid is key heads x items, so nothing is
  // divided here: all copies wait for this.
  __device__ __forceinline__ void find_only_item() const {
    const ListPlace at{static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x)};
    const ItemFacts item = facts_of(at, load(at.place, at.kv_head));
    if (threadIdx.x % kWarpSize == 0) static_cast<ItemFacts&>(shared.items[0]) = item;
  }
  // Copies the rows of Q of the only item, and stores its O.
  __device__ __forceinline__ void serve_only_item() const {
    const int lane = threadIdx.x % kWarpSize;
    const Item& item = shared.items[0];
    PipelineState<kSlots> q;
    int stored = 0;
    if (!item.has_keys()) return;
    copy_queries(q, item, lane);
    if constexpr (kStagesOutput) {
      await_phase(shared.empty_item[0], 0);
      store_output(item, stored, lane);
      if (lane == 0) ptx::bulk_wait_read();
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (!Traits::kPersistent) return serve_only_item();
    PipelineState<kItems> place;
    PipelineState<kSlots> q;
    int stored = 0;  // the slot of Q from which the next O is stored
    int published = 0;
    uint32_t near_end_parity = 0;
    const int lane = threadIdx.x % kWarpSize;
    const int num_items = all_params.num_items * params.num_kv_heads;
    for (int index = blockIdx.x;;) {
      const bool exists = index < num_items;
      const ItemFacts item = exists ? item_of(index) : ItemFacts{};
      // A captured graph has spare items of zeros, which are skipped.
      if (!exists || item.work.tile.num_rows > 0) {
        if (item.has_keys()) prefetch_queries(item, lane);
        Item& next = shared.items[place.stage];
        await_phase(shared.empty_item[place.stage], place.parity ^ 1);
        if (published >= kItems) store_output(shared.items[place.stage], stored, lane);
        ptx::warp_sync();
        if (lane == 0) static_cast<ItemFacts&>(next) = item;
        if constexpr (kMasked) {
          ptx::warp_sync();
          if (exists) skip_masked_tiles(next, lane);
        }
        if constexpr (Traits::LogitsVariant::kFoldsScales) {
          ptx::warp_sync();
          if (next.has_keys()) describe_rows(next, place.stage, lane);
        }
        if (lane == 0) arrive(shared.full_item[place.stage]);
        ptx::warp_sync();
        if (!exists) break;
        // Copy Q as soon as a slot is free, not behind the keys of the item before.
        if (next.has_keys()) {
          if constexpr (kStagesOutput) {
            if (lane == 0) ptx::bulk_wait_read();  // mutate: q-overwrites-output
            ptx::warp_sync();
          }
          copy_queries(q, next, lane);
        }
        // The block takes no further item before it needs one.
        if (next.has_keys()) {
          await_phase(shared.near_end, near_end_parity);
          near_end_parity ^= 1;
        }
        place.advance();
        ++published;
      }
      index = next_index(num_items, lane);
    }
    if constexpr (kStagesOutput) {
      static_assert(kItems == 2 || !Traits::kPersistent, "one item is left");
      place.advance();
      if (published > 0) {
        await_phase(shared.empty_item[place.stage], place.parity ^ 1);
        store_output(shared.items[place.stage], stored, lane);
        if (lane == 0) ptx::bulk_wait_read();
      }
    }
  }

  // Writes the scales of an item's rows, for which consumers would wait.
  __device__ __forceinline__ void describe_rows(const Item& item, int place, int lane) const {
    const TileWork& work = item.work.tile;
    const Request& request = item.work.request;
#pragma unroll 1
    for (int r = lane; r < Traits::kTileQ; r += kWarpSize) {
      const PackGqaRow row = PackGqaRow::of(params, work.first_row + min_of(r, work.num_rows - 1));
      shared.rows[place * Traits::kTileQ + r] = Traits::LogitsVariant::make_row(
          params, request, row.token, request.position<Mask::kKeyShare>(params, row.token),
          work.kv_head * params.group_size + row.group_head, work.kv_head);
    }
    ptx::warp_sync();
  }

  // Stores O of a finished item from its slot of Q, `stored`.
  __device__ __forceinline__ void store_output(const Item& item, int& stored, int lane) const {
    if constexpr (kStagesOutput) {
      if (!item.has_keys()) return;
      if (lane == 0) {
        const uint32_t rows = ptx::shared_address(shared.q[stored]);
        const int head = item.work.tile.kv_head * params.group_size;
        const Boxes boxes{all_params.output_box_rows, all_params.output_box_step};
        for_boxes(item, boxes, item.boxed_rows, [&](int row, int token) {
#pragma unroll
          for (int panel = 0; panel < kOutputPanels; ++panel) {
            ptx::tensor_store_4d(all_params.o, QTile::kPanelColumns * panel, head, token, 0,
                                 rows + row * QTile::kRowBytes + panel * QTile::kPanelBytes);
          }
        });
        ptx::bulk_commit();
      }
      stored = stored + 1 == kSlots ? 0 : stored + 1;  // mutate: output-of-another-slot
    }
  }
  __device__ __forceinline__ void skip_masked_tiles(Item& item, int lane) const {
    const TileSpan tiles = item.template take<typename Traits::Mask>(
        all_params.mask_maps[item.place], params, item.work.request, item.tiles, lane);
    ptx::warp_sync();
    if (lane != 0) return;
    item.tiles = tiles;
    if (!item.has_keys()) item.boxed_rows = 0;
  }

  // A block begins with the item of its own index, and then takes the next item that no block has.
  // Blocks ask as often as there are items, so the counter ends at zero, as it began.
  __device__ __forceinline__ int next_index(int num_items, int lane) const {
    return index_of(take_next(num_items, lane));
  }
  // Its two parts, between which the counter answers.
  __device__ __forceinline__ int take_next(int num_items, int lane) const {
    int taken = 0;
    // mutate: item-counter-not-reset
    if (lane == 0) taken = static_cast<int>(ptx::atomic_inc_wrap(params.counters, num_items - 1));
    return taken;
  }
  __device__ __forceinline__ int index_of(int taken) const {
    return static_cast<int>(gridDim.x) + ptx::warp_uniform(taken);
  }

  // The order of items (L2Swizzle): groups of heads come one after another, so that their keys stay
  // in L2; within a group the heads of an item are neighbours. The shortest items of all heads come
  // last, so that blocks end together.
  __device__ __forceinline__ ItemFacts item_of(int index) const {
    const ListPlace at = list_place(index);
    return facts_of(at, load(at.place, at.kv_head));
  }
  // The item at a place: of the work list, or what lengths in memory make of it. All lanes call this.
  __device__ __forceinline__ WorkItem load(int place, int kv_head) const {
    if constexpr (kFindsItems) {
      const FoundItems& found = all_params.found;
      const Finder finder{found.lengths, params.group_size,
                          whole_token_rows(params, Traits::kTileQ),
                          static_cast<int>(threadIdx.x % kWarpSize)};
      if constexpr (Traits::kFindsParts) {
        const SplitFinder<Traits::kMultipliesBytes> split_finder{found.splits, finder};
        const WorkItem item = split_finder.find(params, place);
        if (kv_head == 0) split_finder.list(params, place, item);
        return item;
      } else {
        return finder.find(place);
      }
    } else if constexpr (Traits::kOfUnions) {
      // Heads that have lists of their own have unions of their own.
      const int groups = all_params.unions().groups;
      // mutate: unions-of-the-first-head
      return params.work[place * groups + (groups > 1 ? kv_head : 0)];
    } else {
      return BlockWork::load(params, place);
    }
  }
  struct ListPlace {
    int place, kv_head;
  };
  __device__ __forceinline__ ListPlace list_place(int index) const {
    const int num_swizzled = all_params.num_items - all_params.num_tail_items;
    // mutate: tail-items-from-first
    int first_place = num_swizzled, first_head = 0, heads = params.num_kv_heads;
    int rest = index - num_swizzled * heads;
    if (rest < 0) {
      const int per_swizzle = num_swizzled * all_params.heads_per_swizzle;
      const int swizzle = index / per_swizzle;
      first_place = 0;
      first_head = swizzle * all_params.heads_per_swizzle;
      heads = min_of(all_params.heads_per_swizzle, heads - first_head);
      rest = index - swizzle * per_swizzle;
    }
    return ListPlace{first_place + rest / heads, first_head + rest % heads};
  }

  __device__ __forceinline__ ItemFacts facts_of(const ListPlace& at, const WorkItem& listed) const {
    ItemFacts item{};
    // mutate: tiles-of-broken-tokens
    const int tile_rows = whole_token_rows(params, Traits::kTileQ);
    item.work = kFindsItems ? BlockWork::of_listed(params, listed, at.kv_head, tile_rows)
                            : BlockWork::of_index(params, at.place, listed, at.kv_head, tile_rows);
    item.place = at.place;
    item.exists = 1;
    if (item.work.tile.num_rows <= 0) return item;  // mutate: spare-items-worked-on
    if constexpr (Traits::kOfUnions) {
      const TileWork& rows = item.work.tile;
      const int last = PackGqaRow::of(params, rows.num_rows - 1).token;
      item.range = KeyRange{0, item.work.request.kv_len, 0, rows.first_state, 0, last};
    } else {
      item.range = KeyRange::of<Mask::kKeyShare>(params, item.work);
    }
    item.tiles = TileSpan::of<Traits::kAlignsTiles>(item.range, kTileKV, item.work.tile);
    // Rows ahead of the range may be copied; pages may not.
    if constexpr (!kPaged && !kMasked) {
      item.tiles.gather_cuts(item.range, kTileKV,
                             item.work.request.template first_key<Mask::kKeyShare>(params));
    }
    const int box = all_params.output_box_rows, num_rows = item.work.tile.num_rows;
    const bool is_boxed = kStagesOutput && box > 0 && num_rows >= box && item.has_keys();
    // A box has the rows of a warpgroup, or of a whole tile.
    // mutate: output-box-of-partial-rows
    const int boxed_rows = box == 64 ? num_rows & ~63 : box;
    item.boxed_rows = is_boxed && !item.work.tile.leaves_state() ? boxed_rows : 0;
    return item;
  }

  // Fetches rows of Q into L2 early, because memory is slow.
  __device__ __forceinline__ void prefetch_queries(const ItemFacts& item, int lane) const {
    if (lane != 0) return;
    const Boxes boxes{all_params.query_box_rows, all_params.query_box_step};
    for_boxes(item, boxes, item.work.tile.num_rows, [&](int, int token) {
#pragma unroll
      for (int panel = 0; panel < QTile::kPanels; ++panel) {
        ptx::tensor_prefetch_4d(all_params.q, QTile::kPanelColumns * panel,
                                item.work.tile.kv_head * params.group_size, token, 0);
      }
    });
  }

  // Copies rows of Q in boxes, if boxes are whole tokens, else one by one. The last box may also bring
  // rows of others, and zeros past the last row of q: nobody stores what becomes of them.
  __device__ __forceinline__ void copy_queries(PipelineState<kSlots>& q, const Item& item,
                                               int lane) const {
    const TileWork& work = item.work.tile;
    const uint32_t tile = ptx::shared_address(shared.q[q.stage]);
    const uint32_t lands = ptx::shared_address(&shared.full_q[q.stage]);
    await_phase(shared.empty_q[q.stage], q.parity ^ 1);
    ptx::warp_sync();
    const int head = work.kv_head * params.group_size;
    const Boxes boxes{all_params.query_box_rows, all_params.query_box_step};
    int boxed_rows = Traits::kRowsAreAlone ? work.num_rows : work.num_rows - boxes.rows + 1;
    if constexpr (Traits::kHasSmallBoxes && Traits::kRowsAreAlone) {
      if (boxes.rows == Traits::kBoxRows) boxed_rows = ceil_div(work.num_rows, 64) * 64;
    }
    const int row = for_boxes(item, boxes, boxed_rows, [&](int row, int token) {
      if (lane != 0) return;
      if (Traits::kHasSmallBoxes && row >= work.num_rows) token = Traits::kNoRow;
      ptx::mbarrier_expect_tx(lands, boxes.rows * QTile::kPanels * QTile::kRowBytes);
#pragma unroll
      for (int panel = 0; panel < QTile::kPanels; ++panel) {
        ptx::tensor_copy_4d(tile + panel * QTile::kPanelBytes + row * QTile::kRowBytes,
                            all_params.q, QTile::kPanelColumns * panel, head, token, 0, lands);
      }
    });
    if (row < ceil_div(work.num_rows, 64) * 64) gather_queries(tile, item, row, lane);
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(lands);
    ptx::warp_sync();
    q.advance();
  }

  // Copies rows of Q one by one. Rows that the last warpgroup lacks become zeros; warpgroups without
  // rows do not read theirs.
  __device__ __forceinline__ void gather_queries(uint32_t tile, const Item& item, int first_row,
                                                 int lane) const {
    const TileWork& work = item.work.tile;
    const int end = ceil_div(work.num_rows, 64) * 64;
    // Products take two chunks at a time: the one that rows may lack is zeros.
    constexpr int kChunks = round_up(QTile::kChunks, 2);
#pragma unroll 2
    for (int index = first_row * kChunks + lane; index < end * kChunks; index += kWarpSize) {
      const int r = index / kChunks;
      const int chunk = index % kChunks;
      // mutate: q-rows-of-first-tile
      const PackGqaRow row = PackGqaRow::of(params, work.first_row + r);
      const DTypeQ* source =
          static_cast<const DTypeQ*>(params.q) +
          (static_cast<int64_t>(item.work.request.q_start) + row.token) * params.q_stride_n +
          (work.kv_head * params.group_size + row.group_head) * params.q_stride_h +
          // mutate: 8-bit-queries-by-16-bits
          16 / static_cast<int>(sizeof(DTypeQ)) * chunk;
      const bool is_row = r < work.num_rows;  // mutate: q-row-past-tile
      // mutate: q-chunk-past-the-row
      const bool exists = kChunks == QTile::kChunks || chunk < QTile::kChunks;
      ptx::cp_async_16(tile + QTile::offset(r, chunk), source, is_row && exists);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait_group<0>();
    ptx::fence_proxy_async();
  }

  // Boxes of so many rows, which are `step` tokens, or rows of the map (PrefillSm90Params).
  struct Boxes {
    int rows, step;
  };
  // Calls body(row, place) for the boxes that hold the first `num_rows` rows of an item; returns the
  // row after. Without boxes that is the first. place: of the box along the map's tokens or rows.
  template <typename Body>
  __device__ __forceinline__ int for_boxes(const ItemFacts& item, const Boxes& boxes, int num_rows,
                                           Body&& body) const {
    const int first_token = item.work.request.q_start, first_row = item.work.tile.first_row;
    // mutate: boxes-of-rows-at-tokens
    int place = boxes.step == boxes.rows
                    ? first_token * params.group_size + first_row
                    : first_token + PackGqaRow::of(params, first_row).token;
    int row = 0;
    for (; boxes.rows > 0 && row < num_rows; row += boxes.rows, place += boxes.step) {
      body(row, place);
    }
    return row;
  }
};

}  // namespace cupyattn
