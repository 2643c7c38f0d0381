// Softmax of a consumer warp of prefill_sm90: turns the logits of one key tile after another into
// probabilities, with masks, soft cap and the running maximum. It issues no product and owns no
// stage.
#pragma once

#include "cupyattn/shared/hidden_values.cuh"
#include "cupyattn/shared/key_rows.cuh"
#include "cupyattn/sm90/roles/byte_softmax.cuh"
#include "cupyattn/sm90/roles/rows.cuh"

namespace cupyattn {

template <typename Traits>
struct PrefillSm90Softmax : conditional<Traits::kSkipsTiles, SkippedTiles, NoSkippedTiles> {
  using LogitsVariant = typename Traits::LogitsVariant;
  using Item = typename Traits::Item;
  using Rows = PrefillSm90Rows<Traits>;
  static constexpr int kTileKV = Traits::kTileKV;
  using Mask = typename Traits::Mask;
  using SeenTile = typename Traits::SeenTile;
  static constexpr bool kOverlap = Traits::kOverlap, kHasFastPath = LogitsVariant::kHasFastPath;
  static constexpr bool kHasFirstMax = LogitsVariant::kHasFirstMax;
  // Tiles of many columns have no registers for a second copy. A block of one item is to have few
  // instructions, which it fetches once.
  static constexpr bool kRaisesInLoop =
      Traits::kMultipliesBytes || Traits::kServesOneItem ||
      (kOverlap && Traits::kTileQ == 128 && Traits::kHeadDimQK > 128);
  using DTypeP = typename Traits::DTypeP;
  static constexpr int kSteps = kTileKV / MmaTraits<DTypeP, typename Traits::VTile::T>::kStep;
  using Logits = float[1][kTileKV / 8][4];
  using Online =
      conditional<Traits::kMultipliesBytes, ByteSoftmax<LogitsVariant::kTileSumBits>,
                  OnlineSoftmax<1, LogitsVariant::kTileSumBits>>;
  using VStage = PipelineState<Traits::kValueStages>;

  // Probabilities of one key tile, and the factors by which O must be rescaled before P V is added.
  struct Probabilities {
    uint32_t p[kSteps][1][4];
    float factors[1][2];
    bool raised;
    int masked_key;  // the tile's first key, or -1 where the tile needs no mask
  };

  const Rows rows;
  const AttentionParams& params;
  typename Traits::SharedMemory& shared;
  Online online;
  // The logits of 128 keys beside two more warpgroups leave no registers for the positions, nor do
  // three more warpgroups.
  static constexpr bool kKeepsPositions =
      (Traits::kTileQ < 192 && !Traits::kMultipliesBytes) ||
      (Traits::kTileQ == 192 && kTileKV < 128 && !Traits::kSkipsTiles);
  int position[2];  // of the thread's rows, if they are kept and `shared.rows` does not hold them
  // What hides keys of the item. Where O takes twice the registers, or three warpgroups also weigh
  // tiles, it is read where the item is.
  static constexpr bool kKeepsLimits =
      !Traits::kMultipliesBytes && !(Traits::kSkipsTiles && Traits::kTileQ == 192);
  struct Limits {
    int origin, full_begin, full_end;
  };
  Limits kept_limits;
  int place;
  // The last tile that takes the fast path; kNone after a tile of the item has failed on it.
  static constexpr int kNone = 1 << 30;
  int fast_until;
  typename LogitsVariant::Kept kept;

  template <typename Block>
  __device__ __forceinline__ PrefillSm90Softmax(const Block& block, int group)
      : rows{block.params, block.shared, group},
        params(block.params),
        shared(block.shared),
        kept(LogitsVariant::keep(shared.logits)) {}

