// What the roles of prefill_sm90 share: tiles, items of work and shared memory. Traits are a role's
// only template argument, so that another kernel can bring its own.
#pragma once

#include "cupyattn/shared/block_scales.cuh"
#include "cupyattn/shared/rope.cuh"
#include "cupyattn/sm90/roles/mask.cuh"
#include "cupyattn/sm90/roles/row_scales.cuh"
#include "cupyattn/sm90/roles/skipped_tiles.cuh"
#include "cupyattn/sm90/roles/soft_cap.cuh"
#include "cupyattn/tile/warpgroup_tile.cuh"

namespace cupyattn {

// Whether the first product of an item runs beside the last one of the item before, where products
// have 8 bits; a Config that does not say so has no such items.
template <typename Config, typename = void>
struct LetsItemsFollow {
  enum : bool { kValue = false };
};
template <typename Config>
struct LetsItemsFollow<Config, typename AnyFlag<Config::kFollows>::type> {
  enum : bool { kValue = Config::kFollows };
};

// Whether items have unions of lists for keys (plan/union_lists.cuh). Few kernels say so.
template <typename Config, typename = void>
struct HasUnions {
  enum : bool { kValue = false };
};
template <typename Config>
struct HasUnions<Config, typename AnyValue<Config::kUnions>::type> {
  enum : bool { kValue = Config::kUnions };
};

// Whether tiles of unions are CutUnionTile.
template <typename Config, typename = void>
struct HasUnionCuts {
  enum : bool { kValue = false };
};
template <typename Config>
struct HasUnionCuts<Config, typename AnyFlag<Config::kUnionCuts>::type> {
  enum : bool { kValue = Config::kUnionCuts };
};

// Whether tiles of unions are SmallUnionTile.
template <typename Config, typename = void>
struct HasSmallUnions {
  enum : bool { kValue = false };
};
template <typename Config>
struct HasSmallUnions<Config, typename AnyFlag<Config::kSmallUnions>::type> {
  enum : bool { kValue = Config::kSmallUnions };
};

template <typename Config>
struct PrefillSm90Traits : Config {
  using Config::kConsumers, Config::kGatherers, Config::kHeadDimQK, Config::kHeadDimVO,
      Config::kPaged, Config::kRope, Config::kStages, Config::kTileKV;
  using typename Config::DTypeKV;
  using typename Config::DTypeO;
  using typename Config::DTypeQ;
  // Products of 8-bit elements take values transposed, and sums of few tiles of keys at a time.
  static constexpr bool kMultipliesBytes = sizeof(DTypeQ) == 1;
  // Keys and values of fewer bits than queries are converted, and land in tiles of their own.
  static constexpr bool kConverts = sizeof(DTypeKV) < sizeof(DTypeQ);
  // What products take: elements of the tiles of keys and of values, and of probabilities, which
  // meet values. fp8 that is converted becomes f16, whatever the queries' type is.
  using DTypeKTile = conditional<kConverts, half_t, DTypeQ>;
  using DTypeVTile = conditional<kMultipliesBytes, DTypeKV, DTypeKTile>;
  using DTypeP = DTypeVTile;
  // Whether consumers turn their rows of Q to f16 (tile/half_rows.cuh).
  static constexpr bool kHalvesQueries = !is_same<DTypeKTile, DTypeQ>;
  // Accumulators of 8-bit products keep some 14 bits. After so many key tiles a part of O is added
  // to a float32 sum, which lies in shared memory.
  static constexpr int kFlushTiles = 640 / kTileKV;
  // Rows of Q of 8 bits are kept in registers, where these are enough, so that their place has those
  // of the next item early.
  static constexpr bool kKeepsQueries = kMultipliesBytes && kConsumers < 3;
  enum : bool { kOfUnions = HasUnions<Config>::kValue, kUnionCuts = HasUnionCuts<Config>::kValue };
  enum : bool { kSmallUnions = HasSmallUnions<Config>::kValue };
  using TileOfUnion =
      conditional<kSmallUnions, SmallUnionTile, conditional<kUnionCuts, CutUnionTile, UnionTile>>;
  static constexpr int kTileQ = 64 * kConsumers, kSlots = Config::kQuerySlots;
  static constexpr bool kOverlap = Config::kIntraWarpgroupOverlap, kMasked = Config::kCustomMask;
  static constexpr bool kTakesMaxima = false, kLatent = false;
  // An enumerator, as of HasKeyShare.
  enum : bool { kSkipsTiles = SkipsTiles<Config>::kValue };
  // cp.async KV: pages that no box fits are gathered row by row, by a warpgroup of its own or by
  // warps 0, 2 and 3.
  static constexpr bool kGathers = kGatherers > 0;
  // They are converted by a warpgroup of its own or, if registers forbid one, by warps 2 and 3. Such
  // warps transpose values too.
  static constexpr bool kLandsValues = kConverts || kMultipliesBytes;
  static constexpr int kConverters = kLandsValues ? Config::kConverters : 0;
  static constexpr bool kHasConverterWarpgroup = kConverters == 4;
  // Boxes of pages start where pages do.
  static constexpr bool kAlignsTiles = (kPaged && !kGathers) || kMasked;
  // A box of a page brings all panels at once, if they are whole.
  static constexpr bool kComesByPatterns = kPaged && !kGathers && !kLandsValues;
  // Ordinary copies fill the tiles that are multiplied.
  static constexpr bool kMultipliesGathered = kGathers && !kConverts;
  static constexpr int kWarpgroup = 4 * kWarpSize;
  static constexpr bool kHasGathererWarpgroup = kGatherers == 4;
  static constexpr int kWarpgroups =
      1 + kConsumers + (kHasConverterWarpgroup || kHasGathererWarpgroup ? 1 : 0);
  static constexpr int kThreads = kWarpgroups * kWarpgroup;
  // Persistent blocks take items until none is left; others have one each, that of their index.
  static constexpr bool kPersistent = Config::kPersistent;
  static constexpr bool kServesOneItem = !kPersistent;
  // The present item and the next; in blocks for short items one more, whose keys are copied while
  // the next Q waits for its place. If others took more, the last blocks would end late.
  static constexpr int kItems = Config::kItems;
  // A block takes its next item when so many key tiles of the newest one are left to copy: early
  // enough for Q and keys to land in time, and no earlier, because another block may be free first.
  static constexpr int kClaimTiles = 4;
  // Ragged keys come in boxes of so many rows, a tile's or less. Small ones, of which Q is made too,
  // bring no more rows than an item has: those past its end lie at kNoRow, ahead of all rows, and are
  // zeros.
  static constexpr int kBoxRows = Config::kBoxRows;
  static constexpr bool kHasSmallBoxes = kBoxRows < kTileKV;
  static constexpr int kNoRow = -(1 << 20);
  // Arrivals when a tile lands: one for a box, or one from each gathering thread.
  static constexpr int kArrivals = kGathers ? kGatherers * kWarpSize : 1;
  // Whether O may be stored from the place of its own rows of Q.
  static constexpr bool kStagesOutput =
      kSlots > 1 && sizeof(DTypeQ) == 2 && sizeof(DTypeO) == 2 && kHeadDimQK == kHeadDimVO;

