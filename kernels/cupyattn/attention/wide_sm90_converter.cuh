// A producer warpgroup of wide_sm90 where keys have 8 bits: it makes 16-bit elements of them in
// shared memory, which products take. Keys that have scales are multiplied by them and rounded.
//
// Keys land where they are converted, so a whole tile is under way without registers or room of its
// own: 128 columns of 8 bits in a row of the first of the two panels that they become, rope columns
// in the rows of theirs. A warp copies, and converts, 16 rows of a tile: what it writes overwrites
// nothing but what it has read. Two producers take every other tile, a stage each: one converts
// while the other's keys land.
#pragma once

#include "cupyattn/attention/wide_sm90_producer.cuh"

namespace cupyattn {

template <typename Traits>
struct WideSm90Converter {
  using DTypeKV = typename Traits::DTypeKV;
  using DTypeQ = typename Traits::DTypeQ;
  using KTile = typename Traits::KTile;
  using Item = typename Traits::Item;
  using Block = WideSm90Block<Traits>;
  using Stage = typename Block::Stage;
  static constexpr int kProducers = Traits::kProducers;
  static constexpr int kRows = Traits::kTileKV / 4;  // of a warp
  static constexpr bool kTokenScales = Traits::kKeyScales == KeyScales::kTokenScales;
  static constexpr bool kRowScales = Traits::kKeyScales == KeyScales::kScalesInRows;
  // A pair of panels has 128 columns, as many as a line of 8 bits.
  static constexpr int kPairs = Traits::kLatentPanels / 2, kPairsOfPiece = kPairs / 2;
  static constexpr int kRope = Traits::kLatentPanels;  // its panel
  static_assert(kRows == 16, "a lane knows where one row is, and another lane too");

  // Where this lane's row is: its latent and its rope columns; nullptr for a row that does not exist.
  // And its scales, of 128 latent columns each.
  struct Row {
    const unsigned char *latent, *rope;
    float4 scales;
  };

  const Block& block;
  const AttentionParams& params;
  const LatentParams& latent;
  typename Traits::SharedMemory& shared;
  const int index;  // of the producer
  const int warp, lane;

