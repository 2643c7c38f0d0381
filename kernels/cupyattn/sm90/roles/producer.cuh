// The producer warp of prefill_sm90: copies tiles of keys and values by TMA.
#pragma once

#include "cupyattn/ptx/tensor_copy.cuh"
#include "cupyattn/shared/key_rows.cuh"
#include "cupyattn/sm90/roles/traits.cuh"

namespace cupyattn {

template <typename Traits>
struct PrefillSm90Producer {
  using Item = typename Traits::Item;
  using KeyStage = PipelineState<Traits::kConverts ? Traits::kFp8Stages : Traits::kStages>;
  using ValueStage = PipelineState<Traits::kFp8Stages>;
  static constexpr bool kPaged = Traits::kPaged;
  static_assert(Traits::kTileKV <= 8 * kWarpSize, "a lane has one box of eight rows or more");

  const PrefillSm90Block<Traits>& block;
  const PrefillSm90Params& all_params = block.all_params;
  const AttentionParams& params = block.params;
  typename Traits::SharedMemory& shared = block.shared;

  // The pages of this lane's box: in `tile`, whose K was copied last, in the tile before it and,
  // looked up ahead, in the next tile. -1 is none.
  struct PagesOfBoxes {
    int tile = -1, present = -1, behind = -1, next = -1;
    // Of unions: a lane's word of what is known of the next tile.
    uint32_t next_fact = 0;
  };
  enum : int { kFacts = sizeof(typename Traits::TileOfUnion) / 4 };

  __device__ __forceinline__ uint32_t fact_of(const Item& item, int tile, int lane) const {
    if (!Traits::kOfUnions || tile < item.tiles.begin || lane >= kFacts) return 0;
    const auto* tiles = static_cast<const typename Traits::TileOfUnion*>(all_params.unions().tiles) +
                        item.work.request.mask_start;
    return reinterpret_cast<const uint32_t*>(tiles + tile)[lane];
  }

  // behind: entries of the table from a key's page to the one that is asked for.
  __device__ __forceinline__ int page_of_box(const Item& item, int tile, int lane,
                                             int behind = 0) const {
    const int row = lane * all_params.box_rows, key = item.first_key(tile) + row;
    if (tile < item.tiles.begin || row >= Traits::kTileKV || key >= item.range.end) return -1;
    return params.kv_indices[item.work.request.kv_start + behind + PageSlot::of(params, key).page];
  }

  __device__ __forceinline__ void run() {
    PipelineState<Traits::kItems> place;
    KeyStage k;
    ValueStage v;
    const int lane = threadIdx.x % kWarpSize;
    for (;;) {
      const Item& item = block.await_item(place);
      if (!item.exists) return;
      PagesOfBoxes pages;
      if constexpr (kPaged) pages.next = page_of_box(item, item.tiles.end - 1, lane);
      pages.next_fact = fact_of(item, item.tiles.end - 1, lane);
      item.for_tiles(
          [&](const KeyTile& tile, int next) {
            if constexpr (kPaged) {
              pages.behind = pages.present;
              pages.present = pages.next;
              pages.tile = tile.tile;
            }
            copy_keys(k, item, tile, pages.present, lane, pages.next_fact);
            if constexpr (kPaged) pages.next = page_of_box(item, next, lane);
            pages.next_fact = fact_of(item, next, lane);
            block.announce_end(item, tile.tile, next, lane);
          },
          [&](const KeyTile& tile) {
            int page = tile.tile == pages.tile ? pages.present : pages.behind;
            // Looked up when it is needed: such tables are rare, and not worth registers.
            if constexpr (Traits::kOwnValuePages) {
              page = page_of_box(item, tile.tile, lane, params.value_pages);
            }
            copy_values(v, item, tile, page, lane);
          });
      if constexpr (!Traits::kPersistent) return;
      block.release_item(place, lane);
    }
  }

  // A stage that a tile is copied to: its memory, its barriers and the parity of `empty`. Under a
  // mask, the number of the key tile is stored at `name`.
  struct Place {
    unsigned char* bytes;
    uint64_t &empty, &full;
    uint32_t parity;
    KeyTile* name = nullptr;
  };

  __device__ __forceinline__ Place key_slot(const KeyStage& k) const {
    if constexpr (Traits::kConverts) {
      return Place{shared.fp8_k[k.stage], shared.empty_fp8_k[k.stage], shared.full_fp8_k[k.stage],
                   k.parity};
    } else {
      Place place{shared.k[k.stage], shared.empty_k[k.stage], shared.full_k[k.stage], k.parity};
      if constexpr (Traits::kMasked) place.name = &shared.row_bits.tiles[k.stage];
      return place;
    }
  }
  __device__ __forceinline__ Place value_slot(const ValueStage& v, bool needs_mask) const {
    if constexpr (Traits::kMultipliesBytes) {
      return Place{shared.v[v.stage], shared.empty_v[v.stage], shared.unchecked_v[v.stage],
                   v.parity};
    } else if constexpr (Traits::kLandsValues) {
      return Place{shared.fp8_v[v.stage], shared.empty_fp8_v[v.stage], shared.full_fp8_v[v.stage],
                   v.parity};
    } else {
      uint64_t& full = needs_mask ? shared.unchecked_v[v.stage] : shared.full_v[v.stage];
      return Place{shared.v[v.stage], shared.empty_v[v.stage], full, v.parity};
    }
  }

