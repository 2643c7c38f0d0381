// fp8 keys of wide_decode_sm90. They become float16, which holds every e4m3 exactly, in the
// registers from which products take their 64 rows: a tile of keys is written to shared memory once,
// as it lands, and read once for each product.
//
// A product takes any order of the columns of keys, if queries have the same, and any order of the
// columns of values, which is the order of the rows of O^T. Both are such that a thread reads 16
// bytes at a time, and the threads that read together different banks.
//   scores   a thread has chunk 2 (lane % 4) + i of a panel of eight chunks, for groups i = 0, 1 of 64
//            columns: four steps of four columns. Of the rope panel it has chunk lane % 4.
//   output   a thread has 16 neighbouring columns, 128 warp + 16 (lane / 4) and on: rows lane / 4 and
//            lane / 4 + 8 of panel p of O^T are columns 2 p and 2 p + 1 of these.
#pragma once

#include "cupyattn/sm90/wide/query_scale.cuh"
#include "cupyattn/sm90/wide_decode/traits.cuh"

namespace cupyattn {

template <typename Traits>
struct WideDecodeSm90Fp8 {
  using DTypeKV = typename Traits::DTypeKV;
  using DTypeQ = typename Traits::DTypeQ;
  using KTile = typename Traits::KTile;
  using QTile = typename Traits::QTile;
  static constexpr int kGroups = QTile::kPanels;  // of 64 columns
  static constexpr bool kScalesInRows = Traits::kKeyScales == KeyScales::kScalesInRows;
  // Rope columns of 16 bits are multiplied as they are.
  static constexpr int kConverted = kScalesInRows ? kGroups - 1 : kGroups;
  static_assert(kGroups == 9, "512 latent and 64 rope columns");

  // Fragments of four products. Two of these take turns, because a product reads its own until it is
  // over.
  using Fragments = uint32_t[4][4];

  // Turns rows of queries into float16 in the order of columns of keys; each warp of all consumers
  // takes a row at a time and a lane a pair of each panel. `scales` of the rows are for the logits.
  static __device__ __forceinline__ void prepare_queries(unsigned char* queries, float* scales,
                                                         float rope_scale, int warp, int lane) {
    // Where a pair of an even panel, or of the rope panel, goes; an odd one's is two further.
    const int step = lane / 2 % 4, half = lane % 2;
    const int even = 8 * step + 4 * half + lane / 16, of_rope = 8 * step + 4 * half + lane / 8;
    const int panel = lane / 8 % 2;
#pragma unroll 1
    for (int row = warp; row < Traits::kTileQ; row += Traits::kConsumerThreads / kWarpSize) {
      float pairs[kConverted][2], largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kConverted; ++i) {
        ptx::unpack_pair<DTypeQ>(*word_at(queries, row, i, lane), pairs[i][0], pairs[i][1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (i == kGroups - 1) pairs[i][e] *= rope_scale;
          largest = fmaxf(largest, fabsf(pairs[i][e]));
        }
      }
      const QueryScale scale = QueryScale::of(warp_max(largest));
      ptx::warp_sync();  // mutate: wide-fp8-queries-overwritten
#pragma unroll
      for (int i = 0; i < kConverted; ++i) {
        const bool is_rope = i == kGroups - 1;
        const int to_panel = is_rope ? i : i / 2 * 2 + panel;
        const int to = is_rope ? of_rope : even + i % 2 * 2;
        *word_at(queries, row, to_panel, to) =
            ptx::pack_pair<half_t>(pairs[i][0] * scale.of_query, pairs[i][1] * scale.of_query);
      }
      if (lane == 0) scales[row] = scale.of_logits;  // mutate: wide-fp8-rows-not-scaled
    }
  }
  static __device__ __forceinline__ uint32_t* word_at(unsigned char* queries, int row, int panel,
                                                      int word) {
    return reinterpret_cast<uint32_t*>(queries + QTile::offset(row, 8 * panel + word / 4)) +
           word % 4;
  }

