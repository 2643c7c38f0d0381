// Online softmax under every maximum: none of a row's logits passes it, so its largest probability
// is 1, unrounded. For rows as softmax.cuh has them, and logits that one scale turns into base 2.
#pragma once

#include "cupyattn/attention/logit_forms.cuh"
#include "cupyattn/attention/softmax.cuh"
#include "cupyattn/common/math.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/convert.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

struct MaximaSoftmax {
  // The shift of a row that has seen no key: hidden logits stay hidden under it, and what its sum
  // and O are to be multiplied by is 0 with the first key, and 1 before.
  static constexpr float kNoMaximum = 3.402823466e38f;

  float row_shift[1][2];  // of exponents: less the maximum, in base 2
  float row_sum[1][2];    // this thread's part
  bool looks_again;       // some row of the warp has no maximum, or one below zero

  // (Others begin with a maximum.)
  __device__ __forceinline__ explicit MaximaSoftmax(float = 0.0f) : looks_again(true) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_shift[0][h] = kNoMaximum;
      row_sum[0][h] = 0.0f;
    }
  }

  // Takes the maxima of a tile: whether one of the warp's rows moves, and what O is to be
  // multiplied by where one does.
  template <int kTilesS>
  __device__ __forceinline__ bool raise(const float (&s)[1][kTilesS][4], float scale,
                                        float (&factors)[1][2]) {
    float largest[] = {largest_beside_zero(s[0], 0), largest_beside_zero(s[0], 1)};
    if (unlikely(looks_again)) {
      largest[0] = largest_of(s[0], 0);
      largest[1] = largest_of(s[0], 1);
    }
    bool moves = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float shift = fminf(row_shift[0][h], -quad_max(largest[h]) * scale);
      moves |= shift != row_shift[0][h];
      factors[0][h] = ptx::ex2_approx(shift - row_shift[0][h]);
      row_shift[0][h] = shift;
    }
    return ptx::warp_any(moves);
  }
  // After maxima have moved.
  __device__ __forceinline__ void look_at_signs() {
    looks_again = ptx::warp_any(row_shift[0][0] > 0.0f || row_shift[0][1] > 0.0f);
  }

  // Of two floats one of which is positive, the larger is the larger integer, and one instruction
  // takes the largest of three of these: half as many as for floats. So what is found is right
  // beside maxima that are not negative.
  template <int kTilesS>
  static __device__ __forceinline__ float largest_beside_zero(const float (&s)[kTilesS][4], int h) {
    int largest[2] = {as_integer(s[0][2 * h]), as_integer(s[0][2 * h + 1])};
#pragma unroll
    for (int n = 1; n < kTilesS; ++n) {
      const int first = as_integer(s[n][2 * h]), second = as_integer(s[n][2 * h + 1]);
      largest[n % 2] = max_of(max_of(largest[n % 2], first), second);
    }
    return __int_as_float(max_of(largest[0], largest[1]));
  }
  static __device__ __forceinline__ int as_integer(float x) {
    return static_cast<int>(__float_as_uint(x));
  }

  // The probabilities of steps kBegin to kEnd of a tile, as fragments, and their sums, added to
  // those of the steps before.
  template <typename T, int kBegin, int kEnd, int kSteps, int kTilesS>
  __device__ __forceinline__ void exponentiate(uint32_t (&p)[kSteps][1][4],
                                               const float (&s)[1][kTilesS][4], float scale,
                                               float (&sums)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int n = 2 * kBegin; n < 2 * kEnd; ++n) {
        const float first = ptx::ex2_approx(fmaf(s[0][n][2 * h], scale, row_shift[0][h]));
        const float second = ptx::ex2_approx(fmaf(s[0][n][2 * h + 1], scale, row_shift[0][h]));
        sums[h] = n == 0 ? first + second : sums[h] + (first + second);
        p[n / 2][0][2 * (n % 2) + h] = ptx::pack_pair<T>(first, second);
      }
    }
  }
  // Sums of the whole tile, to those of the tiles before.
  __device__ __forceinline__ void add(const float (&factors)[1][2], const float (&sums)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) row_sum[0][h] = fmaf(row_sum[0][h], factors[0][h], sums[h]);
  }

  __device__ __forceinline__ const float (&maxima() const)[1][2] { return row_shift; }
  // The base-2 maximum of a row, -inf if it saw no key.
  __device__ __forceinline__ float base2_max(int, int h, float) const {
    return row_shift[0][h] == kNoMaximum ? -ptx::infinity() : -row_shift[0][h];
  }
};

}  // namespace cupyattn
