// The soft cap of prefill_sm90: a fast path for most tiles, and the range in which it holds.
#pragma once

#include "cupyattn/shared/soft_cap.cuh"

namespace cupyattn {

// A cap in place, whatever is masked: logits that are capped take no registers besides.
struct CappedInPlace : CappedLogits {
  template <int kTilesS>
  static __device__ __forceinline__ ScaledForm apply(float (&s)[1][kTilesS][4],
                                                     const float (&)[1][2], const RowInfo*,
                                                     const LogitConstants& constants,
                                                     const AttentionParams&, const Request&, int,
                                                     int, bool) {
    if (exceeds(s, [&](int, int) { return constants.limit; })) {  // mutate: large-logits-said-small
      apply_tanh(s, constants.cap, constants.scale);
      return ScaledForm{1.0f};
    }
    const PolynomialForm form = polynomial(constants);
#pragma unroll
    for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][n][e] *= form.factor(s[0][n][e]);
    }
    return ScaledForm{1.0f};
  }

 protected:
  static __device__ __forceinline__ PolynomialForm polynomial(const LogitConstants& constants) {
    return PolynomialForm{constants.c0, constants.c2, constants.c4, false};
  }
};

// A cubic: one operation a logit less than PolynomialForm. Beyond 1, far outside its range, it
// keeps its slope at 1, so that it increases everywhere.
struct CubicForm {
  float c0, c2;

  __device__ __forceinline__ float exponent(float x, float c) const {
    return fmaf(x, fmaf(ptx::square_saturated(x), c2, c0), c);  // mutate: cubic-not-saturated
  }
};

// The fast path evaluates the polynomial inside the exponent and looks at no logit. Rows with a low
// enough maximum take it. Beyond the polynomial's range
// - a positive logit becomes larger still, because the polynomial increases everywhere. The sum of
//   the tile's probabilities then exceeds `most`, and the tile is made again;
// - a negative logit has little weight. Its error is lost in the sum of a row that has seen many
//   keys.
//
// bfloat16 queries take a cubic. They are multiplied by a power of two, which rounds nothing, so
// that a product of 1 is half of the cap or more.
template <typename TypeP>
struct FastCappedLogits : CappedInPlace {
  // bfloat16 probabilities have the exponents of float32, so rows need no maximum of their own.
  // Under a cap they begin with one that hardly a logit exceeds, and O is never rescaled.
  static constexpr bool kHasFirstMax = is_same<TypeP, bfloat16_t>;
  static constexpr int kTileSumBits = kHasFirstMax ? 30 : 6;
  static constexpr bool kScalesQueries = kHasFirstMax;
  static constexpr bool kHasFastPath = true;
  // The largest error of a logit, in nats.
  static constexpr float kMostError = 1.25e-4f;  // mutate: cubic-range-too-wide
  // Under smaller caps, negative logits beyond the range weigh too much.
  static constexpr float kLeastCap = 16.0f;

  struct Constants : LogitConstants {
    float top;       // the largest base-2 maximum of a row that takes the fast path
    float most;      // the largest sum of a thread's probabilities of one row and tile
    float evidence;  // log2 of the number of keys whose errors are lost in a row's sum of 1
    float query_scale;
    CubicForm cubic;
  };

  struct FastPath {
    static constexpr bool kHasMax = true;  // a row within `top` has a maximum
    conditional<kScalesQueries, CubicForm, PolynomialForm> form;
    float most;

    __device__ __forceinline__ float most_of_tile() const { return most; }
    __device__ __forceinline__ float2 exponents(int, int, float x, float y, float shift) const {
      return make_float2(form.exponent(x, shift), form.exponent(y, shift));
    }
  };
  // Each thread keeps the path in registers: a tile would wait for a read of shared memory.
  using Kept = FastPath;
  static __device__ __forceinline__ Kept keep(const Constants& constants) {
    if constexpr (kScalesQueries) {
      return {constants.cubic, constants.most};
    } else {
      return {polynomial(constants), constants.most};
    }
  }

  static __device__ __forceinline__ float first_max(float cap) {
    constexpr float kFirstMax = 4.0f, kLargestCap = 96.0f;
    return kHasFirstMax && cap <= kLargestCap ? kFirstMax : -ptx::infinity();
  }

  static __device__ __forceinline__ Constants make_constants(const AttentionParams& params) {
    constexpr float kLeastBits = 3.0f;
    const float cap = params.logits_soft_cap, unit = params.sm_scale / cap;
    const float power = power_of_two_above(unit), fraction = kScalesQueries ? unit / power : unit;
    const TanhPolynomial tanh{kTanhRange, kTanh1, kTanh3, kTanh5};
    Constants constants{constants_of(params, tanh, fraction)};
    const TanhPolynomial fast = kScalesQueries ? widest_cubic(kMostError / cap) : tanh;
    constants.query_scale = power;
    constants.cubic = CubicForm{constants.cap * fraction * fast.c1,
                                constants.cap * fraction * fraction * fraction * fast.c3};
    // The base-2 logit at the end of the range.
    const float end = constants.cap * fast.at_range();
    const float first = first_max(constants.cap);
    // Sums may use the part of the range that the row's maximum leaves.
    const float room = first == -ptx::infinity() ? 0.5f * end : end - first;
    const float bits = fminf(room, kTileSumBits);
    const bool is_usable = constants.limit > 0.0f && cap >= kLeastCap && bits >= kLeastBits &&
                           (!kScalesQueries || (fraction >= 0.5f && fraction < 1.0f));
    constants.top = is_usable ? end - bits : -ptx::infinity();
    constants.most = exp2f(bits);  // mutate: sum-range-ignores-maximum
    // The error of one key beyond the range, over the error that a sum of 1 hides.
    const float tail = kScalesQueries ? 1.0f + 0.3f / (kMostError * cap * cap) : 11.0f;
    constants.evidence = end - log2f(tail);
    return constants;
  }

  // For how many keys of an item the fast path holds, as far as a thread's two rows decide.
  static __device__ __forceinline__ int keys_in_range(const float (&row_max)[2],
                                                      const float (&row_sum)[2],
                                                      const Constants& constants) {
    float keys = 1 << 24;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool is_low = row_max[h] <= constants.top;  // mutate: high-rows-are-valid
      // mutate: empty-rows-are-valid
      const float lost = row_sum[h] * ptx::ex2_approx(row_max[h] + constants.evidence);
      keys = fminf(keys, is_low ? lost : 0.0f);
    }
    return static_cast<int>(keys);
  }

 private:
  // The least power of two above `unit`, from 2^-32 to 1; 1 where there is none.
  static __device__ __forceinline__ float power_of_two_above(float unit) {
    const float power = __uint_as_float((__float_as_uint(unit) & 0x7f800000u) + 0x00800000u);
    return power >= 0x1p-32f && power <= 1.0f ? power : 1.0f;
  }
  // The widest odd cubic within `error` of tanh. Its range and coefficients are series fitted to
  // minimax cubics.
  static __device__ __forceinline__ TanhPolynomial widest_cubic(float error) {
    const float range = fminf(kTanhRange, exp2f(0.2f * log2f(120.0f * error)));
    const float square = range * range;
    return {range, 1.0f - square * square * (1.0f / 24.0f - 0.0236f * square),
            -1.0f / 3.0f + square * (1.0f / 6.0f - 0.0708f * square), 0.0f};
  }
};

}  // namespace cupyattn