  // The fragments of a group of 64 columns of keys.
  static __device__ __forceinline__ void load_keys(Fragments& to, const unsigned char* keys,
                                                   int group, int warp, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * warp + 8 * h + (lane >> 2), chunk = lane & 3;
      const uint32_t at = group == kGroups - 1
                              ? KTile::rope_offset(row, chunk)
                              : KTile::offset(row, 8 * (group / 2) + 2 * chunk + group % 2);
      const Vector16 bytes = *reinterpret_cast<const Vector16*>(keys + at);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        to[step][h] = ptx::opaque_copy(low_pair(bytes.word[step]));
        to[step][2 + h] = ptx::opaque_copy(high_pair(bytes.word[step]));
      }
    }
  }

  // Values of the four keys that a thread has of 16, in the order of a fragment.
  struct Values {
    Vector16 of_key[4];
  };
  static __device__ __forceinline__ Values load_values(const unsigned char* values, int first_key,
                                                       int warp, int lane) {
    Values loaded;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first_key + 8 * (i / 2) + 2 * (lane & 3) + i % 2;
      loaded.of_key[i] = *reinterpret_cast<const Vector16*>(
          values + KTile::offset(key, 8 * warp + (lane >> 2)));  // mutate: wide-fp8-other-columns
    }
    return loaded;
  }
  // Their fragments for four panels of O^T, the first or the last.
  static __device__ __forceinline__ void convert_values(Fragments& to, const Values& from,
                                                        int half) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const uint32_t first = from.of_key[2 * pair].word[2 * half + w];
        const uint32_t second = from.of_key[2 * pair + 1].word[2 * half + w];
        // Bytes of the two keys, side by side, for two columns at a time.
        const uint32_t columns[2] = {ptx::permute_bytes(first, second, 0x5140u),
                                     ptx::permute_bytes(first, second, 0x7362u)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          to[2 * w + i][2 * pair] = ptx::opaque_copy(low_pair(columns[i]));
          to[2 * w + i][2 * pair + 1] = ptx::opaque_copy(high_pair(columns[i]));
        }
      }
    }
  }

  // --- Scales of keys ---

  // The scales of a key's four groups of columns: one is all four, where tokens have one.
  static __device__ __forceinline__ float4 scales_of(
      const typename Traits::SharedMemory& shared, int stage, int key) {
    if constexpr (kScalesInRows) {
      return *reinterpret_cast<const float4*>(shared.k[stage] + KTile::scales_offset(key));
    } else {
      const float scale = shared.token_scales[stage][key];
      return make_float4(scale, scale, scale, scale);
    }
  }
  static __device__ __forceinline__ float largest_of(const float4& scales) {
    return fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w)));
  }

  // Multiplies values of a key by its scale of the warp's 128 columns over the largest of its scales,
  // which its probabilities have. What is not finite counts in the probabilities.
  struct Ratios {
    uint32_t of_pair[2];
  };
  static __device__ __forceinline__ Ratios load_ratios(const typename Traits::SharedMemory& shared,
                                                       int stage, int first_key, int warp,
                                                       int lane) {
    Ratios ratios;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      float ratio[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = first_key + 8 * pair + 2 * (lane & 3) + i;
        const float4 scales = scales_of(shared, stage, key);
        const float own = warp == 0   ? scales.x
                          : warp == 1 ? scales.y
                          : warp == 2 ? scales.z
                                      : scales.w;
        const float found = own * ptx::rcp_approx(largest_of(scales));
        ratio[i] = fabsf(found) <= 2.0f ? found : 0.0f;  // mutate: wide-fp8-scales-of-the-largest
      }
      ratios.of_pair[pair] = ptx::pack_pair<half_t>(ratio[0], ratio[1]);
    }
    return ratios;
  }
  static __device__ __forceinline__ void scale_values(Fragments& fragments, const Ratios& ratios) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        fragments[i][w] =
            ptx::opaque_copy(ptx::multiply_half_pair(fragments[i][w], ratios.of_pair[w / 2]));
      }
    }
  }

  static __device__ __forceinline__ uint32_t low_pair(uint32_t bytes) {
    return ptx::Fp8ToHalfPair<DTypeKV, 0, 1>::convert(bytes);
  }
  static __device__ __forceinline__ uint32_t high_pair(uint32_t bytes) {
    return ptx::Fp8ToHalfPair<DTypeKV, 2, 3>::convert(bytes);
  }
};

}  // namespace cupyattn
