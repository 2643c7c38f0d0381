// What the roles of wide_sm90 share: tiles, the item of work and shared memory. wide_decode_sm90
// has the same tiles of keys and producers (WideSm90Tiles).
#pragma once

#include "cupyattn/params/listed_latent.cuh"
#include "cupyattn/params/wide_sm90.cuh"
#include "cupyattn/ptx/grid_dependency.cuh"
#include "cupyattn/shared/hidden_values.cuh"
#include "cupyattn/shared/key_rows.cuh"
#include "cupyattn/sm90/roles/softmax.cuh"

namespace cupyattn {

// Which factors keys of 8 bits have: none, one for each token in an array of its own, four in rows
// of 656 bytes, for 128 latent columns each, whose rope columns are bfloat16, or seven behind all
// rows of a page, for 64 columns each of 448, which are 512 with 64 of bfloat16
// (cupyattn/reference/latent_rows.py).
enum KeyScales { kNoScales, kTokenScales, kScalesInRows, kScalesInPages };

// Latent keys of 8 bits: panels of 128 latent columns, and one of 64 rope columns, whose rows of 64
// bytes follow each other if they have 8 bits. Scales in rows follow.
template <typename Element, int kRowsInTile, int kLatentColumns, int kRopeColumns, int kScales>
struct Fp8KeyTile : PanelTile<Element, kRowsInTile, kLatentColumns> {
  using Latent = PanelTile<Element, kRowsInTile, kLatentColumns>;
  using RopeTile = PanelTile<bfloat16_t, kRowsInTile, kRopeColumns>;  // where scales are in rows
  using Latent::kRows, Latent::kPanelBytes;
  static constexpr bool kHasScales = kScales == kScalesInRows;
  static constexpr int kPanels = Latent::kPanels + 1, kRopeRowBytes = kHasScales ? 128 : 64;
  static constexpr int kRope = Latent::kPanels * kPanelBytes;  // bytes to the rope panel
  static constexpr int kScalesOffset = kRope + kRows * kRopeRowBytes;
  static constexpr int kBytes = kScalesOffset + (kHasScales ? kRows * 16 : 0);
  static_assert(kRopeColumns == 64 && kLatentColumns % 128 == 0, "rows fill lines");

  static __device__ __forceinline__ uint32_t rope_offset(int row, int chunk) {
    if constexpr (kHasScales) return kRope + RopeTile::offset(row, chunk);
    return kRope + row * kRopeRowBytes + chunk * 16;
  }
  static __device__ __forceinline__ uint32_t scales_offset(int row) {
    return kScalesOffset + row * 16;
  }
};

// Whether both consumers of wide_sm90 make scores (WideSm90Half). An enumerator, as of HasKeyShare.
template <typename Config, typename = void>
struct HasAlternates {
  enum : bool { kValue = false };
};
template <typename Config>
struct HasAlternates<Config, typename AnyValue<Config::kAlternates>::type> {
  enum : bool { kValue = Config::kAlternates };
};

// What a block that merges splits knows of rows: what the state of each split weighs, and elements
// from the first of `o` to the row's.
template <int kRows, int kSplits>
struct MergedRows {
  float weights[kRows][kSplits];
  int64_t offsets[kRows];
};

template <typename Config>
struct WideSm90Tiles : Config {
  using Config::kHeadDimQK, Config::kHeadDimRope, Config::kHeadDimVO, Config::kKeyScales,
      Config::kLatent, Config::kPaged, Config::kSparse, Config::kStages, Config::kTileKV, Config::kTileQ,
      Config::kTma;
  using typename Config::DTypeKV;
  using typename Config::DTypeO;
  using typename Config::DTypeQ;
  using Params =
      conditional<kTma, WideSm90Params,
                  conditional<kKeyScales == kScalesInPages, ListedLatentParams,
                              conditional<kLatent, LatentParams, AttentionParams>>>;
  static constexpr int kWarpgroup = 4 * kWarpSize;
  // What the rows and softmax of prefill_sm90 ask for: this kernel rescales O itself, hides keys by
  // causality and windows only, and stores O from registers.
  static constexpr bool kOverlap = true, kMasked = false, kStagesOutput = false,
                        kAlignsTiles = false;
  // Tiles of 32 keys leave room between products to take every maximum.
  static constexpr bool kTakesMaxima = !kLatent;
  enum : bool { kOfUnions = false };
  using SeenTile = KeyTile;
  static constexpr bool kMultipliesBytes = false, kServesOneItem = false;
  static constexpr int kValueStages = kStages;
  using LogitsVariant = PlainLogits;
  using Mask = OfShareIf<HasKeyShare<Config>::kValue, NoMask>;

