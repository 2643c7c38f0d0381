// Warps of prefill_sm90 that bring keys, values and rows of Q by the copy engine, and that look
// after values that are not finite. See prefill_sm90.cuh.
#pragma once

#include "cupyattn/attention/hidden_values.cuh"
#include "cupyattn/attention/key_rows.cuh"
#include "cupyattn/attention/mask_sm90.cuh"
#include "cupyattn/attention/ring.cuh"
#include "cupyattn/attention/work.cuh"
#include "cupyattn/common/math.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/params/prefill_sm90.cuh"
#include "cupyattn/ptx/convert.cuh"
#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/mbarrier.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/ptx/tensor_copy.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

template <typename Kernel>
struct PrefillSm90Producer {
  using DTypeQ = typename Kernel::DTypeQ;
  using DTypeKV = typename Kernel::DTypeKV;
  using QTile = typename Kernel::QTile;
  using KTile = typename Kernel::KTile;
  using VTile = typename Kernel::VTile;
  using KLanding = typename Kernel::KLanding;
  using VLanding = typename Kernel::VLanding;
  using Item = typename Kernel::Item;
  using ItemFacts = typename Kernel::ItemFacts;
  using SharedMemory = typename Kernel::SharedMemory;
  static constexpr int kTileQ = Kernel::kTileQ;
  static constexpr int kTileKV = Kernel::kTileKV;
  static constexpr int kLandings = Kernel::kLandings;
  static constexpr int kSlots = Kernel::kSlots;
  static constexpr int kItems = Kernel::kItems;
  static constexpr int kCleaners = Kernel::kCleaners;
  static constexpr bool kPaged = Kernel::kPaged;
  static constexpr bool kConverts = Kernel::kConverts;
  static_assert(kTileKV <= 8 * kWarpSize, "a lane has one box of eight rows or more");

  const Kernel& kernel;
  const PrefillSm90Params& all_params;
  const AttentionParams& params;
  SharedMemory& shared;

  __device__ __forceinline__ explicit PrefillSm90Producer(const Kernel& kernel)
      : kernel(kernel),
        all_params(kernel.all_params),
        params(kernel.params),
        shared(kernel.shared) {}

  // --- Warp 0: copies ---

  // Of this lane's box: the page that it is in, or is a part of, in the tile that K was copied of
  // last, in the one before it and, looked up ahead, in the next; -1 is none.
  struct PagesOfBoxes {
    int tile = -1, present = -1, behind = -1, next = -1;
  };

  __device__ __forceinline__ int page_of_box(const Item& item, int tile, int lane) const {
    const int row = lane * all_params.box_rows, key = item.first_key(tile) + row;
    if (tile < item.tiles.begin || row >= kTileKV || key >= item.range.end) return -1;
    return params.kv_indices[item.work.request.kv_start + PageSlot::of(params, key).page];
  }

  __device__ __forceinline__ void copy_tiles() {
    RingPlace<kItems> place;
    RingPlace<kLandings> k, v;
    const int lane = threadIdx.x % kWarpSize;
    for (;;) {
      const Item& item = kernel.await_item(place);
      if (!item.exists) return;
      PagesOfBoxes pages;
      if constexpr (kPaged) pages.next = page_of_box(item, item.tiles.end - 1, lane);
      Kernel::for_tiles(
          item,
          [&](const KeyTile& tile, int next) {
            if constexpr (kPaged) {
              pages.behind = pages.present;
              pages.present = pages.next;
              pages.tile = tile.tile;
            }
            copy_keys(k, item, tile, pages.present, lane);
            if constexpr (kPaged) pages.next = page_of_box(item, next, lane);
          },
          [&](const KeyTile& tile) {
            copy_values(v, item, tile, tile.tile == pages.tile ? pages.present : pages.behind,
                        lane);
          });
      kernel.release_item(place, lane);
    }
  }

  // Rows of Q will be wanted, and take long to come from memory.
  __device__ __forceinline__ void prefetch_queries(const ItemFacts& item, int lane) const {
    if (lane != 0) return;
    kernel.for_boxes(item, all_params.query_box_rows, item.work.tile.num_rows, [&](int, int token) {
#pragma unroll
      for (int panel = 0; panel < QTile::kPanels; ++panel) {
        ptx::tensor_prefetch_4d(all_params.q, 64 * panel,
                                item.work.tile.kv_head * params.group_size, token, 0);
      }
    });
  }

