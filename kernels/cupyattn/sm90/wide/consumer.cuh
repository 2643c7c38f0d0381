// The two consumer warpgroups of wide_sm90. A warpgroup holds half of the columns of O, for the
// block's 64 rows. The leader also makes the probabilities; the follower gets them through shared
// memory. docs/wide_sm90.md says why.
//
// The leader, for a tile of keys. "<-" names what a phase waits for.
//   issue_scores          S = Q K^T <- producer: each piece of K
//   await_scores          <- S; releases keys that are not also values
//   next_tile             softmax
//   publish               P goes to shared memory <- follower: P of the tile before is read
//   rescale               O, in the rare tile that raised a maximum
//   issue_output          O += P V, its own columns <- producer: values
//   await_output          <- O; releases the first piece
// O += P V is awaited before the next tile's scores, which wait for memory: a stage is released
// before the next has landed, so more of the keys are under way.
//
// The follower, for a tile of keys.
//   await P               <- leader: P of the tile; rescales O if a maximum was raised
//   issue_output          O += P V, its own columns <- producer: the second piece of K
//   await O               <- O; releases the second piece, and P
//
// After the last tile the leader finishes the rows and publishes their normalisers; both write O.
#pragma once

#include "cupyattn/sm90/wide/scores.cuh"

namespace cupyattn {

template <typename Traits>
struct WideSm90Leader : WideSm90Scores<Traits> {
  using Base = WideSm90Scores<Traits>;
  using Base::item, Base::kColumns, Base::kSteps, Base::kTileKV, Base::o, Base::params, Base::rows,
      Base::shared, Base::softmax, Base::turn;
  using typename Base::Item;
  using typename Base::Probabilities;
  using typename Base::Scores;
  using typename Base::Stage;
  using typename Base::Turn;
  using typename Base::VTile;

  Stage& stage;
  bool scales_rows = false;  // whether logits of the warp's rows have factors

  __device__ __forceinline__ WideSm90Leader(const WideSm90Block<Traits>& block, Turn& turn)
      : Base(block, turn, 0), stage(turn.stage) {}

  __device__ __forceinline__ void run() {
    softmax.begin_item(item);
    this->clear_first();
    if (ptx::warp_uniform(item.has_keys() ? 1 : 0) == 0) {
      this->clear();
      finish();
      return;
    }
    const int begin = ptx::warp_uniform(item.tiles.begin);
    int tile = ptx::warp_uniform(item.tiles.end) - 1;
    this->prepare_queries();
    if constexpr (Traits::kHalfQueries) {
      const float scale = shared.row_scales[rows.warp_row() + rows.lane % 16];
      scales_rows = ptx::warp_any(scale != 1.0f);
    }
    process_first_tile(item, tile, begin);
    while (tile > begin) process_tile(item, --tile, begin);
    finish();
  }

  __device__ __forceinline__ void process_first_tile(const Item& item, int tile, int begin) {
    Scores s;
    Probabilities probabilities;
    stage = WideSm90Block<Traits>::uniform(stage);
    this->issue_scores(s, stage);
    await_scores(s);
    release_queries(tile == begin);
    const int swept = sweep(item, tile);
    softmax.first_tile(probabilities, s, item, KeyTile{tile, softmax.needs_mask(tile)}, stage);
    publish(probabilities);
    issue_output(probabilities, false);
    await_output(item, swept, probabilities);
  }

  __device__ __forceinline__ void process_tile(const Item& item, int tile, int begin) {
    Scores s;
    Probabilities probabilities;
    stage = WideSm90Block<Traits>::uniform(stage);
    this->issue_scores(s, stage);
    await_scores(s);
    release_queries(tile == begin);
    const int swept = sweep(item, tile);
    softmax.next_tile(probabilities, s, o, item, KeyTile{tile, softmax.needs_mask(tile)}, stage);
    publish(probabilities);
    // mutate: wide-leader-output-not-rescaled
    if (unlikely(probabilities.raised)) multiply_rows(o, probabilities.factors);
    issue_output(probabilities, true);  // mutate: wide-values-not-added
    await_output(item, swept, probabilities);
  }

  // --- Phases ---

  __device__ __forceinline__ void await_scores(Scores& s) {
    const bool lacks_keys = this->lacks_keys(stage);
    ptx::wgmma_wait<0>();
    take_results(s);
    // mutate: wide-keys-kept
    if constexpr (!Traits::kLatent) this->release(shared.empty[stage.stage][Traits::kKeys]);
    if constexpr (Traits::kHalfQueries) {
      if (unlikely(scales_rows)) {
        const float factors[1][2] = {
            {shared.row_scales[rows.own_row(0)], shared.row_scales[rows.own_row(1)]}};
        multiply_rows(s, factors);
      }
    }
    if constexpr (Traits::kSparse) {
      if (unlikely(lacks_keys)) this->hide_missing_keys(s, stage);
      this->keep_largest(s);
    }
  }

  // After the scores of an item's last tile the next item's rows of Q may come.
  __device__ __forceinline__ void release_queries(bool is_last) const {
    if constexpr (Traits::kLinked) {
      ptx::mbarrier_arrive_if(is_last && rows.lane == 0, ptx::shared_address(&shared.empty_q));
    }
  }

  // Sweeps the leader's values of the tile of the present scores if it hides keys, and returns the
  // tile then, else -1.
  __device__ __forceinline__ int sweep(const Item& item, int tile) {
    if (!unlikely(softmax.needs_mask(tile)) || !this->block.hides_keys(item, tile)) return -1;
    if constexpr (!Traits::kLatent) {
      await_phase(shared.full[stage.stage][Traits::kOfLeader], stage.parity);
    }
    this->zero_nonfinite_values(item, tile, stage);  // mutate: wide-hidden-values-stay
    return tile;
  }

