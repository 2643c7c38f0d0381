// A hidden key must not touch a row, whatever its value holds; but in the product P V a hidden NaN
// or infinity gives 0 * NaN. Non-finite values of a tile that hides keys are therefore set to zero
// in shared memory, and added by hand, from global memory, to the rows that see their keys. Finite
// values, the rule, cost one scan of such tiles.
#pragma once

#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/ptx/warp.cuh"
#include "cupyattn/tile/shared_tile.cuh"

namespace cupyattn {

// The exponent bits of every element of a word. An element with all of them set is not finite.
// (e4m3 has no infinity; its NaN has all seven bits set.)
template <typename T>
struct ExponentBits;
template <>
struct ExponentBits<half_t> {
  static constexpr uint32_t kMask = 0x7c007c00u, kOne = 0x04000400u, kSign = 0x80008000u;
  static constexpr uint32_t kSpread = 0xffffu, kShift = 15;
};
template <>
struct ExponentBits<bfloat16_t> {
  static constexpr uint32_t kMask = 0x7f807f80u, kOne = 0x00800080u, kSign = 0x80008000u;
  static constexpr uint32_t kSpread = 0xffffu, kShift = 15;
};
template <>
struct ExponentBits<e5m2_t> {
  static constexpr uint32_t kMask = 0x7c7c7c7cu, kOne = 0x04040404u, kSign = 0x80808080u;
  static constexpr uint32_t kSpread = 0xffu, kShift = 7;
};
template <>
struct ExponentBits<e4m3_t> {
  static constexpr uint32_t kMask = 0x7f7f7f7fu, kOne = 0x01010101u, kSign = 0x80808080u;
  static constexpr uint32_t kSpread = 0xffu, kShift = 7;
};

// All ones in place of each element of `word` that is not finite: adding one to a full exponent
// carries into the sign bit.
template <typename T>
__device__ __forceinline__ uint32_t not_finite(uint32_t word) {
  using Bits = ExponentBits<T>;
  const uint32_t carried = ((word & Bits::kMask) + Bits::kOne) & Bits::kSign;
  return (carried >> Bits::kShift) * Bits::kSpread;
}

template <typename T>
__device__ __forceinline__ float element_to_float(T element) {
  float low, high;
  if constexpr (is_fp8<T>) {
    ptx::unpack_pair<half_t>(ptx::Fp8ToHalfPair<T, 0, 1>::convert(element.bits), low, high);
  } else {
    ptx::unpack_pair<T>(element.bits, low, high);
  }
  return low;
}

template <typename T>
__device__ __forceinline__ void load_pair(const T* pair, float (&values)[2]) {
  if constexpr (is_fp8<T>) {
    const uint32_t bits = *reinterpret_cast<const uint16_t*>(pair);
    ptx::unpack_pair<half_t>(ptx::Fp8ToHalfPair<T, 0, 1>::convert(bits), values[0], values[1]);
  } else {
    ptx::unpack_pair<T>(*reinterpret_cast<const uint32_t*>(pair), values[0], values[1]);
  }
}

// The keys of a tile whose values were not finite, a bit each; zero between uses.
struct NonFiniteKeys {
  uint32_t word[2];
};

// Whether this thread's share of a tile of V is finite, as it nearly always is.
template <typename VTile, int kThreads>
__device__ __forceinline__ bool are_values_finite(const unsigned char* tile, int thread) {
  using T = typename VTile::T;
  uint32_t seen = 0;
  for (int index = thread; index < VTile::kRows * VTile::kChunks; index += kThreads) {
    const Vector16 values = *reinterpret_cast<const Vector16*>(
        tile + index / VTile::kChunks * VTile::kRowBytes + index % VTile::kChunks * 16);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (is_fp8<T>) {
        seen |= not_finite<T>(values.word[w]);
      } else {
        // Zero times a value that is not finite is NaN, and a sum keeps it.
        seen = ptx::multiply_add_pair<T>(values.word[w], 0u, seen);
      }
    }
  }
  return (seen & 0x7fff7fffu) == 0;
}

// Sets non-finite values of a tile of V to zero and marks their keys.
template <typename VTile, int kThreads>
__device__ __forceinline__ void zero_nonfinite_values(unsigned char* tile, NonFiniteKeys& bad,
                                                      int thread) {
  for (int index = thread; index < VTile::kRows * VTile::kChunks; index += kThreads) {
    const int row = index / VTile::kChunks;
    Vector16* chunk =
        reinterpret_cast<Vector16*>(tile + row * VTile::kRowBytes + index % VTile::kChunks * 16);
    const Vector16 values = *chunk;
    Vector16 holes;
#pragma unroll
    for (int w = 0; w < 4; ++w) holes.word[w] = not_finite<typename VTile::T>(values.word[w]);
    if ((holes.word[0] | holes.word[1] | holes.word[2] | holes.word[3]) != 0) {
      ptx::atomic_or_shared(&bad.word[row / 32], 1u << (row % 32));
#pragma unroll
      // mutate: bad-values-stay
      for (int w = 0; w < 4; ++w) chunk->word[w] = values.word[w] & ~holes.word[w];
    }
  }
}

