// Which keys a row may see. This header is the only place that knows causality, windows and custom
// masks: `KeyLimits` for one token, `KeyRange` for all the tokens of a tile.
//
// Causality is aligned to the bottom right: row i of qo_len sees keys up to i + kv_len - qo_len.
// A custom mask replaces causality; a window is applied to either.
#pragma once

#include "cupyattn/attention/variants.cuh"
#include "cupyattn/attention/work.cuh"
#include "cupyattn/common/math.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/params/attention.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

// Keys [begin, end) that the token at `position` may see, custom mask aside.
struct KeyLimits {
  int begin, end;

  template <bool kCustomMask>
  static __device__ __forceinline__ KeyLimits of(const AttentionParams& params,
                                                 const Request& request, int position) {
    KeyLimits limits{0, request.kv_len};
    if (!kCustomMask && params.causal) limits.end = min_of(request.kv_len, position + 1);
    if (params.window_left >= 0) limits.begin = max_of(0, position - params.window_left);
    return limits;
  }
};

// The least and the greatest position of tokens [first, last]; the whole warp asks. Rows that share
// a prefix are of many requests, and their positions in no order.
struct PositionSpan {
  int low, high;

  static __device__ __forceinline__ PositionSpan of(const AttentionParams& params,
                                                    const Request& request, int first, int last) {
    if (params.positions == nullptr) {
      return PositionSpan{request.position(params, first), request.position(params, last)};
    }
    int low = 0x7fffffff, high = -low;
    for (int token = first + static_cast<int>(threadIdx.x) % kWarpSize; token <= last;
         token += kWarpSize) {
      const int position = request.position(params, token);
      low = min_of(low, position);
      high = max_of(high, position);
    }
    return PositionSpan{ptx::warp_min(low), ptx::warp_max(high)};
  }
};

// The union [begin, end) of the limits of a tile's tokens, and their intersection [full_begin,
// full_end): a block of keys inside the intersection needs no mask.
struct KeyRange {
  int begin, end, full_begin, full_end;
  int first_token, last_token;

  template <bool kCustomMask>
  static __device__ __forceinline__ KeyRange of(const AttentionParams& params,
                                                const BlockWork& work) {
    const int first_row = work.tile.first_row;
    const int last_row = first_row + work.tile.num_rows - 1;
    const int first = ptx::warp_uniform(PackedRow::of(params, first_row).token);
    const int last = ptx::warp_uniform(PackedRow::of(params, last_row).token);
    const PositionSpan span = PositionSpan::of(params, work.request, first, last);
    const KeyLimits a = KeyLimits::of<kCustomMask>(params, work.request, span.low);
    const KeyLimits b = KeyLimits::of<kCustomMask>(params, work.request, span.high);
    return KeyRange{a.begin, b.end, b.begin, a.end, first, last};
  }

  // Whether some token of the tile does not see all keys of a block of `count`.
  __device__ __forceinline__ bool cuts(int key, int count) const {
    return cuts_begin(key) || cuts_end(key, count);
  }
  __device__ __forceinline__ bool cuts_begin(int key) const { return key < full_begin; }
  __device__ __forceinline__ bool cuts_end(int key, int count) const {
    return key + count > full_end;
  }
};

// The share of a block in the key tiles of its range: tiles [begin, end), split evenly. Tile t is
// keys origin + t * keys_per_tile and on. The first tile starts where the range does, but for
// custom masks, whose tiles are the same for all rows.
struct TileSpan {
  int origin, begin, end;

  template <bool kCustomMask>
  static __device__ __forceinline__ TileSpan of(const KeyRange& range, int keys_per_tile,
                                                const TileWork& work) {
    const int origin = kCustomMask ? range.begin / keys_per_tile * keys_per_tile : range.begin;
    const int count = ceil_div(max_of(range.end - origin, 0), keys_per_tile);
    if (work.num_splits == 1) return TileSpan{origin, 0, count};
    const int64_t product = static_cast<int64_t>(count) * work.split;
    return TileSpan{origin, ptx::warp_uniform(static_cast<int>(product / work.num_splits)),
                    ptx::warp_uniform(static_cast<int>((product + count) / work.num_splits))};
  }
};