  __device__ __forceinline__ void issue_output(const Probabilities& probabilities, bool adds) {
    if constexpr (!Traits::kLatent) {
      // mutate: wide-values-not-awaited
      await_phase(shared.full[stage.stage][Traits::kOfLeader], stage.parity);
      ptx::fence_proxy_async();
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Base::kParts; ++i) {
      issue_pv<VTile, Base::kPart>(this->part(i), probabilities.p,
                                   this->values(stage) + i * Base::kToPart, adds);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void await_output(const Item& item, int swept_tile,
                                               const Probabilities& probabilities) {
    ptx::wgmma_wait<0>();
    take_results(o);
    if (unlikely(swept_tile >= 0)) {
      // mutate: wide-nonfinite-values-not-added
      this->add_nonfinite_values(item, swept_tile, stage, probabilities.p);
    }
    this->release(shared.empty[stage.stage][Traits::kOfLeader]);
    stage.advance();
  }

  // Hands the probabilities of a tile to the follower, once it has read those before.
  __device__ __forceinline__ void publish(const Probabilities& from) {
    const int lane = rows.lane;
    await_phase(shared.empty_p, turn.p_parity ^ 1);  // mutate: wide-p-overwritten
    turn.p_parity ^= 1;
    const uint32_t first = this->p_fragment();
#pragma unroll
    // Two chunks further is a bit of the address.
    // mutate: wide-p-chunks-overlap
    for (int i = 0; i < kSteps; ++i) ptx::stmatrix_x4(first ^ (32 * i), from.p[i][0]);
    if (from.raised && (lane & 3) == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) shared.factors[rows.own_row(h)] = from.factors[0][h];
    }
    if (lane == 0) shared.raised[rows.warp] = from.raised;
    ptx::fence_proxy_async();
    ptx::warp_sync();
    this->release(shared.full_p);
  }

  // Finishes the rows, hands their normalisers to the follower and writes O.
  __device__ __forceinline__ void finish() {
    const int place = turn.place();
    const auto output = rows.finish_rows(softmax.online, place, 0);
    if ((rows.lane & 3) == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) shared.normalisers[place][rows.own_row(h)] = output.factors[h];
    }
    ptx::warp_sync();
    this->release(shared.full_normalisers[place]);
    this->write(output.factors);
    if constexpr (Traits::kSparse) this->raise_max_logits();
  }

};

template <typename Traits>
struct WideSm90Follower : WideSm90Output<Traits> {
  using Base = WideSm90Output<Traits>;
  using Base::item, Base::kColumns, Base::kSteps, Base::o, Base::rows, Base::shared, Base::turn;
  using typename Base::Item;
  using typename Base::PTile;
  using typename Base::Stage;
  using typename Base::Turn;
  using typename Base::VTile;

  __device__ __forceinline__ WideSm90Follower(const WideSm90Block<Traits>& block, Turn& turn)
      : Base(block, turn, 1) {}

  __device__ __forceinline__ void run() {
    this->clear_first();
    if (ptx::warp_uniform(item.has_keys() ? 1 : 0) != 0) {
      if constexpr (Traits::kHalfQueries) this->prepare_queries();
      const int count = ptx::warp_uniform(item.tiles.end - item.tiles.begin);
      Stage& v = turn.stage;
      for (int i = 0; i < count; ++i) {
        v = WideSm90Block<Traits>::uniform(v);
        process_tile(item, item.tiles.end - 1 - i, v, turn.p_parity, i > 0);
        v.advance();
        turn.p_parity ^= 1;
      }
    } else {
      this->clear();
    }
    const int place = turn.place();
    // mutate: wide-normalisers-not-awaited
    await_phase(shared.full_normalisers[place], turn.count >> 1 & 1);
    const float factors[2] = {shared.normalisers[place][rows.own_row(0)],
                              // mutate: wide-normaliser-of-the-upper-row
                              shared.normalisers[place][rows.own_row(1)]};
    this->write(factors);
  }

  __device__ __forceinline__ void process_tile(const Item& item, int tile, const Stage& v,
                                               uint32_t p_parity, bool adds) {
    // The leader may have seen the values land; this warpgroup sees it by its own wait.
    await_phase(shared.full[v.stage][Traits::kOfFollower], v.parity);
    await_phase(shared.full_p, p_parity);  // mutate: wide-p-not-awaited
    if (adds && unlikely(shared.raised[rows.warp] != 0)) {
      const float factors[1][2] = {
          {shared.factors[rows.own_row(0)], shared.factors[rows.own_row(1)]}};
      multiply_rows(o, factors);  // mutate: wide-follower-output-not-rescaled
    }
    const bool hides_keys = unlikely(this->block.hides_keys(item, tile));
    if (hides_keys) this->zero_nonfinite_values(item, tile, v);
    if constexpr (Traits::kFencesReads) ptx::fence_proxy_async();
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Base::kParts; ++i) {
      issue_pv_shared<PTile, VTile, Base::kPart>(
          this->part(i), operand_at<PTile>(ptx::shared_address(shared.p)),
          this->values(v) + i * Base::kToPart, adds);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    take_results(o);
    if (hides_keys) {
      uint32_t p[kSteps][1][4];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) ptx::ldmatrix_x4(p[i][0], this->p_fragment() ^ (32 * i));
      this->add_nonfinite_values(item, tile, v, p);
    }
    this->release(shared.empty[v.stage][Traits::kOfFollower]);
    this->release(shared.empty_p);
  }
};

}  // namespace cupyattn