  __device__ __forceinline__ WideSm90Converter(const Block& block, int index)
      : block(block),
        params(block.params),
        latent(latent_of(block.all_params)),
        shared(block.shared),
        index(index),
        warp(ptx::warp_uniform(threadIdx.x % Traits::kWarpgroup / kWarpSize)),
        lane(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ void run() const {
    const Item& item = shared.items[0];
    if (index == 0 && item.has_keys()) WideSm90Producer<Traits>(block).copy_queries(item);
    Stage stage;
    if (index > 0) stage.advance();
    int tile = item.tiles.end - 1 - index;
    int page = page_of(item, tile);
    for (; tile >= item.tiles.begin; tile -= kProducers) {
      const Row row = find(item, tile, page);
      // Looked up ahead, because the page table is far away.
      page = page_of(item, tile - kProducers);  // mutate: wide-converter-page-of-the-same-tile
      copy_tile(stage, row);
      convert_tile(stage, row.scales);
#pragma unroll
      for (int i = 0; i < kProducers; ++i) stage.advance();
    }
  }

  // --- Where keys are ---

  __device__ __forceinline__ int own_key(const Item& item, int tile) const {
    return item.first_key(tile) + kRows * warp + lane % kRows;
  }
  __device__ __forceinline__ int page_of(const Item& item, int tile) const {
    const int key = own_key(item, tile);
    if (tile < item.tiles.begin || key >= item.range.end) return -1;
    const int entry = Traits::kSparse ? key : PageSlot::of(params, key).page;
    return params.kv_indices[item.work.request.kv_start + entry];
  }
  __device__ __forceinline__ Row find(const Item& item, int tile, int page) const {
    Row row{nullptr, nullptr, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
    if (page < 0) return row;
    const PageSlot at = Traits::kSparse
                            ? PageSlot::of(params, page)
                            : PageSlot{page, PageSlot::of(params, own_key(item, tile)).slot};
    row.latent = reinterpret_cast<const unsigned char*>(keys_of<DTypeKV>(params, 0)) +
                 paged_row(at.page, at.slot, params.k_stride_page, params.k_stride_n);
    row.rope = static_cast<const unsigned char*>(latent.k_rope) +
               paged_row(at.page, at.slot, latent.k_rope_stride_page, latent.k_rope_stride_n);
    if constexpr (kTokenScales) {
      const int64_t token = static_cast<int64_t>(at.page) * params.page_size + at.slot;
      row.scales.x = params.scale_k[token];  // mutate: wide-converter-scale-of-another-token
    } else if constexpr (kRowScales) {
      row.scales = *reinterpret_cast<const float4*>(row.latent + Traits::kHeadDimVO);
    }
    return row;
  }

  // --- Copies ---

  // Starts the copies of a tile's rows as their places become free. Rows that do not exist become
  // zeros.
  __device__ __forceinline__ void copy_tile(const Stage& stage, const Row& row) const {
    // mutate: wide-converter-place-not-awaited
    await_phase(shared.empty[stage.stage][Traits::kOfFollower], stage.parity ^ 1);
    if constexpr (Traits::kSparse) mark_keys(stage, row);
    copy_rope(stage, row);
    copy_pairs<kPairsOfPiece, kPairs>(stage, row);
    ptx::cp_async_commit();
    await_phase(shared.empty[stage.stage][Traits::kOfLeader], stage.parity ^ 1);
    copy_pairs<0, kPairsOfPiece>(stage, row);
    ptx::cp_async_commit();
  }
  // Eight lanes copy a line, of four rows at a time.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy_pairs(const Stage& stage, const Row& row) const {
#pragma unroll 1
    for (int i = 0; i < kRows; i += 4) {
      const int r = i + lane / 8;
      const unsigned char* const from = of_lane(row.latent, r);
      const uint32_t to = ptx::shared_address(shared.k[stage.stage]) +
                          KTile::offset(kRows * warp + r, lane % 8);
#pragma unroll
      for (int pair = kFirst; pair < kEnd; ++pair) {
        const bool exists = from != nullptr;  // mutate: wide-converter-absent-key-read
        ptx::cp_async_16(to + 2 * pair * KTile::kPanelBytes, from + 128 * pair + 16 * (lane % 8),
                         exists);
      }
    }
  }
  // As many lanes as a row has chunks.
  __device__ __forceinline__ void copy_rope(const Stage& stage, const Row& row) const {
    constexpr int kLanes = kRowScales ? 8 : 4, kRowsAtOnce = kWarpSize / kLanes;
#pragma unroll 1
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
      const int r = i + lane / kLanes, chunk = lane % kLanes;
      const unsigned char* const from = of_lane(row.rope, r);
      ptx::cp_async_16(ptx::shared_address(shared.k[stage.stage]) +
                           KTile::offset(kRows * warp + r, 8 * kRope + chunk),
                       from + 16 * chunk, from != nullptr);
    }
  }
  static __device__ __forceinline__ const unsigned char* of_lane(const unsigned char* pointer,
                                                                 int source) {
    const uint64_t bits = reinterpret_cast<uintptr_t>(pointer);
    const int low = ptx::shuffle(static_cast<int>(bits), source);
    const int high = ptx::shuffle(static_cast<int>(bits >> 32), source);
    return reinterpret_cast<const unsigned char*>(
        static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low));
  }

  // Says which keys of a stage are there.
  __device__ __forceinline__ void mark_keys(const Stage& stage, const Row& row) const {
    const bool exists = row.latent != nullptr;  // mutate: wide-converter-hidden-keys-marked
    if (lane < kRows) shared.exists[stage.stage][kRows * warp + lane] = exists;
  }

  // --- Conversions ---
  // Four lanes convert 64 columns of a row, 16 each, and eight lanes those of two rows at once, of
  // each eight: rows r and r ^ 5, whose chunks lie in different banks before and after.

  __device__ __forceinline__ int own_row() const { return lane / 8 ^ (lane / 4 % 2 ? 5 : 0); }

