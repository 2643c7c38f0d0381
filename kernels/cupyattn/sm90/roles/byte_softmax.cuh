// Online softmax whose probabilities are e4m3, which reach from 2^-9 to 448. A row's maximum is kept
// below its largest logit, so that its largest probability is a power of two: 2^7 where one key of
// the tile decides, less where keys are comparable, whose sums grow. Sums, sinks and LSE follow from
// the maximum. A probability never exceeds 448: a sum of eight may not, or the maximum is raised.
#pragma once

#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/shared/softmax.cuh"

namespace cupyattn {

template <int kTileSumBits = 8>
struct ByteSoftmax : OnlineSoftmax<1, kTileSumBits> {
  using Base = OnlineSoftmax<1, kTileSumBits>;
  using Base::row_max, Base::row_sum;
  static constexpr int kMostHeadroom = 7;
  static constexpr float kLargest = 448.0f;
  static constexpr int kTilesOfGroup = 4;  // n-tiles, of which a thread has eight keys

  using Base::Base;

  // As OnlineSoftmax has it.
  template <typename T, bool kInLoop, int kSteps, int kTilesS, typename Form>
  __device__ __forceinline__ bool exponentiate_or_raise(uint32_t (&p)[kSteps][1][4],
                                                        const float (&s)[1][kTilesS][4],
                                                        float (&factors)[1][2], const Form& form,
                                                        float scale, float,
                                                        bool takes_maxima) {
    float tile_sum[2] = {};
    bool raises = takes_maxima;
#pragma unroll 1
    for (;;) {
      if (raises) raise(s, factors, tile_sum, form, scale, takes_maxima);
      exponentiate(p, s, form, scale, tile_sum);
      if (raises || !ptx::warp_any(asks(0, tile_sum[0]) | asks(1, tile_sum[1]))) break;
      raises = true;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) row_sum[0][h] += tile_sum[h];
    return raises;
  }

 private:
  // The sum of a tile is infinite where one of its groups is too large for e4m3.
  __device__ __forceinline__ bool asks(int h, float tile_sum) const {
    return tile_sum == ptx::infinity() || row_max[0][h] == -ptx::infinity();
  }

  template <int kTilesS, typename Form>
  __device__ __forceinline__ void raise(const float (&s)[1][kTilesS][4], float (&factors)[1][2],
                                        const float (&tile_sum)[2], const Form& form, float scale,
                                        bool all) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // mutate: rows-beside-raised
      const bool row_moves = all || quad_any(asks(h, tile_sum[h]));
      const float largest = quad_max(form.value(largest_of(s[0], h)));
      // The sum of a thread's probabilities if the largest of the row were 1.
      const float shift = form.shift(largest, scale);
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          sum += ptx::ex2_approx(form.exponent(s[0][n][2 * h + e], shift));
        }
      }
      const int power = static_cast<int>(__float_as_uint(quad_max(sum)) >> 23) - 127;
      const float headroom = static_cast<float>(kMostHeadroom - max_of(power, 0));
      // mutate: small-probabilities-flushed
      const float value = largest - headroom * ptx::rcp_approx(scale);
      factors[0][h] = this->raise_row(0, h, row_moves ? value : -ptx::infinity(), scale);
    }
  }

  template <int kSteps, int kTilesS, typename Form>
  __device__ __forceinline__ void exponentiate(uint32_t (&p)[kSteps][1][4],
                                               const float (&s)[1][kTilesS][4], const Form& form,
                                               float scale, float (&tile_sum)[2]) const {
    static_assert(kTilesS == 4 * kSteps, "fragments take four n-tiles");
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float shift = this->shift_of(0, h, form, scale);
      float sum = 0.0f, largest = 0.0f;
#pragma unroll
      for (int n = 0; n < kTilesS; n += kTilesOfGroup) {
        float group = 0.0f;
#pragma unroll
        for (int pair = n; pair < n + kTilesOfGroup; pair += 2) {
          float x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[i] = ptx::ex2_approx(form.exponent(s[0][pair + i / 2][2 * h + i % 2], shift));
          }
          const float four = (x[0] + x[1]) + (x[2] + x[3]);
          group = pair == n ? four : group + four;
          p[pair / 4][0][2 * (pair / 2 % 2) + h] = ptx::pack_four_e4m3(x[0], x[1], x[2], x[3]);
        }
        largest = n == 0 ? group : fmaxf(largest, group);
        sum = n == 0 ? group : sum + group;
      }
      tile_sum[h] = largest > kLargest ? ptx::infinity() : sum;
    }
  }
};

}  // namespace cupyattn
