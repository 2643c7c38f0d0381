// Custom masks for blocks of specialised warps. One warp finds out ahead which key tiles of an item
// are worth visiting, and which of them hide keys; others leave what the rows of such a tile see in
// shared memory, as bits, before the logits that they hide are there.
#pragma once

#include "cupyattn/attention/mask.cuh"
#include "cupyattn/attention/variants.cuh"
#include "cupyattn/attention/work.cuh"
#include "cupyattn/common/math.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

// Without a mask every tile of an item is worth visiting.
struct AllKeyTiles {
  static __device__ __forceinline__ int before(int tile) { return tile - 1; }
  static __device__ __forceinline__ bool is_mixed(int) { return false; }
};

// The key tiles of an item from `first` on, which the mask reaches; those before hide nothing.
// Tiles past the capacity count as mixed.
template <int kTileKV>
struct KeyTileMap {
  static constexpr int kCapacity = 4096;
  static constexpr int kWords = kCapacity / 32;
  int first;
  uint32_t any[kWords];    // tiles that hold a key some row sees
  uint32_t mixed[kWords];  // tiles that hold a key some row does not see

  // The next tile worth visiting below this one; may be below all of them.
  __device__ __forceinline__ int before(int tile) const {
    --tile;
    while (tile >= first && tile - first < kCapacity) {
      const int index = tile - first;
      const uint32_t rest = any[index / 32] << (31 - index % 32);
      if (rest != 0) return tile - __clz(static_cast<int>(rest));
      tile -= index % 32 + 1;
    }
    return tile;
  }
  __device__ __forceinline__ bool is_mixed(int tile) const {
    const int index = tile - first;
    if (index < 0) return false;
    return index >= kCapacity || ((mixed[index / 32] >> (index % 32)) & 1);
  }

  // Fills the map, a lane a tile; returns the span without hidden tiles at its ends.
  template <typename Mask>
  __device__ __forceinline__ TileSpan scan(const AttentionParams& params, const Request& request,
                                           const KeyRange& range, const TileSpan& span, int lane) {
    const int ahead = max_of(Mask::first_key(request) - span.origin, 0) / kTileKV;
    const int begin = min_of(max_of(span.begin, ahead), span.end);
    const int count = min_of(span.end - begin, kCapacity);
    const bool is_past = begin + count < span.end;
    int low = begin > span.begin ? span.begin : begin + count;
    int high = is_past ? span.end : begin;
    for (int base = 0; base < count; base += 32) {
      const int tile = begin + base + lane;
      bool is_any = false, is_mixed = false;
      if (base + lane < count) {
        scan_tile<Mask>(params, request, range, span.origin + tile * kTileKV, is_any, is_mixed);
      }
      const uint32_t any_bits = ptx::warp_sum(is_any ? 1u << lane : 0u);
      const uint32_t mixed_bits = ptx::warp_sum(is_mixed ? 1u << lane : 0u);
      if (any_bits != 0) {
        low = min_of(low, begin + base + __ffs(static_cast<int>(any_bits)) - 1);
        high = max_of(high, begin + base + 32 - __clz(static_cast<int>(any_bits)));
      }
      if (lane == 0) {
        any[base / 32] = any_bits;
        mixed[base / 32] = mixed_bits;
      }
    }
    if (lane == 0) first = begin;
    return TileSpan{span.origin, low, max_of(low, high)};
  }

 private:
  static constexpr int kRowWords = ceil_div(kTileKV, 32);
  // So many loads of each lane are on their way.
  static constexpr int kBatch = 8;

  template <typename Mask>
  static __device__ __forceinline__ void scan_tile(const AttentionParams& params,
                                                   const Request& request, const KeyRange& range,
                                                   int key, bool& is_any, bool& is_mixed) {
    const int first = range.first_token, last = range.last_token;
    uint32_t some[kRowWords] = {}, all[kRowWords];
#pragma unroll
    for (int w = 0; w < kRowWords; ++w) all[w] = ~0u;
    if (Mask::template is_inside<kRowWords>(params, request, first, last, key)) {
#pragma unroll 1
      for (int token = first; token <= last; token += kBatch) {
        uint32_t bits[kBatch][kRowWords];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          Mask::template load<true>(bits[i], params, request, min_of(token + i, last), key);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) add_row(bits[i], some, all);
      }
    } else {
#pragma unroll 1
      for (int token = first; token <= last; ++token) {
        uint32_t bits[kRowWords];
        Mask::load(bits, params, request, token, key);
        add_row(bits, some, all);
      }
    }
#pragma unroll
    for (int w = 0; w < kRowWords; ++w) {
      const uint32_t exists = low_bits(min_of(request.kv_len - key, kTileKV) - 32 * w);
      is_any |= (some[w] & exists) != 0;
      is_mixed |= (all[w] & exists) != exists;
    }
  }
  static __device__ __forceinline__ void add_row(const uint32_t (&bits)[kRowWords],
                                                 uint32_t (&some)[kRowWords],
                                                 uint32_t (&all)[kRowWords]) {
#pragma unroll
    for (int w = 0; w < kRowWords; ++w) {
      some[w] |= bits[w];
      all[w] &= bits[w];
    }
  }
};

// What the rows of an item see of the keys of each stage, by tokens: a bit a key. Full once a tile,
// but filled only for tiles that hide keys.
template <int kTileQ, int kStages>
struct RowBits {
  alignas(16) Vector16 of[kStages][kTileQ];
  alignas(8) uint64_t full[kStages];
};
struct NoRowBits {
  uint32_t unused;
};

// Which of up to 128 keys a row sees: a bit each.
template <typename Mask, int kTileKV>
__device__ __forceinline__ Vector16 visible_keys(const AttentionParams& params,
                                                 const Request& request, int token, int first_key) {
  static_assert(kTileKV <= 128, "16 bytes hold the bits of a row");
  const KeyLimits limits = KeyLimits::of(params, request, request.position(params, token));
  constexpr int kWords = ceil_div(kTileKV, 32);
  uint32_t bits[kWords];
  Mask::load(bits, params, request, token, first_key);
  Vector16 visible{};
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int key = first_key + 32 * w;
    visible.word[w] = bits[w] & low_bits(limits.end - key) & ~low_bits(limits.begin - key);
  }
  return visible;
}

// Hides the logits of keys that rows do not see; `visible` has the bits of each token of a tile.
template <typename Form, int kMmaQ, int kTilesS>
__device__ __forceinline__ void hide_by_bits(float (&s)[kMmaQ][kTilesS][4], const RowInfo* rows,
                                             const Vector16* visible, int first_token, int lane) {
#pragma unroll
  for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = rows[16 * m + 8 * h + (lane >> 2)].token - first_token;
#pragma unroll
      for (int n = 0; n < kTilesS; ++n) {
        const uint32_t bits = visible[token].word[n / 4] >> (2 * (lane & 3));
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (!((bits >> (8 * (n % 4) + e)) & 1)) s[m][n][2 * h + e] = Form::hidden();
        }
      }
    }
  }
}

}  // namespace cupyattn
