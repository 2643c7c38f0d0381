// Prefill and append attention on Hopper's asynchronous units. Blocks are persistent and their
// warps specialised: of the first four, one finds out what to do next, one starts the copies, two
// look after values that are not finite. Two or three warpgroups share the tiles of keys, each for
// 64 rows of its own: S = Q K^T of a tile runs beside O += P V of the one before, also from one
// item to the next, and while one warpgroup is at its softmax, another multiplies.
#pragma once

#include "cupyattn/attention/consumer_sm90.cuh"
#include "cupyattn/attention/converter_sm90.cuh"
#include "cupyattn/attention/gatherer_sm90.cuh"
#include "cupyattn/attention/mask.cuh"
#include "cupyattn/attention/mask_sm90.cuh"
#include "cupyattn/attention/producer_sm90.cuh"
#include "cupyattn/attention/ring.cuh"
#include "cupyattn/attention/rope.cuh"
#include "cupyattn/attention/variants.cuh"
#include "cupyattn/attention/work.cuh"
#include "cupyattn/common/math.cuh"
#include "cupyattn/params/prefill_sm90.cuh"
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
  // Pages that no box fits come row by row, gathered by so many warps: a warpgroup of their own, or
  // warps 0, 2 and 3.
  static constexpr int kGatherers = Config::kGatherers;
  static constexpr bool kGathers = kGatherers > 0;
  // fp8 keys and values land apart, and others turn them into the type of q: a warpgroup of their
  // own, or, where registers forbid one, warps 2 and 3.
  static constexpr bool kConverts = is_fp8<DTypeKV>::value;
  static constexpr int kConverters = kConverts ? Config::kConverters : 0;
  static constexpr bool kConvertsApart = kConverters == 4;
  // Boxes of pages bring all panels at once.
  static constexpr bool kByPatterns = kPaged && !kGathers && !kConverts;
  // Ordinary copies fill the tiles that are multiplied.
  static constexpr bool kIsGathered = kGathers && !kConverts;
  static constexpr bool kTakesTurns = Config::kTakesTurns;
  static constexpr int kWarpgroup = 4 * kWarpSize;
  static constexpr bool kGathersApart = kGatherers == 4;
  static constexpr int kWarpgroups = 1 + kConsumers + (kConvertsApart || kGathersApart ? 1 : 0);
  static constexpr int kThreads = kWarpgroups * kWarpgroup;
  // The present item and the next. More would be taken early, and the last blocks end late.
  static constexpr int kItems = 2;
  static constexpr int kCleaners = 2 * kWarpSize;
  // That a tile has landed: a box is one arrival, rows are one of each thread that gathers.
  static constexpr int kArrivals = kGathers ? kGatherers * kWarpSize : 1;
  // Whether O may leave through the place of its own rows of Q.
  static constexpr bool kStagesOutput = kSlots > 1 && kTakesTurns &&
                                        sizeof(DTypeO) == 2 && kHeadDimQK == kHeadDimVO;

  using QTile = PanelTile<DTypeQ, kTileQ, kHeadDimQK>;
  using KTile = PanelTile<DTypeQ, kTileKV, kHeadDimQK, kByPatterns>;
  using VTile = PanelTile<DTypeQ, kTileKV, kHeadDimVO, kByPatterns>;
  // As keys and values land, and in how many places.
  template <typename Tile, int kHeadDim>
  using Landing = typename conditional<kConverts, RowTile<DTypeKV, kTileKV, kHeadDim>, Tile>::type;
  using KLanding = Landing<KTile, kHeadDimQK>;
  using VLanding = Landing<VTile, kHeadDimVO>;
  static constexpr int kLandings = kConverts ? Config::kLandings : kStages;
  using AnyLogits = typename Logits<Config::kAlibi, Config::kSoftCap, Config::kRowScales>::type;
  // bfloat16 takes any power of two without a rounding.
  static constexpr bool kScalesQueries =
      is_same<AnyLogits, CappedLogits>::value && is_same<DTypeQ, bfloat16_t>::value;
  using LogitsVariant = typename conditional<kScalesQueries, NearCappedLogits, AnyLogits>::type;
  using Mask = typename MaskOf<Config::kCustomMask, Config::kMaskForm>::type;
  static constexpr bool kMasked = Config::kCustomMask;
  static constexpr bool kRope = Config::kRope;
  using KeyTiles = typename conditional<kMasked, KeyTileMap<kTileKV>, AllKeyTiles<kTileKV>>::type;

  // What a block does next. The last one does not exist.
  struct ItemFacts {
    BlockWork work;
    int place;  // in the work list
    KeyRange range;
    TileSpan tiles;
    int exists;
    int boxed_rows;  // whose answers leave in boxes: those of whole warpgroups

    __device__ __forceinline__ bool has_keys() const { return tiles.begin < tiles.end; }
    __device__ __forceinline__ int first_key(int tile) const {
      return tiles.origin + tile * kTileKV;
    }
  };
  // The same for all its warps, with the tiles of keys that a mask leaves.
  struct Item : ItemFacts, KeyTiles {};

  struct LandingPlaces {
    alignas(KLanding::kAlign) unsigned char landing_k[kLandings][KLanding::kBytes];
    alignas(VLanding::kAlign) unsigned char landing_v[kLandings][VLanding::kBytes];
  };
  struct NoLandingPlaces {};

  struct SharedMemory : conditional<kConverts, LandingPlaces, NoLandingPlaces>::type {
    alignas(QTile::kAlign) unsigned char q[kSlots][QTile::kBytes];
    alignas(KTile::kAlign) unsigned char k[kStages][KTile::kBytes];
    alignas(VTile::kAlign) unsigned char v[kStages][VTile::kBytes];
    alignas(16) RowInfo rows[LogitsVariant::kReadsRows ? kTileQ : 1];
    typename LogitsVariant::Constants logits;
    alignas(8) Item items[kItems];
    // Bits of the keys of a stage of V whose values were not finite.
    Vector16 bad_keys[kStages];
    typename conditional<kMasked, RowBits<kTileQ, kTileKV, kStages>, NoRowBits>::type row_bits;
    typename conditional<kRope, RopeSteps<kHeadDimQK>, NoRopeSteps>::type rope;
    alignas(8) uint64_t full_item[kItems], empty_item[kItems];
    // Values of tiles that hide keys land at `raw_v`; what is not finite is taken out of them.
    uint64_t full_q[kSlots], empty_q[kSlots];
    uint64_t full_k[kStages], empty_k[kStages], raw_v[kStages], full_v[kStages], empty_v[kStages];
    // Where keys and values land apart.
    uint64_t landed_k[kLandings], taken_k[kLandings], landed_v[kLandings], taken_v[kLandings];
  };

  enum NamedBarrier {
    kTurn = 1,
    kCleaned = kTurn + kConsumers,
    kQueriesDone,
    kDone = kQueriesDone + kConsumers
  };

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles.py) must agree");
  static_assert(kHeadDimVO % 32 == 0, "rows of O are stored by vectors of whole quads");
  // A block is launched with as many for each thread, and more would be waited for without end.
  static_assert((kWarpgroups - kConsumers) * Config::kLoadRegisters +
                        kConsumers * Config::kMultiplyRegisters <=
                    kWarpgroups * (65536 / kThreads / 8 * 8),
                "registers come from what the block was launched with");
  static_assert(kTileKV <= 128, "bits of a tile's keys are read at once");
  static_assert(!Config::kTakesMaxima || Config::kOverlaps, "maxima are taken beside products");
  static_assert(!kGathers || !kRope, "rotated keys are found by their map");
  static_assert(!(kConvertsApart && kGathersApart), "a warpgroup besides is for one thing");
  static_assert(kGatherers != 3 || kConvertsApart || (!kMasked && !kConverts),
                "warps 2 and 3 have one thing to do besides");
  static_assert(is_same<DTypeQ, DTypeKV>::value || kConverts,
                "both operands of a product have one type");

  const PrefillSm90Params& all_params;
  const AttentionParams& params;
  SharedMemory& shared;

  __device__ __forceinline__ PrefillSm90(const PrefillSm90Params& params, SharedMemory& shared)
      : all_params(params), params(params.attention), shared(shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) init_barriers();
    if constexpr (kRope) shared.rope.fill(params, threadIdx.x, kThreads);
    ptx::block_sync();
    // By the block's index, so that the compiler knows it is the same for a whole warp.
    const int warpgroup = ptx::warp_uniform(threadIdx.x / kWarpgroup);
    if (warpgroup == 0) {
      ptx::set_max_registers_down<Config::kLoadRegisters>();
      const int warp = ptx::warp_uniform(threadIdx.x / kWarpSize);
      if (warp == 1) {
        publish_items();
      } else if constexpr (kGatherers == 3) {
        PrefillSm90Gatherer<PrefillSm90>(*this, warp == 0 ? 0 : warp - 1).run();
      } else if (warp == 0) {
        if constexpr (!kGathers) PrefillSm90Producer<PrefillSm90>(*this).copy_tiles();
      } else if constexpr (!kConverts) {
        PrefillSm90Producer<PrefillSm90>(*this).clean_tiles();
      } else if constexpr (!kConvertsApart) {
        PrefillSm90Converter<PrefillSm90>(*this).run();
      }
    } else if (warpgroup > kConsumers) {
      ptx::set_max_registers_down<Config::kLoadRegisters>();
      if constexpr (kConvertsApart) {
        PrefillSm90Converter<PrefillSm90>(*this).run();
      } else if constexpr (kGathersApart) {
        const int warp = ptx::warp_uniform(threadIdx.x / kWarpSize);
        PrefillSm90Gatherer<PrefillSm90>(*this, warp % 4).run();
      }
    } else {
      ptx::set_max_registers_up<Config::kMultiplyRegisters>();
      PrefillSm90Consumer<PrefillSm90>(*this, warpgroup - 1).run();
    }
  }

  __device__ __forceinline__ void init_barriers() {
    ptx::prefetch_tensor_map(all_params.q);
    if constexpr (!kGathers) {
      ptx::prefetch_tensor_map(all_params.k);
      ptx::prefetch_tensor_map(all_params.v);
    }
    ptx::prefetch_tensor_map(all_params.o);
    const auto init = [](uint64_t& barrier, int count) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), count);
    };
    for (int place = 0; place < kItems; ++place) {
      init(shared.full_item[place], 1);
      // The warps that copy or gather, those that clean, those that multiply, those that convert.
      init(shared.empty_item[place], max_of(1, kGatherers) +
                                         (kConverts || kGatherers == 3 ? 0 : 2) + 4 * kConsumers +
                                         kConverters);
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      init(shared.full_q[slot], 1);
      init(shared.empty_q[slot], 4 * kConsumers);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      if constexpr (kMasked) init(shared.row_bits.full[stage], kConverts ? kConverters : 2);
      init(shared.full_k[stage],
           kConverts ? kConverters : kArrivals + (kMasked && kGathers ? 1 : 0));
      init(shared.raw_v[stage], kArrivals);
      init(shared.full_v[stage], kConverts ? kConverters : kArrivals);
      init(shared.empty_k[stage], 4 * kConsumers);
      init(shared.empty_v[stage], 4 * kConsumers + (kMasked && !kConverts ? 2 : 0));
    }
    if constexpr (kConverts) {
      for (int place = 0; place < kLandings; ++place) {
        init(shared.landed_k[place], kArrivals);
        init(shared.landed_v[place], kArrivals);
        init(shared.taken_k[place], kConverters);
        init(shared.taken_v[place], kConverters);
      }
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

  // --- Warp 1: what to do next, its rows of Q, and O of what is over ---

  __device__ __forceinline__ void publish_items() {
    const PrefillSm90Producer<PrefillSm90> producer(*this);
    RingPlace<kItems> place;
    RingPlace<kSlots> q;
    int stored = 0;  // the place of Q of the next item whose O leaves
    int published = 0;
    const int lane = threadIdx.x % kWarpSize;
    const int num_items = all_params.num_items * params.num_kv_heads;
    for (int index = blockIdx.x;;) {
      const bool exists = index < num_items;
      const ItemFacts item = exists ? item_of(index) : ItemFacts{};
      // Items of zeros, as a captured graph has them to spare, are nobody's business.
      if (!exists || item.work.tile.num_rows > 0) {
        if (item.has_keys()) producer.prefetch_queries(item, lane);
        Item& next = shared.items[place.stage];
        wait(shared.empty_item[place.stage], place.parity ^ 1);
        if (published >= kItems) store_output(shared.items[place.stage], stored, lane);
        ptx::warp_sync();
        if (lane == 0) static_cast<ItemFacts&>(next) = item;
        if constexpr (kMasked) {
          ptx::warp_sync();
          if (exists) leave_hidden_tiles_out(next, lane);
        }
        if (lane == 0) arrive(shared.full_item[place.stage]);
        ptx::warp_sync();
        if (!exists) break;
        // As early as there is a place, and not behind the keys of the item before.
        if (next.has_keys()) {
          if constexpr (kStagesOutput) {
            if (lane == 0) ptx::bulk_wait_read();
            ptx::warp_sync();
          }
          producer.copy_queries(q, next, lane);
        }
        place.advance();
        ++published;
      }
      index = next_index(num_items, lane);
    }
    if constexpr (kStagesOutput) {
      static_assert(kItems == 2, "one item is left");
      place.advance();
      if (published > 0) {
        wait(shared.empty_item[place.stage], place.parity ^ 1);
        store_output(shared.items[place.stage], stored, lane);
        if (lane == 0) ptx::bulk_wait_read();
      }
    }
  }

  // O of an item that is over, from the place of its rows of Q, `stored`.
  __device__ __forceinline__ void store_output(const Item& item, int& stored, int lane) const {
    if constexpr (kStagesOutput) {
      if (!item.has_keys()) return;
      if (lane == 0) {
        const uint32_t rows = ptx::shared_address(shared.q[stored]);
        const int head = item.work.tile.kv_head * params.group_size;
        for_boxes(item, all_params.output_box_rows, item.boxed_rows, [&](int row, int token) {
#pragma unroll
          for (int panel = 0; panel < QTile::kPanels; ++panel) {
            ptx::tensor_store_4d(all_params.o, 64 * panel, head, token, 0,
                                 rows + row * QTile::kRowBytes + panel * QTile::kPanelBytes);
          }
        });
        ptx::bulk_commit();
      }
      stored = stored + 1 == kSlots ? 0 : stored + 1;
    }
  }
  // Calls body(row, token) for the first `num_rows` rows of an item in boxes of `box` rows, which
  // are whole tokens; returns the row after.
  template <typename Body>
  __device__ __forceinline__ int for_boxes(const ItemFacts& item, int box, int num_rows,
                                           Body&& body) const {
    const int tokens = PackGqaRow::of(params, box).token;
    int token = item.work.request.q_start + PackGqaRow::of(params, item.work.tile.first_row).token;
    int row = 0;
    for (; box > 0 && row + box <= num_rows; row += box, token += tokens) body(row, token);
    return row;
  }

  __device__ __forceinline__ void leave_hidden_tiles_out(Item& item, int lane) const {
    const TileSpan tiles = item.template take<Mask>(all_params.mask_maps[item.place],
                                                    item.work.request, item.tiles, lane);
    ptx::warp_sync();
    if (lane != 0) return;
    item.tiles = tiles;
    if (!item.has_keys()) item.boxed_rows = 0;
  }

  // A block begins with the item of its own index and takes the next that nobody has. As many as
  // there are items are asked for in all, so the counter ends where it began, at zero.
  __device__ __forceinline__ int next_index(int num_items, int lane) const {
    int taken = 0;
    if (lane == 0) taken = static_cast<int>(ptx::atomic_inc_wrap(params.counters, num_items - 1));
    return static_cast<int>(gridDim.x) + ptx::warp_uniform(taken);
  }

  // Sections of heads come one after another, so that their keys stay in L2; within one, heads of
  // an item are neighbours. The last items, the shortest, follow all sections, so that blocks end
  // together.
  __device__ __forceinline__ ItemFacts item_of(int index) const {
    const int sectioned = all_params.num_items - all_params.num_last;
    int first_place = sectioned, first_head = 0, heads = params.num_kv_heads;
    int rest = index - sectioned * heads;
    if (rest < 0) {
      const int per_section = sectioned * all_params.heads_per_section;
      const int section = index / per_section;
      first_place = 0;
      first_head = section * all_params.heads_per_section;
      heads = min_of(all_params.heads_per_section, heads - first_head);
      rest = index - section * per_section;
    }
    const int place = first_place + rest / heads;
    const int kv_head = first_head + rest % heads;
    ItemFacts item{};
    item.work = BlockWork::of_index(params, place, kv_head, kTileQ);
    item.place = place;
    item.exists = 1;
    if (item.work.tile.num_rows <= 0) return item;  // mutate: spare-items-worked-on
    item.range = KeyRange::of(params, item.work);
    // Boxes of pages start where pages do.
    item.tiles =
        TileSpan::of < (kPaged && !kGathers) || kMasked > (item.range, kTileKV, item.work.tile);
    // Rows may be copied that nobody asks for; pages may not.
    if constexpr (!kPaged && !kMasked) item.tiles.gather_cuts(item.range, kTileKV);
    const int box = all_params.output_box_rows, num_rows = item.work.tile.num_rows;
    const bool is_boxed = kStagesOutput && box > 0 && num_rows >= box && item.has_keys();
    item.boxed_rows = is_boxed && !item.work.tile.leaves_state() ? num_rows / 64 * 64 : 0;
    return item;
  }

  // Keys and values of an item in the order in which they are wanted, from the last tile, which
  // causality cuts, to the first. V comes one tile behind K, but for that of the last tile, which
  // is to be looked through. (Either is in the code once.) Of keys, the tile after is told too.
  template <typename Keys, typename Values>
  static __device__ __forceinline__ void for_tiles(const Item& item, Keys&& keys, Values&& values) {
    const int begin = item.tiles.begin;
    typename KeyTiles::Walk next(item);
    KeyTile behind{-1, 0};
    for (bool is_last = true;; is_last = false) {
      const KeyTile present{next.tile, next.hides()};
      const bool is_tile = present.tile >= begin;
      if (is_tile) {
        next.advance();
        keys(present, next.tile);
      }
      const KeyTile wanted = is_tile && is_last ? present : behind;
      if (wanted.tile >= 0) values(wanted);
      if (!is_tile) break;
      behind = is_last ? KeyTile{-1, 0} : present;
    }
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
};

}  // namespace cupyattn