  // fp8 keys of 64 rows become 16-bit elements in shared memory (WideSm90Converter).
  static constexpr bool kConverts = is_fp8<DTypeKV> && kTileQ == 64;
  // All warps of a producer convert what they have gathered; of boxes all but the one that copies.
  static constexpr int kConvertingWarps = kWarpgroup / kWarpSize - (kTma ? 1 : 0);
  // Arrivals when a piece is there: one from each warp that converts, one by the copy engine, or
  // one from each thread that gathers.
  static constexpr int kArrivals = kConverts ? kConvertingWarps : kTma ? 1 : kWarpgroup;
  // Copies of 16 bytes arrive by themselves, so readers have the fence between them and products.
  static constexpr bool kFencesReads = !kTma && !kConverts;
  // Sparse: a list says for each key where it is, or by a negative entry that it is hidden. The
  // producer marks the keys of a stage that are there.
  static constexpr bool kHasTokenScales = kKeyScales == kTokenScales;
  static constexpr bool kIsMarked = (kSparse || kHasTokenScales) && !kConverts;
  static constexpr int kMarkers = kIsMarked ? kWarpgroup / kWarpSize : 0;
  using KeyMarks = conditional<kSparse, uint8_t[kStages][kTileKV], uint8_t>;

  // fp8 keys of fewer rows lie in shared memory as they are, and become fragments.
  static constexpr bool kFp8 = is_fp8<DTypeKV> && !kConverts;
  // fp8 keys are multiplied as float16, which holds them exactly and is one instruction away; so
  // are q and P then. Keys that are multiplied by scales of their own may leave its range.
  static constexpr bool kHalfQueries = kConverts && !kKeyScales;
  using DTypeMma = conditional<kFp8 || kHalfQueries, half_t, DTypeQ>;
  using DTypeP = DTypeMma;
  using QTile = PanelTile<DTypeMma, kTileQ, kHeadDimQK>;
  using KTile =
      conditional<kFp8, Fp8KeyTile<DTypeKV, kTileKV, kHeadDimVO, kHeadDimRope, kKeyScales>,
                  PanelTile<DTypeMma, kTileKV, kHeadDimQK>>;
  // The latent columns of a key are also its value, so a tile of keys is one of values.
  using VTile = conditional<kLatent, KTile, PanelTile<DTypeQ, kTileKV, kHeadDimVO>>;
  using PTile = PanelTile<DTypeP, kTileQ, kTileKV>;

  // The last block of a tile merges up to so many splits (WideMergeSm90); 0: a launch does.
  static constexpr int kFusedSplits = Config::kFusedSplits;
  using MergedRows = cupyattn::MergedRows<kTileQ, max_of(kFusedSplits, 1)>;
  static_assert(kFusedSplits == 0 || sizeof(MergedRows) <= PTile::kBytes, "rows fit P's place");

  // O and the values are split by columns over two consumer warpgroups. A stage comes in pieces,
  // each with barriers of its own: the values of the leader, those of the follower (with the rope
  // part of latent keys), and keys that are not also values. A piece of values is free when its
  // warpgroup has multiplied by it.
  enum Piece { kOfLeader, kOfFollower, kKeys };
  static constexpr int kPieces = kLatent ? 2 : 3, kColumns = kHeadDimVO / 2;
  static constexpr int kPanelsOfPiece = kColumns / VTile::kPanelColumns;
  template <int kPiece>
  static constexpr int kFirstPanel = kPiece == kOfFollower ? kPanelsOfPiece : 0;
  template <int kPiece>
  // mutate: wide-rope-not-multiplied
  static constexpr int kEndPanel = kPiece == kOfLeader ? kPanelsOfPiece : VTile::kPanels;
  // Where the second array of a row begins: the rope part.
  static constexpr int kLatentPanels = kLatent ? kHeadDimVO / KTile::kPanelColumns : KTile::kPanels;