  // Whether finished rows of O leave in boxes of a warp's.
  static constexpr bool kHasWarpBoxes = kMultipliesBytes && sizeof(DTypeO) == 2;
  static constexpr int kBoxOfWarp = 16;
  using BoxTile = PanelTile<DTypeO, kBoxOfWarp, kHeadDimVO>;

  // Whether an item's first product runs beside the last one of the item before. Where Q has one
  // place the next rows land later, so the item is completed first, unless registers keep Q.
  static constexpr bool kItemsFollow =
      kPersistent && (kMultipliesBytes ? LetsItemsFollow<Config>::kValue : kSlots > 1);

  using QTile = PanelTile<DTypeKTile, kTileQ, kHeadDimQK>;
  template <typename Element, int kHeadDim>
  using KeyTileOf = PanelTile<Element, kTileKV, kHeadDim, kComesByPatterns && kHeadDim % 64 == 0>;
  using KTile = KeyTileOf<DTypeKTile, kHeadDimQK>;
  using VTile = conditional<kMultipliesBytes, StepTile<DTypeVTile, kHeadDimVO, kTileKV, 32 * 128>,
                            KeyTileOf<DTypeVTile, kHeadDimVO>>;
  // The tiles in which keys and values land, and the number of their stages.
  template <typename Tile, int kHeadDim>
  using Landing = conditional<kConverts, RowTile<DTypeKV, kTileKV, kHeadDim>, Tile>;
  using KLoadTile = Landing<KTile, kHeadDimQK>;
  using VLoadTile = conditional<kMultipliesBytes, PanelTile<DTypeKV, kTileKV, kHeadDimVO>,
                                Landing<VTile, kHeadDimVO>>;
  static constexpr int kFp8Stages = kLandsValues ? Config::kFp8Stages : kStages;
  // Values that are transposed are so where they have landed, some tiles ahead.
  static constexpr int kValueStages = kMultipliesBytes ? kFp8Stages : kStages;
  using AnyLogits = Logits<Config>;
  using LogitsVariant =
      conditional<kMultipliesBytes && is_same<AnyLogits, TransformedLogits<false, false, true>>,
                  RowScaledLogits,
                  conditional<is_same<AnyLogits, CappedLogits>, FastCappedLogits<DTypeP>, AnyLogits>>;
  // Whether the other rows of a warp decide nothing of a row. A tile may then have rows of other
  // requests where it lacks its own.
  static constexpr bool kRowsAreAlone =
      LogitsVariant::kFoldsScales || is_same<AnyLogits, PlainLogits>;
  using Mask = MaskOf<Config>;
  // What consumers know of a key tile.
  using SeenTile = conditional<kOfUnions, UnionKeyTile, KeyTile>;
  using KeyTiles = conditional<kMasked, KeyTileMap<kTileKV>, AllKeyTiles<kTileKV>>;

