// Finds which key tiles of each item of prefill_sm90 a custom mask leaves, once for all KV heads,
// before prefill_sm90 runs.
#pragma once

#include "cupyattn/params/prefill_sm90.cuh"
#include "cupyattn/shared/mask.cuh"

namespace cupyattn {

template <typename Config>
struct MaskScan {
  static constexpr int kTileKV = Config::kTileKV, kThreads = Config::kThreads;
  static constexpr int kWarps = kThreads / kWarpSize, kRowWords = ceil_div(kTileKV, 32);
  using Mask = OfShareIf<HasKeyShare<Config>::kValue,
                         MaskOfForm<Config::kMaskForm, typename Config::LogitsExpression>>;
  // ptxas would spill what an expression takes to make room for four blocks; 0 leaves it the choice.
  static constexpr int kMinBlocks = Mask::kIsExpression ? 2 : 0;

  const AttentionParams& params;
  MaskMap& map;  // in shared memory

  __device__ __forceinline__ void run(MaskMap* maps) const {
    const int thread = threadIdx.x;
    const int tile_rows = whole_token_rows(params, Config::kTileQ);
    const BlockWork work = BlockWork::of_index(params, blockIdx.x, 0, tile_rows);
    if (work.tile.num_rows <= 0) return;
    const KeyRange range = KeyRange::of<Mask::kKeyShare>(params, work);
    const TileSpan span = TileSpan::of<true>(range, kTileKV, work.tile);
    const int first = first_masked_tile<Mask, kTileKV>(params, work.request, span);
    const int count = min_of(span.end - first, MaskMap::kCapacity);
    const int num_words = ceil_div(count, 32);
    for (int word = thread; word < num_words; word += kThreads) map.any[word] = map.mixed[word] = 0;
    ptx::block_sync();
    if constexpr (Mask::kIsExpression) {
      for (int tile = thread / kWarpSize; tile < count; tile += kWarps) {
        evaluate_tile(work.request, range, tile, span.origin + (first + tile) * kTileKV);
      }
    } else {
      for (int word = 0; word < num_words; ++word) {
        const int tile = 32 * word + thread % kWarpSize;
        if (tile >= count) continue;
        add_tile(work.request, range, word, span.origin + (first + tile) * kTileKV);
      }
    }
    ptx::block_sync();
    for (int word = thread; word < num_words; word += kThreads) {
      maps[blockIdx.x].any[word] = map.any[word];
      maps[blockIdx.x].mixed[word] = map.mixed[word];
    }
  }

 private:
  // Adds what the tokens see of a tile under an expression. A warp calls this.
  __device__ __forceinline__ void evaluate_tile(const Request& request, const KeyRange& range,
                                                int tile, int key) const {
    const TileSight sight =
        TileSight::of<Mask, kTileKV>(params, request, range.first_token, range.last_token, key, 0,
                                     params.num_kv_heads * params.group_size);
    if (threadIdx.x % kWarpSize != 0) return;
    const uint32_t bit = 1u << (tile % 32);
    if (sight.some) ptx::atomic_or_shared(&map.any[tile / 32], bit);
    // mutate: mixed-expression-tile-is-whole
    if (!sight.all) ptx::atomic_or_shared(&map.mixed[tile / 32], bit);
  }

  // Adds what every kWarps-th token sees of this lane's tile.
  __device__ __forceinline__ void add_tile(const Request& request, const KeyRange& range, int word,
                                           int key) const {
    const int first = range.first_token + threadIdx.x / kWarpSize, last = range.last_token;
    // Keys that some of these tokens see, and keys that all of them see.
    uint32_t some[kRowWords] = {}, all[kRowWords];
#pragma unroll
    for (int w = 0; w < kRowWords; ++w) all[w] = ~0u;
#pragma unroll 4
    for (int token = first; token <= last; token += kWarps) {  // mutate: mask-scanned-by-one-warp
      uint32_t bits[kRowWords];
      Mask::load(bits, params, request, token, key);
#pragma unroll
      for (int w = 0; w < kRowWords; ++w) {
        some[w] |= bits[w];
        all[w] &= bits[w];
      }
    }
    bool is_any = false, is_mixed = false;
#pragma unroll
    for (int w = 0; w < kRowWords; ++w) {
      const uint32_t exists = low_bits(min_of(request.kv_len - key, kTileKV) - 32 * w);
      is_any |= (some[w] & exists) != 0;
      is_mixed |= (all[w] & exists) != exists;  // mutate: hopper-mixed-tile-counts-as-full
    }
    const uint32_t bit = 1u << (threadIdx.x % kWarpSize);
    if (is_any) ptx::atomic_or_shared(&map.any[word], bit);
    if (is_mixed) ptx::atomic_or_shared(&map.mixed[word], bit);
  }
};

}  // namespace cupyattn
