// Producer warpgroups of wide_sm90 where keys have 8 bits: they make 16-bit elements of them in
// shared memory, which products take. Keys that have scales are multiplied by them and rounded.
//
// Keys land where they are converted, so a whole tile is under way without registers or room of its
// own: 128 columns of 8 bits in a row of the first of the two panels that they become. A warp
// converts 16 rows of a tile: what it writes of latent columns overwrites nothing but what it has
// read.
//
// WideSm90TmaConverter has keys brought by boxes: one warp copies, and three convert all tiles.
// WideSm90Converter gathers them: a warp copies the rows that it converts, rope columns to the rows
// of theirs. Two producers take every other tile, a stage each: one converts while the other's keys
// land.
#pragma once

#include "cupyattn/shared/listed_slots.cuh"
#include "cupyattn/sm90/wide/tma_producer.cuh"

namespace cupyattn {

template <typename Traits>
struct WideSm90Converter {
  using DTypeKV = typename Traits::DTypeKV;
  using DTypeMma = typename Traits::DTypeMma;
  using KTile = typename Traits::KTile;
  using Item = typename Traits::Item;
  using Block = WideSm90Block<Traits>;
  using Stage = typename Block::Stage;
  static constexpr int kProducers = Traits::kProducers;
  static constexpr int kRows = Traits::kTileKV / 4;  // of a warp
  static constexpr bool kTokenScales = Traits::kKeyScales == KeyScales::kTokenScales;
  static constexpr bool kRowScales = Traits::kKeyScales == KeyScales::kScalesInRows;
  static constexpr bool kPageScales = Traits::kKeyScales == KeyScales::kScalesInPages;
  static constexpr bool kHasScales = kTokenScales || kRowScales || kPageScales;
  // A pair of panels has 128 columns, as many as a line of 8 bits.
  static constexpr int kPairs = Traits::kLatentPanels / 2, kPairsOfPiece = kPairs / 2;
  // The panel of rope columns. Where these are values too, it is the last pair's second one.
  static constexpr int kRope = Traits::kLatentPanels - (kPageScales ? 1 : 0);
  static constexpr int kScaledColumns = 448;  // ahead of rope columns that are values too
  static_assert(kRows == 16, "a lane knows where one row is, and another lane too");

