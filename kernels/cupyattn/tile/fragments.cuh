// Fragments of the two matrix products, S = Q K^T and O += P V, for keys and values of 16 bits or
// of fp8. fp8 bytes are converted in registers; which k-slot or column a byte lands in is chosen so
// that no shuffle is needed:
//   K: a lane's four bytes are dims 4t..4t+3 of a group of 16. They fill slots {2t, 2t+1, 2t+8,
//      2t+9}, so Q's columns are permuted once in shared memory to match (permute_for_fp8_keys).
//   V: a transposed load gives a lane two neighbouring columns of two keys. Even columns go to one
//      n-tile, odd ones to the next, so a lane's outputs are columns 4t..4t+3 (output_column).
#pragma once

#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/convert.cuh"
#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/ptx/ldmatrix.cuh"
#include "cupyattn/ptx/mma.cuh"
#include "cupyattn/tile/shared_tile.cuh"

namespace cupyattn {

// Each lane's address of the first fragment of a tile; the others are found by SharedTile::advance.
// For keys of 16 bits the two k-halves of 8 keys must come in neighbouring registers.
template <typename Tile>
__device__ __forceinline__ uint32_t lane_address(uint32_t tile, int lane, int first_row = 0) {
  return tile + first_row * Tile::kRowBytes + Tile::offset(lane & 15, lane >> 4);
}
template <typename KTile>
__device__ __forceinline__ uint32_t k_lane_address(uint32_t tile, int lane) {
  if constexpr (is_fp8<typename KTile::T>::value) return lane_address<KTile>(tile, lane);
  // mutate: k-lanes-swapped
  return KTile::address(tile, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}

// The A fragment of 16 rows from row `row` of the warp's on, 16 columns at k-step `step`.
template <typename QTile>
__device__ __forceinline__ void load_q_fragment(uint32_t (&a)[4], uint32_t q, int row, int step) {
  ptx::ldmatrix_x4(a, QTile::advance(q, row, 2 * step));
}

// The B fragments of 16 keys at k-step `step`: b[0..1] for keys 0-7, b[2..3] for keys 8-15.
template <typename T, typename KTile>
__device__ __forceinline__ void load_k_fragment(uint32_t (&b)[4], uint32_t k, int key, int step) {
  static_assert(sizeof(typename KTile::T) == 2, "fp8 keys come two k-steps at a time");
  ptx::ldmatrix_x4(b, KTile::advance(k, key, 2 * step));
}

// The same for fp8: k-steps `step` and `step + 1`.
template <typename T, typename KTile>
__device__ __forceinline__ void load_k_fragments_fp8(uint32_t (&b)[2][4], uint32_t k, int key,
                                                     int step) {
  using Fp8 = typename KTile::T;
  uint32_t bytes[4];
  ptx::ldmatrix_x4(bytes, KTile::advance(k, key, step));
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      b[s][2 * half] = ptx::fp8_to_pair<T, Fp8, 0, 1>(bytes[2 * s + half]);
      b[s][2 * half + 1] = ptx::fp8_to_pair<T, Fp8, 2, 3>(bytes[2 * s + half]);
    }
  }
}

// The B fragments of 16 keys x 16 columns of V: b[0..1] for one n-tile, b[2..3] for the next.
template <typename T, typename VTile>
__device__ __forceinline__ void load_v_fragment(uint32_t (&b)[4], uint32_t v, int key, int group) {
  static_assert(sizeof(typename VTile::T) == 2, "fp8 values come two column groups at a time");
  ptx::ldmatrix_x4_trans(b, VTile::advance(v, key, 2 * group));  // mutate: values-not-transposed
}

