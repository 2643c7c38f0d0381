// Prefill and append attention on Hopper's asynchronous units. Blocks are persistent and their
// warps specialised: of the first four, one finds out what to do next, one starts the copies, two
// look after values that are not finite. Two or three warpgroups share the tiles of keys, each for
// 64 rows of its own: S = Q K^T of a tile runs beside O += P V of the one before, also from one
// item to the next, and while one warpgroup is at its softmax, another multiplies.
#pragma once

#include "cupyattn/attention/consumer_sm90.cuh"
#include "cupyattn/attention/hidden_values.cuh"
#include "cupyattn/attention/key_rows.cuh"
#include "cupyattn/attention/mask.cuh"
#include "cupyattn/attention/ring.cuh"
#include "cupyattn/attention/variants.cuh"
#include "cupyattn/attention/work.cuh"
#include "cupyattn/common/math.cuh"
#include "cupyattn/params/prefill_sm90.cuh"
#include "cupyattn/ptx/convert.cuh"
#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/mbarrier.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/ptx/tensor_copy.cuh"
#include "cupyattn/ptx/warp.cuh"
#include "cupyattn/tile/warpgroup_tile.cuh"

namespace cupyattn {

template <typename Config>
struct PrefillSm90 {
  using ConfigType = Config;
  using DTypeQ = typename Config::DTypeQ;
  using DTypeKV = typename Config::DTypeKV;
  using DTypeO = typename Config::DTypeO;
  static constexpr int kHeadDimQK = Config::kHeadDimQK;
  static constexpr int kHeadDimVO = Config::kHeadDimVO;
  static constexpr int kConsumers = Config::kConsumers;
  static constexpr int kTileQ = 64 * kConsumers;
  static constexpr int kTileKV = Config::kTileKV;
  static constexpr int kStages = Config::kStages;
  static constexpr int kSlots = Config::kQuerySlots;
  static constexpr bool kPaged = Config::kPaged;
  static constexpr int kWarpgroup = 4 * kWarpSize;
  // The present item and the next. More would be taken early, and the last blocks end late.
  static constexpr int kItems = 2;
  static constexpr int kCleaners = 2 * kWarpSize;

  using QTile = PanelTile<DTypeQ, kTileQ, kHeadDimQK>;
  using KTile = PanelTile<DTypeKV, kTileKV, kHeadDimQK, kPaged>;
  using VTile = PanelTile<DTypeKV, kTileKV, kHeadDimVO, kPaged>;
  using LogitsVariant = typename Logits<Config::kAlibi, Config::kSoftCap, Config::kRowScales>::type;

  // What a block does next, for all its warps. The last one does not exist.
  struct Item {
    BlockWork work;
    KeyRange range;
    TileSpan tiles;
    int exists;

    // Lists of a captured graph have more items than there is work.
    __device__ __forceinline__ bool is_spare() const { return exists && work.tile.num_rows <= 0; }
    __device__ __forceinline__ int first_key(int tile) const {
      return tiles.origin + tile * kTileKV;
    }
    __device__ __forceinline__ bool hides_keys(int tile) const {
      return range.cuts(first_key(tile), kTileKV);
    }
  };

  struct SharedMemory {
    alignas(QTile::kAlign) unsigned char q[kSlots][QTile::kBytes];
    alignas(KTile::kAlign) unsigned char k[kStages][KTile::kBytes];
    alignas(VTile::kAlign) unsigned char v[kStages][VTile::kBytes];
    alignas(16) RowInfo rows[kTileQ];
    LogitConstants logits;
    alignas(8) Item items[kItems];
    // Bits of the keys of a stage of V whose values were not finite.
    uint32_t bad_keys[kStages][ceil_div(kTileKV, 32)];
    alignas(8) uint64_t full_item[kItems], empty_item[kItems];
    // Values of tiles that hide keys land at `raw_v`; what is not finite is taken out of them.
    uint64_t full_q[kSlots], empty_q[kSlots];
    uint64_t full_k[kStages], empty_k[kStages], raw_v[kStages], full_v[kStages], empty_v[kStages];
  };

  enum NamedBarrier { kTurn = 1, kCleaned = kTurn + kConsumers };

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles.py) must agree");
  static_assert(kHeadDimVO % 32 == 0, "rows of O are stored by vectors of whole quads");
  static_assert(is_same<DTypeQ, DTypeKV>::value, "both operands of a product have one type");

  const PrefillSm90Params& all_params;
  const AttentionParams& params;
  SharedMemory& shared;

