// What the consumer warpgroups of wide_sm90 that make scores have in common: S = Q K^T, the keys that
// a list lacks, and the largest logits that a call asks for.
#pragma once

#include "cupyattn/sm90/wide/output.cuh"

namespace cupyattn {

template <typename Traits>
struct WideSm90Scores : WideSm90Output<Traits> {
  using Base = WideSm90Output<Traits>;
  using Base::item, Base::kTileKV, Base::params, Base::rows, Base::shared;
  using typename Base::QTile;
  using typename Base::Stage;
  using typename Base::Turn;
  using KTile = typename Traits::KTile;
  using Softmax = PrefillSm90Softmax<Traits>;
  using Probabilities = typename Softmax::Probabilities;
  using Scores = float[1][kTileKV / 8][4];

  // The largest of this thread's logits of a row, if the call asks for it: the maxima of the softmax
  // need not be as large.
  float largest[2] = {-ptx::infinity(), -ptx::infinity()};
  Softmax softmax;

  __device__ __forceinline__ WideSm90Scores(const WideSm90Block<Traits>& block, Turn& turn, int piece)
      : Base(block, turn, piece), softmax(block, 0) {}

  // S = Q K^T of a stage whose keys land next. kFirst: the piece that lands first.
  template <int kFirst = Traits::kOfFollower>
  __device__ __forceinline__ void issue_scores(Scores& s, const Stage& stage) {
    // Copies, because ptxas would keep the operand of each product in registers, and spill.
    const uint64_t queries = ptx::opaque_copy(operand_at<QTile>(ptx::shared_address(shared.q)));
    const uint64_t keys =
        ptx::opaque_copy(operand_at<KTile>(ptx::shared_address(shared.k[stage.stage])));
    if constexpr (Traits::kLatent) {
      issue_piece<kFirst>(s, queries, keys, stage, false);
      issue_piece<Traits::kOfLeader + Traits::kOfFollower - kFirst>(s, queries, keys, stage, true);
    } else {
      issue_piece<Traits::kKeys>(s, queries, keys, stage, false);
    }
    ptx::wgmma_commit();
  }
  // The products by one piece, once it has landed.
  template <int kPiece>
  __device__ __forceinline__ void issue_piece(Scores& s, uint64_t queries, uint64_t keys,
                                              const Stage& stage, bool adds) const {
    constexpr bool kIsAll = kPiece == Traits::kKeys;
    constexpr int kFirst = kIsAll ? 0 : Traits::template kFirstPanel<kPiece>;
    constexpr int kEnd = kIsAll ? KTile::kPanels : Traits::template kEndPanel<kPiece>;
    // mutate: wide-keys-not-awaited
    await_phase(shared.full[stage.stage][kPiece], stage.parity);
    if constexpr (Traits::kFencesReads) ptx::fence_proxy_async();
    ptx::wgmma_fence();
    issue_qk_panels<QTile, KTile, kFirst, kEnd>(s, queries, keys, adds);
  }

  // Whether a list lacks keys of a stage that has landed.
  __device__ __forceinline__ bool lacks_keys(const Stage& stage) const {
    if constexpr (Traits::kSparse) {
      static_assert(kTileKV == 64, "a lane looks at four keys");
      const int four = 4 * (rows.lane & 15);
      const uint32_t marks = *reinterpret_cast<const uint32_t*>(&shared.exists[stage.stage][four]);
      return ptx::warp_any(marks != 0x01010101u);  // mutate: wide-lacking-keys-overlooked
    }
    return false;
  }
  // Hides them; a stage is not free before P is published.
  __device__ __forceinline__ void hide_missing_keys(Scores& s, const Stage& stage) const {
#pragma unroll
    for (int n = 0; n < kTileKV / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool exists = shared.exists[stage.stage][8 * n + 2 * (rows.lane & 3) + e] != 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (!exists) s[0][n][2 * h + e] = -ptx::infinity();  // mutate: wide-missing-keys-seen
        }
      }
    }
  }

  __device__ __forceinline__ void keep_largest(const Scores& s) {
    if (!unlikely(latent_of(this->block.all_params).max_logits != nullptr)) return;
#pragma unroll
    // mutate: largest-logit-of-a-tile
    for (int h = 0; h < 2; ++h) largest[h] = fmaxf(largest[h], largest_of(s[0], h));
  }
  __device__ __forceinline__ void raise_max_logits() const {
    if (latent_of(this->block.all_params).max_logits == nullptr) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float max = quad_max(largest[h]) * params.softmax_scale;
      const typename Softmax::Rows::RowPlace row = rows.row_place(item, h);
      if (!row.exists || (rows.lane & 3) != 0) continue;
      raise_max_logit(latent_of(this->block.all_params), row.token, row.head, max);
    }
  }
};

}  // namespace cupyattn
