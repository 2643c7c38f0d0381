// Which keys a row may see. This header is the only place that knows causality, windows and custom
// masks: `KeyLimits` for one token, `KeyRange` for all the tokens of a tile.
//
// Causality is aligned to the bottom right: row i of qo_len sees keys up to i + kv_len - qo_len.
// Where ranks share the keys (kKeyShare), all this holds of positions in the whole sequence, and
// the limits, counted in this rank's own keys, still rise with the position.
// A custom mask holds besides causality and window. It has one of four forms, Config::kMaskForm:
//   DenseMask      bit token * kv_len + key, little-endian, from the request's byte `mask_start` on
//   RowMask        a row of bits for each row of q, for the last qo_len keys, the query tokens: bit
//                  key - (kv_len - qo_len); all earlier keys are visible
//   MultiItemMask  a KeyInterval for each row of q; no bits, so sequences may be long
//   ExpressionMask a condition of the caller's (logits_expression.cuh)
#pragma once

#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/shared/key_share.cuh"
#include "cupyattn/shared/logits.cuh"
#include "cupyattn/shared/work.cuh"

namespace cupyattn {

// Keys [begin, end) that the token at `position` may see, custom mask aside.
struct KeyLimits {
  int begin, end;

  template <bool kKeyShare = false>
  static __device__ __forceinline__ KeyLimits of(const AttentionParams& params,
                                                 const Request& request, int position) {
    if constexpr (kKeyShare) return of_share(params, request, position);
    KeyLimits limits{0, request.kv_len};
    if (params.window_right >= 0) {
      // mutate: right-window-lost
      const int keys_to_the_right = min_of(request.kv_len - 1 - position, params.window_right);
      limits.end = position + 1 + keys_to_the_right;  // mutate: causality-off-by-one
    }
    // mutate: window-off-by-one
    if (params.window_left >= 0) limits.begin = max_of(0, position - params.window_left);
    return limits;
  }

 private:
  static __device__ __forceinline__ KeyLimits of_share(const AttentionParams& params,
                                                       const Request& request, int position) {
    const KeyShare share = KeyShare::of(params);
    KeyLimits limits{0, request.kv_len};
    if (params.window_right >= 0) {
      // Of a large window as many as do not overflow; this rank's keys end it.
      const int keys_to_the_right = min_of(params.window_right, 0x7ffffffe - max_of(position, 0));
      limits.end = min_of(share.count(position + 1 + keys_to_the_right), request.kv_len);
    }
    if (params.window_left >= 0) limits.begin = share.count(position - params.window_left);
    return limits;
  }
};

// The least and the greatest position of tokens [first, last]; a whole warp calls this. Rows that
// share a prefix belong to many requests, so their positions have no order.
struct PositionSpan {
  int low, high;

