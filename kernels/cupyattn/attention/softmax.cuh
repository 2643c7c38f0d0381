// Online softmax of the rows one thread holds in accumulator fragments: two rows (lane / 4 and
// lane / 4 + 8) for each m-tile of 16.
//
// decode_sm80 takes every maximum, and so does prefill_sm90, by maxima_softmax.cuh, with exceptions
// (kernels/README.md). Elsewhere it is lazy: it moves only when some logit exceeds it by more than
// kSlack (base 2), so P may reach 2^kSlack and O is rarely rescaled. The result is the same up to
// rounding, because numerator and denominator share whatever maximum was used (fp16's largest P,
// 256, is far from its limit).
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/convert.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, ptx::shuffle_xor(x, 1));
  return fmaxf(x, ptx::shuffle_xor(x, 2));  // mutate: maximum-of-half-a-quad
}

__device__ __forceinline__ float quad_sum(float x) {
  x += ptx::shuffle_xor(x, 1);
  return x + ptx::shuffle_xor(x, 2);  // mutate: sum-of-half-a-quad
}

// Of a thread's logits of one of its rows.
template <int kTilesS>
__device__ __forceinline__ float largest_of(const float (&s)[kTilesS][4], int h) {
  float largest = s[0][2 * h];
#pragma unroll
  for (int n = 0; n < kTilesS; ++n) {
    largest = fmaxf(largest, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
  }
  return largest;
}

template <int kMmaQ, int kTilesO>
__device__ __forceinline__ void multiply_rows(float (&o)[kMmaQ][kTilesO][4],
                                              const float (&factors)[kMmaQ][2]) {
#pragma unroll
  for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
    for (int n = 0; n < kTilesO; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[m][n][e] *= factors[m][e / 2];
    }
  }
}

//
// Logits come in a form (variants.cuh). `scale` turns its values into base 2, `slack` is kSlack in
// their units. Both are arguments, not members: as parameters or constants they cost no registers.
constexpr float kSlack = 8.0f;

// Who looks at sums for a maximum that must move takes kSlackBits of slack, in base 2.
template <int kMmaQ, int kSlackBits = 8>
struct OnlineSoftmax {
  static constexpr float kMostOfTile = 1 << kSlackBits;

  float row_max[kMmaQ][2];  // in the units of the logits; -inf while a row has seen no key
  float row_sum[kMmaQ][2];  // this thread's part