  __device__ __forceinline__ void begin_item(const Item& item) {
    begin_limits(item);
    begin_rows(item);
  }
  // Takes over what hides keys of an item.
  // item_place: where `shared` has the item.
  __device__ __forceinline__ void begin_limits(const Item& item, int item_place = 0) {
    if constexpr (kKeepsLimits) {
      kept_limits = Limits{ptx::warp_uniform(item.tiles.origin),
                           ptx::warp_uniform(item.range.full_begin),
                           ptx::warp_uniform(item.range.full_end)};
    } else {
      place = item_place;
    }
    fast_until = 0;
    if constexpr (kKeepsPositions) {
#pragma unroll
      for (int h = 0; h < 2; ++h) position[h] = position_of(item, h);
    }
    if constexpr (LogitsVariant::kReadsRows && !LogitsVariant::kFoldsScales) rows.describe(item);
  }
  // Begins the sums of an item's rows. Those of the item before are needed until it is finished.
  __device__ __forceinline__ void begin_rows(const Item& item) {
    float first_max = -ptx::infinity();
    if constexpr (kHasFirstMax) {
      // Rows of a single tile take their own maximum, whose probability is 1 and not rounded.
      if (item.tiles.end - item.tiles.begin > 1) {
        first_max = LogitsVariant::first_max(shared.logits.cap);
      }
    }
    online = Online(first_max);
  }

  // Whether a tile that needs no mask weighs something in a row of this warp.
  __device__ __forceinline__ bool matters(const Logits& s, const Item& item) const {
    return this->exceeds_margins(params, item.work.request.kv_len, rows.own_row(0),
                                 item.work.tile.num_rows, s[0], online.row_max[0]);
  }

  // Makes the probabilities of an item's first tile, in which rows take their maximum. `v` is the
  // stage of its values.
  __device__ __forceinline__ void first_tile(Probabilities& to, Logits& s, const Item& item,
                                             const SeenTile& tile, const VStage& v) {
    make(to, s, item, tile, v, true);
  }

  // Makes the probabilities of any other tile. Without overlap `o` is complete and rescaled here.
  template <int kTilesO>
  __device__ __forceinline__ void next_tile(Probabilities& to, Logits& s, float (&o)[1][kTilesO][4],
                                            const Item& item, const SeenTile& tile,
                                            const VStage& v) {
    make(to, s, item, tile, v, false);
    if (!kOverlap && unlikely(to.raised)) multiply_rows(o, to.factors);
  }

  // Whether a tile takes the fast path of a soft cap; `after_masked`: the tile before was masked.
  // This is one condition, settled while products run, because after them each condition would be
  // waited for.
  __device__ __forceinline__ bool takes_fast_path(const KeyTile& tile, bool after_masked) const {
    if constexpr (!kHasFastPath) return false;
    const bool takes = tile.needs_mask == 0 && !after_masked && tile.tile >= fast_until;
    return ptx::opaque_copy(static_cast<uint32_t>(takes)) != 0;
  }
  // Returns false, and leaves the logits as they are, if the tile must be made by next_tile.
  __device__ __forceinline__ bool fast_tile(Probabilities& to, const Logits& s) {
    if constexpr (kHasFastPath) {
      to.masked_key = -1;
      if (exponentiate_fast(to, s, kept, 0.0f)) return true;
      fast_until = kNone;
    }
    return false;
  }