  __device__ __forceinline__ void copy_keys(KeyStage& k, const Item& item, const KeyTile& tile,
                                            int page, int lane,
                                            [[maybe_unused]] uint32_t fact = 0) const {
    const Maps maps{all_params.k, all_params.k_tail};
    if constexpr (Traits::kOfUnions) {
      // Consumers have read what the stage had before they let it go.
      await_phase(shared.empty_k[k.stage], k.parity ^ 1);
      if (lane < kFacts) reinterpret_cast<uint32_t*>(&shared.unions.of[k.stage])[lane] = fact;
    }
    copy_boxes<typename Traits::KLoadTile, Traits::kRope>(maps, all_params.k_units, key_slot(k),
                                                          item, tile, page, lane);
    k.advance();
  }

  __device__ __forceinline__ void copy_values(ValueStage& v, const Item& item, const KeyTile& tile,
                                              int page, int lane) const {
    const Maps maps{all_params.v, all_params.v_tail};
    copy_boxes<typename Traits::VLoadTile, false>(
        maps, all_params.v_units, value_slot(v, tile.needs_mask), item, tile, page, lane);
    v.advance();
  }

  // The map of a tile's panels, and that of the last one if it is a part.
  struct Maps {
    const TensorMap &whole, &tail;

    template <typename Tile>
    __device__ __forceinline__ const TensorMap& of(int panel) const {
      // mutate: tail-by-whole-boxes
      return Tile::kHasTail && panel == Tile::kPanels - 1 ? tail : whole;
    }
  };

  // Copies a tile once its place is free. Rows past the last key become zeros or another request's
  // rows. kInOrder: the pages of rotated keys lie in the order of the table.
  template <typename Tile, bool kInOrder>
  __device__ __forceinline__ void copy_boxes(const Maps& maps, const PageUnits& units,
                                             const Place& place, const Item& item,
                                             const KeyTile& tile, int page, int lane) const {
    const Request& request = item.work.request;
    const int kv_head = item.work.tile.kv_head;
    const int first_key = item.first_key(tile.tile);
    const uint32_t destination = ptx::shared_address(place.bytes);
    const uint32_t lands = ptx::shared_address(&place.full);
    if constexpr (!kPaged) {
      // Wait before a copy begins until all lanes have seen the place free. A lane that came later
      // could find the place free again with the other parity, and wait for ever.
      await_phase(place.empty, place.parity ^ 1);  // mutate: k-stage-not-awaited
      ptx::warp_sync();
      if (lane == 0) {
        if (place.name != nullptr) *place.name = tile;  // mutate: tile-not-named
        ptx::mbarrier_arrive_expect_tx(lands, Tile::kCopiedBytes);
        const int num_keys = item.range.end - first_key;
#pragma unroll 1
        for (int row = 0; row < Traits::kTileKV; row += Traits::kBoxRows) {
          // mutate: last-small-box-left-out
          const bool is_row = !Traits::kHasSmallBoxes || row < num_keys;
          const int key = is_row ? request.kv_start + first_key + row : Traits::kNoRow;
#pragma unroll
          for (int panel = 0; panel < Tile::kPanels; ++panel) {
            ptx::tensor_copy_4d(destination + panel * Tile::kPanelBytes + row * Tile::kRowBytes,
                                maps.template of<Tile>(panel), Tile::kPanelColumns * panel, key,
                                kv_head * units.head, 0, lands);
          }
        }
      }
    } else {
      const int row = lane * all_params.box_rows;
      const PageSlot at = PageSlot::of(params, first_key + row);
      // mutate: rotated-pages-by-table
      if (kInOrder && page >= 0) page = request.kv_start + at.page;
      // A box outside the map is zeros.
      const int place_of_page = page < 0 ? -1 : page * units.page + kv_head * units.head;
      await_phase(place.empty, place.parity ^ 1);
      if (Traits::kOfUnions) ptx::warp_sync();
      if (lane == 0) {
        if (place.name != nullptr) *place.name = tile;
        ptx::mbarrier_arrive_expect_tx(lands, Tile::kCopiedBytes);
      }
      ptx::warp_sync();
      if (row < Traits::kTileKV) {
        if constexpr (Tile::kIsByPatterns) {
          ptx::tensor_copy_5d(destination + row * Tile::kPanels * Tile::kRowBytes, maps.whole, 0, 0,
                              0, at.slot / 8, place_of_page, lands);
        } else {
#pragma unroll
          for (int panel = 0; panel < Tile::kPanels; ++panel) {
            ptx::tensor_copy_4d(destination + panel * Tile::kPanelBytes + row * Tile::kRowBytes,
                                maps.template of<Tile>(panel), Tile::kPanelColumns * panel,
                                at.slot, place_of_page, 0, lands);
          }
        }
      }
    }
  }
};

}  // namespace cupyattn
