// Warps of prefill_sm90 that gather keys and values row by row, from pages that no box of the copy
// engine fits. See prefill_sm90.cuh.
#pragma once

#include "cupyattn/attention/key_rows.cuh"
#include "cupyattn/attention/producer_sm90.cuh"
#include "cupyattn/attention/ring.cuh"
#include "cupyattn/common/math.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/params/prefill_sm90.cuh"
#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

template <typename Kernel>
struct PrefillSm90Gatherer {
  using Producer = PrefillSm90Producer<Kernel>;
  using Place = typename Producer::Place;
  using DTypeKV = typename Kernel::DTypeKV;
  using Item = typename Kernel::Item;
  static constexpr int kTileKV = Kernel::kTileKV;
  static constexpr int kGatherers = Kernel::kGatherers;
  // A warp has every kGatherers-th group of eight rows of a tile, and eight of its lanes copy one
  // of these, row by row.
  static constexpr int kGroups = kTileKV / 8;
  static constexpr int kBatches = ceil_div(kGroups, 4 * kGatherers);

  // Whether warps 2 and 3, which gather, look after values that are not finite besides.
  static constexpr bool kCleans = kGatherers == 3 && !Kernel::kConverts;

  // Each lane looks up one row of the group that its eight copy: the page that it is in; -1 is
  // none.
  struct Pages {
    int of[kBatches];
  };

  const Kernel& kernel;
  const Producer producer;
  const PrefillSm90Params& all_params;
  const AttentionParams& params;
  const int gatherer, lane;

  __device__ __forceinline__ PrefillSm90Gatherer(const Kernel& kernel, int gatherer)
      : kernel(kernel),
        producer(kernel),
        all_params(kernel.all_params),
        params(kernel.params),
        gatherer(gatherer),
        lane(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ void run() const {
    RingPlace<Kernel::kItems> place;
    RingPlace<Kernel::kLandings> k, v;
    uint32_t raw_parities = 0;
    for (;;) {
      const Item& item = kernel.await_item(place);
      if (!item.exists) return;
      const int kv_head = item.work.tile.kv_head;
      const DTypeKV* const keys =
          static_cast<const DTypeKV*>(params.k) + kv_head * params.k_stride_h;
      const DTypeKV* const values =
          static_cast<const DTypeKV*>(params.v) + kv_head * params.v_stride_h;
      // Looked up a tile ahead, and kept for V, which comes a tile behind: a look between the two
      // would make everybody wait for V.
      Pages next = look_up(item, item.tiles.end - 1), present = next, behind = next;
      int present_tile = -1;
      Kernel::for_tiles(
          item,
          [&](const KeyTile& tile, int next_tile) {
            behind = present;
            present = next;
            present_tile = tile.tile;
            gather<typename Kernel::KLanding>(keys, all_params.k_units, producer.place_of_keys(k),
                                              item, tile, present);
            next = look_up(item, next_tile);
            k.advance();
          },
          [&](const KeyTile& tile) {
            gather<typename Kernel::VLanding>(values, all_params.v_units,
                                              producer.place_of_values(v, tile.hides), item, tile,
                                              select(tile.tile == present_tile, present, behind));
            if constexpr (kCleans) {
              if (gatherer > 0) producer.clean_tile(v, item, tile, raw_parities);
            }
            v.advance();
          });
      kernel.release_item(place, lane);
    }
  }

  static __device__ __forceinline__ Pages select(bool is_first, const Pages& first,
                                                 const Pages& second) {
    Pages pages;
#pragma unroll
    for (int i = 0; i < kBatches; ++i) pages.of[i] = is_first ? first.of[i] : second.of[i];
    return pages;
  }

  // The first row of the group that this lane's eight have of a batch.
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

  // Gathers this warp's part of a tile of `rows`, one head's, once its place is free. What no key
  // has is zeros.
  template <typename Tile>
  __device__ __forceinline__ void gather(const DTypeKV* rows, const PageUnits& units,
                                         const Place& place, const Item& item, const KeyTile& tile,
                                         const Pages& pages) const {
    Kernel::wait(place.empty, place.parity ^ 1);
    if constexpr (Kernel::kMasked) {
      // Not with the copies: those do not say that what was written before them is there.
      if (place.name != nullptr && gatherer == 0 && lane == 0) {
        *place.name = tile;
        Kernel::arrive(place.full);
      }
    }
    const int chunk = lane % 8;
    const uint64_t source = reinterpret_cast<uintptr_t>(rows) + 16 * chunk;
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      const int first = first_row(batch), page = pages.of[batch];
      const int slot = PageSlot::of(params, item.first_key(tile.tile) + first + lane % 8).slot;
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
          ptx::cp_async_16(Tile::further(to, i) + c / 8 * Tile::kPanelBytes,
                           reinterpret_cast<const void*>(from + 16 * c), exists && unit != -1);
        }
      }
    }
    ptx::cp_async_mbarrier_arrive_noinc(ptx::shared_address(&place.full));
  }
};

}  // namespace cupyattn
