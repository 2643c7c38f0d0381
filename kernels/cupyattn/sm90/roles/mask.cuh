// Masks of prefill_sm90. scan_mask has found which key tiles of an item have visible keys, and
// which have hidden ones. For the latter, warps that load or sweep write what each row sees to
// shared memory, as bits, ahead of the logits.
#pragma once

#include "cupyattn/params/prefill_sm90.cuh"
#include "cupyattn/shared/mask.cuh"
#include "cupyattn/sm90/roles/ring.cuh"

namespace cupyattn {

// The number of a key tile, and what hides its keys from rows: nothing; causality, windows and the
// end of the keys alone; a custom mask.
struct KeyTile {
  enum HiddenBy : int { kNothing, kLimits, kMask };
  int tile;
  int needs_mask;
};

// Which keys of its request a row sees of half a tile of a union: of its list, or of its window.
struct SeenOfHalf {
  int begin, end;

  // seen: keys that the row sees of the request.
  static __device__ __forceinline__ SeenOfHalf of(const CutUnionTile& tile, int half, int seen,
                                                  int window) {
    const int begin = tile.begin[half], listed_end = seen - window;
    // mutate: union-windows-as-lists
    return begin < 0 ? SeenOfHalf{max_of(~begin, listed_end), seen} : SeenOfHalf{begin, listed_end};
  }
  static __device__ __forceinline__ SeenOfHalf of(const UnionTile&, int, int seen, int) {
    return SeenOfHalf{0, seen};
  }
};

// A key tile of a union, and which of a thread's keys each of its two rows sees: a bit for each. Under
// kLimits the warp's rows see some keys, and under kMask none.
struct UnionKeyTile : KeyTile {
  uint32_t seen[2];
};

// The tiles that the stages of K hold, where items have unions of lists for keys.
template <typename Tile, int kStages, int kTileQ>
struct UnionTiles {
  Tile of[kStages];
  float row_max[kTileQ];  // of rows that are made again (sm90/prefill/union_rows.cuh)
};

// Without a custom mask every tile of an item has visible keys.
template <int kTileKV>
struct AllKeyTiles {
  // From the last tile down.
  struct Walk {
    int tile, first_key, full_begin, full_end;

    template <typename Item>
    __device__ __forceinline__ explicit Walk(const Item& item)
        : tile(item.tiles.end - 1),
          first_key(item.first_key(tile)),
          full_begin(item.range.full_begin),
          full_end(item.range.full_end) {}
    __device__ __forceinline__ bool needs_mask() const {
      return first_key < full_begin || first_key + kTileKV > full_end;
    }
    __device__ __forceinline__ void advance() {
      --tile;
      first_key -= kTileKV;
    }
  };
};

// The key tiles of an item under a custom mask, from `first` on. The mask does not reach earlier
// tiles. In tiles that are not mixed, only causality and windows hide keys. Tiles beyond the
// capacity count as mixed.
template <int kTileKV>
struct KeyTileMap {
  int first;
  MaskMap found;

  // From the last tile down, without those in which no row sees a key. The words are kept, because
  // loading warps have no time to look them up for each tile.
  struct Walk {
    const KeyTileMap& map;
    const KeyRange& range;
    const TileSpan& span;
    int tile;
    uint32_t any = 0, mixed = 0;

    template <typename Item>
    __device__ __forceinline__ explicit Walk(const Item& item)
        : map(item), range(item.range), span(item.tiles), tile(item.tiles.end - 1) {
      load(tile - map.first);
    }
    __device__ __forceinline__ int needs_mask() const {
      const int index = tile - map.first;
      if (index >= MaskMap::kCapacity) return KeyTile::kMask;
      if (index >= 0 && ((mixed >> (index % 32)) & 1)) return KeyTile::kMask;
      const bool is_cut = range.cuts(span.origin + tile * kTileKV, kTileKV);
      return is_cut ? KeyTile::kLimits : KeyTile::kNothing;
    }
    // The new tile may lie below all tiles.
    __device__ __forceinline__ void advance() {
      int index = --tile - map.first;
      if (index < 0 || index >= MaskMap::kCapacity) return;
      if (index % 32 == 31) load(index);
      for (;;) {
        const uint32_t rest = any << (31 - index % 32);
        if (rest != 0) {
          tile -= __clz(static_cast<int>(rest));  // mutate: hidden-tiles-skip-too-far
          return;
        }
        tile -= index % 32 + 1;
        index = tile - map.first;
        if (index < 0) return;
        load(index);
      }
    }