  template <bool kKeyShare, bool kMayHavePositions>
  static __device__ __forceinline__ PositionSpan of(const AttentionParams& params,
                                                    const Request& request, int first, int last) {
    if constexpr (kKeyShare) {
      return PositionSpan{request.position<true>(params, first),
                          request.position<true>(params, last)};
    }
    // mutate: positions-in-order
    if (!kMayHavePositions || params.positions == nullptr) {
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

  // kMayHavePositions: whether a level of a cascade may ask.
  template <bool kKeyShare = false, bool kMayHavePositions = true>
  static __device__ __forceinline__ KeyRange of(const AttentionParams& params,
                                                const BlockWork& work) {
    const int first_row = work.tile.first_row;
    const int last_row = first_row + work.tile.num_rows - 1;
    const int first = ptx::warp_uniform(PackGqaRow::of(params, first_row).token);
    const int last = ptx::warp_uniform(PackGqaRow::of(params, last_row).token);
    const PositionSpan span =
        PositionSpan::of<kKeyShare, kMayHavePositions>(params, work.request, first, last);
    const KeyLimits a = KeyLimits::of<kKeyShare>(params, work.request, span.low);
    const KeyLimits b = KeyLimits::of<kKeyShare>(params, work.request, span.high);
    // Tiles begin with the range, so no row has to hide the keys ahead of the first.
    const int first_key = ptx::warp_uniform(work.request.first_key<kKeyShare>(params));
    const int begin = max_of(a.begin, first_key), full_begin = max_of(b.begin, first_key);
    return KeyRange{begin, b.end, full_begin, a.end, first, last};  // mutate: union-for-intersection
  }

  // Whether some token of the tile does not see all of the `count` keys from `key` on.
  __device__ __forceinline__ bool cuts(int key, int count) const {
    return cuts_begin(key) || cuts_end(key, count);
  }
  // mutate: full-begin-off-by-one
  __device__ __forceinline__ bool cuts_begin(int key) const { return key < full_begin; }
  __device__ __forceinline__ bool cuts_end(int key, int count) const {
    return key + count > full_end;  // mutate: full-end-off-by-one
  }
};

// A block's share [begin, end) of the key tiles of its range. Tile t starts at key
// origin + t * keys_per_tile. The first tile starts with the range. Under a custom mask it starts
// at a multiple of keys_per_tile, so that tiles are the same for all rows.
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
                    // mutate: last-split-tile-lost
                    ptx::warp_uniform(static_cast<int>((product + count) / work.num_splits))};
  }

  // Starts the tiles ahead of a range that a window cuts, if that adds no tile and leaves the cuts
  // of each end in one tile. Otherwise causality often cuts two tiles.
  __device__ __forceinline__ void gather_cuts(const KeyRange& range, int keys_per_tile,
                                              int first_key) {
    const int count = ceil_div(max_of(range.end - range.begin, 0), keys_per_tile);
    const int ahead = range.begin + (count - 1) * keys_per_tile - range.full_end;
    const int spare = min_of(range.begin + count * keys_per_tile - range.end,
                             range.begin + keys_per_tile - range.full_begin);
    const int most = min_of(spare, range.begin - first_key);
    if (range.full_begin > range.begin && ahead > 0 && ahead <= most) {
      origin -= ahead;  // mutate: window-tiles-start-too-early
    }
  }
};

// The first tile of an item that the mask reaches.
template <typename Mask, int kTileKV>
__device__ __forceinline__ int first_masked_tile(const AttentionParams& params,
                                                 const Request& request, const TileSpan& span) {
  const int ahead = max_of(Mask::first_key(params, request) - span.origin, 0) / kTileKV;
  return min_of(max_of(span.begin, ahead), span.end);
}

// A word whose lowest `count` bits are 1: none if `count` is negative, all if it is large.
__device__ __forceinline__ uint32_t low_bits(int count) {
  return count >= 32 ? ~0u : (1u << max_of(count, 0)) - 1;
}

// A word of `mask` from bit `bit` of byte `byte` on; bits outside the buffer are 0.
__device__ __forceinline__ uint32_t load_word_at_edge(const AttentionParams& params, int64_t byte,
                                                      int bit) {
  uint64_t bytes = 0;
  // Rolled, because the case is rare and not worth registers.
#pragma unroll 1
  for (int i = 0; i < 5; ++i) {
    if (byte + i < 0 || byte + i >= params.mask_bytes) continue;
    bytes |= static_cast<uint64_t>(params.mask[byte + i]) << (8 * i);
  }
  return static_cast<uint32_t>(bytes >> bit);
}

// `kWords` words of `mask` from bit `bit` of byte `start` on; bits outside the buffer are 0.
template <int kWords>
__device__ __forceinline__ void load_bits(uint32_t (&bits)[kWords], const AttentionParams& params,
                                          int64_t start, int64_t bit) {
  const int64_t byte = start + (bit >> 3);
  if (byte >= 3 && byte + 4 * kWords + 4 <= params.mask_bytes) {
    const int ahead = static_cast<int>(reinterpret_cast<uintptr_t>(params.mask + byte) & 3);
    const uint32_t* from = reinterpret_cast<const uint32_t*>(params.mask + byte - ahead);
    uint32_t words[kWords + 1];
#pragma unroll
    for (int i = 0; i < kWords + 1; ++i) words[i] = from[i];
    // mutate: mask-rows-start-on-bytes
    const uint32_t shift = 8 * ahead + static_cast<uint32_t>(bit & 7);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      bits[i] = ptx::funnel_shift_right(words[i], words[i + 1], shift);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      bits[i] = load_word_at_edge(params, byte + 4 * i, static_cast<int>(bit & 7));
    }
  }
}