  __device__ __forceinline__ PrefillSm90(const PrefillSm90Params& params, SharedMemory& shared)
      : all_params(params), params(params.attention), shared(shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) init_barriers();
    ptx::block_sync();
    // By the block's index, so that the compiler knows it is the same for a whole warp.
    const int warpgroup = ptx::warp_uniform(threadIdx.x / kWarpgroup);
    if (warpgroup == 0) {
      ptx::set_max_registers_down<Config::kLoadRegisters>();
      const int warp = ptx::warp_uniform(threadIdx.x / kWarpSize);
      if (warp == 0) {
        copy_tiles();
      } else if (warp == 1) {
        publish_items();
      } else {
        clean_all_values();
      }
    } else {
      ptx::set_max_registers_up<Config::kMultiplyRegisters>();
      PrefillSm90Consumer<PrefillSm90>(*this, warpgroup - 1).run();
    }
  }

  __device__ __forceinline__ void init_barriers() {
    ptx::prefetch_tensor_map(all_params.q);
    ptx::prefetch_tensor_map(all_params.k);
    ptx::prefetch_tensor_map(all_params.v);
    const auto init = [](uint64_t& barrier, int count) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), count);
    };
    for (int place = 0; place < kItems; ++place) {
      init(shared.full_item[place], 1);
      // The warp that copies, those that clean, those that multiply.
      init(shared.empty_item[place], 1 + 2 + 4 * kConsumers);
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      init(shared.full_q[slot], 1);
      init(shared.empty_q[slot], 4 * kConsumers);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      init(shared.full_k[stage], 1);
      init(shared.raw_v[stage], 1);
      init(shared.full_v[stage], 1);
      init(shared.empty_k[stage], 4 * kConsumers);
      init(shared.empty_v[stage], 4 * kConsumers);
    }
    shared.logits = LogitsVariant::make_constants(params);
    ptx::fence_mbarrier_init();
  }

  static __device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_wait_parity(ptx::shared_address(&barrier), parity);
  }
  static __device__ __forceinline__ void arrive(uint64_t& barrier) {
    ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  }

  // --- Warp 1: what to do next ---

  __device__ __forceinline__ void publish_items() {
    RingPlace<kItems> place;
    const int lane = threadIdx.x % kWarpSize;
    const int num_items = all_params.num_items * params.num_kv_heads;
    for (int index = blockIdx.x;;) {
      const bool exists = index < num_items;
      const Item item = exists ? item_of(index) : Item{};
      if (item.is_spare()) {
        index = next_index(num_items, lane);
        continue;
      }
      wait(shared.empty_item[place.stage], place.parity ^ 1);
      if (lane == 0) {
        shared.items[place.stage] = item;
        arrive(shared.full_item[place.stage]);
      }
      ptx::warp_sync();
      if (!exists) return;
      place.advance();
      index = next_index(num_items, lane);
    }
  }

  // A block begins with the item of its own index and takes the next that nobody has. As many as
  // there are items are asked for in all, so the counter ends where it began, at zero.
  __device__ __forceinline__ int next_index(int num_items, int lane) const {
    int taken = 0;
    if (lane == 0) taken = static_cast<int>(ptx::atomic_inc_wrap(params.counters, num_items - 1));
    return static_cast<int>(gridDim.x) + ptx::warp_uniform(taken);
  }

  // Sections of heads come one after another, so that their keys stay in L2; within one, heads of
  // an item are neighbours.
  __device__ __forceinline__ Item item_of(int index) const {
    const int per_section = all_params.num_items * all_params.heads_per_section;
    const int section = index / per_section;
    const int first_head = section * all_params.heads_per_section;
    const int heads = min_of(all_params.heads_per_section, params.num_kv_heads - first_head);
    const int rest = index - section * per_section;
    const int place = rest / heads;
    const int kv_head = first_head + rest - place * heads;
    Item item{};
    if (params.work != nullptr) {
      item.work = BlockWork::of_item(params, place, kv_head, kTileQ);
    } else {
      const int tile = place / params.num_splits;
      item.work = BlockWork::of_tile(params, params.num_q_tiles - 1 - tile, kv_head,
                                     place - tile * params.num_splits, kTileQ);
    }
    item.exists = 1;
    if (item.is_spare()) return item;
    item.range = KeyRange::of(params, item.work);
    // Boxes of pages start where pages do.
    item.tiles = TileSpan::of<kPaged>(item.range, kTileKV, item.work.tile);
    return item;
  }

  // The next item, and whether there is one.
  __device__ __forceinline__ const Item& await_item(const RingPlace<kItems>& place) const {
    wait(shared.full_item[place.stage], place.parity);
    return shared.items[place.stage];
  }
  __device__ __forceinline__ void release_item(RingPlace<kItems>& place, int lane) const {
    ptx::warp_sync();
    if (lane == 0) arrive(shared.empty_item[place.stage]);
    place.advance();
  }

  // --- Warp 0: copies ---

  __device__ __forceinline__ void copy_tiles() {
    RingPlace<kItems> place;
    RingPlace<kStages> k, v;
    RingPlace<kSlots> q;
    const int lane = threadIdx.x % kWarpSize;
    for (;;) {
      const Item& item = await_item(place);
      if (!item.exists) return;
      const TileSpan tiles = item.tiles;
      // From the last tile, which causality cuts, to the first. V comes one tile behind K.
      for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
        copy_tile<KTile>(all_params.k, all_params.k_units, shared.k[k.stage],
                         shared.empty_k[k.stage], shared.full_k[k.stage], k.parity, item, tile,
                         lane);
        k.advance();
        if (tile + 1 == tiles.end) {
          copy_queries(q, item, lane);
        } else {
          copy_values(v, item, tile + 1, lane);
        }
      }
      if (tiles.begin < tiles.end) copy_values(v, item, tiles.begin, lane);
      release_item(place, lane);
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
    wait(shared.empty_q[q.stage], q.parity ^ 1);
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

  // Copies a tile once its place is free. What no key has is zeros, or another request's.
  template <typename Tile>
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
      wait(empty, parity ^ 1);
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
          page = params.kv_indices[request.kv_start + at.page] * units.page + kv_head * units.head;
        }
        if (!is_free) {
          wait(empty, parity ^ 1);
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
      const Item& item = await_item(place);
      if (!item.exists) return;
      for (int tile = item.tiles.end - 1; tile >= item.tiles.begin; --tile) {
        if (item.hides_keys(tile)) {
          wait(shared.raw_v[v.stage], (raw_parities >> v.stage) & 1);
          raw_parities ^= 1u << v.stage;
          clean_values(v.stage, item.range.end - item.first_key(tile), thread);
        }
        v.advance();
      }
      release_item(place, thread % kWarpSize);
    }
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
    ptx::named_barrier_sync(kCleaned, kCleaners);
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
    ptx::named_barrier_sync(kCleaned, kCleaners);
    if (thread == 0) arrive(shared.full_v[stage]);
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