   private:
    __device__ __forceinline__ void load(int index) {
      if (index < 0 || index >= MaskMap::kCapacity) return;
      any = map.found.any[index / 32];
      mixed = map.found.mixed[index / 32];
    }
  };

  // Copies what scan_mask has found, by one warp; returns the span without hidden tiles at its
  // ends.
  template <typename Mask>
  __device__ __forceinline__ TileSpan take(const MaskMap& map, const AttentionParams& params,
                                           const Request& request, const TileSpan& span,
                                           int lane) {
    const int begin = first_masked_tile<Mask, kTileKV>(params, request, span);
    const int count = min_of(span.end - begin, MaskMap::kCapacity);
    int low = begin > span.begin ? span.begin : begin + count;
    int high = begin + count < span.end ? span.end : begin;
#pragma unroll 1
    for (int word = lane; word < ceil_div(count, 32); word += kWarpSize) {
      const uint32_t any = map.any[word];
      found.any[word] = any;
      found.mixed[word] = map.mixed[word];
      if (any == 0) continue;
      low = min_of(low, begin + 32 * word + __ffs(static_cast<int>(any)) - 1);
      high = max_of(high, begin + 32 * word + 32 - __clz(static_cast<int>(any)));
    }
    if (lane == 0) first = begin;
    low = ptx::warp_min(low);
    return TileSpan{span.origin, low, max_of(low, ptx::warp_max(high))};
  }
};

// A bit for each key of a tile.
template <int kTileKV>
struct KeyBits {
  static constexpr int kWords = ceil_div(kTileKV, 32);
  uint32_t word[kWords];
};

// Which keys of each stage of V the tokens of an item see, or its rows if heads of a token see
// different keys. `full` completes once a tile, but the
// bits are only written for tiles that need masking. `tiles` names the tile that each stage of K
// holds, because consumers have no time to look it up.
template <int kTileQ, int kTileKV, int kStages>
struct RowBits {
  KeyBits<kTileKV> of[kStages][kTileQ];
  KeyTile tiles[kStages];
  alignas(8) uint64_t full[kStages];

  // Fills a stage that is free; `num_threads` threads take part, in whole warps. Consumers wait
  // only for tiles that hide keys, so the end of the last phase is awaited here.
  template <typename Mask, typename Item>
  __device__ __forceinline__ void fill(const PipelineState<kStages>& place,
                                       const AttentionParams& params, const Item& item,
                                       const KeyTile& tile, int thread, int num_threads) {
    ptx::mbarrier_wait_parity(ptx::shared_address(&full[place.stage]), place.parity ^ 1);
    if (tile.needs_mask != KeyTile::kNothing) {
      KeyBits<kTileKV>(&rows)[kTileQ] = of[place.stage];
      if constexpr (Mask::kIsExpression) {
        evaluate<Mask>(rows, params, item, tile, thread, num_threads);
      } else {
        load<Mask>(rows, params, item, tile, thread, num_threads);
      }
    }
    ptx::warp_sync();
    if (thread % kWarpSize == 0) ptx::mbarrier_arrive(ptx::shared_address(&full[place.stage]));
  }

 private:
  // What a thread sees of a token's keys from `key` on, of the bits of a word.
  static __device__ __forceinline__ uint32_t within(uint32_t bits, const KeyLimits& limits,
                                                    int key) {
    return bits & low_bits(limits.end - key) & ~low_bits(limits.begin - key);
  }

  template <typename Mask, typename Item>
  static __device__ __forceinline__ void load(KeyBits<kTileKV> (&rows)[kTileQ],
                                              const AttentionParams& params, const Item& item,
                                              const KeyTile& tile, int thread, int num_threads) {
    const int first_key = item.first_key(tile.tile);
    const Request& request = item.work.request;
#pragma unroll 1
    for (int token = item.range.first_token + thread; token <= item.range.last_token;
         token += num_threads) {
      KeyBits<kTileKV> bits;
      Mask::load(bits.word, params, request, token, first_key);
      const KeyLimits limits = KeyLimits::of<Mask::kKeyShare>(
          params, request, request.position<Mask::kKeyShare>(params, token));
#pragma unroll
      for (int w = 0; w < KeyBits<kTileKV>::kWords; ++w) {
        rows[token - item.range.first_token].word[w] =
            within(bits.word[w], limits, first_key + 32 * w);
      }
    }
  }

