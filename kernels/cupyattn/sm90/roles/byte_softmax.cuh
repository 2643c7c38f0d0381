// Online softmax whose probabilities are e4m3, which reach from 2^-9 to 448. A row's maximum is kept
// below its largest logit, so that its largest probability is a power of two: 2^7 where one key of
// the tile decides, less where keys are comparable, whose sums grow. Sums, sinks and LSE follow from
// the maximum. A probability never exceeds 448: a sum of eight may not, or the maximum is raised.
//
// Exponentials take the place of their logits, so that many are under way at a time, and are packed
// when all are there. A row whose maximum must be raised is multiplied, for its logits are gone; one
// whose exponentials have left the range of float32 has its logits made again.
#pragma once

#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/shared/softmax.cuh"
#include "cupyattn/sm90/roles/row_scales.cuh"

namespace cupyattn {

template <int kTileSumBits = 8>
struct ByteSoftmax : OnlineSoftmax<1, kTileSumBits> {
  using Base = OnlineSoftmax<1, kTileSumBits>;
  using Base::row_max, Base::row_sum;
  static constexpr int kMostHeadroom = 7;
  static constexpr float kLargest = 448.0f;
  static constexpr float kFar = 0x1p+100f;  // of sums whose exponentials are in the range of float32
  static constexpr int kTilesOfGroup = 4;   // n-tiles, of which a thread has eight keys

  using Base::Base;

  // Turns the logits of a tile into probabilities, and raises maxima: in an item's first tile and in
  // a tile that takes them, of all rows that ask for it; else of rows whose probabilities are too
  // large. Returns whether it did; O is then to be multiplied by `factors`. again(s, h): makes the
  // logits of row h again.
  template <int kSteps, int kTilesS, typename Form, typename Again>
  __device__ __forceinline__ bool exponentiate_or_raise(uint32_t (&p)[kSteps][1][4],
                                                        float (&s)[1][kTilesS][4],
                                                        float (&factors)[1][2], const Form& form,
                                                        float scale, bool is_first,
                                                        bool takes_maxima, Again&& again) {
    // Logits that are all 0 have no maximum.
    takes_maxima = (is_first || takes_maxima) && scale != 0.0f;
    float tile_sum[2], largest[2];
    if (is_first) factors[0][0] = factors[0][1] = 1.0f;
    if (takes_maxima) {
#pragma unroll
      for (int h = 0; h < 2; ++h) factors[0][h] = take_maximum(s, h, form, scale, true);
    }
    exponentiate<0, 2>(s, form, scale, tile_sum, largest);
    bool raises = takes_maxima;
    const bool asks = takes_maxima || largest[0] > kLargest || largest[1] > kLargest;
    if (is_first || unlikely(ptx::warp_any(asks))) {
      raises = true;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // mutate: rows-beside-raised
        const bool row_moves = takes_maxima || quad_any(largest[h] > kLargest);
        if (!is_first && !takes_maxima) {
          factors[0][h] = make_far(s, h, tile_sum[h], row_moves, form, scale, again);
        }
        settle(s, h, factors[0][h], tile_sum[h], row_moves, scale);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) row_sum[0][h] += tile_sum[h];
    pack(p, s);
    return raises;
  }

 private:
  // Raises the maximum of row h to its largest logit, if the row moves. Returns what sums are to be
  // multiplied by.
  template <int kTilesS, typename Form>
  __device__ __forceinline__ float take_maximum(const float (&s)[1][kTilesS][4], int h,
                                                const Form& form, float scale, bool row_moves) {
    const float largest = quad_max(value_of(form, largest_of(s[0], h), h));
    const float before = row_max[0][h];
    const float next = row_moves ? fmaxf(before, largest) : before;
    row_max[0][h] = next;
    return next == before ? 1.0f : ptx::ex2_approx((before - next) * scale);
  }
  // The power of two that the largest probability becomes. sum: of a thread if the largest were 1.
  static __device__ __forceinline__ float headroom(float sum) {
    const int power = static_cast<int>(__float_as_uint(sum) >> 23) - 127;
    return static_cast<float>(kMostHeadroom - max_of(power, 0));
  }