  // Scales of 128 latent columns each, or exponents of those of 64.
  using Scales = conditional<kPageScales, Words<2>, float4>;
  // Where this lane's row is: its latent and its rope columns; nullptr for a row that does not exist.
  struct Row {
    const unsigned char *latent, *rope;
    Scales scales;
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
    if constexpr (kPageScales) return listed(item, key);
    const int entry = Traits::kSparse ? key : PageSlot::of(params, key).page;
    // As it is: whoever looks at it waits for it.
    return params.kv_indices[item.work.request.kv_start + entry];
  }
  // The list that has a key of a token's two lists.
  __device__ __forceinline__ const ListedKeys& list_of(int key) const {
    const ListedKeys(&lists)[2] = block.all_params.lists;
    return lists[key >= lists[0].length ? 1 : 0];
  }
  __device__ __forceinline__ int listed(const Item& item, int key) const {
    const ListedKeys& list = list_of(key);
    const int row = item.work.request.q_start, request = row / latent.request_tokens;
    const int of_first = block.all_params.lists[0].length, before = key >= of_first ? of_first : 0;
    // mutate: wide-converter-entry-of-the-first-list
    return listed_slot(list, request, row - request * latent.request_tokens, key - before);
  }
  // The first byte of the row that a slot of a list has, and its scales.
  __device__ __forceinline__ const unsigned char* listed_row(int key, int slot,
                                                             const unsigned char** scales) const {
    const ListedKeys& list = list_of(key);  // mutate: wide-converter-row-of-the-first-cache
    const int number = slot / list.page_size, offset = slot - number * list.page_size;
    const unsigned char* page =
        static_cast<const unsigned char*>(list.keys) + number * list.page_bytes;
    // mutate: wide-converter-scales-of-the-first-slot
    *scales = page + list.page_size * list.row_bytes + 8 * offset;
    return page + offset * list.row_bytes;
  }
  __device__ __forceinline__ Row find(const Item& item, int tile, int page) const {
    Row row{};
    if constexpr (Traits::kSparse && !kPageScales) page = latent.slot(page);
    if (page < 0) return row;
    if constexpr (kPageScales) {
      const unsigned char* scales;
      row.latent = listed_row(own_key(item, tile), page, &scales);
      row.rope = row.latent + kScaledColumns;
      row.scales = *reinterpret_cast<const Words<2>*>(scales);
      return row;
    } else {
      return find_in_pages(item, tile, page);
    }
  }
  __device__ __forceinline__ Row find_in_pages(const Item& item, int tile, int page) const {
    Row row{};
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
        // Half a line of 8 bits is ahead of rope columns that are values.
        if (kPageScales && pair == kPairs - 1 && lane % 8 >= 4) continue;
        const bool exists = from != nullptr;  // mutate: wide-converter-absent-key-read
        ptx::cp_async_16(to + 2 * pair * KTile::kPanelBytes, from + 128 * pair + 16 * (lane % 8),
                         exists);
      }
    }
  }
  // As many lanes as a row has chunks.
  __device__ __forceinline__ void copy_rope(const Stage& stage, const Row& row) const {
    constexpr int kLanes = kRowScales || kPageScales ? 8 : 4, kRowsAtOnce = kWarpSize / kLanes;
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
  __device__ __forceinline__ void convert_tile(const Stage& stage, const Scales& scales) const {
    Scales own_scales[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) own_scales[i] = scales_of(scales, 8 * i + own_row());
    ptx::cp_async_wait_group<1>();  // mutate: wide-converter-copies-not-awaited
    ptx::warp_sync();
    if constexpr (!kRowScales && !kPageScales) convert_rope(rows_of(stage));
    convert_pairs<kPairsOfPiece, kPairs>(stage, own_scales);
    pass_on(shared.full[stage.stage][Traits::kOfFollower]);
    ptx::cp_async_wait_group<0>();
    ptx::warp_sync();
    convert_pairs<0, kPairsOfPiece>(stage, own_scales);
    pass_on(shared.full[stage.stage][Traits::kOfLeader]);
  }
  __device__ __forceinline__ void pass_on(uint64_t& full) const {
    ptx::fence_proxy_async();
    ptx::warp_sync();
    ptx::mbarrier_arrive_if(lane == 0, ptx::shared_address(&full));
  }
  static __device__ __forceinline__ Words<2> scales_of(const Words<2>& own, int row) {
    Words<2> scales;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales.word[i] =
          static_cast<uint32_t>(ptx::shuffle(static_cast<int>(own.word[i]), row));
    }
    return scales;
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

  // The rows of this warp, in the first panel.
  __device__ __forceinline__ unsigned char* rows_of(const Stage& stage) const {
    return shared.k[stage.stage] + kRows * warp / 8 * KTile::kGroupBytes;
  }

  // Converts pairs of panels, eight rows of one at a time. The bytes of the next are loaded before
  // the present ones are converted, because one warp has nothing else to do until they are there.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void convert_pairs(const Stage& stage,
                                                const Scales (&scales)[2]) const {
    constexpr int kCount = 2 * (kEnd - kFirst);
    unsigned char* const rows = rows_of(stage);
    const auto group_of = [&](int i) {
      return rows + 2 * (kFirst + i / 2) * KTile::kPanelBytes + i % 2 * KTile::kGroupBytes;
    };
    // The last pair's second panel has rope columns where these are values.
    const auto are_all = [](int i) { return !kPageScales || kFirst + i / 2 < kPairs - 1; };
    Bytes next = load(group_of(0), are_all(0));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Bytes bytes = next;
      if (i + 1 < kCount) next = load(group_of(i + 1), are_all(i + 1));
      ptx::warp_sync();  // mutate: wide-converter-overwritten
      const Scales& own = scales[i % 2];
      if constexpr (kPageScales) {
        write_halves(group_of(i), bytes, own, kFirst + i / 2);
      } else {
        const float scale = kTokenScales ? own.x : of_pair(own, kFirst + i / 2);
        write_both<kHasScales>(group_of(i), bytes, scale);
      }
    }
  }
  // This lane's bytes of eight rows of a pair of panels: of the columns of each.
  struct Bytes {
    Vector16 of_half[2];
  };
  __device__ __forceinline__ Bytes load(unsigned char* rows, bool are_both = true) const {
    Bytes bytes;
    bytes.of_half[0] = *chunk_at(rows, lane % 4);
    if (are_both) bytes.of_half[1] = *chunk_at(rows, 4 + lane % 4);
    return bytes;
  }
  template <bool kScaled>
  __device__ __forceinline__ void write_both(unsigned char* rows, const Bytes& bytes,
                                             float scale) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      write<kScaled>(rows + half * KTile::kPanelBytes, own_row(), bytes.of_half[half], scale);
    }
  }
  // Each panel by a scale of its own; the last one has rope columns.
  __device__ __forceinline__ void write_halves(unsigned char* rows, const Bytes& bytes,
                                               const Words<2>& exponents, int pair) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int panel = 2 * pair + half;
      if (panel == kRope) continue;
      // mutate: wide-converter-scale-of-another-panel
      const uint32_t exponent = exponents.word[panel / 4] >> 8 * (panel % 4) & 255u;
      write<true>(rows + half * KTile::kPanelBytes, own_row(), bytes.of_half[half],
                  scale_of_exponent(exponent));
    }
  }
  __device__ __forceinline__ void convert_rope(unsigned char* rows) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned char* const of_rows = rows + kRope * KTile::kPanelBytes + i * KTile::kGroupBytes;
      const Vector16 bytes = *chunk_at(of_rows, lane % 4);
      ptx::warp_sync();
      // Float16 queries have taken the scale.
      write<!Traits::kHalfQueries>(of_rows, own_row(), bytes, latent.rope_scale);
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
  // Writes 16 bytes of a row as two chunks.
  template <bool kScaled>
  __device__ __forceinline__ void write(unsigned char* rows, int row, const Vector16& bytes,
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
      *reinterpret_cast<Vector16*>(rows + KTile::offset(row, 2 * (lane % 4) + half)) = converted;
    }
  }
  template <bool kScaled, int kLow, int kHigh>
  static __device__ __forceinline__ uint32_t pair_of(uint32_t bytes, float scale) {
    const uint32_t pair = ptx::Fp8ToHalfPair<DTypeKV, kLow, kHigh>::convert(bytes);
    if constexpr (kScaled) {
      float low, high;
      ptx::unpack_pair<half_t>(pair, low, high);
      return ptx::pack_pair<DTypeMma>(low * scale, high * scale);
    } else {
      static_assert(is_same<DTypeMma, half_t>, "without a scale e4m3 stays what it is");
      return pair;
    }
  }
};