  // first_max: of all rows.
  __device__ __forceinline__ OnlineSoftmax(float first_max = -ptx::infinity()) {
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_max[m][h] = first_max;
        row_sum[m][h] = 0.0f;
      }
    }
  }

  // Moves the maximum if these logits ask for it, and rescales O to match.
  template <int kTilesS, int kTilesO, typename Form>
  __device__ __forceinline__ void raise_max(const float (&s)[kMmaQ][kTilesS][4],
                                            float (&o)[kMmaQ][kTilesO][4], const Form& form,
                                            float scale, float slack) {
    float tile_max[kMmaQ][2];
    if (exceeds_max(s, form, slack, tile_max)) rescale(tile_max, o, scale);
  }

  // Whether some logit of the warp asks for the maximum to move; finds this thread's maxima.
  template <int kTilesS, typename Form>
  __device__ __forceinline__ bool exceeds_max(const float (&s)[kMmaQ][kTilesS][4], const Form& form,
                                              float slack, float (&tile_max)[kMmaQ][2]) const {
    bool moves = false;
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < kTilesS; ++n) {
          x = fmaxf(x, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        }
        x = form.value(x);
        tile_max[m][h] = x;
        // Written so that a row that has seen nothing moves exactly when a key is seen.
        moves |= (x - slack) > row_max[m][h];
      }
    }
    return ptx::warp_any(moves);
  }

  // The probabilities of 16 keys (n-tiles 2 k and 2 k + 1 of the logits) under the present maximum,
  // as A fragments of the second product: for 16-bit types the accumulator layout of S is already
  // the layout of A.
  template <typename T, int kTilesS, typename Form>
  __device__ __forceinline__ void exponentiate(uint32_t (&p)[kMmaQ][4],
                                               const float (&s)[kMmaQ][kTilesS][4], int k,
                                               const Form& form, float scale) {
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float shift = row_max[m][h] == -ptx::infinity() ? 0.0f : -row_max[m][h] * scale;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float (&pair)[4] = s[m][2 * k + half];
          const float first = ptx::ex2_approx(form.exponent(pair[2 * h], shift));
          const float second = ptx::ex2_approx(form.exponent(pair[2 * h + 1], shift));
          row_sum[m][h] += first + second;
          p[m][2 * half + h] = ptx::pack_pair<T>(first, second);  // mutate: p-fragment-swapped
        }
      }
    }
  }

  // All probabilities of a tile, as fragments, and the maximum moved if they ask for it: whether it
  // has, and then `factors` are what O is to be multiplied by. Nobody looks for the logits' maxima,
  // but in the first tile: that a row's must move shows in the sum of what comes out, and then the
  // logits are still there.
  template <typename T, bool kIsFirst, int kSteps, int kTilesS, typename Form>
  __device__ __forceinline__ bool exponentiate_or_raise(uint32_t (&p)[kSteps][kMmaQ][4],
                                                        const float (&s)[kMmaQ][kTilesS][4],
                                                        float (&factors)[kMmaQ][2],
                                                        const Form& form, float scale) {
    float tile_sum[kMmaQ][2] = {};
    bool moves = false;
    if constexpr (kIsFirst) {
      raise_where_asked<kIsFirst>(s, factors, tile_sum, form, scale);
      exponentiate_all<T>(p, s, form, scale, tile_sum);
    } else {
      exponentiate_all<T>(p, s, form, scale, tile_sum);
#pragma unroll
      for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) moves |= asks_for_more(m, h, tile_sum[m][h]);
      }
      moves = ptx::warp_any(moves);
      if (moves) {
        raise_where_asked<kIsFirst>(s, factors, tile_sum, form, scale);
        exponentiate_all<T>(p, s, form, scale, tile_sum);
      }
    }
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) row_sum[m][h] += tile_sum[m][h];
    }
    return moves;
  }

  // Each row by its own logits alone: its bits do not depend on the rows beside it.
  template <bool kIsFirst, int kTilesS, typename Form>
  __device__ __forceinline__ void raise_where_asked(const float (&s)[kMmaQ][kTilesS][4],
                                                    float (&factors)[kMmaQ][2],
                                                    const float (&tile_sum)[kMmaQ][2],
                                                    const Form& form, float scale) {
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float largest = largest_of(s[m], h);
        const bool row_moves = kIsFirst || asks_for_more(m, h, quad_max(tile_sum[m][h]));
        const float value = row_moves ? form.value(largest) : -ptx::infinity();
        factors[m][h] = raise_row(m, h, value, scale);
      }
    }
  }

  // Whether the maximum of a row must move, given its thread's sum of a tile: no probability
  // exceeds 2^kSlackBits. A row without a maximum has to find one.
  __device__ __forceinline__ bool asks_for_more(int m, int h, float tile_sum) const {
    return tile_sum > kMostOfTile || row_max[m][h] == -ptx::infinity();
  }

  template <typename T, int kSteps, int kTilesS, typename Form>
  __device__ __forceinline__ void exponentiate_all(uint32_t (&p)[kSteps][kMmaQ][4],
                                                   const float (&s)[kMmaQ][kTilesS][4],
                                                   const Form& form, float scale,
                                                   float (&tile_sum)[kMmaQ][2]) const {
    static_assert(kTilesS == 2 * kSteps, "fragments take two n-tiles");
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float shift = row_max[m][h] == -ptx::infinity() ? 0.0f : -row_max[m][h] * scale;
        tile_sum[m][h] = 0.0f;
#pragma unroll
        for (int n = 0; n < kTilesS; ++n) {
          const float first = ptx::ex2_approx(form.exponent(s[m][n][2 * h], shift));
          const float second = ptx::ex2_approx(form.exponent(s[m][n][2 * h + 1], shift));
          tile_sum[m][h] += first + second;
          p[n / 2][m][2 * (n % 2) + h] = ptx::pack_pair<T>(first, second);
        }
      }
    }
  }

  // The same under a guess how products become exponents; false, and nothing has changed, if it is
  // wrong or a maximum must move. A look at all logits ahead would cost more than half as much
  // again.
  template <typename T, int kSteps, int kTilesS, typename Guess>
  __device__ __forceinline__ bool exponentiate_guessed(uint32_t (&p)[kSteps][kMmaQ][4],
                                                       const float (&s)[kMmaQ][kTilesS][4],
                                                       const Guess& guess, float scale) {
    static_assert(kMmaQ == 1 && kTilesS == 2 * kSteps, "fragments take two n-tiles");
    float tile_sum[2];
    bool fails = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool has_max = Guess::kHasMax || row_max[0][h] != -ptx::infinity();
      const float shift = has_max ? -row_max[0][h] * scale : 0.0f;
      tile_sum[h] = 0.0f;
#pragma unroll
      for (int n = 0; n < kTilesS; ++n) {
        const float2 x = guess.exponents(h, n, s[0][n][2 * h], s[0][n][2 * h + 1], shift);
        const float first = ptx::ex2_approx(x.x), second = ptx::ex2_approx(x.y);
        tile_sum[h] += first + second;
        p[n / 2][0][2 * (n % 2) + h] = ptx::pack_pair<T>(first, second);
      }
      fails |= tile_sum[h] > guess.most_of_tile() || !has_max;
    }
    if (unlikely(ptx::warp_any(fails))) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) row_sum[0][h] += tile_sum[h];
    return true;
  }

  // One probability under the present maximum.
  template <typename Form>
  __device__ __forceinline__ float probability(int m, int h, float logit, const Form& form,
                                               float scale) const {
    const float shift = row_max[m][h] == -ptx::infinity() ? 0.0f : -row_max[m][h] * scale;
    return ptx::ex2_approx(form.exponent(logit, shift));
  }

  template <int kTilesO>
  __device__ __forceinline__ void rescale(const float (&tile_max)[kMmaQ][2],
                                          float (&o)[kMmaQ][kTilesO][4], float scale) {
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = raise_row(m, h, tile_max[m][h], scale);
#pragma unroll
        for (int n = 0; n < kTilesO; ++n) {
          o[m][n][2 * h] *= factor;
          o[m][n][2 * h + 1] *= factor;  // mutate: output-not-rescaled
        }
      }
    }
  }

  // Raises one row's maximum, with its sum; returns the factor for the rest.
  __device__ __forceinline__ float raise_row(int m, int h, float tile_max, float scale) {
    const float old_max = row_max[m][h];
    const float new_max = fmaxf(old_max, quad_max(tile_max));
    const float factor =
        new_max == -ptx::infinity() ? 1.0f : ptx::ex2_approx((old_max - new_max) * scale);
    row_max[m][h] = new_max;
    row_sum[m][h] *= factor;  // mutate: sum-not-rescaled
    return factor;
  }

  __device__ __forceinline__ const float (&maxima() const)[kMmaQ][2] { return row_max; }
  // The base-2 maximum of a row, -inf if it saw no key.
  __device__ __forceinline__ float base2_max(int m, int h, float scale) const {
    return row_max[m][h] == -ptx::infinity() ? row_max[m][h] : row_max[m][h] * scale;
  }
};

}  // namespace cupyattn