// A form of mask has two functions:
//   load       the keys that `token` sees from key `key` on; bits past the last key mean nothing.
//              An expression says it of one key (`sees`) or of 32 (`seen_of_word`) instead, and its
//              heads may differ (kReadsHeads)
//   first_key  the first key that some row may not see
// kOfRows: it is a RowMask. kKeyShare: ranks share the keys.
struct AnyMask {
  static constexpr bool kReadsHeads = false, kIsExpression = false;
  enum : bool { kExists = true, kOfRows = false, kKeyShare = false };

  static __device__ __forceinline__ int first_key(const AttentionParams&, const Request&) {
    return 0;
  }
};
struct DenseMask : AnyMask {
  template <int kWords>
  static __device__ __forceinline__ void load(uint32_t (&bits)[kWords],
                                              const AttentionParams& params, const Request& request,
                                              int token, int key) {
    load_bits(bits, params, request.mask_start, static_cast<int64_t>(token) * request.kv_len + key);
  }
};
struct RowMask : AnyMask {
  enum : bool { kOfRows = true };

  template <int kWords>
  static __device__ __forceinline__ void load(uint32_t (&bits)[kWords],
                                              const AttentionParams& params, const Request& request,
                                              int token, int key) {
    const int64_t row = static_cast<int64_t>(request.q_start) + token;
    // mutate: mask-row-of-token
    const int64_t bit = 8 * row * params.mask_row_bytes + (key - first_key(params, request));
    load_bits(bits, params, 0, bit);
    // Keys ahead of the mask are visible.
    const int ahead = first_key(params, request) - key;
#pragma unroll
    // mutate: keys-ahead-of-mask-hidden
    for (int i = 0; i < kWords; ++i) bits[i] |= low_bits(ahead - 32 * i);
  }
  static __device__ __forceinline__ int first_key(const AttentionParams&, const Request& request) {
    return request.kv_len - request.qo_len;  // mutate: row-mask-begins-late
  }
};
struct MultiItemMask : AnyMask {
  template <int kWords>
  static __device__ __forceinline__ void load(uint32_t (&bits)[kWords],
                                              const AttentionParams& params, const Request& request,
                                              int token, int key) {
    const auto* intervals = reinterpret_cast<const KeyInterval*>(params.mask);
    const KeyInterval hidden = intervals[request.q_start + token];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      // mutate: items-miss-prefix-end
      // mutate: items-see-delimiter
      bits[i] = low_bits(hidden.begin - key - 32 * i) | ~low_bits(hidden.end - key - 32 * i);
    }
  }
};
template <typename Expression>
struct ExpressionMask : AnyMask {
  static constexpr bool kReadsHeads = Expression::kReadsHeads, kIsExpression = true;

  // Which of 32 keys from `key` on a row sees.
  static __device__ __forceinline__ uint32_t seen_of_word(const AttentionParams& params,
                                                          const Request& request,
                                                          const RowInfo& row, int key) {
    const auto sees_key = test(params, request, row, key);
    uint32_t word = 0;
#pragma unroll 4
    for (int bit = 0; bit < 32; ++bit) word |= static_cast<uint32_t>(sees_key(bit)) << bit;
    return word;
  }
  static __device__ __forceinline__ bool sees(const AttentionParams& params, const Request& request,
                                              int token, int key, int head) {
    LogitAt at = LogitAt::of(params, request, token, request.position(params, token), head);
    at.kv_first = key;
    return Expression::sees(at);
  }
  // Whether `row` sees key `first_key` + offset, for any of its offsets.
  static __device__ __forceinline__ auto test(const AttentionParams& params,
                                              const Request& request, const RowInfo& row,
                                              int first_key) {
    LogitAt at = LogitAt::of(params, request, row.token, row.position, row.head);
    at.kv_first = first_key;
    return [=](int offset) { return Expression::sees(at.key(offset, 0.0f)); };
  }
};

