// Fragments of products of 8-bit elements, for which both operands are K-major: values are
// transposed first. No thread needs another's probabilities:
//
// Keys. A thread t of a quad has the logits of keys 8 n + 2 t and 8 n + 2 t + 1 of n-tile n. A
// fragment of 32 keys wants places 4 t to 4 t + 3 of each 16. So place 4 t + i of 16 keys is
// key 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t, in P and in V^T alike.
//
// Columns. Row of V^T and column of O, of each 16 columns of values: column 2 t at row 2 t,
// 8 + 2 t at 2 t + 1, 2 t + 1 at 8 + 2 t, 9 + 2 t at 9 + 2 t. The eight even columns, which a warp
// stores at once, then have eight rows of one pattern, whose banks differ, and a thread has the
// columns of a 16-bit fragment, two of them in each other's register.
#pragma once

#include "cupyattn/ptx/convert.cuh"
#include "cupyattn/shared/hidden_values.cuh"

namespace cupyattn {

// The row of V^T, in a group of 16, of the `index`th even column of the group; the odd column behind
// it is eight rows further.
__device__ __forceinline__ int row_of_even_column(int index) {
  return index < 4 ? 2 * index : 2 * index - 7;  // mutate: turned-columns-in-order
}

// O of 16-bit fragments, from accumulators whose columns lie as above.
template <int kTiles>
__device__ __forceinline__ void order_columns(float (&o)[1][kTiles][4]) {
  static_assert(kTiles % 2 == 0, "columns come by 16");
#pragma unroll
  for (int n = 0; n < kTiles; n += 2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float second = o[0][n][2 * h + 1];
      o[0][n][2 * h + 1] = o[0][n + 1][2 * h];
      o[0][n + 1][2 * h] = second;  // mutate: columns-of-o-in-the-order-of-rows
    }
  }
}

// As add_nonfinite_key of 16-bit fragments: O += P V for one key and the values that are not finite,
// in rows that see the key. p[i] holds keys 32 i and on.
template <typename T, int kSteps, int kTilesO>
__device__ __forceinline__ void add_nonfinite_key_of_bytes(float (&o)[1][kTilesO][4],
                                                           const uint32_t (&p)[kSteps][1][4],
                                                           int key, const T* value_row, int lane) {
  float of_key[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t four = 0;
#pragma unroll
    for (int pair = 0; pair < 2 * kSteps; ++pair) {
      const uint32_t bits = p[pair / 2][0][2 * (pair % 2) + h];
      if (pair == key / 16) four = bits;
    }
    const int source = (lane & ~3) | ((key & 7) >> 1);  // mutate: 8-bit-value-of-another-key
    four = static_cast<uint32_t>(ptx::shuffle(static_cast<int>(four), source));
    const int place = (key >> 3 & 1) * 2 + (key & 1);
    of_key[h] = element_to_float(e4m3_t{static_cast<uint8_t>(four >> (8 * place))});
  }
#pragma unroll
  for (int n = 0; n < kTilesO; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * (n & ~1) + 2 * (lane & 3) + 8 * e + (n & 1);
      const float value = element_to_float(value_row[column]);
      const float bad = is_finite(value) ? 0.0f : value;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (of_key[h] != 0.0f) o[0][n][2 * h + e] += of_key[h] * bad;
      }
    }
  }
}

}  // namespace cupyattn