  // Rows of Q: boxes where all rows of one are the item's; the others are gathered, and what rows
  // their warpgroup lacks is zeros. Warpgroups without rows do not look.
  __device__ __forceinline__ void copy_queries(RingPlace<kSlots>& q, const Item& item,
                                               int lane) const {
    const TileWork& work = item.work.tile;
    const uint32_t tile = ptx::shared_address(shared.q[q.stage]);
    const uint32_t lands = ptx::shared_address(&shared.full_q[q.stage]);
    Kernel::wait(shared.empty_q[q.stage], q.parity ^ 1);
    ptx::warp_sync();
    const int box = all_params.query_box_rows, head = work.kv_head * params.group_size;
    const int row = kernel.for_boxes(item, box, work.num_rows, [&](int row, int token) {
      if (lane != 0) return;
      ptx::mbarrier_expect_tx(lands, box * QTile::kPanels * QTile::kRowBytes);
#pragma unroll
      for (int panel = 0; panel < QTile::kPanels; ++panel) {
        ptx::tensor_copy_4d(tile + panel * QTile::kPanelBytes + row * QTile::kRowBytes,
                            all_params.q, 64 * panel, head, token, 0, lands);
      }
    });
    if (row < work.num_rows) gather_queries(tile, item, row, lane);
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(lands);
    ptx::warp_sync();
    q.advance();
  }

  __device__ __forceinline__ void gather_queries(uint32_t tile, const Item& item, int first_row,
                                                 int lane) const {
    const TileWork& work = item.work.tile;
    const int end = ceil_div(work.num_rows, 64) * 64;
#pragma unroll 4
    for (int index = first_row * QTile::kChunks + lane; index < end * QTile::kChunks;
         index += kWarpSize) {
      const int r = index / QTile::kChunks;
      const int chunk = index % QTile::kChunks;
      const PackGqaRow row = PackGqaRow::of(params, work.first_row + r);
      const DTypeQ* source =
          static_cast<const DTypeQ*>(params.q) +
          (static_cast<int64_t>(item.work.request.q_start) + row.token) * params.q_stride_n +
          (work.kv_head * params.group_size + row.group_head) * params.q_stride_h + 8 * chunk;
      ptx::cp_async_16(tile + QTile::offset(r, chunk), source, r < work.num_rows);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait_group<0>();
    ptx::fence_proxy_async();
  }

  // --- Keys and values, and where they land ---

  // Where a tile lands, who says that the place is free, and who is told that it is full; where
  // to say which tile of keys it is, if a mask leaves some out.
  struct Place {
    unsigned char* bytes;
    uint64_t &empty, &full;
    uint32_t parity;
    KeyTile* name = nullptr;
  };

  __device__ __forceinline__ Place place_of_keys(const RingPlace<kLandings>& k) const {
    if constexpr (kConverts) {
      return Place{shared.landing_k[k.stage], shared.taken_k[k.stage], shared.landed_k[k.stage],
                   k.parity};
    } else {
      Place place{shared.k[k.stage], shared.empty_k[k.stage], shared.full_k[k.stage], k.parity};
      if constexpr (Kernel::kMasked) place.name = &shared.row_bits.tiles[k.stage];
      return place;
    }
  }
  __device__ __forceinline__ Place place_of_values(const RingPlace<kLandings>& v,
                                                   bool hides) const {
    if constexpr (kConverts) {
      return Place{shared.landing_v[v.stage], shared.taken_v[v.stage], shared.landed_v[v.stage],
                   v.parity};
    } else {
      uint64_t& full = hides ? shared.raw_v[v.stage] : shared.full_v[v.stage];
      return Place{shared.v[v.stage], shared.empty_v[v.stage], full, v.parity};
    }
  }

  __device__ __forceinline__ void copy_keys(RingPlace<kLandings>& k, const Item& item,
                                            const KeyTile& tile, int page, int lane) const {
    copy_boxes<KLanding, Kernel::kRope>(all_params.k, all_params.k_units, place_of_keys(k), item,
                                        tile, page, lane);
    k.advance();
  }

  __device__ __forceinline__ void copy_values(RingPlace<kLandings>& v, const Item& item,
                                              const KeyTile& tile, int page, int lane) const {
    copy_boxes<VLanding, false>(all_params.v, all_params.v_units, place_of_values(v, tile.hides),
                                item, tile, page, lane);
    v.advance();
  }

  // Copies a tile once its place is free. What no key has is zeros, or another request's. Pages of
  // rotated keys lie in the order of the table.
  template <typename Tile, bool kInOrder>
  __device__ __forceinline__ void copy_boxes(const TensorMap& map, const PageUnits& units,
                                             const Place& place, const Item& item,
                                             const KeyTile& tile, int page, int lane) const {
    const Request& request = item.work.request;
    const int kv_head = item.work.tile.kv_head;
    const int first_key = item.first_key(tile.tile);
    const uint32_t destination = ptx::shared_address(place.bytes);
    const uint32_t lands = ptx::shared_address(&place.full);
    if constexpr (!kPaged) {
      // All lanes are past the wait before a copy begins: one that came later might find the place
      // used, free again and, by its parity, still taken.
      Kernel::wait(place.empty, place.parity ^ 1);
      ptx::warp_sync();
      if (lane == 0) {
        if (place.name != nullptr) *place.name = tile;
        ptx::mbarrier_arrive_expect_tx(lands, Tile::kBytes);
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; ++panel) {
          ptx::tensor_copy_4d(destination + panel * Tile::kPanelBytes, map, 64 * panel,
                              request.kv_start + first_key, kv_head * units.head, 0, lands);
        }
      }
    } else {
      const int row = lane * all_params.box_rows;
      const PageSlot at = PageSlot::of(params, first_key + row);
      if (kInOrder && page >= 0) page = request.kv_start + at.page;
      // A box of a page that is none is zeros.
      const int place_of_page = page < 0 ? -1 : page * units.page + kv_head * units.head;
      Kernel::wait(place.empty, place.parity ^ 1);
      if (lane == 0) {
        if (place.name != nullptr) *place.name = tile;
        ptx::mbarrier_arrive_expect_tx(lands, Tile::kBytes);
      }
      ptx::warp_sync();
      if (row < kTileKV) {
        if constexpr (kConverts) {
          ptx::tensor_copy_4d(destination + row * Tile::kRowBytes, map, 0, at.slot, place_of_page,
                              0, lands);
        } else {
          ptx::tensor_copy_5d(destination + row * Tile::kPanels * Tile::kRowBytes, map, 0, 0, 0,
                              at.slot / 8, place_of_page, lands);
        }
      }
    }
  }