  // Threads share rows, or the words of rows if there are more threads. Neighbours have the same
  // keys, of tokens in a row.
  template <typename Mask, typename Item>
  static __device__ __forceinline__ void evaluate(KeyBits<kTileKV> (&rows)[kTileQ],
                                                  const AttentionParams& params, const Item& item,
                                                  const KeyTile& tile, int thread,
                                                  int num_threads) {
    constexpr int kWords = KeyBits<kTileKV>::kWords;
    const TileWork& work = item.work.tile;
    const Request& request = item.work.request;
    const int first_key = item.first_key(tile.tile);
    const int num_rows =
        Mask::kReadsHeads ? work.num_rows : item.range.last_token - item.range.first_token + 1;
    const int num_shares = min_of(kWords, max_of(num_threads / num_rows, 1));
#pragma unroll 1
    for (int index = thread; index < num_shares * num_rows; index += num_threads) {
      const int share = index / num_rows, r = index - share * num_rows;
      int token = item.range.first_token + r, head = 0;
      if constexpr (Mask::kReadsHeads) {
        const PackGqaRow row = PackGqaRow::of(params, work.first_row + r);
        token = row.token;
        head = work.kv_head * params.group_size + row.group_head;
      }
      const int position = request.position(params, token);
      const KeyLimits limits = KeyLimits::of(params, request, position);
      const RowInfo row{token, position, head, 1.0f, 0.0f};
#pragma unroll 1
      for (int w = share; w < kWords; w += num_shares) {
        const int key = first_key + 32 * w;
        uint32_t bits = ~0u;
        if (tile.needs_mask == KeyTile::kMask) {
          bits = Mask::seen_of_word(params, request, row, key);
        }
        rows[r].word[w] = within(bits, limits, key);
      }
    }
  }
};

// Hides the logits of keys that a row does not see, in half h of a thread's part of a tile.
template <typename Form, int kTileKV, int kTilesS>
__device__ __forceinline__ void mask_by_bits(float (&s)[kTilesS][4], int h,
                                             const KeyBits<kTileKV>& visible, int lane) {
  static_assert(kTileKV == 8 * kTilesS, "bits are of the tile's keys");
#pragma unroll
  for (int n = 0; n < kTilesS; ++n) {
    const uint32_t bits = visible.word[n / 4] >> (2 * (lane & 3));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (!((bits >> (8 * (n % 4) + e)) & 1)) s[n][2 * h + e] = Form::hidden();
    }
  }
}

// How many of a thread's keys of a row lie less than `offset` behind its first key. They come in
// pairs, eight apart.
__device__ __forceinline__ int own_keys_before(int offset) {
  return 2 * (offset >> 3) + min_of(offset & 7, 2);  // mutate: second-key-hidden-late
}

// Hides the keys of row h of a thread that `seen` has no bit for.
template <typename Form, int kTilesS>
__device__ __forceinline__ void mask_by_seen(float (&s)[kTilesS][4], int h, uint32_t seen) {
  static_assert(kTilesS <= 16, "a thread's keys of a row are bits of a word");
#pragma unroll
  for (int i = 0; i < 2 * kTilesS; ++i) {
    if (!((seen >> i) & 1)) s[i / 2][2 * h + i % 2] = Form::hidden();
  }
}

// Hides the keys outside [begin, end) of row h of a thread, counted from the tile's first key, in a
// thread's part of 128 keys from n-tile kFirst on. They are bits of a word: one instruction turns
// seven bits into predicates; comparisons take an instruction for each key.
template <typename Form, int kFirst, int kTilesS>
__device__ __forceinline__ void mask_word_by_limits(float (&s)[kTilesS][4], int h, int begin,
                                                    int end, int lane) {
  constexpr int kTiles = kTilesS - kFirst < 16 ? kTilesS - kFirst : 16;
  const int first = 2 * (lane & 3);
  const uint32_t visible =
      low_bits(own_keys_before(end - first)) & ~low_bits(own_keys_before(begin - first));
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    if (!((visible >> i) & 1)) s[kFirst + i / 2][2 * h + i % 2] = Form::hidden();
  }
}
template <typename Form, int kTilesS>
__device__ __forceinline__ void mask_by_limits(float (&s)[kTilesS][4], int h, int begin, int end,
                                               int lane) {
  static_assert(kTilesS <= 32, "a thread's keys of a row are bits of two words");
  mask_word_by_limits<Form, 0>(s, h, begin, end, lane);
  if constexpr (kTilesS > 16) mask_word_by_limits<Form, 16>(s, h, begin - 128, end - 128, lane);
}

}  // namespace cupyattn
