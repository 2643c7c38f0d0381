// The warps of prefill_sm90 that bring keys, values and rows of Q: one starts the copies, two look
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
  using Item = typename Kernel::Item;
  using SharedMemory = typename Kernel::SharedMemory;
  static constexpr int kTileQ = Kernel::kTileQ;
  static constexpr int kTileKV = Kernel::kTileKV;
  static constexpr int kStages = Kernel::kStages;
  static constexpr int kSlots = Kernel::kSlots;
  static constexpr int kItems = Kernel::kItems;
  static constexpr int kCleaners = Kernel::kCleaners;
  static constexpr bool kPaged = Kernel::kPaged;

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

  __device__ __forceinline__ void copy_tiles() {
    RingPlace<kItems> place;
    RingPlace<kStages> k, v;
    const int lane = threadIdx.x % kWarpSize;
    for (;;) {
      const Item& item = kernel.await_item(place);
      if (!item.exists) return;
      const TileSpan tiles = item.tiles;
      // From the last tile, which causality cuts, to the first. V comes one tile behind K, but for
      // that of the last tile, which is to be looked through.
      int behind = -1;
      for (int tile = tiles.end - 1; tile >= tiles.begin; tile = item.before(tile)) {
        copy_tile<KTile, Kernel::kRope>(all_params.k, all_params.k_units, shared.k[k.stage],
                                        shared.empty_k[k.stage], shared.full_k[k.stage], k.parity,
                                        item, tile, lane);
        k.advance();
        if (tile + 1 == tiles.end) {
          copy_values(v, item, tile, lane);
          continue;
        }
        if (behind >= 0) copy_values(v, item, behind, lane);
        behind = tile;
      }
      if (behind >= 0) copy_values(v, item, behind, lane);
      kernel.release_item(place, lane);
    }
  }

  // Rows of Q: whole tiles are one box, if groups fill it; others are gathered, and what rows they
  // lack is zeros.
  __device__ __forceinline__ void copy_queries(RingPlace<kSlots>& q, const Item& item,
                                               int lane) const {
    const Request& request = item.work.request;
    const TileWork& work = item.work.tile;
    const uint32_t tile = ptx::shared_address(shared.q[q.stage]);
    const uint32_t lands = ptx::shared_address(&shared.full_q[q.stage]);
    const int first_head = work.kv_head * params.group_size;
    Kernel::wait(shared.empty_q[q.stage], q.parity ^ 1);
    if (all_params.has_query_boxes && work.num_rows == kTileQ) {
      if (lane == 0) {
        const int token = request.q_start + PackedRow::of(params, work.first_row).token;
        ptx::mbarrier_arrive_expect_tx(lands, QTile::kBytes);
#pragma unroll
        for (int panel = 0; panel < QTile::kPanels; ++panel) {
          ptx::tensor_copy_4d(tile + panel * QTile::kPanelBytes, all_params.q, 64 * panel,
                              first_head, token, 0, lands);
        }
      }
    } else {
#pragma unroll 4
      for (int index = lane; index < kTileQ * QTile::kChunks; index += kWarpSize) {
        const int r = index / QTile::kChunks;
        const int chunk = index % QTile::kChunks;
        const PackedRow row = PackedRow::of(params, work.first_row + r);
        const DTypeQ* source =
            static_cast<const DTypeQ*>(params.q) +
            (static_cast<int64_t>(request.q_start) + row.token) * params.q_stride_n +
            (first_head + row.group_head) * params.q_stride_h + 8 * chunk;
        ptx::cp_async_16(tile + QTile::offset(r, chunk), source, r < work.num_rows);
      }
      ptx::cp_async_commit();
      ptx::cp_async_wait_group<0>();
      ptx::fence_proxy_async();
      ptx::warp_sync();
      if (lane == 0) ptx::mbarrier_arrive(lands);
    }
    ptx::warp_sync();
    q.advance();
  }

  __device__ __forceinline__ void copy_values(RingPlace<kStages>& v, const Item& item, int tile,
                                              int lane) const {
    uint64_t& lands = item.hides_keys(tile) ? shared.raw_v[v.stage] : shared.full_v[v.stage];
    copy_tile<VTile>(all_params.v, all_params.v_units, shared.v[v.stage], shared.empty_v[v.stage],
                     lands, v.parity, item, tile, lane);
    v.advance();
  }

  // Copies a tile once its place is free. What no key has is zeros, or another request's. Pages of
  // rotated keys lie in the order of the table.
  template <typename Tile, bool kInOrder = false>
  __device__ __forceinline__ void copy_tile(const TensorMap& map, const PageUnits& units,
                                            unsigned char* place, uint64_t& empty, uint64_t& full,
                                            uint32_t parity, const Item& item, int tile,
                                            int lane) const {
    const Request& request = item.work.request;
    const int kv_head = item.work.tile.kv_head;
    const int first_key = item.first_key(tile);
    const uint32_t destination = ptx::shared_address(place);
    const uint32_t lands = ptx::shared_address(&full);
    if constexpr (!kPaged) {
      Kernel::wait(empty, parity ^ 1);
      if (lane == 0) {
        ptx::mbarrier_arrive_expect_tx(lands, Tile::kBytes);
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; ++panel) {
          ptx::tensor_copy_4d(destination + panel * Tile::kPanelBytes, map, 64 * panel,
                              request.kv_start + first_key, kv_head * units.head, 0, lands);
        }
      }
      ptx::warp_sync();
    } else {
      const int box_rows = all_params.box_rows;
      bool is_free = false;
      for (int row = lane * box_rows; ptx::warp_any(row < kTileKV); row += kWarpSize * box_rows) {
        const int key = first_key + row;
        const PageSlot at = PageSlot::of(params, key);
        // Looked up before the wait; a box of a page that is none is zeros.
        int page = -1;
        if (row < kTileKV && key < item.range.end) {
          const int entry = request.kv_start + at.page;
          page = (kInOrder ? entry : params.kv_indices[entry]) * units.page + kv_head * units.head;
        }
        if (!is_free) {
          Kernel::wait(empty, parity ^ 1);
          if (lane == 0) ptx::mbarrier_arrive_expect_tx(lands, Tile::kBytes);
          ptx::warp_sync();
          is_free = true;
        }
        if (row < kTileKV) {
          ptx::tensor_copy_5d(destination + row * Tile::kPanels * Tile::kRowBytes, map, 0, 0, 0,
                              at.slot / 8, page, lands);
        }
      }
    }
  }

  // --- Warps 2 and 3: values that are not finite ---

  __device__ __forceinline__ void clean_all_values() {
    RingPlace<kItems> place;
    RingPlace<kStages> v;
    uint32_t raw_parities = 0;  // a bit a stage
    const int thread = threadIdx.x - 2 * kWarpSize;
    for (;;) {
      const Item& item = kernel.await_item(place);
      if (!item.exists) return;
      for (int tile = item.tiles.end - 1; tile >= item.tiles.begin; tile = item.before(tile)) {
        if constexpr (Kernel::kMasked) leave_row_bits(item, tile, v, thread);
        if (item.hides_keys(tile)) {
          Kernel::wait(shared.raw_v[v.stage], (raw_parities >> v.stage) & 1);
          raw_parities ^= 1u << v.stage;
          clean_values(v.stage, item.range.end - item.first_key(tile), thread);
        }
        v.advance();
      }
      kernel.release_item(place, thread % kWarpSize);
    }
  }

  // Leaves what rows see of a tile that hides keys, once the last tile of its stage is over.
  __device__ __forceinline__ void leave_row_bits(const Item& item, int tile,
                                                 const RingPlace<kStages>& v, int thread) {
    constexpr int kRowsEach = ceil_div(kTileQ, kCleaners);
    const int num_tokens = item.range.last_token - item.range.first_token + 1;
    const bool hides = item.hides_keys(tile);
    Vector16 bits[kRowsEach];
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int token = thread + i * kCleaners;
      if (hides && token < num_tokens) {
        bits[i] = visible_keys<typename Kernel::Mask, kTileKV>(
            params, item.work.request, item.range.first_token + token, item.first_key(tile));
      }
    }
    Kernel::wait(shared.empty_v[v.stage], v.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int token = thread + i * kCleaners;
      if (hides && token < num_tokens) shared.row_bits.of[v.stage][token] = bits[i];
    }
    ptx::warp_sync();
    if (thread % kWarpSize == 0) Kernel::arrive(shared.row_bits.full[v.stage]);
  }

  // A tile that hides keys from some row has landed: takes out what is not finite, since it would
  // be NaN times zero there, marks whose it was of the first `num_keys`, and hands the tile on.
  __device__ __forceinline__ void clean_values(int stage, int num_keys, int thread) {
    constexpr int kWords = ceil_div(kTileKV, 32);
    constexpr int kChunks = VTile::kBytes / (16 * kCleaners);
    constexpr int kBatch = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
    static_assert(VTile::kBytes == 16 * kCleaners * kChunks && kChunks % kBatch == 0,
                  "batches are whole");
    Vector16* chunks = reinterpret_cast<Vector16*>(shared.v[stage]);
    if (thread < kWords) shared.bad_keys[stage][thread] = 0;
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
        clean_chunk(chunks[index], shared.bad_keys[stage], VTile::row_at(16 * index), num_keys);
      }
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(Kernel::kCleaned, kCleaners);
    if (thread == 0) Kernel::arrive(shared.full_v[stage]);
  }
  static __device__ __forceinline__ void clean_chunk(Vector16& chunk, uint32_t* bad_keys, int key,
                                                     int num_keys) {
    const Vector16 values = chunk;
    Vector16 holes;
#pragma unroll
    for (int w = 0; w < 4; ++w) holes.word[w] = not_finite<DTypeKV>(values.word[w]);
    if ((holes.word[0] | holes.word[1] | holes.word[2] | holes.word[3]) == 0) return;
#pragma unroll
    for (int w = 0; w < 4; ++w) chunk.word[w] = values.word[w] & ~holes.word[w];
    if (key < num_keys) ptx::atomic_or_shared(&bad_keys[key / 32], 1u << (key % 32));
  }
};

}  // namespace cupyattn