  // Boxes of keys land as lines of 128 bytes, and rope columns of fp8 as rows of 64. Lines that are
  // converted land in the first of the two panels that they become.
  static constexpr bool kLands = kConverts && kTma;
  static constexpr int kBoxPanels = kConverts ? kLatentPanels / 2 : kLatentPanels;
  static constexpr int kBoxPanelBytes = kConverts ? 2 * KTile::kPanelBytes : KTile::kPanelBytes;
  static constexpr int kRopeRowBytes = is_fp8<DTypeKV> ? 64 : KTile::kRowBytes;
  template <int kPiece>
  static constexpr int kBoxBytes = kBoxPanels / 2 * kTileKV * KTile::kRowBytes +
                                   (kPiece == kOfFollower ? kTileKV * kRopeRowBytes : 0);

  // A block may take several items, one after another, as the list links them (ListedPart), or
  // every so many tokens' lists of one length: the first keys of the next are under way before the
  // last of one are used.
  static constexpr bool kLinked =
      (kTma && !kConverts && kTileQ == 64 && !Mask::kKeyShare) || HasAlternates<Config>::kValue;
  static constexpr int kItems = kLinked ? 2 : 1;

  // Each consumer makes the scores of every other tile.
  enum : bool { kAlternates = HasAlternates<Config>::kValue };
  // An item of work.
  struct Item {
    BlockWork work;
    KeyRange range;
    TileSpan tiles;
    int boxed_rows;  // 0: O is stored row by row

    __device__ __forceinline__ bool has_keys() const { return tiles.begin < tiles.end; }
    __device__ __forceinline__ int first_key(int tile) const {
      return tiles.origin + tile * kTileKV;
    }
  };

  static_assert(!kLatent || kHeadDimQK == kHeadDimVO + kHeadDimRope,
                "a key is a latent and a rope part");
  static_assert(!kTma || (kLatent && kPaged && !kSparse && kTileKV == 64 && !kKeyScales),
                "boxes are of pages of latent keys");
  static_assert(!kKeyScales || is_fp8<DTypeKV>, "scales are of fp8 keys");
  static_assert(!kSparse || (kLatent && kPaged), "sparse lists are of latent keys");
  static_assert(kKeyScales != kScalesInPages || (kSparse && kConverts && kHeadDimRope == 0),
                "rows whose scales lie behind them are listed, and values as a whole");
  static_assert(kColumns % VTile::kPanelColumns == 0 && kColumns <= 256,
                "a warpgroup has whole panels, and one product has its columns");
  static_assert(kFp8 || (kHeadDimQK % 64 == 0 && kHeadDimRope % 64 == 0),
                "the parts of a row have panels of their own");
  static_assert(sizeof(DTypeQ) == 2 && (is_fp8<DTypeKV> ? kLatent : is_same<DTypeQ, DTypeKV>),
                "products of 16-bit elements");
};

template <typename Config>
struct WideSm90Traits : WideSm90Tiles<Config> {
  using Tiles = WideSm90Tiles<Config>;
  using Tiles::kLatent, Tiles::kPieces, Tiles::kStages, Tiles::kTileKV, Tiles::kTileQ;
  using typename Tiles::Item;
  using typename Tiles::KeyMarks;
  using typename Tiles::KTile;
  using typename Tiles::LogitsVariant;
  using typename Tiles::PTile;
  using typename Tiles::QTile;
  using typename Tiles::VTile;
  // Two warpgroups that gather keys, and convert them, take every other tile; of keys that land in
  // boxes one converts all.
  static constexpr int kProducers = Tiles::kConverts && !Tiles::kLands ? 2 : 1;
  static constexpr int kWarpgroups = kProducers + 2;
  static constexpr int kThreads = kWarpgroups * Tiles::kWarpgroup;
  enum : bool { kSkipsTiles = false };