template <typename Traits>
struct WideSm90TmaConverter : WideSm90Converter<Traits> {
  using Base = WideSm90Converter<Traits>;
  using Base::block, Base::kPairs, Base::kPairsOfPiece, Base::kRope, Base::lane, Base::shared,
      Base::warp;
  using typename Base::Bytes;
  using typename Base::Item;
  using typename Base::KTile;
  using typename Base::Stage;
  // Warps behind the first convert, eight rows at a time.
  static constexpr int kWarps = Traits::kConvertingWarps, kRowGroups = Traits::kTileKV / 8;
  static_assert(Traits::kHalfQueries, "boxes bring no scales");

  __device__ __forceinline__ explicit WideSm90TmaConverter(const WideSm90Block<Traits>& block)
      : Base(block, 0) {}

  __device__ __forceinline__ void run() const {
    const Item& item = shared.items[0];
    // The first warp copies keys. If it converted too, the next tile would land only after that.
    WideSm90TmaProducer<Traits>(block).run();
    if (warp == 0 || !item.has_keys()) return;
    Stage stage;
    for (int tile = item.tiles.end - 1; tile >= item.tiles.begin; --tile) {
      convert_tile(stage);
      stage.advance();
    }
  }

  // Converts the pieces of a tile as they land, and passes them on.
  __device__ __forceinline__ void convert_tile(const Stage& stage) const {
    unsigned char* const keys = shared.k[stage.stage];
    // mutate: wide-converter-boxes-not-awaited
    await_phase(shared.landed[stage.stage][Traits::kOfFollower], stage.parity);
    convert_rope(keys + kRope * KTile::kPanelBytes);
    convert_pairs(keys + 2 * kPairsOfPiece * KTile::kPanelBytes);
    this->pass_on(shared.full[stage.stage][Traits::kOfFollower]);
    await_phase(shared.landed[stage.stage][Traits::kOfLeader], stage.parity);
    convert_pairs(keys);
    this->pass_on(shared.full[stage.stage][Traits::kOfLeader]);
  }

  // Converts every third eight rows of the pairs of a piece.
  __device__ __forceinline__ void convert_pairs(unsigned char* panels) const {
    constexpr int kMost = ceil_div(kRowGroups, kWarps), kUnits = kPairsOfPiece * kMost;
    const int first = warp - 1;
    unsigned char* const rows = panels + first * KTile::kGroupBytes;
    const auto rows_of = [&](int unit) {
      return rows + unit / kMost * 2 * KTile::kPanelBytes +
             unit % kMost * kWarps * KTile::kGroupBytes;
    };
    const auto exists = [&](int unit) { return first + unit % kMost * kWarps < kRowGroups; };
    Bytes next = this->load(rows_of(0));
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const Bytes bytes = next;
      if (unit + 1 < kUnits && exists(unit + 1)) next = this->load(rows_of(unit + 1));
      ptx::warp_sync();
      if (exists(unit)) this->template write_both<false>(rows_of(unit), bytes, 1.0f);
    }
  }

  // Rows of rope columns land one after another: where eight lie, eight others go.
  __device__ __forceinline__ void convert_rope(unsigned char* panel) const {
    constexpr int kBarrier = 4, kCount = ceil_div(kRowGroups, kWarps);
    const int first = kWarps - warp;  // the last warp, which has fewer latent rows, has more here
    Vector16 bytes[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int group = first + kWarps * i;
      if (group < kRowGroups) {
        bytes[i] = *reinterpret_cast<const Vector16*>(panel + group * 8 * Traits::kRopeRowBytes +
                                                      16 * lane);
      }
    }
    // mutate: wide-converter-rope-overwritten
    ptx::named_barrier_sync(kBarrier, kWarps * kWarpSize);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int group = first + kWarps * i;
      if (group < kRowGroups) {
        this->template write<false>(panel + group * KTile::kGroupBytes, lane / 4, bytes[i], 1.0f);
      }
    }
  }
};

}  // namespace cupyattn
