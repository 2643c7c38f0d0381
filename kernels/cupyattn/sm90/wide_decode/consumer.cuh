// A consumer warpgroup of wide_decode_sm90. Its products are transposed: keys, and then columns of
// values, are their 64 rows, and the few rows of queries are their columns. A thread has the logits
// of two keys, 16 warp + lane / 4 (+ 8), and the columns of O that are as far into each panel of 64,
// for rows 8 n + 2 (lane % 4) (+ 1). docs/wide_sm90.md says why.
//
// A tile of keys. "<-" names what a phase waits for.
//   make_scores     S^T = K Q^T <- producer: each piece of K
//   raise_maxima    every row's maximum <- other warps' maxima
//   publish         P goes to shared memory, and O is rescaled where a maximum was raised
//   make_output     O^T += V^T P^T <- other warps' P; releases the pieces of K
// Two consumers take every other tile, and have rows of their own until the end: keys that are
// converted keep one warpgroup waiting for its own results for most of the time.
#pragma once

#include "cupyattn/sm90/wide_decode/fp8.cuh"
#include "cupyattn/sm90/wide_decode/output.cuh"

namespace cupyattn {

template <typename Traits>
struct WideDecodeSm90Consumer : WideDecodeSm90Output<Traits> {
  using Base = WideDecodeSm90Output<Traits>;
  using Base::kConsumers, Base::kFp8, Base::kHasScales, Base::kHeadDimVO, Base::kPanels, Base::kTileQ,
      Base::kTilesQ;
  using Base::block, Base::index, Base::lane, Base::o, Base::params, Base::row_max, Base::row_of,
      Base::row_sum, Base::scale_of, Base::shared, Base::sync, Base::sync_consumers, Base::warp;
  using typename Base::Item;
  using typename Base::OfRows;
  using DTypeKV = typename Traits::DTypeKV;
  using DTypeMma = typename Traits::DTypeMma;
  using KTile = typename Traits::KTile;
  using PTile = typename Traits::PTile;
  using QTile = typename Traits::QTile;
  using VTile = typename Traits::VTile;
  using Stage = PipelineState<Traits::kStages>;
  static constexpr int kTileKV = Traits::kTileKV;
  using Mask = typename Traits::Mask;
  using Fp8 = WideDecodeSm90Fp8<Traits>;
  using Scores = float[1][kTilesQ][4];

  float key_log2[2];    // of the largest scale of a thread's keys, if keys have scales
  bool is_negative[2];  // whether that scale is below zero

  using Base::Base;

  // The keys of a thread's logits.
  __device__ __forceinline__ int key_of(int h) const { return 16 * warp + 8 * h + (lane >> 2); }

  __device__ __forceinline__ void run() {
    const Item& item = shared.items[0];
    this->clear();
    if (item.has_keys()) {
      Stage stage;
      const int begin = ptx::warp_uniform(item.tiles.begin);
      prepare_queries();
      if (index > 0) stage.advance();  // mutate: wide-decode-tiles-of-the-first-consumer
      for (int tile = ptx::warp_uniform(item.tiles.end) - 1 - index; tile >= begin;
           tile -= kConsumers) {
        process_tile(item, tile, stage);
#pragma unroll
        for (int i = 0; i < kConsumers; ++i) stage.advance();
      }
    }
    this->finish(item);
  }

  __device__ __forceinline__ void prepare_queries() {
    await_phase(shared.full_q, 0);
    if constexpr (kFp8) {
      Fp8::prepare_queries(shared.q, shared.row_scales, latent_of(block.all_params).rope_scale,
                           warp + index * (Traits::kWarpgroup / kWarpSize), lane);
    }
    ptx::fence_proxy_async();
    if constexpr (kFp8) sync_consumers();  // mutate: wide-fp8-queries-read-early
  }

  __device__ __forceinline__ void process_tile(const Item& item, int tile, const Stage& stage) {
    Scores s;
    make_scores(s, stage);
    const int first_key = item.first_key(tile);
    if constexpr (Traits::kSparse) hide_missing_keys(s, stage);
    if (unlikely(item.range.cuts(first_key, kTileKV))) hide_keys(s, item, first_key);
    if constexpr (kHasScales) weigh_keys(stage);
    raise_maxima(s);
    publish(s);
    const bool hides_keys = unlikely(block.hides_keys(item, tile));
    if (hides_keys) zero_nonfinite_values(item, tile, stage);
    make_output(stage, hides_keys ? tile : -1, item);
  }