  // What the halves tell each other: maxima that a tile raised, and in the end sums.
  struct RaisedMaxima {
    float factors[kTileQ], maxima[kTileQ];
    uint32_t warps[4];
  };
  struct Halves {
    RaisedMaxima raised[2];
    float sums[kTileQ];
    uint64_t full_p[2], full_sums;
  };
  // Halves keep P where rope columns were.
  static constexpr int kHalvesOffset = sizeof(typename Tiles::MergedRows);
  static constexpr int kBytesOfP =
      Tiles::kAlternates ? kHalvesOffset + sizeof(Halves) : PTile::kBytes;

  struct ValueTiles {
    alignas(VTile::kAlign) unsigned char v[kStages][VTile::kBytes];
  };
  struct NoValueTiles {};

  struct SharedMemory : conditional<Config::kLatent, NoValueTiles, ValueTiles> {
    alignas(QTile::kAlign) unsigned char q[QTile::kBytes];
    alignas(KTile::kAlign) unsigned char k[kStages][KTile::kBytes];
    alignas(PTile::kAlign) unsigned char p[kBytesOfP];
    float factors[kTileQ];      // by which the second warpgroup rescales O, if `raised`
    float normalisers[Tiles::kItems][kTileQ];  // of the rows of O
    uint32_t raised[4];         // whether rows of a warp have a larger maximum, for each warp
    uint32_t is_last;           // whether this block merges the states of its tile
    float row_scales[Tiles::kHalfQueries ? kTileQ : 1];  // of logits (QueryScale)
    typename LogitsVariant::Constants logits;
    RowInfo rows[1];
    NonFiniteKeys nonfinite_keys[2][kStages];  // of each warpgroup's values of a stage
    alignas(4) KeyMarks exists;
    alignas(8) Item items[Tiles::kItems];
    alignas(8) uint64_t full_q, empty_q, full_p, empty_p;
    uint64_t full_normalisers[Tiles::kItems], full_item[Tiles::kItems], empty_item[Tiles::kItems];
    uint64_t full[kStages][kPieces], empty[kStages][kPieces];
    uint64_t landed[Tiles::kLands ? kStages : 1][kPieces];  // pieces that are yet to be converted

    __device__ __forceinline__ Halves& halves() {
      return *reinterpret_cast<Halves*>(p + kHalvesOffset);
    }
    __device__ __forceinline__ unsigned char* values(int stage) {
      if constexpr (kLatent) {
        return k[stage];
      } else {
        return this->v[stage];
      }
    }
  };

  static_assert(kTileQ == 64, "O of two warpgroups has 64 rows");
  static_assert(kProducers * Config::kProducerRegisters + 2 * Config::kConsumerRegisters <=
                    kWarpgroups * (65536 / kThreads / 8 * 8),
                "registers come from what the block was launched with");
};

__device__ __forceinline__ const AttentionParams& attention_of(const AttentionParams& params) {
  return params;
}
__device__ __forceinline__ const AttentionParams& attention_of(const LatentParams& params) {
  return params.attention;
}
__device__ __forceinline__ const AttentionParams& attention_of(const WideSm90Params& params) {
  return params.latent.attention;
}
__device__ __forceinline__ const AttentionParams& attention_of(const ListedLatentParams& params) {
  return params.latent.attention;
}
__device__ __forceinline__ const LatentParams& latent_of(const LatentParams& params) {
  return params;
}
__device__ __forceinline__ const LatentParams& latent_of(const WideSm90Params& params) {
  return params.latent;
}
__device__ __forceinline__ const LatentParams& latent_of(const ListedLatentParams& params) {
  return params.latent;
}

// What all roles of a block of wide_sm90 know.
template <typename KernelTraits>
struct WideSm90Block {
  using Traits = KernelTraits;
  using SharedMemory = typename Traits::SharedMemory;
  using Stage = PipelineState<Traits::kStages>;