  // Makes the probabilities of a tile. If it is an item's first, rows take their maxima. Else O is to
  // be multiplied by the factors if a maximum has been raised.
  __device__ __forceinline__ void make(Probabilities& to, Logits& s, const Item& item,
                                       const SeenTile& tile, const VStage& v, bool is_first,
                                       [[maybe_unused]] bool after_masked = false) {
    const int first_key = first_key_of(tile);
    if constexpr (LogitsVariant::kFoldsBias && !Traits::kMultipliesBytes) {
      // Without the copy ptxas keeps the condition's operands, and spills.
      if (ptx::opaque_copy(static_cast<uint32_t>(is_first || tile.needs_mask)) == 0) {
        const auto path =
            LogitsVariant::fast_path(rows.rows_of(place), params, item.work.request,
                                     first_key, rows.lane);
        to.masked_key = -1;
        if (exponentiate_fast(to, s, path, room_of(first_key))) return;
      }
    }
    const bool needs_mask = tile.needs_mask != 0;
    to.masked_key = needs_mask ? first_key : -1;
    if constexpr (Traits::kOfUnions) {
      // Values are swept where an end of keys cuts a tile, whatever these rows see of it.
      to.masked_key = this->needs_mask(tile.tile) ? first_key : -1;
      // A first tile begins with maxima, also those of rows that see nothing of it.
      if (tile.needs_mask == KeyTile::kMask && !is_first) return make_nothing(to);
    }
    const float scale = LogitsVariant::softmax_scale(params);
    const auto form = LogitsVariant::apply(s, online.row_max, rows.rows_of(place),
                                           shared.logits, params, item.work.request, first_key,
                                           rows.lane, needs_mask);
    // Rows that begin with a maximum take another only if they must.
    bool takes_maxima = is_first && !kHasFirstMax;
    if constexpr (Traits::kOfUnions) {
      if (needs_mask) {
#pragma unroll
        for (int h = 0; h < 2; ++h) mask_by_seen<decltype(form)>(s[0], h, tile.seen[h]);
      }
    } else if (unlikely(needs_mask)) {
      apply_mask<decltype(form)>(s, item, first_key, v);
      // Rows that causality cut in the first tile may have seen few keys or none. They also take
      // the maximum of the next cut tile, if O is complete.
      if constexpr (!kOverlap && !kHasFastPath && !Traits::kMasked && !Traits::kMultipliesBytes) {
        takes_maxima |= first_key + kTileKV > limits().full_end;
      }
    }
    if constexpr (Traits::kMultipliesBytes) {
      // Rows that have seen no key take the maximum of the next tile. Others may be raised once
      // their exponentials are there.
      takes_maxima = needs_mask || after_masked;  // mutate: rows-behind-cuts-without-maximum
      to.raised = online.exponentiate_or_raise(
          to.p, s, to.factors, form, scale, is_first, takes_maxima,
          [&](Logits& logits, int h) { make_again(logits, h, item, first_key); });
    } else if constexpr (Traits::kTakesMaxima) {
      to.raised =
          online.template raise_and_exponentiate<DTypeP>(to.p, s, to.factors, form, scale);
    } else {
      to.raised = online.template exponentiate_or_raise<DTypeP, kRaisesInLoop>(
          to.p, s, to.factors, form, scale, room_of(first_key), takes_maxima);
    }
    if constexpr (kHasFastPath) settle_fast_path(item);
  }

