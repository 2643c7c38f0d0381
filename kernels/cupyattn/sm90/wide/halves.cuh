// The two consumer warpgroups of wide_sm90 where each makes the scores of every other tile of keys
// (kAlternates), and holds half of the columns of O, for the block's 64 rows. The first takes the
// tiles of stage 0, the second those of stage 1. docs/wide_sm90.md says why.
//
// Of two tiles, the first warpgroup; "<-" names what a phase waits for:
//   issue_scores          S = Q K^T <- producer: each piece of K
//   make                  softmax <- S
//   publish               P takes the place of the tile's rope columns
//   issue_own             O += P V of its tile, its own columns
//   issue_other           O += P V of the other's tile <- second: P; rescales O if it raised a maximum
//   release               both tiles' pieces <- O
// The second issues its scores, then O += P V of the first's tile, beside which it makes its own P.
//
// Both add the tiles in one order, and a raised maximum passes with P: what both hold is always of
// the same maxima. In the end the second hands its sums over, and the first finishes the rows.
#pragma once

#include "cupyattn/sm90/wide/scores.cuh"

namespace cupyattn {

template <typename Traits>
struct WideSm90Half : WideSm90Scores<Traits> {
  using Base = WideSm90Scores<Traits>;
  using Base::item, Base::kColumns, Base::o, Base::rows, Base::shared, Base::softmax, Base::turn;
  using typename Base::KTile;
  using typename Base::Probabilities;
  using typename Base::PTile;
  using typename Base::Scores;
  using typename Base::Stage;
  using typename Base::Turn;
  using typename Base::VTile;
  using Base::piece;
  static_assert(Traits::kStages == 2 && Traits::kSparse && Base::kParts == 1,
                "a warpgroup has a stage, and lists hide keys from all rows alike");

  __device__ __forceinline__ WideSm90Half(const WideSm90Block<Traits>& block, Turn& turn)
      : Base(block, turn,
             ptx::warp_uniform(threadIdx.x / Traits::kWarpgroup - Traits::kProducers)) {}

  __device__ __forceinline__ void run() {
    softmax.begin_item(item);
    this->clear_first();
    const int count = ptx::warp_uniform(item.tiles.end - item.tiles.begin);
    if (count <= 0) {
      this->clear();
    } else {
      this->prepare_queries();
      if (piece == 0) {
        run_first(count);
      } else {
        run_second(count);
      }
    }
    finish();
  }

  __device__ __forceinline__ void run_first(int count) {
    uint32_t own = parity_of(0), other = parity_of(1);
    Probabilities probabilities;
#pragma unroll 1
    for (int i = 0;; i += 2) {
      Scores s;
      this->template issue_scores<0>(s, Stage{0, own});
      const bool lacks_keys = this->lacks_keys(Stage{0, own});
      ptx::wgmma_wait<0>();
      take_results(s);
      release_queries(i + 2 >= count);
      make<0>(probabilities, s, lacks_keys, count - 1 - i, i == 0);
      // mutate: halves-first-output-not-rescaled
      if (i > 0 && unlikely(probabilities.raised)) multiply_rows(o, probabilities.factors);
      issue_own<0>(probabilities, i > 0);
      await_output();
      this->release(shared.empty[0][0]);
      own ^= 1;
      if (i + 1 >= count) break;
      await_other<1>(other, true);
      issue_other<1>(true);
      await_output();
      this->release(shared.empty[1][0]);
      this->release(shared.empty[1][1]);  // mutate: halves-other-p-kept
      other ^= 1;
      if (i + 2 >= count) break;
    }
    keep(own, other);
  }

  __device__ __forceinline__ void run_second(int count) {
    uint32_t own = parity_of(1), other = parity_of(0);
    int i = 0;
    if (count == 1) release_queries(true);
#pragma unroll 1
    for (; i + 1 < count; i += 2) {
      Scores s;
      Probabilities probabilities;
      this->template issue_scores<1>(s, Stage{1, own});
      await_other<0>(other, i > 0);
      issue_other<0>(i > 0);
      const bool lacks_keys = this->lacks_keys(Stage{1, own});
      ptx::wgmma_wait<1>();
      take_results(s);
      release_queries(i + 3 >= count);
      make<1>(probabilities, s, lacks_keys, count - 2 - i, i == 0);
      ptx::wgmma_wait<0>();
      this->release(shared.empty[0][1]);
      take_results(o);
      // mutate: halves-second-output-not-rescaled
      if (unlikely(probabilities.raised)) multiply_rows(o, probabilities.factors);
      issue_own<1>(probabilities, true);
      ptx::wgmma_wait<0>();
      take_results(o);
      this->release(shared.empty[1][1]);
      own ^= 1;
      other ^= 1;
    }
    if (i < count) {
      await_other<0>(other, i > 0);
      issue_other<0>(i > 0);
      ptx::wgmma_wait<0>();
      take_results(o);
      this->release(shared.empty[0][1]);
      other ^= 1;
    }
    keep(other, own);
  }

  // Whether a stage was used an odd number of times. Items begin at the first stage.
  __device__ __forceinline__ uint32_t parity_of(int stage) const {
    return ptx::warp_uniform(turn.p_parity >> stage & 1);
  }
  __device__ __forceinline__ void keep(uint32_t first, uint32_t second) {
    turn.p_parity = first | second << 1;
  }
  // After an item's last scores the next item's rows of Q may come.
  __device__ __forceinline__ void release_queries(bool is_last) const {
    if constexpr (Traits::kLinked) {
      ptx::mbarrier_arrive_if(is_last && rows.lane == 0, ptx::shared_address(&shared.empty_q));
    }
  }