  // How far a warpgroup is: the items before the present one, the next stage, and the parities of P
  // and of Q. Halves keep the parities of both stages, a bit each, in that of P.
  struct Turn {
    int count = 0;
    Stage stage;
    uint32_t p_parity = 0, q_parity = 0;

    __device__ __forceinline__ int place() const { return place_of(count); }
  };
  // A stage that the compiler knows to be the same for a warp, where it lives from item to item:
  // descriptors of products are in registers of warps, and two moves each otherwise.
  static __device__ __forceinline__ Stage uniform(const Stage& stage) {
    if constexpr (!Traits::kLinked) return stage;
    Stage same = stage;
    same.stage = ptx::warp_uniform(stage.stage);
    same.parity = ptx::warp_uniform(stage.parity);
    return same;
  }

  const typename Traits::Params& all_params;
  const AttentionParams& params;
  SharedMemory& shared;

  __device__ __forceinline__ WideSm90Block(const typename Traits::Params& params,
                                           SharedMemory& shared)
      : all_params(params), params(attention_of(params)), shared(shared) {}

  // The first warp finds the block's work, once the launch ahead that may write it has ended; a
  // barrier of the block must follow.
  __device__ __forceinline__ void await_item() const {
    ptx::grid_dependency_wait();
    put_item(find_work(), 0);
  }
  __device__ __forceinline__ void put_item(const BlockWork& work, int place) const {
    typename Traits::Item item{};
    item.work = work;
    if (item.work.tile.num_rows > 0) {
      item.range = KeyRange::of<Traits::Mask::kKeyShare, !Traits::kLatent>(params, item.work);
      item.tiles = tiles_of(item);
    }
    if (threadIdx.x == 0) shared.items[place] = item;
  }

  // --- Items that follow one another. `count`: of those that the block has taken before. ---

  static __device__ __forceinline__ int place_of(int count) {
    return Traits::kLinked ? count & 1 : 0;
  }
  // Waits for the next item; false if there is none. Its answer is the same for a warp, or what a
  // loop keeps from item to item would not be.
  __device__ __forceinline__ bool await_next(int count) const {
    // mutate: wide-item-read-early
    await_phase(shared.full_item[place_of(count)], (count - 1) >> 1 & 1);
    return ptx::warp_uniform(shared.items[place_of(count)].work.tile.num_rows) > 0;
  }
  __device__ __forceinline__ void release_item(int count, int lane) const {
    ptx::warp_sync();
    ptx::mbarrier_arrive_if(lane == 0, ptx::shared_address(&shared.empty_item[place_of(count)]));
  }
  // Finds the item behind the present one, in the first warp.
  __device__ __forceinline__ void publish_next(const typename Traits::Item& present, int count,
                                               int lane) const {
    const int next = ptx::warp_uniform(ListedPart::of(present.work.request).next);
    BlockWork work{};
    if (has_equal_lists() && params.num_splits == 1) {
      // mutate: lists-of-the-next-block
      const int tile = present.work.tile.split_tile + static_cast<int>(gridDim.y);
      if (tile < params.num_q_tiles) work = equal_work(tile, present.work.tile.kv_head, 0);
    } else if (next != 0) {
      work = BlockWork::of_item(params, next, present.work.tile.kv_head, Traits::kTileQ);
    }
    if (count > 0) {
      // mutate: wide-item-overwritten
      await_phase(shared.empty_item[place_of(count + 1)], (count - 1) >> 1 & 1);
    }
    put_item(work, place_of(count + 1));
    ptx::warp_sync();
    ptx::mbarrier_arrive_if(lane == 0, ptx::shared_address(&shared.full_item[place_of(count + 1)]));
  }

