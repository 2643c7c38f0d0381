// Fragments of the two matrix products, S = Q K^T and O += P V, for keys and values of 16 bits or
// of fp8. fp8 bytes are converted in registers. They land in k-slots and columns that need no
// shuffle:
//   K: a lane's four bytes are dims 4t..4t+3 of a group of 16. They fill slots {2t, 2t+1, 2t+8,
//      2t+9}, so Q's columns are permuted once in shared memory to match (permute_for_fp8_keys).
//   V: a transposed load gives a lane two neighbouring columns of two keys. Even columns go to one
//      n-tile, odd ones to the next, so a lane's outputs are columns 4t..4t+3 (store_output_row).
#pragma once

#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/ptx/ldmatrix.cuh"
#include "cupyattn/ptx/mma.cuh"
#include "cupyattn/tile/shared_tile.cuh"

namespace cupyattn {

// Each lane's address of the first fragment of a tile; SharedTile::advance finds the others. The
// two k-halves of 8 keys of 16 bits must come in neighbouring registers.
template <typename Tile>
__device__ __forceinline__ uint32_t lane_address(uint32_t tile, int lane, int first_row = 0) {
  return tile + first_row * Tile::kRowBytes + Tile::offset(lane & 15, lane >> 4);
}
template <typename KTile>
__device__ __forceinline__ uint32_t k_lane_address(uint32_t tile, int lane) {
  if constexpr (is_fp8<typename KTile::T>) return lane_address<KTile>(tile, lane);
  // mutate: k-lanes-swapped
  return KTile::address(tile, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}

// The A fragment of 16 rows from row `row` of the warp's on, 16 columns at k-step `step`.
template <typename QTile>
__device__ __forceinline__ void load_q_fragment(uint32_t (&a)[4], uint32_t q, int row, int step) {
  ptx::ldmatrix_x4(a, QTile::advance(q, row, 2 * step));
}

// How many k-steps of K, or groups of 16 columns of V, one ldmatrix loads: rows of fp8 are half as
// long.
template <typename Tile>
constexpr int kStepsPerLoad = is_fp8<typename Tile::T> ? 2 : 1;

// The B fragments of 16 keys at k-step `step` (fp8: and at `step + 1`): b[i][0..1] for keys 0-7,
// b[i][2..3] for keys 8-15.
template <typename T, typename KTile>
__device__ __forceinline__ void load_k_fragments(uint32_t (&b)[kStepsPerLoad<KTile>][4], uint32_t k,
                                                 int key, int step) {
  if constexpr (!is_fp8<typename KTile::T>) {
    ptx::ldmatrix_x4(b[0], KTile::advance(k, key, 2 * step));
  } else {
    using Fp8 = typename KTile::T;
    uint32_t bytes[4];
    ptx::ldmatrix_x4(bytes, KTile::advance(k, key, step));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b[i / 2][2 * (i % 2)] = ptx::fp8_to_pair<T, Fp8, 0, 1>(bytes[i]);
      b[i / 2][2 * (i % 2) + 1] = ptx::fp8_to_pair<T, Fp8, 2, 3>(bytes[i]);
    }
  }
}

// The B fragments of 16 keys and column group `group` of V (fp8: and `group + 1`): b[i][0..1] for
// one n-tile, b[i][2..3] for the next.
template <typename T, typename VTile>
__device__ __forceinline__ void load_v_fragments(uint32_t (&b)[kStepsPerLoad<VTile>][4], uint32_t v,
                                                 int key, int group) {
  if constexpr (!is_fp8<typename VTile::T>) {
    // mutate: values-not-transposed
    ptx::ldmatrix_x4_trans(b[0], VTile::advance(v, key, 2 * group));
  } else {
    using Fp8 = typename VTile::T;
    uint32_t bytes[4];
    ptx::ldmatrix_x4_trans(bytes, VTile::advance(v, key, group));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // mutate: fp8-value-columns-swapped
      b[i / 2][i % 2] = ptx::fp8_to_pair<T, Fp8, 0, 2>(bytes[i]);
      b[i / 2][2 + i % 2] = ptx::fp8_to_pair<T, Fp8, 1, 3>(bytes[i]);
    }
  }
}

// S[m][n] = Q K^T for kMmaQ x 16 query rows and kKeys keys. `load_q(a, m, step)` yields Q; `k` and,
// below, `v` are lane addresses.
template <typename T, typename KTile, int kSteps, int kMmaQ, int kKeys, typename LoadQ>
__device__ __forceinline__ void multiply_qk(float (&s)[kMmaQ][kKeys / 8][4], LoadQ&& load_q,
                                            uint32_t k) {
  constexpr int kLoaded = kStepsPerLoad<KTile>;
#pragma unroll
  for (int step = 0; step < kSteps; step += kLoaded) {
    uint32_t a[kLoaded][kMmaQ][4];
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int i = 0; i < kLoaded && step + i < kSteps; ++i) load_q(a[i][m], m, step + i);
    }
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t b[kLoaded][4];
      load_k_fragments<T, KTile>(b, k, 16 * n, step);
#pragma unroll
      for (int i = 0; i < kLoaded && step + i < kSteps; ++i) {
        const bool is_first = step + i == 0;
#pragma unroll
        for (int m = 0; m < kMmaQ; ++m) {
          // mutate: k-fragment-swapped
          ptx::mma_m16n8k16<T>(s[m][2 * n], a[i][m], b[i][0], b[i][1], is_first);
          ptx::mma_m16n8k16<T>(s[m][2 * n + 1], a[i][m], b[i][2], b[i][3], is_first);
        }
      }
    }
  }
}

// O[m][n] += P V for 16 keys from key `key` on.
template <typename T, typename VTile, int kColumnGroups, int kMmaQ>
__device__ __forceinline__ void multiply_pv(float (&o)[kMmaQ][2 * kColumnGroups][4],
                                            const uint32_t (&p)[kMmaQ][4], uint32_t v, int key) {
  constexpr int kLoaded = kStepsPerLoad<VTile>;
#pragma unroll
  for (int group = 0; group < kColumnGroups; group += kLoaded) {
    uint32_t b[kLoaded][4];
    load_v_fragments<T, VTile>(b, v, key, group);
#pragma unroll
    for (int i = 0; i < kLoaded && group + i < kColumnGroups; ++i) {
#pragma unroll
      for (int m = 0; m < kMmaQ; ++m) {
        ptx::mma_m16n8k16<T>(o[m][2 * (group + i)], p[m], b[i][0], b[i][1]);
        ptx::mma_m16n8k16<T>(o[m][2 * (group + i) + 1], p[m], b[i][2], b[i][3]);
      }
    }
  }
}

}  // namespace cupyattn
