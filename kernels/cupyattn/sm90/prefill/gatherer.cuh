// The gatherer warps of prefill_sm90: copy keys and values row by row by cp.async, from pages that
// no box of the copy engine fits.
#pragma once

#include "cupyattn/sm90/prefill/nonfinite.cuh"
#include "cupyattn/sm90/roles/producer.cuh"

namespace cupyattn {

template <typename Traits>
struct PrefillSm90Gatherer {
  using Producer = PrefillSm90Producer<Traits>;
  using Place = typename Producer::Place;
  using DTypeKV = typename Traits::DTypeKV;
  using Item = typename Traits::Item;
  static constexpr int kTileKV = Traits::kTileKV, kGatherers = Traits::kGatherers;
  // A warp has every kGatherers-th group of eight rows of a tile. Eight of its lanes copy one
  // group, row by row.
  static constexpr int kGroups = kTileKV / 8, kBatches = ceil_div(kGroups, 4 * kGatherers);

  // Whether warps 2 and 3, which gather, also sweep masked tiles for non-finite values.
  static constexpr bool kChecksValues = kGatherers == 3 && !Traits::kConverts;

  // The page of one row of the lane's group, for each batch; -1 is none.
  struct Pages {
    int of[kBatches];
  };

  const PrefillSm90Block<Traits>& block;
  const PrefillSm90Params& all_params;
  const AttentionParams& params;
  const Producer producer;
  const int gatherer, lane;

  __device__ __forceinline__ PrefillSm90Gatherer(const PrefillSm90Block<Traits>& block,
                                                 int gatherer)
      : block(block),
        all_params(block.all_params),
        params(block.params),
        producer{block},
        gatherer(gatherer),
        lane(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ void run() const {
    PipelineState<Traits::kItems> place;
    PipelineState<Traits::kFp8Stages> k, v;
    uint32_t unchecked_parities = 0;
    for (;;) {
      const Item& item = block.await_item(place);
      if (!item.exists) return;
      const DTypeKV* const keys = keys_of<DTypeKV>(params, item.work.tile.kv_head);
      const DTypeKV* const values = values_of<DTypeKV>(params, item.work.tile.kv_head);
      // Pages are looked up a tile ahead and kept for V, which comes a tile behind. A look-up
      // between the two would make all consumers wait for V.
      Pages next = look_up(item, item.tiles.end - 1), present = next, behind = next;
      int present_tile = -1;
      Facts next_facts{};
      if constexpr (Traits::kOfUnions) next_facts = facts_of(item, item.tiles.end - 1);
      item.for_tiles(
          [&](const KeyTile& tile, int next_tile) {
            behind = present;
            present = next;
            present_tile = tile.tile;
            if constexpr (Traits::kOfUnions) write_facts(k, next_facts);
            gather<typename Traits::KLoadTile>(keys, all_params.k_units, producer.key_slot(k), item,
                                               tile, present);
            next = look_up(item, next_tile);
            if constexpr (Traits::kOfUnions) next_facts = facts_of(item, next_tile);
            if (gatherer == 0) block.announce_end(item, present_tile, next_tile, lane);
            k.advance();
          },
          [&](const KeyTile& tile) {
            gather<typename Traits::VLoadTile>(values, all_params.v_units,
                                               producer.value_slot(v, tile.needs_mask), item, tile,
                                               // mutate: values-of-next-tile
                                               select(tile.tile == present_tile, present, behind));
            if constexpr (kChecksValues) {
              if (gatherer > 0)
                PrefillSm90NonFinite<Traits>{block}.zero_nonfinite_tile(v, item, tile,
                                                                        unchecked_parities);
            }
            v.advance();
          });
      block.release_item(place, lane);
    }
  }

  // Of unions: a lane's words of what is known of a tile, which the first warp hands on.
  struct alignas(8) TwoWords {
    uint32_t word[2];
  };
  using Facts = conditional<Traits::kOfUnions, TwoWords, typename Traits::Nothing>;
  __device__ __forceinline__ Facts facts_of(const Item& item, int tile) const {
    if (gatherer > 0 || tile < item.tiles.begin) return Facts{};
    using TileOfUnion = typename Traits::TileOfUnion;
    static_assert(sizeof(TileOfUnion) == 2 * 4 * kWarpSize, "a lane has two words");
    const auto* tiles =
        static_cast<const TileOfUnion*>(all_params.unions().tiles) + item.work.request.mask_start;
    return reinterpret_cast<const Facts*>(tiles + tile)[lane];
  }
  template <typename KeyStage>
  __device__ __forceinline__ void write_facts(const KeyStage& k, const Facts& facts) const {
    if (gatherer > 0) return;
    // Consumers have read what the stage had before they let it go.
    await_phase(block.shared.empty_k[k.stage], k.parity ^ 1);
    reinterpret_cast<Facts*>(&block.shared.unions.of[k.stage])[lane] = facts;
    ptx::warp_sync();
    // An arrival of its own, because those of copies do not order this write.
    if (lane == 0) arrive(block.shared.full_k[k.stage]);
  }

  static __device__ __forceinline__ Pages select(bool is_first, const Pages& first,
                                                 const Pages& second) {
    Pages pages;
#pragma unroll
    for (int i = 0; i < kBatches; ++i) pages.of[i] = is_first ? first.of[i] : second.of[i];
    return pages;
  }

  // The first row of this lane's group of a batch.
  __device__ __forceinline__ int first_row(int batch) const {
    return ((4 * batch + lane / 8) * kGatherers + gatherer) * 8;
  }

  __device__ __forceinline__ Pages look_up(const Item& item, int tile) const {
    Pages pages;
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      const int row = first_row(batch) + lane % 8, key = item.first_key(tile) + row;
      const bool exists = tile >= item.tiles.begin && row < kTileKV && key < item.range.end;
      pages.of[batch] = -1;
      if (exists) {
        pages.of[batch] =
            params.kv_indices[item.work.request.kv_start + PageSlot::of(params, key).page];
      }
    }
    return pages;
  }