  // The tiles of keys of a split, as many as of any other or one more. TileSpan::of divides 64 bits,
  // by a call into code that nobody has fetched, and the first keys would wait for it.
  static __device__ __forceinline__ TileSpan tiles_of(const typename Traits::Item& item) {
    TileWork whole = item.work.tile;
    whole.num_splits = 1;
    TileSpan span = TileSpan::of<Traits::kTma>(item.range, Traits::kTileKV, whole);
    if (const ListedPart part = ListedPart::of(item.work.request); part.end > 0) {
      // Rows that do not see the last tile end before it.
      span.end = ptx::warp_uniform(min_of(part.end, span.end));  // mutate: wide-cut-not-at-the-end
      span.begin = ptx::warp_uniform(min_of(part.begin, span.end));
      return span;
    }
    const int split = item.work.tile.split, num_splits = item.work.tile.num_splits;
    const int each = static_cast<int>(static_cast<uint32_t>(span.end) /
                                      static_cast<uint32_t>(num_splits));
    const int rest = span.end - each * num_splits;
    // mutate: wide-rest-of-tiles-lost
    span.begin = ptx::warp_uniform(each * split + min_of(split, rest));
    span.end = ptx::warp_uniform(span.begin + each + (split < rest ? 1 : 0));
    return span;
  }

  // In the place of P, which no product reads by then.
  __device__ __forceinline__ typename Traits::MergedRows& merged_rows() const {
    return *reinterpret_cast<typename Traits::MergedRows*>(&shared.p);
  }

  __device__ __forceinline__ BlockWork find_work() const {
    if (has_equal_lists()) {
      return equal_work(params.first_q_tile + blockIdx.y, blockIdx.x, blockIdx.z);
    }
    return BlockWork::of(params, Traits::kTileQ);
  }
  __device__ __forceinline__ bool has_equal_lists() const {
    return Traits::kSparse && params.work == nullptr;
  }
  // The work of a tile of rows, where all lists are equally long.
  __device__ __forceinline__ BlockWork equal_work(int q_tile, int kv_head, int split) const {
    BlockWork work{};
    if constexpr (Traits::kSparse) {
      const LatentParams& latent = latent_of(all_params);
      work = BlockWork::of_equal(params, q_tile, kv_head, split, Traits::kTileQ, latent.list_step);
      const int token = work.request.q_start;
      work.request.kv_start += static_cast<int>(latent.gaps_before(token, latent.list_gap));
      if (latent.list_lens != nullptr) cut_list(work.request, latent);
    }
    return work;
  }

  // Cuts a token's list to what its request has: the tokens behind it see one key more each.
  static __device__ __forceinline__ void cut_list(Request& request, const LatentParams& latent) {
    const int of_caller = request.q_start / latent.request_tokens;
    const int later = (of_caller + 1) * latent.request_tokens - 1 - request.q_start;
    const int64_t place = static_cast<int64_t>(of_caller) * latent.list_lens_stride;
    const int most = latent.list_lens[place] - later;  // mutate: later-tokens-not-counted
    request.kv_len = ptx::warp_uniform(max_of(min_of(request.kv_len, most), 0));
  }

  // Whether some row does not see some key of a tile. Boxes bring rows past the last key, too.
  __device__ __forceinline__ bool hides_keys(const typename Traits::Item& item, int tile) const {
    const int key = item.first_key(tile);
    const int count =
        Traits::kTma ? Traits::kTileKV : min_of(Traits::kTileKV, item.range.end - key);
    return item.range.cuts(key, count);
  }

  // The row of a key's values.
  __device__ __forceinline__ const typename Traits::DTypeKV* value_of(
      const typename Traits::Item& item, int key) const {
    const Request& request = item.work.request;
    const int kv_head = item.work.tile.kv_head;
    using T = typename Traits::DTypeKV;
    if constexpr (Traits::kLatent) {
      const PageSlot at = PageSlot::of(params, key);
      return keys_of<T>(params, kv_head) +
             paged_row(params.kv_indices[request.kv_start + at.page], at.slot, params.k_stride_page,
                       params.k_stride_n);
    } else {
      return values_of<T>(params, kv_head) + value_row<Traits::kPaged>(params, request, key);
    }
  }
};

}  // namespace cupyattn