// What the tokens [first, last] see of a tile of keys under an expression: some key, and all keys
// that exist. A whole warp calls this; each lane looks at keys of its own, so that what depends on
// a key alone is found once. `num_heads` heads from `first_head` on see the same if the mask reads
// no heads.
struct TileSight {
  bool some, all;

  template <typename Mask, int kTileKV>
  static __device__ __forceinline__ TileSight of(const AttentionParams& params,
                                                 const Request& request, int first, int last,
                                                 int key, int first_head, int num_heads) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int heads = Mask::kReadsHeads ? num_heads : 1;
    bool some = false, all = true;
#pragma unroll
    for (int w = 0; w < ceil_div(kTileKV, kWarpSize); ++w) {
      const int own = kWarpSize * w + lane;
      // Keys that do not exist are looked at too, because lanes that part cost more.
      const bool exists = own < kTileKV && key + own < request.kv_len;
#pragma unroll 4
      for (int token = first; token <= last; ++token) {
        for (int head = 0; head < heads; ++head) {  // mutate: tile-seen-by-first-head
          const bool sees = Mask::sees(params, request, token, key + own, first_head + head);
          some |= sees && exists;
          all &= sees || !exists;
        }
      }
    }
    return TileSight{ptx::warp_any(some), !ptx::warp_any(!all)};
  }
};
struct NoMask : AnyMask {
  enum : bool { kExists = false };
};

// The same masks where ranks share the keys. Bits of a DenseMask are of this rank's own keys; those
// of a RowMask are of the last qo_len tokens of the whole sequence, of which a rank holds some.
template <typename Mask>
struct OfKeyShare : Mask {
  enum : bool { kKeyShare = true };
};
template <>
struct OfKeyShare<RowMask> : AnyMask {
  enum : bool { kOfRows = true, kKeyShare = true };

  template <int kWords>
  static __device__ __forceinline__ void load(uint32_t (&bits)[kWords],
                                              const AttentionParams& params, const Request& request,
                                              int token, int key) {
    const KeyShare share = KeyShare::of(params);
    const int first = first_key(params, request), begin = first_token(request);
    const int64_t row = static_cast<int64_t>(request.q_start) + token;
    const int64_t row_byte = row * params.mask_row_bytes;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t word = low_bits(first - key - 32 * i);
      const int low = max_of(first - key - 32 * i, 0);
      const int high = min_of(request.kv_len - key - 32 * i, 32);
#pragma unroll 1
      for (int b = low; b < high; ++b) {
        const int bit = share.position(key + 32 * i + b) - begin;  // mutate: key-share-bits-of-own-keys
        const int64_t byte = row_byte + (bit >> 3);
        if (bit >= request.qo_len || byte >= params.mask_bytes) break;
        word |= ((static_cast<uint32_t>(params.mask[byte]) >> (bit & 7)) & 1u) << b;
      }
      bits[i] = word;
    }
  }
  static __device__ __forceinline__ int first_key(const AttentionParams& params,
                                                  const Request& request) {
    return KeyShare::of(params).count(first_token(request));
  }

 private:
  // The token of the whole sequence that the first bit of a row is of.
  static __device__ __forceinline__ int first_token(const Request& request) {
    return request.whole_len() - request.qo_len;
  }
};

// The bits of 64 keys, as one number.
template <typename Mask>
__device__ __forceinline__ uint64_t load_visible(const AttentionParams& params,
                                                 const Request& request, int token, int key) {
  uint32_t bits[2];
  Mask::load(bits, params, request, token, key);
  return (static_cast<uint64_t>(bits[1]) << 32) | bits[0];
}