  // Which of a thread's keys of a tile of a union its rows see; with a window of so many keys.
  template <typename TileOfUnion>
  __device__ __forceinline__ void find_seen(UnionKeyTile& to, const TileOfUnion& tile,
                                            [[maybe_unused]] int window) const {
    bool is_whole = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      to.seen[h] = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool is_listed = (tile.tokens[half] >> (position[h] & 31)) & 1;
        int seen = position[h] >> 5;
        uint32_t hidden = 0;
        if constexpr (is_same<TileOfUnion, CutUnionTile>) {
          const SeenOfHalf part = SeenOfHalf::of(tile, half, seen, window);
          seen = part.end;
          hidden = low_bits(own_half_before(part.begin - tile.first_key[half]));
        }
        // mutate: union-blocks-not-cut
        const int count = is_listed ? seen - tile.first_key[half] : 0;
        to.seen[h] |= (low_bits(own_half_before(count)) & ~hidden) << (16 * half);
      }
      is_whole = is_whole && to.seen[h] == ~0u;
    }
    to.needs_mask = ptx::warp_any(!is_whole) ? KeyTile::kLimits : KeyTile::kNothing;
    // mutate: union-rows-see-nothing
    if (!ptx::warp_any((to.seen[0] | to.seen[1]) != 0)) to.needs_mask = KeyTile::kMask;
  }

  // The same of small blocks: a row's bits of units become those of a thread's pairs of keys, which
  // lie in every other unit. Tiles that an end of keys may cut are looked at key by key.
  __device__ __forceinline__ void find_seen(UnionKeyTile& to, const SmallUnionTile& tile, int) const {
    constexpr uint32_t kEveryPair = 0x55555555u >> (32 - 2 * (kTileKV / 8));
    constexpr uint32_t kAll = 3 * kEveryPair;
    const int unit = (rows.lane & 3) >> 1;
    bool is_whole = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // mutate: small-unions-of-another-unit
      to.seen[h] = 3 * ((tile.units[position[h] & 31] >> unit) & kEveryPair);
    }
    if (unlikely(needs_mask(to.tile))) {
#pragma unroll 1
      for (int n = 0; n < kTileKV / 8; ++n) {
        const int first = tile.first_key[2 * n + unit] + 2 * (rows.lane & 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // mutate: small-unions-not-cut
          const uint32_t hidden = 3u & ~low_bits((position[h] >> 5) - first);
          to.seen[h] &= ~(hidden << (2 * n));
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) is_whole = is_whole && to.seen[h] == kAll;
    to.needs_mask = ptx::warp_any(!is_whole) ? KeyTile::kLimits : KeyTile::kNothing;
    if (!ptx::warp_any((to.seen[0] | to.seen[1]) != 0)) to.needs_mask = KeyTile::kMask;
  }

  // How many of a thread's keys of half a tile lie before this one.
  __device__ __forceinline__ int own_half_before(int count) const {
    return own_keys_before(min_of(count, static_cast<int>(kUnionKeys)) - 2 * (rows.lane & 3));
  }

  __device__ __forceinline__ int first_key_of(const KeyTile& tile) const {
    return limits().origin + tile.tile * kTileKV;
  }
  __device__ __forceinline__ bool needs_mask(int tile) const {
    const Limits limits = this->limits();
    const int first_key = limits.origin + tile * kTileKV;
    return first_key < limits.full_begin || first_key + kTileKV > limits.full_end;
  }
  __device__ __forceinline__ Limits limits() const {
    if constexpr (kKeepsLimits) return kept_limits;
    const Item& item = shared.items[place];
    return Limits{item.tiles.origin, item.range.full_begin, item.range.full_end};
  }

 private:
  // The probabilities of a tile of which the warp's rows see nothing.
  __device__ __forceinline__ void make_nothing(Probabilities& to) const {
    to.raised = false;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) to.p[i][0][e] = 0;
    }
  }

  // Makes the logits of row h of a tile that needs no mask again, from global memory, one key after
  // another. Rolled, because it is rare.
  __device__ __forceinline__ void make_again(Logits& s, int h, const Item& item,
                                             int first_key) const {
    using T = typename Traits::DTypeQ;
    const auto own = rows.row_place(item, h);
    if (!own.exists) return;
    const T* query =
        static_cast<const T*>(params.q) + own.token * params.q_stride_n + own.head * params.q_stride_h;
    const T* keys = keys_of<T>(params, item.work.tile.kv_head);
#pragma unroll 1
    for (int n = 0; n < kTileKV / 8; ++n) {
      float pair[1][1][4] = {};
#pragma unroll 1
      for (int e = 0; e < 2; ++e) {
        const int key = first_key + 8 * n + 2 * (rows.lane & 3) + e;
        const T* row = keys + key_row<Traits::kPaged>(params, item.work.request, key);
        float sum = 0.0f;
#pragma unroll 1
        for (int column = 0; column < Traits::kHeadDimQK; ++column) {
          sum = fmaf(element_to_float(query[column]), element_to_float(row[column]), sum);
        }
        if constexpr (LogitsVariant::kFoldsScales) {
          // mutate: far-logits-without-sign
          if (LogitsVariant::is_negative(rows.rows_of(place)[8 * h + (rows.lane >> 2)])) sum = -sum;
        }
        pair[0][0][0] = e == 0 ? sum : pair[0][0][0];
        pair[0][0][1] = sum;
      }
      pair[0][0][2] = pair[0][0][0];
      pair[0][0][3] = pair[0][0][1];
      LogitsVariant::apply(pair, online.row_max, rows.rows_of(place), shared.logits,
                           params, item.work.request, first_key + 8 * n, rows.lane, false);
#pragma unroll
      for (int i = 0; i < kTileKV / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) s[0][i][2 * h + e] = i == n ? pair[0][0][2 * h + e] : s[0][i][2 * h + e];
      }
    }
  }

  template <typename Path>
  __device__ __forceinline__ bool exponentiate_fast(Probabilities& to, const Logits& s,
                                                    const Path& path, float room) {
    to.raised = false;
    return online.template exponentiate_fast<DTypeP>(
        to.p, s, path, LogitsVariant::softmax_scale(params), room);
  }

  __device__ __forceinline__ int position_of(const Item& item, int h) const {
    const int token = rows.token_of(item, rows.own_row(h)).token;
    // Of unions: how many keys the row sees, and its token of the item.
    if constexpr (Traits::kOfUnions) {
      const int seen = item.work.request.key_offset + (params.window_right >= 0 ? token : 0);
      return seen * 32 + token;
    }
    return item.work.request.template position<Mask::kKeyShare>(params, token);
  }

  // Hides the keys of a tile that rows do not see.
  template <typename Form>
  __device__ __forceinline__ void apply_mask(Logits& s, const Item& item, int first_key,
                                             const VStage& v) const {
    if constexpr (Traits::kMasked) {
      await_phase(shared.row_bits.full[v.stage], v.parity);  // mutate: mask-bits-not-awaited
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int row = rows.token_of(item, rows.own_row(h)).token - item.range.first_token;
        if constexpr (Traits::Mask::kReadsHeads) {
          row = min_of(rows.own_row(h), item.work.tile.num_rows - 1);
        }
        mask_by_bits<Form>(s[0], h, shared.row_bits.of[v.stage][row], rows.lane);
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int row_position = position[h];
        if constexpr (LogitsVariant::kReadsRows) {
          row_position = rows.rows_of(place)[8 * h + (rows.lane >> 2)].position;
        } else if constexpr (!kKeepsPositions) {
          row_position = position_of(item, h);
        }
        KeyLimits limits = KeyLimits::of<Mask::kKeyShare>(params, item.work.request, row_position);
        if constexpr (Traits::kAlignsTiles) {
          // Boxes of pages may begin ahead of all keys that the item sees.
          // mutate: padding-of-a-page-seen
          limits.begin = max_of(limits.begin, item.range.begin);
        }
        mask_by_limits<Form>(s[0], h, limits.begin - first_key, limits.end - first_key, rows.lane);
      }
    }
  }

  // The room that a thread's sum of a tile has before the maximum is raised
  // (OnlineSoftmax::asks_for_more). Rows that causality cuts have small sums, which grow in the
  // next tile only because it has more keys.
  __device__ __forceinline__ float room_of(int first_key) const {
    constexpr float kRoom = 4.0f, kRoomBehindCuts = 32.0f;
    if constexpr (kHasFastPath) return Online::kMostOfTile;  // the first maximum is no logit's
    return first_key + 2 * kTileKV > limits().full_end ? kRoomBehindCuts : kRoom;
  }

  // Finds the last tile of the item that takes the fast path.
  __device__ __forceinline__ void settle_fast_path(const Item& item) {
    if (fast_until == kNone) return;
    const float sums[] = {quad_sum(online.row_sum[0][0]), quad_sum(online.row_sum[0][1])};
    const int keys = LogitsVariant::keys_in_range(online.row_max[0], sums, shared.logits);
    fast_until = ptx::warp_uniform(item.tiles.end) - ptx::warp_min(keys) / kTileKV;
  }
};

}  // namespace cupyattn