// 64 bits of the mask row of `token` from key `key` on. Bits past the end of the buffer are 0.
__device__ __forceinline__ uint64_t load_mask_bits(const AttentionParams& params,
                                                   const Request& request, int token, int key) {
  const int64_t bit = static_cast<int64_t>(token) * request.kv_len + key;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(params.mask);
  const uintptr_t end = begin + params.mask_bytes;
  const uintptr_t address = begin + request.mask_start + (bit >> 3);
  const uintptr_t first_word = address & ~static_cast<uintptr_t>(3);
  const uint32_t shift = static_cast<uint32_t>(address & 3) * 8 + static_cast<uint32_t>(bit & 7);
  uint32_t words[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const uintptr_t word = first_word + 4 * i;
    if (word >= begin && word + 4 <= end) {
      words[i] = *reinterpret_cast<const uint32_t*>(word);
    } else {
      words[i] = 0;
      for (int byte = 0; byte < 4; ++byte) {
        if (word + byte >= begin && word + byte < end) {
          words[i] |= static_cast<uint32_t>(*reinterpret_cast<const uint8_t*>(word + byte))
                      << (8 * byte);
        }
      }
    }
  }
  const uint32_t low = ptx::funnel_shift_right(words[0], words[1], shift);
  const uint32_t high = ptx::funnel_shift_right(words[1], words[2], shift);
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Sets the logits of hidden keys, which come in `Form`. The thread's accumulators are rows lane / 4
// + 16 m (+ 8) of `rows`, keys first_key + 8 n + 2 (lane % 4) (+ 1). `is_hidden_for(row)` gives a
// test of an offset from the thread's first key, so that the inner loop compares with constants.
template <typename Form, int kMmaQ, int kTilesS, typename HiddenFor>
__device__ __forceinline__ void hide_logits(float (&s)[kMmaQ][kTilesS][4], const RowInfo* rows,
                                            int lane, HiddenFor&& is_hidden_for) {
#pragma unroll
  for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto is_hidden = is_hidden_for(rows[16 * m + 8 * h + (lane >> 2)]);
#pragma unroll
      for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (is_hidden(8 * n + e)) s[m][n][2 * h + e] = Form::hidden();
        }
      }
    }
  }
}

// Hides the logits of invisible keys.
template <bool kCustomMask, typename Form, int kMmaQ, int kTilesS>
__device__ __forceinline__ void apply_mask(float (&s)[kMmaQ][kTilesS][4],
                                           const AttentionParams& params, const Request& request,
                                           const KeyRange& range, bool is_partial,
                                           const RowInfo* rows, int first_key, int lane) {
  static_assert(kTilesS <= 8, "load_mask_bits yields 64 keys");
  const int first = first_key + 2 * (lane & 3);
  if (range.cuts_end(first_key, 8 * kTilesS)) {
    hide_logits<Form>(s, rows, lane, [&](const RowInfo& row) {
      const int end = KeyLimits::of<kCustomMask>(params, request, row.position).end - first;
      return [=](int offset) { return offset >= end; };
    });
  }
  if (range.cuts_begin(first_key)) {
    hide_logits<Form>(s, rows, lane, [&](const RowInfo& row) {
      const int begin = KeyLimits::of<kCustomMask>(params, request, row.position).begin - first;
      return [=](int offset) { return offset < begin; };
    });
  }
  if (kCustomMask && is_partial) {
    hide_logits<Form>(s, rows, lane, [&](const RowInfo& row) {
      const uint64_t bits =
          load_mask_bits(params, request, row.token, first_key) >> (2 * (lane & 3));
      return [=](int offset) { return !((bits >> offset) & 1); };
    });
  }
}

// For a custom mask: which key tiles of a block's range hold any visible key, and which hold only
// visible keys, found once at the start. Tiles past the capacity count as mixed.
template <int kTileKV>
struct MaskTileMap {
  static constexpr int kCapacity = 4096;
  static constexpr int kWords = kCapacity / 32;
  uint32_t any[kWords];
  uint32_t partial[kWords];

  // Every thread of the block takes part; the caller synchronises before and after.
  __device__ __forceinline__ void clear(int thread, int threads) {
    for (int i = thread; i < kWords; i += threads) any[i] = partial[i] = 0;
  }
  __device__ __forceinline__ void scan(const AttentionParams& params, const Request& request,
                                       int first_token, int last_token, TileSpan span, int thread,
                                       int threads) {
    static_assert(kTileKV <= 64, "a tile's keys must fit load_mask_bits");
    constexpr uint64_t kAll = ~0ull >> (64 - kTileKV);
    const int tiles = min_of(span.end - span.begin, kCapacity);
    const int64_t total = static_cast<int64_t>(tiles) * (last_token - first_token + 1);
    for (int64_t i = thread; i < total; i += threads) {
      const int tile = static_cast<int>(i % tiles);
      const int token = first_token + static_cast<int>(i / tiles);
      const int key = span.origin + (span.begin + tile) * kTileKV;
      uint64_t visible = load_mask_bits(params, request, token, key) & kAll;
      if (key + kTileKV > request.kv_len) visible &= (1ull << (request.kv_len - key)) - 1;
      if (visible != 0) ptx::atomic_or_shared(&any[tile / 32], 1u << (tile % 32));
      if (visible != kAll) ptx::atomic_or_shared(&partial[tile / 32], 1u << (tile % 32));
    }
  }
  // The first tile from `tile` on that is worth visiting, or span.end.
  __device__ __forceinline__ int next(int tile, TileSpan span) const {
    while (tile < span.end && tile - span.begin < kCapacity) {
      const int index = tile - span.begin;
      const uint32_t rest = any[index / 32] >> (index % 32);
      if (rest != 0) return min_of(tile + __ffs(static_cast<int>(rest)) - 1, span.end);
      tile += 32 - index % 32;
    }
    return min_of(tile, span.end);
  }
  __device__ __forceinline__ bool is_partial(int tile, TileSpan span) const {
    const int index = tile - span.begin;
    return index >= kCapacity || ((partial[index / 32] >> (index % 32)) & 1);
  }
};

struct NoMaskTileMap {
  uint32_t unused;
};

}  // namespace cupyattn