// The same for fp8: column groups `group` and `group + 1`.
template <typename T, typename VTile>
__device__ __forceinline__ void load_v_fragments_fp8(uint32_t (&b)[2][4], uint32_t v, int key,
                                                     int group) {
  using Fp8 = typename VTile::T;
  uint32_t bytes[4];
  ptx::ldmatrix_x4_trans(bytes, VTile::advance(v, key, group));
#pragma unroll
  for (int g = 0; g < 2; ++g) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = bytes[2 * g + half];
      b[g][half] = ptx::fp8_to_pair<T, Fp8, 0, 2>(word);  // mutate: fp8-value-columns-swapped
      b[g][2 + half] = ptx::fp8_to_pair<T, Fp8, 1, 3>(word);
    }
  }
}

// `is_first` is a constant after unrolling: the first product needs no zeroed accumulators.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1, bool is_first) {
  if (is_first) {
    ptx::mma_m16n8k16_first<T>(c, a, b0, b1);
  } else {
    ptx::mma_m16n8k16<T>(c, a, b0, b1);
  }
}

// S[m][n] = Q K^T for kMmaQ x 16 query rows and kKeys keys. `load_q(a, m, step)` yields Q; `k` and,
// below, `v` are lane addresses.
template <typename T, typename KTile, int kSteps, int kMmaQ, int kKeys, typename LoadQ>
__device__ __forceinline__ void multiply_qk(float (&s)[kMmaQ][kKeys / 8][4], LoadQ&& load_q,
                                            uint32_t k, int first_key) {
  if constexpr (!is_fp8<typename KTile::T>::value) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[kMmaQ][4];
#pragma unroll
      for (int m = 0; m < kMmaQ; ++m) load_q(a[m], m, step);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        load_k_fragment<T, KTile>(b, k, first_key + 16 * n, step);
#pragma unroll
        for (int m = 0; m < kMmaQ; ++m) {
          multiply_add<T>(s[m][2 * n], a[m], b[0], b[1], step == 0);  // mutate: k-fragment-swapped
          multiply_add<T>(s[m][2 * n + 1], a[m], b[2], b[3], step == 0);
        }
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t a[2][kMmaQ][4];
#pragma unroll
      for (int m = 0; m < kMmaQ; ++m) {
        load_q(a[0][m], m, step);
        if (step + 1 < kSteps) load_q(a[1][m], m, step + 1);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[2][4];
        load_k_fragments_fp8<T, KTile>(b, k, first_key + 16 * n, step);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (step + half < kSteps) {
#pragma unroll
            for (int m = 0; m < kMmaQ; ++m) {
              multiply_add<T>(s[m][2 * n], a[half][m], b[half][0], b[half][1], step + half == 0);
              multiply_add<T>(s[m][2 * n + 1], a[half][m], b[half][2], b[half][3],
                              step + half == 0);
            }
          }
        }
      }
    }
  }
}

// O[m][n] += P V for 16 keys from key `key` on.
template <typename T, typename VTile, int kColumnGroups, int kMmaQ>
__device__ __forceinline__ void multiply_pv(float (&o)[kMmaQ][2 * kColumnGroups][4],
                                            const uint32_t (&p)[kMmaQ][4], uint32_t v, int key) {
  if constexpr (!is_fp8<typename VTile::T>::value) {
#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group) {
      uint32_t b[4];
      load_v_fragment<T, VTile>(b, v, key, group);
#pragma unroll
      for (int m = 0; m < kMmaQ; ++m) {
        ptx::mma_m16n8k16<T>(o[m][2 * group], p[m], b[0], b[1]);
        ptx::mma_m16n8k16<T>(o[m][2 * group + 1], p[m], b[2], b[3]);
      }
    }
  } else {
#pragma unroll
    for (int group = 0; group < kColumnGroups; group += 2) {
      uint32_t b[2][4];
      load_v_fragments_fp8<T, VTile>(b, v, key, group);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (group + half < kColumnGroups) {
#pragma unroll
          for (int m = 0; m < kMmaQ; ++m) {
            ptx::mma_m16n8k16<T>(o[m][2 * (group + half)], p[m], b[half][0], b[half][1]);
            ptx::mma_m16n8k16<T>(o[m][2 * (group + half) + 1], p[m], b[half][2], b[half][3]);
          }
        }
      }
    }
  }
}

}  // namespace cupyattn