template <int kForm, typename Expression>
using MaskOfForm =
    conditional<kForm == 0, DenseMask,
                conditional<kForm == 1, RowMask,
                            conditional<kForm == 2, MultiItemMask, ExpressionMask<Expression>>>>;

template <bool kKeyShare, typename Mask>
using OfShareIf = conditional<kKeyShare, OfKeyShare<Mask>, Mask>;

// The mask that a Config asks for.
template <typename Config>
using MaskOf = OfShareIf<
    HasKeyShare<Config>::kValue,
    conditional<Config::kCustomMask,
                MaskOfForm<Config::kMaskForm, typename Config::LogitsExpression>, NoMask>>;

// Sets the logits of hidden keys, in `Form`. The thread's accumulators are rows lane / 4 + 16 m
// (+ 8) of `rows`, keys first_key + 8 n + 2 (lane % 4) (+ 1). `is_hidden_for(row)` returns a test
// of an offset from the thread's first key, so that the inner loop compares with constants. Returns
// whether the thread has hidden one.
template <typename Form, int kMmaQ, int kTilesS, typename HiddenFor>
__device__ __forceinline__ bool hide_logits(float (&s)[kMmaQ][kTilesS][4], const RowInfo* rows,
                                            int lane, HiddenFor&& is_hidden_for) {
  bool any = false;
#pragma unroll
  for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto is_hidden = is_hidden_for(rows[16 * m + 8 * h + (lane >> 2)]);
#pragma unroll
      for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool hides = is_hidden(8 * n + e);
          if (hides) s[m][n][2 * h + e] = Form::hidden();
          any |= hides;
        }
      }
    }
  }
  return any;
}

// Hides the logits of keys that rows do not see. Returns whether the thread has hidden one.
template <typename Mask, typename Form, int kMmaQ, int kTilesS>
__device__ __forceinline__ bool apply_mask(float (&s)[kMmaQ][kTilesS][4],
                                           const AttentionParams& params, const Request& request,
                                           const KeyRange& range, bool is_partial,
                                           const RowInfo* rows, int first_key, int lane) {
  const int first = first_key + 2 * (lane & 3);
  bool any = false;
  if (range.cuts_end(first_key, 8 * kTilesS)) {
    any |= hide_logits<Form>(s, rows, lane, [&](const RowInfo& row) {
      const int end = KeyLimits::of<Mask::kKeyShare>(params, request, row.position).end - first;
      return [=](int offset) { return offset >= end; };
    });
  }
  if (range.cuts_begin(first_key)) {
    any |= hide_logits<Form>(s, rows, lane, [&](const RowInfo& row) {
      const int begin = KeyLimits::of<Mask::kKeyShare>(params, request, row.position).begin - first;
      return [=](int offset) { return offset < begin; };
    });
  }
  if constexpr (Mask::kIsExpression) {
    if (!is_partial) return any;
    any |= hide_logits<Form>(s, rows, lane, [&](const RowInfo& row) {
      const auto sees = Mask::test(params, request, row, first);  // mutate: expression-mask-of-lane-0
      return [=](int offset) { return !sees(offset); };
    });
  } else if constexpr (Mask::kExists) {
    static_assert(kTilesS <= 8, "64 bits hold what a row sees of a tile");
    if (!is_partial) return any;
    any |= hide_logits<Form>(s, rows, lane, [&](const RowInfo& row) {
      const uint64_t bits =
          // mutate: mask-bits-of-another-key
          load_visible<Mask>(params, request, row.token, first_key) >> (2 * (lane & 3));
      return [=](int offset) { return !((bits >> offset) & 1); };
    });
  }
  return any;
}

// Which key tiles of a block's range have a visible key under a custom mask, and which also have a
// hidden one. Found once, at the start. Tiles beyond the capacity count as partial.
template <int kTileKV>
struct MaskTileMap {
  static constexpr int kCapacity = 4096;
  static constexpr int kWords = kCapacity / 32;
  int first;  // the first tile that the mask reaches; earlier tiles hide nothing
  uint32_t any[kWords];
  uint32_t partial[kWords];

