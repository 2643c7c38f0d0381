// What the roles of wide_sm90 share: tiles, the item of work and shared memory.
#pragma once

#include "cupyattn/attention/softmax_sm90.cuh"
#include "cupyattn/params/latent.cuh"

namespace cupyattn {

template <typename Config>
struct WideSm90Traits : Config {
  using Config::kHeadDimQK, Config::kHeadDimRope, Config::kHeadDimVO, Config::kPaged,
      Config::kSparse, Config::kStages, Config::kTileKV;
  using typename Config::DTypeKV;
  using typename Config::DTypeO;
  using typename Config::DTypeQ;
  using Params = LatentParams;
  static constexpr int kTileQ = 64, kWarpgroup = 4 * kWarpSize, kThreads = 3 * kWarpgroup;
  // What the rows and softmax of prefill_sm90 ask for: this kernel rescales O itself, hides keys by
  // causality and windows only, and stores O from registers.
  static constexpr bool kOverlap = true, kMasked = false, kStagesOutput = false;
  using LogitsVariant = PlainLogits;

  // Sparse: a list says for each key where it is, or by a negative entry that it is hidden. The
  // producer marks the keys of a stage that are there.
  static constexpr int kMarkers = kSparse ? kWarpgroup / kWarpSize : 0;
  using KeyMarks = conditional<kSparse, uint8_t[kStages][kTileKV], uint8_t>;

  using QTile = PanelTile<DTypeQ, kTileQ, kHeadDimQK>;
  // A key's latent columns are also its value, so a tile of keys is one of values.
  using KTile = PanelTile<DTypeQ, kTileKV, kHeadDimQK>;
  using PTile = PanelTile<DTypeQ, kTileQ, kTileKV>;

  // O and the values are split by columns over two consumer warpgroups. A stage of keys comes in
  // two pieces: the columns of the first warpgroup, then those of the second and the rope part. A
  // piece is free when the warpgroup has multiplied by its values.
  static constexpr int kPieces = 2, kColumns = kHeadDimVO / 2;
  static constexpr int kPanelsOfPiece = kColumns / KTile::kPanelColumns;
  static constexpr int kLatentPanels = kHeadDimVO / KTile::kPanelColumns;
  template <int kPiece>
  static constexpr int kFirstPanel = kPiece * kPanelsOfPiece;
  template <int kPiece>
  // mutate: wide-rope-not-multiplied
  static constexpr int kEndPanel = kPiece == 0 ? kPanelsOfPiece : KTile::kPanels;

  // The block's item of work.
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

  struct SharedMemory {
    alignas(QTile::kAlign) unsigned char q[QTile::kBytes];
    alignas(KTile::kAlign) unsigned char k[kStages][KTile::kBytes];
    alignas(PTile::kAlign) unsigned char p[PTile::kBytes];
    float factors[kTileQ];      // by which the second warpgroup rescales O, if `raised`
    float normalisers[kTileQ];  // of the rows of O
    uint32_t raised[4];         // whether rows of a warp have a larger maximum, for each warp
    typename LogitsVariant::Constants logits;
    RowInfo rows[1];
    alignas(4) KeyMarks exists;
    alignas(8) Item items[1];
    alignas(8) uint64_t full_q, full_p, empty_p, full_normalisers;
    uint64_t full_k[kStages][kPieces], empty_k[kStages][kPieces];
  };

  static_assert(kHeadDimQK == kHeadDimVO + kHeadDimRope, "a key is a latent and a rope part");
  static_assert(kColumns % KTile::kPanelColumns == 0 && kColumns <= 256,
                "a warpgroup has whole panels, and one product has its columns");
  static_assert(kHeadDimRope % KTile::kPanelColumns == 0, "the rope part has panels of its own");
  static_assert(is_same<DTypeQ, DTypeKV> && sizeof(DTypeQ) == 2, "products of 16-bit elements");
  static_assert(Config::kProducerRegisters + 2 * Config::kConsumerRegisters <=
                    3 * (65536 / kThreads / 8 * 8),
                "registers come from what the block was launched with");
};

// What all roles of a block of wide_sm90 know.
template <typename KernelTraits>
struct WideSm90Block {
  using Traits = KernelTraits;
  using SharedMemory = typename Traits::SharedMemory;
  using Stage = PipelineState<Traits::kStages>;

  const typename Traits::Params& all_params;
  const AttentionParams& params;
  SharedMemory& shared;

  __device__ __forceinline__ WideSm90Block(const typename Traits::Params& params,
                                           SharedMemory& shared)
      : all_params(params), params(params.attention), shared(shared) {}
};

}  // namespace cupyattn
