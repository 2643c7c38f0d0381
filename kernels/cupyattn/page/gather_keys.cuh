// Listed keys of one or two caches, side by side and in 16 bits: a warp takes a key.
#pragma once

#include "cupyattn/params/gather_keys.cuh"
#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/shared/listed_slots.cuh"
#include "cupyattn/tile/elements.cuh"

namespace cupyattn {

// Bytes of a row in fp8: latent values, then scales where they lie with them, then rope columns.
// Scales of pages lie behind all rows of a page, eight bytes each.
template <KeyForm kForm>
struct ScaledKey {
  static constexpr bool kOfPages = kForm == KeyForm::kScaledPages;
  static constexpr int kLatent = kOfPages ? 448 : 512;
  static constexpr int kGroup = kOfPages ? 64 : 128;  // values of a scale
  static constexpr int kRope = kOfPages ? kLatent : kLatent + 16;
  static constexpr int kScaleBytes = 8;
};

// Eight values in fp8 times a scale.
__device__ __forceinline__ Vector16 scaled_values(const Words<2>& bytes, float scale) {
  Vector16 values;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t four = bytes.word[w / 2];
    const uint32_t pair = w % 2 == 0 ? ptx::fp8_to_pair<half_t, e4m3_t, 0, 1>(four)
                                     : ptx::fp8_to_pair<half_t, e4m3_t, 2, 3>(four);
    float low, high;
    ptx::unpack_pair<half_t>(pair, low, high);
    values.word[w] = ptx::pack_pair<bfloat16_t>(low * scale, high * scale);
  }
  return values;
}

// 16 bytes of the target's row, of a key at an offset in its page.
template <KeyForm kForm>
__device__ __forceinline__ Vector16 load_key(const ListedKeys& list, const uint8_t* page,
                                             int32_t offset, int vector) {
  const uint8_t* row = page + offset * list.row_bytes;
  if constexpr (kForm == KeyForm::kPlain) {
    return *reinterpret_cast<const Vector16*>(row + 16 * vector);
  } else {
    using Key = ScaledKey<kForm>;
    constexpr int kValues = 8;
    const int rope = vector - Key::kLatent / kValues;
    if (rope >= 0) return *reinterpret_cast<const Vector16*>(row + Key::kRope + 16 * rope);
    const int group = vector * kValues / Key::kGroup;
    float scale;
    if constexpr (Key::kOfPages) {
      const uint8_t* scales = page + list.page_size * list.row_bytes;
      scale = scale_of_exponent(scales[offset * Key::kScaleBytes + group]);
    } else {
      // mutate: scale-of-another-group
      scale = reinterpret_cast<const float*>(row + Key::kLatent)[group];
    }
    return scaled_values(*reinterpret_cast<const Words<2>*>(row + kValues * vector), scale);
  }
}

template <typename Config>
__device__ __forceinline__ void gather_keys(const GatherKeysParams& params) {
  constexpr KeyForm kForm = static_cast<KeyForm>(Config::kForm);
  constexpr int kWarps = Config::kThreads / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int32_t first_length = params.lists[0].length;
  const int32_t length = first_length + params.lists[1].length;
  const int32_t step = static_cast<int32_t>(gridDim.x) * kWarps;
  for (int64_t row = blockIdx.y; row < params.num_tokens; row += gridDim.y) {
    const int64_t request = row / params.tokens_of_request;
    const int64_t token = row - request * params.tokens_of_request;
    for (int32_t at = blockIdx.x * kWarps + threadIdx.x / kWarpSize; at < length; at += step) {
      const bool is_second = at >= first_length;
      const ListedKeys& list = params.lists[is_second ? 1 : 0];
      const int32_t slot = listed_slot(list, request, token, is_second ? at - first_length : at);
      const int64_t place = row * length + at;
      if (lane == 0) params.entries[place] = slot < 0 ? -1 : static_cast<int32_t>(place);
      Vector16* target = static_cast<Vector16*>(params.target) + place * params.row_vectors;
      for (int vector = params.key_vectors + lane; vector < params.row_vectors; vector += kWarpSize) {
        target[vector] = Vector16{};
      }
      if (slot < 0) continue;
      const int32_t number = slot / list.page_size, offset = slot - number * list.page_size;
      const uint8_t* page = static_cast<const uint8_t*>(list.keys) + number * list.page_bytes;
      for (int vector = lane; vector < params.key_vectors; vector += kWarpSize) {
        target[vector] = load_key<kForm>(list, page, offset, vector);
      }
    }
  }
}

}  // namespace cupyattn