  // --- Warps 2 and 3: values that are not finite, and masks ---

  __device__ __forceinline__ void clean_tiles() {
    RingPlace<kItems> place;
    RingPlace<kLandings> v;
    uint32_t raw_parities = 0;
    const int thread = threadIdx.x - 2 * kWarpSize;
    for (;;) {
      const Item& item = kernel.await_item(place);
      if (!item.exists) return;
      Kernel::for_tiles(
          item, [](const KeyTile&, int) {},
          [&](const KeyTile& tile) {
            if constexpr (Kernel::kMasked) {
              Kernel::wait(shared.empty_v[v.stage], v.parity ^ 1);
              shared.row_bits.template fill<typename Kernel::Mask>(v, params, item, tile, thread,
                                                                   kCleaners);
            }
            clean_tile(v, item, tile, raw_parities);
            if constexpr (Kernel::kMasked) {
              // Nobody waits for this where no key is hidden, and who came two rounds late would
              // take a place that is free for one that is not.
              ptx::warp_sync();
              if (thread % kWarpSize == 0) Kernel::arrive(shared.empty_v[v.stage]);
            }
            v.advance();
          });
      kernel.release_item(place, thread % kWarpSize);
    }
  }

  // Passes values on once they hold nothing that hidden keys must not bring. raw_parities: a bit a
  // stage.
  __device__ __forceinline__ void clean_tile(const RingPlace<kLandings>& v, const Item& item,
                                             const KeyTile& tile, uint32_t& raw_parities) const {
    if (!tile.hides) return;
    const int thread = threadIdx.x - 2 * kWarpSize;
    Kernel::wait(shared.raw_v[v.stage], (raw_parities >> v.stage) & 1);
    raw_parities ^= 1u << v.stage;
    clean_values(v.stage, item.range.end - item.first_key(tile.tile), thread);
    if (thread == 0) {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.full_v[v.stage]), Kernel::kArrivals);
    }
  }

  // A tile that hides keys from some row has landed: takes out what is not finite, since it would
  // be NaN times zero there, marks whose it was of the first `num_keys`.
  __device__ __forceinline__ void clean_values(int stage, int num_keys, int thread) const {
    constexpr int kChunks = VTile::kBytes / (16 * kCleaners);
    constexpr int kBatch = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
    static_assert(VTile::kBytes == 16 * kCleaners * kChunks && kChunks % kBatch == 0,
                  "batches are whole");
    Vector16* chunks = reinterpret_cast<Vector16*>(shared.v[stage]);
    if (thread == 0) shared.bad_keys[stage] = Vector16{};
    ptx::named_barrier_sync(Kernel::kCleaned, kCleaners);
    for (int first = thread; first < VTile::kBytes / 16; first += kBatch * kCleaners) {
      uint32_t seen[4] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const Vector16 values = chunks[first + i * kCleaners];
        // Zero times a value that is not finite is NaN, and a sum keeps it.
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          seen[w] = ptx::multiply_add_pair<DTypeKV>(values.word[w], 0u, seen[w]);
        }
      }
      if (((seen[0] | seen[1] | seen[2] | seen[3]) & 0x7fff7fffu) == 0) continue;
#pragma unroll 1
      for (int index = first; index < first + kBatch * kCleaners; index += kCleaners) {
        zero_nonfinite_chunk<DTypeKV>(chunks[index], shared.bad_keys[stage].word,
                                      VTile::row_at(16 * index), num_keys);
      }
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(Kernel::kCleaned, kCleaners);
  }
};

}  // namespace cupyattn