  // Exponentials in the place of the logits of rows kBegin to kEnd, their sums, and the largest of
  // eight. ptxas puts an addition right behind the exponential that it waits for, unless that stands
  // in another basic block. So a block has the exponents of one group, the exponentials of the group
  // before and the sums of the one before that.
  template <int kBegin, int kEnd, int kTilesS, typename Form>
  __device__ __forceinline__ void exponentiate(float (&s)[1][kTilesS][4], const Form& form,
                                               float scale, float (&sum)[2],
                                               float (&largest)[2]) const {
    static_assert(kTilesS % kTilesOfGroup == 0, "groups are whole");
    constexpr int kGroups = kTilesS / kTilesOfGroup;
#pragma unroll
    for (int step = 0; step < kGroups + 2; ++step) {
#pragma unroll
      for (int h = kBegin; h < kEnd; ++h) {
        if (step < kGroups) {
          const float shift = this->shift_of(0, h, form, scale);
          each_of_group(s, step, h, [&](float x) { return exponent_of(form, x, shift, h); });
        }
        if (step >= 1 && step <= kGroups) each_of_group(s, step - 1, h, ptx::ex2_approx);
        if (step >= 2) {
          const float group = sum_of_group(s, step - 2, h);
          largest[h] = step == 2 ? group : fmaxf(largest[h], group);
          sum[h] = step == 2 ? group : sum[h] + group;
        }
      }
      // The scale of some logits is a constant, by which ptxas would see that no event happens.
      if (step < kGroups + 1) ptx::end_basic_block(__float_as_uint(row_max[0][0]));
    }
  }
  template <int kTilesS, typename Function>
  static __device__ __forceinline__ void each_of_group(float (&s)[1][kTilesS][4], int group, int h,
                                                       Function&& function) {
#pragma unroll
    for (int i = 0; i < kTilesOfGroup; ++i) {
      float (&x)[4] = s[0][group * kTilesOfGroup + i];
#pragma unroll
      for (int e = 0; e < 2; ++e) x[2 * h + e] = function(x[2 * h + e]);
    }
  }
  template <int kTilesS>
  static __device__ __forceinline__ float sum_of_group(const float (&s)[1][kTilesS][4], int group,
                                                       int h) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kTilesOfGroup; ++i) {
      const float (&x)[4] = s[0][group * kTilesOfGroup + i];
      const float pair = x[2 * h] + x[2 * h + 1];
      sum = i == 0 ? pair : sum + pair;
    }
    return sum;
  }

  // Makes a row's exponentials again, under its largest logit, if they have left float32's range.
  // Returns what sums are to be multiplied by.
  template <int kTilesS, typename Form, typename Again>
  __device__ __forceinline__ float make_far(float (&s)[1][kTilesS][4], int h, float& tile_sum,
                                            bool row_moves, const Form& form, float scale,
                                            Again&& again) {
    const bool is_far = (quad_max(tile_sum) > kFar) & row_moves;
    if (!unlikely(ptx::warp_any(is_far))) return 1.0f;
    if (is_far) again(s, h);  // mutate: far-logits-not-made-again
    ptx::warp_sync();
    const float factor = take_maximum(s, h, form, scale, is_far);
    const float shift = this->shift_of(0, h, form, scale);
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[0][n][2 * h + e];
        x = is_far ? ptx::ex2_approx(exponent_of(form, x, shift, h)) : x;
        sum += x;
      }
    }
    tile_sum = is_far ? sum : tile_sum;
    return factor;
  }

  // Gives the probabilities of row h their headroom, if the row moves: its maximum is to be below
  // the largest, but not below the one before, which `factor` is of. The factor then is what O is to
  // be multiplied by.
  template <int kTilesS>
  __device__ __forceinline__ void settle(float (&s)[1][kTilesS][4], int h, float& factor,
                                         float& tile_sum, bool row_moves, float scale) {
    const float largest = quad_max(largest_of(s[0], h)), sum = quad_max(tile_sum);
    // mutate: small-probabilities-flushed
    const float room = headroom(sum * ptx::rcp_approx(largest));
    float power = 0.0f;
    if (row_moves && largest > 0.0f) {
      power = fminf(room - ptx::lg2_approx(largest), -ptx::lg2_approx(factor));
    }
    const float factor_of_tile = ptx::ex2_approx(power);
#pragma unroll
    for (int n = 0; n < kTilesS; ++n) {
      s[0][n][2 * h] *= factor_of_tile;
      s[0][n][2 * h + 1] *= factor_of_tile;
    }
    tile_sum *= factor_of_tile;
    row_max[0][h] -= power * ptx::rcp_approx(scale);
    factor *= factor_of_tile;
    row_sum[0][h] *= factor;  // mutate: sum-of-bytes-not-rescaled
  }

  template <int kSteps, int kTilesS>
  static __device__ __forceinline__ void pack(uint32_t (&p)[kSteps][1][4],
                                              const float (&s)[1][kTilesS][4]) {
    static_assert(kTilesS == 4 * kSteps, "fragments take four n-tiles");
#pragma unroll
    for (int pair = 0; pair < kTilesS; pair += 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float(&x)[4] = s[0][pair];
        const float(&y)[4] = s[0][pair + 1];
        p[pair / 4][0][2 * (pair / 2 % 2) + h] =
            ptx::pack_four_e4m3(x[2 * h], x[2 * h + 1], y[2 * h], y[2 * h + 1]);
      }
    }
  }
};

}  // namespace cupyattn