  // All threads of the block take part; the caller synchronises before and after.
  __device__ __forceinline__ void clear(int thread, int threads) {
    for (int i = thread; i < kWords; i += threads) any[i] = partial[i] = 0;
  }
  template <typename Mask>
  __device__ __forceinline__ void scan(const AttentionParams& params, const BlockWork& work,
                                       int first_token, int last_token, TileSpan span, int thread,
                                       int threads) {
    static_assert(kTileKV <= 64, "64 bits hold what a row sees of a tile");
    const Request& request = work.request;
    const int ahead = max_of(Mask::first_key(params, request) - span.origin, 0);
    // mutate: mask-map-one-tile-late
    const int first_tile = min_of(max_of(span.begin, ahead / kTileKV), span.end);
    if (thread == 0) first = first_tile;
    const int tiles = min_of(span.end - first_tile, kCapacity);
    if constexpr (Mask::kIsExpression) {
      const int first_head = work.tile.kv_head * params.group_size;
      for (int tile = thread / kWarpSize; tile < tiles; tile += threads / kWarpSize) {
        const int key = span.origin + (first_tile + tile) * kTileKV;
        const TileSight sight = TileSight::of<Mask, kTileKV>(
            params, request, first_token, last_token, key, first_head, params.group_size);
        if (thread % kWarpSize != 0) continue;
        const uint32_t bit = 1u << (tile % 32);
        const bool is_whole = sight.all && key + kTileKV <= request.kv_len;
        if (sight.some) ptx::atomic_or_shared(&any[tile / 32], bit);
        if (!is_whole) ptx::atomic_or_shared(&partial[tile / 32], bit);
      }
    } else {
      scan_bits<Mask>(params, request, first_token, last_token, span, first_tile, tiles, thread,
                      threads);
    }
  }
  template <typename Mask>
  __device__ __forceinline__ void scan_bits(const AttentionParams& params, const Request& request,
                                            int first_token, int last_token, TileSpan span,
                                            int first_tile, int tiles, int thread, int threads) {
    constexpr uint64_t kAll = ~0ull >> (64 - kTileKV);
    const int64_t total = static_cast<int64_t>(tiles) * (last_token - first_token + 1);
    for (int64_t i = thread; i < total; i += threads) {
      const int tile = static_cast<int>(i % tiles);
      const int token = first_token + static_cast<int>(i / tiles);
      const int key = span.origin + (first_tile + tile) * kTileKV;
      uint64_t visible = load_visible<Mask>(params, request, token, key) & kAll;
      if (key + kTileKV > request.kv_len) visible &= (1ull << (request.kv_len - key)) - 1;
      if (visible != 0) ptx::atomic_or_shared(&any[tile / 32], 1u << (tile % 32));
      // mutate: mixed-tile-counts-as-full
      if (visible != kAll) ptx::atomic_or_shared(&partial[tile / 32], 1u << (tile % 32));
    }
  }
  // The first tile from `tile` on that is worth visiting, or span.end.
  __device__ __forceinline__ int next(int tile, TileSpan span) const {
    if (tile < first) return tile;  // mutate: tiles-ahead-of-mask-skipped
    while (tile < span.end && tile - first < kCapacity) {
      const int index = tile - first;
      const uint32_t rest = any[index / 32] >> (index % 32);
      if (rest != 0) return min_of(tile + __ffs(static_cast<int>(rest)) - 1, span.end);
      tile += 32 - index % 32;  // mutate: empty-tile-walk-too-far
    }
    return min_of(tile, span.end);
  }
  __device__ __forceinline__ bool is_partial(int tile) const {
    const int index = tile - first;
    if (index < 0) return false;
    return index >= kCapacity || ((partial[index / 32] >> (index % 32)) & 1);
  }
};

}  // namespace cupyattn