  // --- Phases ---

  // The probabilities of the warpgroup's tile, which it hands to the other.
  template <int kPlace>
  __device__ __forceinline__ void make(Probabilities& to, Scores& s, bool lacks_keys, int index,
                                       bool is_first) {
    const int tile = ptx::warp_uniform(item.tiles.begin) + index;
    const Stage stage{kPlace, 0};
    if (unlikely(lacks_keys)) this->hide_missing_keys(s, stage);
    this->keep_largest(s);
    softmax.make(to, s, item, KeyTile{tile, softmax.needs_mask(tile)}, stage, is_first);
    publish<kPlace>(to);
  }

  // Where P of a stage lies: its rope columns are read by scores alone.
  __device__ __forceinline__ uint32_t place_of_p(int place) const {
    static_assert(PTile::kBytes == KTile::kPanelBytes, "P takes the place of a panel");
    return ptx::shared_address(shared.k[place]) + Traits::kLatentPanels * KTile::kPanelBytes;
  }

  template <int kPlace>
  __device__ __forceinline__ void publish(const Probabilities& from) {
    const int lane = rows.lane;
    this->sync();  // the scores of all four warps are complete
    const uint32_t first =
        place_of_p(kPlace) + PTile::offset(rows.warp_row() + (lane & 15), lane >> 4);
#pragma unroll
    for (int i = 0; i < Base::kSteps; ++i) ptx::stmatrix_x4(first ^ (32 * i), from.p[i][0]);
    auto& raised = shared.halves().raised[kPlace];
    if (from.raised && (lane & 3) == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        raised.factors[rows.own_row(h)] = from.factors[0][h];
        raised.maxima[rows.own_row(h)] = softmax.online.row_max[0][h];
      }
    }
    if (lane == 0) raised.warps[rows.warp] = from.raised;
    ptx::fence_proxy_async();
    ptx::warp_sync();
    this->release(shared.halves().full_p[kPlace]);
  }

  template <int kPlace>
  __device__ __forceinline__ void issue_own(const Probabilities& probabilities, bool adds) {
    ptx::wgmma_fence();
    issue_pv<VTile, kColumns>(o, probabilities.p, values_of(kPlace), adds);
    ptx::wgmma_commit();
  }

  // Waits for the other's P, and takes over the maxima that it raised.
  template <int kPlace>
  __device__ __forceinline__ void await_other(uint32_t parity, bool has_output) {
    // The other has seen the values land; this warpgroup sees it by its own wait.
    await_phase(shared.full[kPlace][1 - kPlace], parity);
    await_phase(shared.halves().full_p[kPlace], parity);  // mutate: halves-p-not-awaited
    const auto& raised = shared.halves().raised[kPlace];
    // All four warps wait for the scores under way, whichever of them is told: ptxas asks for it.
    if (unlikely((raised.warps[0] | raised.warps[1] | raised.warps[2] | raised.warps[3]) != 0)) {
      ptx::wgmma_wait<0>();
      if (raised.warps[rows.warp] != 0) take_over(raised, has_output);
    }
    ptx::fence_proxy_async();
  }
  template <typename Raised>
  __device__ __forceinline__ void take_over(const Raised& raised, bool has_output) {
    float factors[1][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factors[0][h] = raised.factors[rows.own_row(h)];
      // mutate: halves-maxima-not-taken-over
      softmax.online.row_max[0][h] = raised.maxima[rows.own_row(h)];
      softmax.online.row_sum[0][h] *= factors[0][h];  // mutate: halves-sums-under-old-maxima
    }
    if (has_output) multiply_rows(o, factors);  // mutate: halves-output-under-old-maxima
  }
  __device__ __forceinline__ void await_output() {
    ptx::wgmma_wait<0>();
    take_results(o);
  }
  template <int kPlace>
  __device__ __forceinline__ void issue_other(bool adds) {
    ptx::wgmma_fence();
    issue_pv_shared<PTile, VTile, kColumns>(o, operand_at<PTile>(place_of_p(kPlace)),
                                            values_of(kPlace), adds);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ uint64_t values_of(int place) const {
    return this->values(Stage{place, 0});
  }

  // The second hands over its sums, the first finishes the rows; both write O.
  __device__ __forceinline__ void finish() {
    const int place = turn.place();
    float factors[2];
    if (piece == 0) {
      await_phase(shared.halves().full_sums, turn.count & 1);
      if ((rows.lane & 3) == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // mutate: halves-sums-not-added
          softmax.online.row_sum[0][h] += shared.halves().sums[rows.own_row(h)];
        }
      }
      const auto output = rows.finish_rows(softmax.online, place, 0);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factors[h] = output.factors[h];
        if ((rows.lane & 3) == 0) shared.normalisers[place][rows.own_row(h)] = factors[h];
      }
      ptx::warp_sync();
      this->release(shared.full_normalisers[place]);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = quad_sum(softmax.online.row_sum[0][h]);
        if ((rows.lane & 3) == 0) shared.halves().sums[rows.own_row(h)] = sum;
      }
      ptx::warp_sync();
      this->release(shared.halves().full_sums);
      await_phase(shared.full_normalisers[place], turn.count >> 1 & 1);
#pragma unroll
      for (int h = 0; h < 2; ++h) factors[h] = shared.normalisers[place][rows.own_row(h)];
    }
    this->write(factors);
    this->raise_max_logits();
  }
};

}  // namespace cupyattn