  // Gathers this warp's part of a tile of `rows`, one head's, once its place is free. Rows past the
  // last key become zeros.
  template <typename Tile>
  __device__ __forceinline__ void gather(const DTypeKV* rows, const PageUnits& units,
                                         const Place& place, const Item& item, const KeyTile& tile,
                                         const Pages& pages) const {
    await_phase(place.empty, place.parity ^ 1);
    if constexpr (Traits::kMasked) {
      // An arrival of its own, because the copies' arrivals do not order this write.
      if (place.name != nullptr && gatherer == 0 && lane == 0) {
        *place.name = tile;
        arrive(place.full);
      }
    }
    const int chunk = lane % 8;
    const uint64_t source = reinterpret_cast<uintptr_t>(rows) + 16 * chunk;
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      const int first = first_row(batch), page = pages.of[batch];
      const int slot = PageSlot::of(params, item.first_key(tile.tile) + first + lane % 8).slot;
      // mutate: rows-from-page-start
      const int own = page < 0 ? -1 : page * units.page + slot * units.row;
      const uint32_t to = ptx::shared_address(place.bytes) + Tile::offset(first, chunk);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int unit = ptx::shuffle_in_eight(own, i);
        if (kGroups % (4 * kGatherers) != 0 && first >= kTileKV) continue;
        const uint64_t from =
            source + static_cast<uint64_t>(static_cast<uint32_t>(unit)) * units.bytes;
#pragma unroll
        for (int c = 0; c < Tile::kPlaces; c += 8) {
          if (Tile::kPlaces % 8 != 0 && c + chunk >= Tile::kPlaces) continue;
          const bool exists = Tile::kChunks % 8 == 0 || c + chunk < Tile::kChunks;
          const bool is_last = c + chunk == Tile::kChunks - 1;
          // mutate: fp8-chunk-past-the-row
          const int count = is_last ? Tile::kBytesOfLastChunk : 16;
          ptx::cp_async_part(Tile::further(to, i) + c / 8 * Tile::kPanelBytes,
                             reinterpret_cast<const void*>(from + 16 * c),
                             exists && unit != -1 ? count : 0);
        }
      }
    }
    ptx::cp_async_mbarrier_arrive_noinc(ptx::shared_address(&place.full));
  }
};

}  // namespace cupyattn