  // --- Phases ---

  __device__ __forceinline__ void make_scores(Scores& s, const Stage& stage) const {
    const uint64_t queries = ptx::opaque_copy(operand_at<QTile>(ptx::shared_address(shared.q)));
    if constexpr (kHasScales) {
      make_scaled_scores(s, queries, stage);
      return;
    } else if constexpr (kFp8) {
      issue_fp8_scores(s, queries, stage);
    } else {
      const uint64_t keys =
          ptx::opaque_copy(operand_at<KTile>(ptx::shared_address(shared.k[stage.stage])));
      issue_piece<Traits::kOfFollower>(s, queries, keys, stage, false);
      issue_piece<Traits::kOfLeader>(s, queries, keys, stage, true);
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait<0>();
    take_results(s);
  }
  __device__ __forceinline__ void issue_fp8_scores(Scores& s, uint64_t queries,
                                                   const Stage& stage) const {
    float (&d)[kTileQ / 2] = reinterpret_cast<float (&)[kTileQ / 2]>(s);
    typename Fp8::Fragments fragments[2];
#pragma unroll
    for (int i = 0; i < Fp8::kGroups; ++i) {
      // The rope columns and those of the follower's piece come first.
      constexpr int kHalf = (Fp8::kGroups - 1) / 2;
      const int group = i == 0 ? Fp8::kGroups - 1 : (i - 1 + kHalf) % (2 * kHalf);
      if (i == 0) await_phase(shared.full[stage.stage][Traits::kOfFollower], stage.parity);
      if (i == kHalf + 1) await_phase(shared.full[stage.stage][Traits::kOfLeader], stage.parity);
      if (i >= 2) ptx::wgmma_wait<1>();
      Fp8::load_keys(fragments[i % 2], shared.k[stage.stage], group, warp, lane);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::Wgmma<kTileQ>::template multiply_rs_k_major<DTypeMma>(
            d, fragments[i % 2][step],
            operand_behind<QTile>(queries, group * (QTile::kPanelBytes / 16) + 2 * step),
            i > 0 || step > 0);
      }
      ptx::wgmma_commit();
    }
  }
  // S of keys that have scales, as logits in base 2: the product of each panel of 128 columns is
  // multiplied by its scale.
  __device__ __forceinline__ void make_scaled_scores(Scores& s, uint64_t queries,
                                                     const Stage& stage) const {
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][n][e] = 0.0f;
    }
    float4 scales[2];
    await_phase(shared.full[stage.stage][Traits::kOfFollower], stage.parity);
#pragma unroll
    for (int h = 0; h < 2; ++h) scales[h] = Fp8::scales_of(shared, stage.stage, key_of(h));
    add_scaled_panel(s, queries, stage, 2, scales[0].z, scales[1].z);
    add_scaled_panel(s, queries, stage, 3, scales[0].w, scales[1].w);
    if constexpr (!Fp8::kScalesInRows) add_scaled_panel(s, queries, stage, 4, 1.0f, 1.0f);
    await_phase(shared.full[stage.stage][Traits::kOfLeader], stage.parity);
    add_scaled_panel(s, queries, stage, 0, scales[0].x, scales[1].x);
    add_scaled_panel(s, queries, stage, 1, scales[0].y, scales[1].y);
    Scores rope;
    if constexpr (Fp8::kScalesInRows) multiply_rope(rope, queries, stage);
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[0][n][e];
        x *= shared.row_scales[row_of(n, e % 2)];
        if constexpr (Fp8::kScalesInRows) x += rope[0][n][e];
        x *= params.softmax_scale;
      }
    }
  }
  // Adds a panel's product times its scale to S. panel: of 128 columns; 4: the 64 rope columns.
  __device__ __forceinline__ void add_scaled_panel(Scores& s, uint64_t queries, const Stage& stage,
                                                   int panel, float scale, float upper_scale) const {
    Scores part;
    float (&d)[kTileQ / 2] = reinterpret_cast<float (&)[kTileQ / 2]>(part);
    typename Fp8::Fragments fragments[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (panel == 4 && i == 1) continue;
      const int group = 2 * panel + i;
      Fp8::load_keys(fragments[i], shared.k[stage.stage], group, warp, lane);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::Wgmma<kTileQ>::template multiply_rs_k_major<DTypeMma>(
            d, fragments[i][step],
            operand_behind<QTile>(queries, group * (QTile::kPanelBytes / 16) + 2 * step),
            i > 0 || step > 0);
      }
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait<0>();
    take_results(part);
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // mutate: wide-fp8-scale-of-the-lower-key
        s[0][n][e] = fmaf(part[0][n][e], e < 2 ? scale : upper_scale, s[0][n][e]);
      }
    }
  }
  // The products by rope columns of 16 bits.
  __device__ __forceinline__ void multiply_rope(Scores& rope, uint64_t queries,
                                                const Stage& stage) const {
    using RopeTile = typename KTile::RopeTile;
    float (&d)[kTileQ / 2] = reinterpret_cast<float (&)[kTileQ / 2]>(rope);
    const uint64_t keys = ptx::opaque_copy(
        operand_at<RopeTile>(ptx::shared_address(shared.k[stage.stage]) + KTile::kRope));
    ptx::fence_proxy_async();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::Wgmma<kTileQ>::template multiply_ss<bfloat16_t>(
          d, operand_behind<RopeTile>(keys, 2 * step),
          operand_behind<QTile>(queries, (QTile::kPanels - 1) * (QTile::kPanelBytes / 16) + 2 * step),
          step > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    take_results(rope);
  }

  // The products by one piece, once it has landed.
  template <int kPiece>
  __device__ __forceinline__ void issue_piece(Scores& s, uint64_t queries, uint64_t keys,
                                              const Stage& stage, bool adds) const {
    // mutate: wide-decode-keys-not-awaited
    await_phase(shared.full[stage.stage][kPiece], stage.parity);
    if constexpr (!Traits::kTma) ptx::fence_proxy_async();
    ptx::wgmma_fence();
    issue_qk_panels<KTile, QTile, Traits::template kFirstPanel<kPiece>,
                    Traits::template kEndPanel<kPiece>>(s, keys, queries, adds);
  }

  // Hides the keys that a sparse list lacks.
  __device__ __forceinline__ void hide_missing_keys(Scores& s, const Stage& stage) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (shared.exists[stage.stage][key_of(h)] != 0) continue;  // mutate: wide-decode-missing-keys-seen
#pragma unroll
      for (int n = 0; n < kTilesQ; ++n) s[0][n][2 * h] = s[0][n][2 * h + 1] = -ptx::infinity();
    }
  }

  // Hides the keys that causality or a window hides from rows, and those past the last.
  __device__ __forceinline__ void hide_keys(Scores& s, const Item& item, int first_key) const {
    const TileWork& work = item.work.tile;
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = work.first_row + min_of(row_of(n, e), work.num_rows - 1);
        const int token = PackGqaRow::of(params, row).token;
        const Request& request = item.work.request;
        const KeyLimits limits = KeyLimits::of<Mask::kKeyShare>(
            params, request, request.position<Mask::kKeyShare>(params, token));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = first_key + key_of(h);
          // mutate: wide-decode-hidden-keys-seen
          if (key < limits.begin || key >= limits.end) s[0][n][2 * h + e] = -ptx::infinity();
        }
      }
    }
  }

  // Finds the logarithms of keys' largest scales. P carries that scale: its exponent is the logit
  // plus the logarithm. Maxima are those of the sums, so that 16 bits hold P; for keys with tiny
  // scales the logarithm counts as -30 there.
  __device__ __forceinline__ void weigh_keys(const Stage& stage) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 scales = Fp8::scales_of(shared, stage.stage, key_of(h));
      const float sum = fabsf(scales.x) + fabsf(scales.y) + fabsf(scales.z) + fabsf(scales.w);
      // Any scale that is not finite shows in the sum.
      key_log2[h] = log2f(is_finite(sum) ? Fp8::largest_of(scales) : ptx::nan());
      is_negative[h] = !Fp8::kScalesInRows && scales.x < 0.0f;
    }
  }

  // Takes every row's maximum over the keys of all warps, and rescales what it has so far.
  __device__ __forceinline__ void raise_maxima(const Scores& s) {
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float largest = fmaxf(s[0][n][e], s[0][n][2 + e]);
        if constexpr (kHasScales) {
          constexpr float kLeast = -30.0f;
          largest = fmaxf(s[0][n][e] + fmaxf(key_log2[0], kLeast),
                          s[0][n][2 + e] + fmaxf(key_log2[1], kLeast));
        }
#pragma unroll
        // mutate: wide-decode-maximum-of-some-keys
        for (int mask = 4; mask < kWarpSize; mask *= 2) {
          largest = fmaxf(largest, ptx::shuffle_xor(largest, mask));
        }
        if (lane < 4) shared.of_warps[index][row_of(n, e)][warp] = largest;
      }
    }
    sync();  // mutate: wide-decode-maxima-read-early
    bool is_raised = false;
    OfRows factors;
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 of = *reinterpret_cast<const float4*>(shared.of_warps[index][row_of(n, e)]);
        const float old_max = row_max[n][e];
        const float new_max = fmaxf(fmaxf(fmaxf(of.x, of.y), fmaxf(of.z, of.w)), old_max);
        row_max[n][e] = new_max;
        factors[n][e] =
            old_max == new_max ? 1.0f : ptx::ex2_approx((old_max - new_max) * scale_of(n, e));
        row_sum[n][e] *= factors[n][e];  // mutate: wide-decode-sum-not-rescaled
        is_raised |= old_max != new_max;
      }
    }
    if (unlikely(ptx::warp_any(is_raised))) rescale(factors);
  }
  __device__ __forceinline__ void rescale(const OfRows& factors) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
        // mutate: wide-decode-output-not-rescaled
        for (int e = 0; e < 4; ++e) o[panel][n][e] *= factors[n][e % 2];
      }
    }
  }

  // Makes the probabilities of a tile, and writes them as rows of queries.
  __device__ __forceinline__ void publish(const Scores& s) {
    // Lane 8 m + r gives the place of row r of the m-th matrix: rows of queries 8 (m / 2), keys
    // 16 warp + 8 (m % 2).
    const uint32_t to =
        ptx::shared_address(shared.p[index]) +
        PTile::offset(8 * (lane >> 4) + (lane & 7), 2 * warp + ((lane >> 3) & 1));
#pragma unroll
    for (int n = 0; n < kTilesQ; n += 2) {
      uint32_t p[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float pair[2][2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float max = row_max[n + i][e], scale = scale_of(n + i, e);
          const float shift = max == -ptx::infinity() ? 0.0f : -max * scale;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float logit = s[0][n + i][2 * h + e], exponent = fmaf(logit, scale, shift);
            pair[h][e] = ptx::ex2_approx(exponent);
            row_sum[n + i][e] += pair[h][e];
            if constexpr (kHasScales) {
              const float weighed = ptx::ex2_approx(exponent + key_log2[h]);
              // The scale of a hidden key may be anything.
              pair[h][e] = logit == -ptx::infinity() ? 0.0f : is_negative[h] ? -weighed : weighed;
            }
          }
        }
#pragma unroll
        // mutate: wide-decode-p-of-other-keys
        for (int h = 0; h < 2; ++h) p[2 * i + h] = ptx::pack_pair<DTypeMma>(pair[h][0], pair[h][1]);
      }
      ptx::stmatrix_x4_trans(to + n * PTile::kPatternBytes, p);
    }
    ptx::fence_proxy_async();
  }

  // Adds V^T P^T to O^T. tile: that of the keys if some are hidden; else -1.
  __device__ __forceinline__ void make_output(const Stage& stage, int tile, const Item& item) {
    const uint64_t p = ptx::opaque_copy(operand_at<PTile>(ptx::shared_address(shared.p[index])));
    sync();  // mutate: wide-decode-p-read-early
    if constexpr (kFp8) {
      issue_fp8_output(stage, p);
    } else {
      issue_output(stage, p, tile < 0);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(reinterpret_cast<float (&)[kPanels * kTilesQ * 4]>(o));
    if (tile >= 0) add_nonfinite_values(item, tile);
    if (kFp8 || tile >= 0) release(shared.empty[stage.stage][Traits::kOfFollower]);
    release(shared.empty[stage.stage][Traits::kOfLeader]);
  }
  __device__ __forceinline__ void issue_output(const Stage& stage, uint64_t p, bool releases) {
    const uint64_t values =
        ptx::opaque_copy(operand_at<VTile>(ptx::shared_address(shared.values(stage.stage))));
    ptx::wgmma_fence();
    constexpr int kFirst = Traits::template kFirstPanel<Traits::kOfFollower>;
    issue_pv_transposed<VTile, PTile, kFirst, kPanels>(o, values, p);
    ptx::wgmma_commit();
    issue_pv_transposed<VTile, PTile, 0, kFirst>(o, values, p);
    ptx::wgmma_commit();
    if (!releases) return;
    ptx::wgmma_wait<1>();
    release(shared.empty[stage.stage][Traits::kOfFollower]);
  }
  __device__ __forceinline__ void issue_fp8_output(const Stage& stage, uint64_t p) {
    typename Fp8::Fragments fragments[2];
#pragma unroll
    for (int step = 0; step < kTileKV / 16; ++step) {
      const auto values = Fp8::load_values(shared.k[stage.stage], 16 * step, warp, lane);
      typename Fp8::Ratios ratios;
      if constexpr (Fp8::kScalesInRows) {
        ratios = Fp8::load_ratios(shared, stage.stage, 16 * step, warp, lane);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (step > 0) ptx::wgmma_wait<1>();
        Fp8::convert_values(fragments[half], values, half);
        if constexpr (Fp8::kScalesInRows) Fp8::scale_values(fragments[half], ratios);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kPanels / 2; ++i) {
          float (&d)[kTileQ / 2] =
              reinterpret_cast<float (&)[kTileQ / 2]>(o[kPanels / 2 * half + i]);
          ptx::Wgmma<kTileQ>::template multiply_rs_k_major<DTypeMma>(
              d, fragments[half][i], operand_behind<PTile>(p, 2 * step), true);
        }
        ptx::wgmma_commit();
      }
    }
  }
  __device__ __forceinline__ void release(uint64_t& barrier) const {
    ptx::mbarrier_arrive_if(lane == 0, ptx::shared_address(&barrier));
  }

  // --- Non-finite values of hidden keys (see hidden_values.cuh and WideSm90Output) ---

  __device__ __forceinline__ void zero_nonfinite_values(const Item& item, int tile,
                                                        const Stage& stage) const {
    constexpr int kBytes = Traits::kLatentPanels * VTile::kPanelBytes;
    const int thread = threadIdx.x % Traits::kWarpgroup;
    const int num_keys = item.range.end - item.first_key(tile);
    // All threads are done with the keys of the tile before, and scores with the values of this.
    sync();
    if (thread == 0) shared.nonfinite_keys[index] = NonFiniteKeys{};
    sync();
    Vector16* chunks = reinterpret_cast<Vector16*>(shared.values(stage.stage));
#pragma unroll 1
    for (int i = thread; i < kBytes / 16; i += Traits::kWarpgroup) {
      zero_nonfinite_chunk<DTypeKV>(chunks[i], shared.nonfinite_keys[index].word,
                                    VTile::row_at(16 * i), num_keys);
    }
    ptx::fence_proxy_async();
  }

  __device__ __forceinline__ void add_nonfinite_values(const Item& item, int tile) {
#pragma unroll 1
    for (int word = 0; word < kTileKV / 32; ++word) {
      for (uint32_t bits = shared.nonfinite_keys[index].word[word]; bits != 0; bits &= bits - 1) {
        const int key = 32 * word + __ffs(static_cast<int>(bits)) - 1;
        add_nonfinite_key(block.value_of(item, item.first_key(tile) + key), key);
      }
    }
    ptx::warp_sync();
  }
  __device__ __forceinline__ void add_nonfinite_key(const DTypeKV* values, int key) {
    OfRows p;
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = PTile::offset(row_of(n, e), key / 8) + key % 8 * 2;
        p[n][e] = element_to_float(*reinterpret_cast<const DTypeMma*>(shared.p[index] + at));
      }
    }
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float value = element_to_float(values[this->column_of(panel, h)]);
        if (is_finite(value)) continue;
#pragma unroll
        for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            // mutate: wide-decode-bad-values-reach-all-rows
            if (p[n][e] != 0.0f) o[panel][n][2 * h + e] += p[n][e] * value;
          }
        }
      }
    }
  }
};

}  // namespace cupyattn
