// What the roles of wide_decode_sm90 share: tiles, those of wide_sm90, and shared memory.
#pragma once

#include "cupyattn/sm90/wide/traits.cuh"

namespace cupyattn {

template <typename Config>
struct WideDecodeSm90Traits : WideSm90Tiles<Config> {
  using Tiles = WideSm90Tiles<Config>;
  using Tiles::kHeadDimVO, Tiles::kLatent, Tiles::kPieces, Tiles::kStages, Tiles::kTileKV,
      Tiles::kTileQ, Tiles::kWarpgroup;
  using typename Tiles::Item;
  using typename Tiles::KeyMarks;
  using typename Tiles::KTile;
  using typename Tiles::PTile;
  using typename Tiles::QTile;
  using typename Tiles::VTile;
  // A producer, and a consumer or two, which take every other tile of keys.
  using Config::kConsumers;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;

  struct SharedMemory {
    alignas(QTile::kAlign) unsigned char q[QTile::kBytes];
    alignas(KTile::kAlign) unsigned char k[kStages][KTile::kBytes];
    alignas(PTile::kAlign) unsigned char p[kConsumers][PTile::kBytes];
    // What each warp knows of a row: its largest logit of a tile, and in the end its sum.
    alignas(16) float of_warps[kConsumers][kTileQ][4];
    float factors[kConsumers][kTileQ];  // by which O is multiplied in the end
    float row_scales[Tiles::kFp8 ? kTileQ : 1];  // of logits (QueryScale)
    NonFiniteKeys nonfinite_keys[kConsumers];
    uint32_t is_last;  // whether this block merges the states of its tile
    float token_scales[Tiles::kHasTokenScales ? kStages : 1][kTileKV];
    alignas(4) KeyMarks exists;
    alignas(8) Item items[1];
    alignas(8) uint64_t full_q;
    uint64_t full[kStages][kPieces], empty[kStages][kPieces];

    __device__ __forceinline__ unsigned char* values(int stage) { return k[stage]; }
  };

  static_assert(kLatent, "values are the first columns of keys");
  static_assert(kConsumers == 1 || (kConsumers == 2 && kTileQ == 16),
                "three warpgroups have registers for O of 16 rows");
  static_assert((kTileQ == 16 || kTileQ == 32) && kTileKV == 64,
                "keys are the rows of a product, and rows of queries its columns");
};

}  // namespace cupyattn