// Sets non-finite values of a chunk to zero; returns whether there were any.
template <typename T>
__device__ __forceinline__ bool zero_nonfinite_chunk(Vector16& chunk) {
  const Vector16 values = chunk;
  Vector16 holes;
#pragma unroll
  for (int w = 0; w < 4; ++w) holes.word[w] = not_finite<T>(values.word[w]);
  if ((holes.word[0] | holes.word[1] | holes.word[2] | holes.word[3]) == 0) return false;
#pragma unroll
  // mutate: hopper-bad-values-stay
  for (int w = 0; w < 4; ++w) chunk.word[w] = values.word[w] & ~holes.word[w];
  return true;
}
// The same of a chunk of key `key`, which is marked if it is one of the first `num_keys`.
template <typename T>
__device__ __forceinline__ void zero_nonfinite_chunk(Vector16& chunk, uint32_t* bad_keys, int key,
                                                     int num_keys) {
  if (!zero_nonfinite_chunk<T>(chunk)) return;
  // mutate: bad-keys-not-marked
  if (key < num_keys) ptx::atomic_or_shared(&bad_keys[key / 32], 1u << (key % 32));
}

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < ptx::infinity(); }

// O += P V for one value of a key, column e of n-tile n, if the value is not finite (or any, if
// kAll) and the row sees the key. Branches for each column and row would take most of the kernel's
// compile time.
template <bool kAll = false, int kMmaQ, int kTilesO>
__device__ __forceinline__ void add_nonfinite_value(float (&o)[kMmaQ][kTilesO][4], int n, int e,
                                                    const float (&p)[kMmaQ][2], float value) {
  const float bad = !kAll && is_finite(value) ? 0.0f : value;
#pragma unroll
  for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
    // mutate: bad-values-reach-all-rows
    for (int h = 0; h < 2; ++h) o[m][n][2 * h + e] += p[m][h] * (p[m][h] != 0.0f ? bad : 0.0f);
  }
}

// O += P V for one key and the columns whose values are not finite, in rows that see the key.
// `value_row` is the key's row of V in global memory.
template <int kHeadDim, typename T, int kMmaQ, int kTilesS, int kTilesO, typename Softmax,
          typename Form>
__device__ __forceinline__ void add_nonfinite_key(float (&o)[kMmaQ][kTilesO][4],
                                                  const float (&s)[kMmaQ][kTilesS][4],
                                                  const Softmax& softmax, const Form& form,
                                                  float scale, int key, const T* value_row,
                                                  int lane) {
  float p[kMmaQ][2];
#pragma unroll
  for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // One lane of the quad has the logit, in a register that only unrolled code can name.
      float logit = form.hidden();
#pragma unroll
      for (int n = 0; n < kTilesS; ++n) {
        // Copies, because a choice between the elements themselves would put S in local memory.
        const float even = s[m][n][2 * h], odd = s[m][n][2 * h + 1];
        if (n == key / 8) logit = key & 1 ? odd : even;
      }
      p[m][h] = ptx::shuffle(softmax.probability(m, h, logit, form, scale),
                             (lane & ~3) | ((key & 7) >> 1));  // mutate: bad-value-of-another-key
    }
  }
  const int t = lane & 3;
#pragma unroll
  for (int n = 0; n < kTilesO; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // fp8 fragments leave columns in another order (see fragments.cuh).
      const int column = is_fp8<T> ? 8 * (n & ~1) + 4 * t + (n & 1) + 2 * e : 8 * n + 2 * t + e;
      if (column >= kHeadDim) continue;
      const float value = element_to_float(value_row[column]);
      // A branch, so that values are not loaded all at once, for which there are no registers.
      if (!is_finite(value)) add_nonfinite_value(o, n, e, p, value);
    }
  }
}

// O += P V for one key, by probabilities that are fragments already: p[i] holds keys 16 i and on,
// in pairs of type P. Rows of values are aligned, and O has the columns of 16-bit fragments. kAll:
// the key's finite values are added too.
template <typename P, bool kAll = false, typename T, int kMmaQ, int kSteps, int kTilesO>
__device__ __forceinline__ void add_nonfinite_key(float (&o)[kMmaQ][kTilesO][4],
                                                  const uint32_t (&p)[kSteps][kMmaQ][4], int key,
                                                  const T* value_row, int lane) {
  float of_key[kMmaQ][2];
#pragma unroll
  for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float pair = 0.0f;
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        const uint32_t bits = p[n / 2][m][2 * (n % 2) + h];
        if (n == key / 8) pair = __uint_as_float(bits);
      }
      float even, odd;
      ptx::unpack_pair<P>(__float_as_uint(ptx::shuffle(pair, (lane & ~3) | ((key & 7) >> 1))), even,
                          odd);
      of_key[m][h] = key & 1 ? odd : even;
    }
  }
#pragma unroll
  for (int n = 0; n < kTilesO; ++n) {
    float values[2];
    load_pair(value_row + 8 * n + 2 * (lane & 3), values);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float bad = !kAll && is_finite(values[e]) ? 0.0f : values[e];
#pragma unroll
      for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (of_key[m][h] != 0.0f) o[m][n][2 * h + e] += of_key[m][h] * bad;
        }
      }
    }
  }
}

}  // namespace cupyattn