  // An item of work.
  struct ItemFacts {
    BlockWork work;
    int place;  // in the work list
    KeyRange range;
    TileSpan tiles;
    int exists;      // 0 ends the block
    int boxed_rows;  // rows of O that are stored in boxes

    __device__ __forceinline__ bool has_keys() const { return tiles.begin < tiles.end; }
    __device__ __forceinline__ int first_key(int tile) const {
      return tiles.origin + tile * kTileKV;
    }
    // Whether the copy of `tile`, which `next` follows, leaves few tiles for the first time. A
    // mask may leave out tiles between the two.
    __device__ __forceinline__ bool nears_end(int tile, int next) const {
      const int near = min_of(tiles.begin + kClaimTiles, tiles.end - 1);
      return tile >= near && next < near;
    }
  };
  // A published item, with the key tiles that a mask leaves.
  struct Item : ItemFacts, KeyTiles {
    // Calls keys(tile, next tile) and values(tile) in the order in which consumers want them: from
    // the last tile, which causality cuts, to the first. V comes one tile behind K, except for the
    // last tile, whose values are swept. Each call stands once in the code.
    template <typename Keys, typename Values>
    __device__ __forceinline__ void for_tiles(Keys&& keys, Values&& values) const {
      const int begin = this->tiles.begin;
      typename KeyTiles::Walk next(*this);
      KeyTile behind{-1, 0};
      for (bool is_last = true;; is_last = false) {
        const KeyTile present{next.tile, next.needs_mask()};
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
  };

  // A bit for each key of a tile.
  struct alignas(16) KeyMarks {
    uint32_t word[4 * ceil_div(kTileKV, 128)];
  };

  struct Fp8Tiles {
    alignas(KLoadTile::kAlign) unsigned char fp8_k[kFp8Stages][KLoadTile::kBytes];
    alignas(VLoadTile::kAlign) unsigned char fp8_v[kFp8Stages][VLoadTile::kBytes];
  };
  struct Totals {
    // Each consumer thread keeps its four sums of every eight columns of O here. A warp's finished
    // rows take the same place, as one box.
    alignas(1024) Vector16 totals[kConsumers * 4][kHeadDimVO / 8][kWarpSize];
  };
  struct Unions {
    UnionTiles<TileOfUnion, kStages, kTileQ> unions;
  };
  struct Nothing {};

  struct SharedMemory
      : conditional<kConverts, Fp8Tiles,
                    conditional<kMultipliesBytes, Totals,
                                conditional<kOfUnions, Unions, Nothing>>> {
    alignas(QTile::kAlign) unsigned char q[kSlots][QTile::kBytes];
    alignas(KTile::kAlign) unsigned char k[kStages][KTile::kBytes];
    alignas(VLoadTile::kAlign) unsigned char v[kValueStages][VTile::kBytes];
    alignas(16) typename LogitsVariant::Row
        rows[(LogitsVariant::kFoldsScales ? kItems : 1) * (LogitsVariant::kReadsRows ? kTileQ : 1)];
    typename LogitsVariant::Constants logits;
    alignas(8) Item items[kItems];
    // Bits of the keys of a stage of V whose values were not finite.
    KeyMarks nonfinite_keys[kValueStages];
    conditional<kMasked, RowBits<kTileQ, kTileKV, kStages>,
                conditional<kSkipsTiles, TileVotes<kConsumers>, uint32_t>>
        row_bits;
    conditional<kRope, RopeSteps<kHeadDimQK>, uint32_t> rope;
    alignas(8) uint64_t full_item[kItems], empty_item[kItems];
    uint64_t near_end;
    // Values of masked tiles arrive at `unchecked_v`; once swept, they are handed on to `full_v`.
    uint64_t full_q[kSlots], empty_q[kSlots];
    uint64_t full_k[kStages], empty_k[kStages], unchecked_v[kValueStages], full_v[kValueStages],
        empty_v[kValueStages];
    // Barriers of the tiles in which fp8 keys and values land.
    uint64_t full_fp8_k[kFp8Stages], empty_fp8_k[kFp8Stages], full_fp8_v[kFp8Stages],
        empty_fp8_v[kFp8Stages];
  };

  enum NamedBarrier {
    kSchedulerBarrier = 1,
    kNonFiniteBarrier = kSchedulerBarrier + kConsumers,
    kQueriesDone,
    kDone = kQueriesDone + kConsumers,
    kMayCopy = kDone + kConsumers,
    kItemFound
  };

  // A launch gives each thread an equal share; a block that asks for more would wait for ever.
  static_assert((kWarpgroups - kConsumers) * Config::kProducerRegisters +
                        kConsumers * Config::kConsumerRegisters <=
                    kWarpgroups * (65536 / (Config::kMinBlocks * kThreads) / 8 * 8),
                "registers come from what the block was launched with");
  static_assert(kPersistent || (!kMasked && !kRope && !kLandsValues && !kGathers),
                "blocks of one item have the roles that all have");
  static_assert(kTileKV % kBoxRows == 0 && (!kHasSmallBoxes || (64 % kBoxRows == 0 && !kGathers)),
                "boxes fill a tile of keys, and the rows of a warpgroup");
  static_assert(kTileKV <= 128 || kMultipliesBytes, "bits of a tile's keys are read at once");
  static_assert(!kMasked || kValueStages == kStages, "bits of a mask are of a stage of both");
  static_assert(!kOfUnions || (kPaged && kPersistent && kOverlap && !kMasked && !kLandsValues &&
                               kRowsAreAlone && kGathers == kSmallUnions),
                "unions are of pages, and of plain logits");
  static_assert(!kOfUnions || (kSmallUnions ? kTileKV <= kUnitKeys * kMaxUnits
                                            : kTileKV == 2 * kUnionKeys),
                "a tile has two halves, or units of small blocks");
  static_assert(!kGathers || kPaged, "rows that are gathered are found by pages");
  static_assert(!kGathers || !kRope, "rotated keys are found by their map");
  static_assert(!(kHasConverterWarpgroup && kHasGathererWarpgroup),
                "one more warpgroup converts or gathers");
  static_assert(kGatherers != 3 || kHasConverterWarpgroup || (!kMasked && !kConverts),
                "warps 2 and 3 have one role");
  static_assert(!kConverts || is_fp8<DTypeKV>, "what is converted has 8 bits");
  static_assert(!kSkipsTiles || (is_same<AnyLogits, PlainLogits> && kPersistent && !kMasked && !kRope && !kLandsValues && !Mask::kKeyShare),
                "tiles are left out of plain attention, between products");
};

// What all roles of a block of prefill_sm90 know.
template <typename KernelTraits>
struct PrefillSm90Block {
  using Traits = KernelTraits;
  using SharedMemory = typename Traits::SharedMemory;
  using ItemStage = PipelineState<Traits::kItems>;

  const PrefillSm90Params& all_params;
  const AttentionParams& params;
  SharedMemory& shared;

  __device__ __forceinline__ PrefillSm90Block(const PrefillSm90Params& params, SharedMemory& shared)
      : all_params(params), params(params.attention), shared(shared) {}

  // The item of a block that has one is there before the roles part.
  __device__ __forceinline__ const typename Traits::Item& await_item(const ItemStage& stage) const {
    if constexpr (Traits::kPersistent) await_phase(shared.full_item[stage.stage], stage.parity);
    return shared.items[stage.stage];
  }
  // Lets the scheduler take the next item, once in each that has keys. One warp calls this for every
  // tile of keys that it has copied.
  __device__ __forceinline__ void announce_end(const typename Traits::Item& item, int tile, int next,
                                               int lane) const {
    // mutate: end-not-announced
    if (Traits::kPersistent && lane == 0 && item.nears_end(tile, next)) arrive(shared.near_end);
  }
  __device__ __forceinline__ void release_item(ItemStage& stage, int lane) const {
    ptx::warp_sync();
    if (lane == 0) arrive(shared.empty_item[stage.stage]);
    stage.advance();
  }
};

}  // namespace cupyattn