  // Converts what this warp has copied, and passes the pieces on.
  __device__ __forceinline__ void convert_tile(const Stage& stage, const float4& scales) const {
    unsigned char* const rows =
        shared.k[stage.stage] + kRows * warp / 8 * KTile::kGroupBytes;
    float4 own_scales[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) own_scales[i] = scales_of(scales, 8 * i + own_row());
    ptx::cp_async_wait_group<1>();  // mutate: wide-converter-copies-not-awaited
    ptx::warp_sync();
    if constexpr (!kRowScales) convert_rope(rows);
#pragma unroll
    for (int pair = kPairsOfPiece; pair < kPairs; ++pair) convert_pair(rows, pair, own_scales);
    pass_on(shared.full[stage.stage][Traits::kOfFollower]);
    ptx::cp_async_wait_group<0>();
    ptx::warp_sync();
#pragma unroll
    for (int pair = 0; pair < kPairsOfPiece; ++pair) convert_pair(rows, pair, own_scales);
    pass_on(shared.full[stage.stage][Traits::kOfLeader]);
  }
  __device__ __forceinline__ void pass_on(uint64_t& full) const {
    ptx::fence_proxy_async();
    ptx::warp_sync();
    ptx::mbarrier_arrive_if(lane == 0, ptx::shared_address(&full));
  }
  static __device__ __forceinline__ float4 scales_of(const float4& own, int row) {
    float4 scales = own;
    if constexpr (kTokenScales || kRowScales) scales.x = ptx::shuffle(own.x, row);
    if constexpr (kRowScales) {
      scales.y = ptx::shuffle(own.y, row);
      scales.z = ptx::shuffle(own.z, row);
      scales.w = ptx::shuffle(own.w, row);
    }
    return scales;
  }

  // rows: of this warp, in the first panel.
  __device__ __forceinline__ void convert_pair(unsigned char* rows, int pair,
                                               const float4 (&scales)[2]) const {
    unsigned char* const panels = rows + 2 * pair * KTile::kPanelBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned char* const of_rows = panels + i * KTile::kGroupBytes;
      Vector16 bytes[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        bytes[half] = *chunk_at(of_rows, 4 * half + lane % 4);
      }
      ptx::warp_sync();  // mutate: wide-converter-overwritten
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = kTokenScales ? scales[i].x : of_pair(scales[i], pair);
        write<kTokenScales || kRowScales>(of_rows + half * KTile::kPanelBytes, bytes[half], scale);
      }
      ptx::warp_sync();  // few elements in registers at a time
    }
  }
  __device__ __forceinline__ void convert_rope(unsigned char* rows) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned char* const of_rows = rows + kRope * KTile::kPanelBytes + i * KTile::kGroupBytes;
      const Vector16 bytes = *chunk_at(of_rows, lane % 4);
      ptx::warp_sync();
      write<true>(of_rows, bytes, latent.rope_scale);
    }
  }
  static __device__ __forceinline__ float of_pair(const float4& scales, int pair) {
    // mutate: wide-converter-scale-of-the-first-columns
    return pair == 0 ? scales.x : pair == 1 ? scales.y : pair == 2 ? scales.z : scales.w;
  }

  // A chunk of this lane's row.
  __device__ __forceinline__ Vector16* chunk_at(unsigned char* rows, int chunk) const {
    return reinterpret_cast<Vector16*>(rows + KTile::offset(own_row(), chunk));
  }
  // Writes 16 bytes as two chunks.
  template <bool kScaled>
  __device__ __forceinline__ void write(unsigned char* rows, const Vector16& bytes,
                                        float scale) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vector16 converted;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const uint32_t word = bytes.word[2 * half + w];
        converted.word[2 * w] = pair_of<kScaled, 0, 1>(word, scale);
        converted.word[2 * w + 1] = pair_of<kScaled, 2, 3>(word, scale);
      }
      *chunk_at(rows, 2 * (lane % 4) + half) = converted;
    }
  }
  template <bool kScaled, int kLow, int kHigh>
  static __device__ __forceinline__ uint32_t pair_of(uint32_t bytes, float scale) {
    if constexpr (!kScaled) {
      return ptx::fp8_to_pair<DTypeQ, DTypeKV, kLow, kHigh>(bytes);
    } else {
      float low, high;
      ptx::unpack_pair<half_t>(ptx::Fp8ToHalfPair<DTypeKV, kLow, kHigh>::convert(bytes), low, high);
      return ptx::pack_pair<DTypeQ>(low * scale, high * scale);
    }
  }
};

}  // namespace cupyattn
