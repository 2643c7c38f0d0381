// A producer warpgroup of wide_sm90 where keys have 8 bits: it makes 16-bit elements of them in
// shared memory, which products take. Keys that have scales are multiplied by them and rounded.
//
// A thread has the same columns of each panel, in two rows of a tile: 16 bytes, which become 32. They
// land where the first of these are to lie, so nobody else's are in their way, and a whole tile is
// under way without registers. Four threads have neighbouring columns of a row; eight have two
// neighbouring rows, whose chunks lie in different banks. Two producers take every other tile, a
// stage each: one converts while the other's keys land. Lines come to L2 a tile ahead.
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
  static constexpr int kThreadsOfRow = 4, kRowsAtOnce = Traits::kWarpgroup / kThreadsOfRow;
  static constexpr int kRows = Traits::kTileKV / kRowsAtOnce;
  static constexpr int kPanels = KTile::kPanels, kRope = Traits::kLatentPanels;  // its panel
  static constexpr bool kTokenScales = Traits::kKeyScales == KeyScales::kTokenScales;
  static constexpr bool kRowScales = Traits::kKeyScales == KeyScales::kScalesInRows;

  // Where this thread's columns of the first panels of its rows lie; nullptr for a row that does not
  // exist.
  struct Rows {
    const unsigned char *latent[kRows], *rope[kRows];
  };
  // Of the latent columns of its rows: one of a token, or one of each 128 columns.
  struct Scales {
    float of_token[kTokenScales ? kRows : 1];
    float4 in_row[kRowScales ? kRows : 1];
  };
  using Pages = int[kRows];

  const Block& block;
  const AttentionParams& params;
  const LatentParams& latent;
  typename Traits::SharedMemory& shared;
  const int index;      // of the producer
  const int row, lane;  // the first of the thread's rows, and which of its four threads it is

  __device__ __forceinline__ WideSm90Converter(const Block& block, int index)
      : block(block),
        params(block.params),
        latent(latent_of(block.all_params)),
        shared(block.shared),
        index(index),
        row(threadIdx.x % Traits::kWarpgroup / kThreadsOfRow),
        lane(threadIdx.x % kThreadsOfRow) {}

  __device__ __forceinline__ void run() const {
    const Item& item = shared.items[0];
    int tile = item.tiles.end - 1 - index;
    if (index == 0 && item.has_keys()) WideSm90Producer<Traits>(block).copy_queries(item);
    if (tile < item.tiles.begin) return;
    // Those of the tile that is copied next are looked up before they are needed: the page table is
    // far away.
    Pages pages, next;
    look_up(pages, item, tile);
    look_up(next, item, tile - kProducers);
    Scales scales;
    Stage stage;
    if (index > 0) stage.advance();
    copy_tile(item, tile, stage, pages, scales);
    while (true) {
      prefetch(item, tile - kProducers, next);
#pragma unroll
      for (int i = 0; i < kRows; ++i) pages[i] = next[i];
      // mutate: wide-converter-page-of-the-same-tile
      look_up(next, item, tile - 2 * kProducers);
      convert_tile(stage, scales);
#pragma unroll
      for (int i = 0; i < kProducers; ++i) stage.advance();
      tile -= kProducers;
      if (tile < item.tiles.begin) return;
      copy_tile(item, tile, stage, pages, scales);
    }
  }

  // The order in which consumers want the panels: the follower's, with the rope panel, the leader's.
  static constexpr int kFollowers = kPanels - Traits::kPanelsOfPiece;
  static __device__ __forceinline__ constexpr int panel_at(int i) {
    return i < kFollowers ? Traits::kPanelsOfPiece + i : i - kFollowers;
  }

  // --- Where keys are ---

  __device__ __forceinline__ void look_up(Pages& pages, const Item& item, int tile) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int key = item.first_key(tile) + row + i * kRowsAtOnce;
      pages[i] = -1;
      if (tile < item.tiles.begin || key >= item.range.end) continue;
      const int entry = Traits::kSparse ? key : PageSlot::of(params, key).page;
      pages[i] = params.kv_indices[item.work.request.kv_start + entry];
    }
  }

  __device__ __forceinline__ PageSlot slot_of(const Item& item, int tile, int i, int page) const {
    if constexpr (Traits::kSparse) return PageSlot::of(params, page);
    const int key = item.first_key(tile) + row + i * kRowsAtOnce;
    return PageSlot{page, PageSlot::of(params, key).slot};
  }
  __device__ __forceinline__ void find(Rows& rows, const Item& item, int tile,
                                       const Pages& pages) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows.latent[i] = rows.rope[i] = nullptr;
      if (pages[i] < 0) continue;
      const PageSlot at = slot_of(item, tile, i, pages[i]);
      rows.latent[i] =
          reinterpret_cast<const unsigned char*>(keys_of<DTypeKV>(params, 0)) +
          paged_row(at.page, at.slot, params.k_stride_page, params.k_stride_n) + 16 * lane;
      rows.rope[i] = static_cast<const unsigned char*>(latent.k_rope) +
                     paged_row(at.page, at.slot, latent.k_rope_stride_page,
                               latent.k_rope_stride_n) +
                     (kRowScales ? 32 : 16) * lane;
    }
  }
  __device__ __forceinline__ void load_scales(Scales& scales, const Item& item, int tile,
                                              const Pages& pages, const Rows& rows) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (kTokenScales) {
        scales.of_token[i] = 0.0f;
        if (pages[i] < 0) continue;
        const PageSlot at = slot_of(item, tile, i, pages[i]);
        const int64_t token = static_cast<int64_t>(at.page) * params.page_size + at.slot;
        scales.of_token[i] = params.scale_k[token];  // mutate: wide-converter-scale-of-another-token
      } else if constexpr (kRowScales) {
        scales.in_row[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (rows.latent[i] == nullptr) continue;
        scales.in_row[i] = *reinterpret_cast<const float4*>(rows.latent[i] - 16 * lane +
                                                            Traits::kHeadDimVO);
      }
    }
  }

  // Brings the lines of a tile's rows to L2, four and the last.
  __device__ __forceinline__ void prefetch(const Item& item, int tile, const Pages& pages) const {
    Rows rows;
    find(rows, item, tile, pages);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (rows.latent[i] == nullptr) continue;
      ptx::prefetch_l2(rows.latent[i] + 112 * lane);
      if (lane == 0) ptx::prefetch_l2(rows.rope[i]);
    }
  }

  // --- Copies ---

  // Where the thread's first chunks of its first row and the first panel go.
  struct Place {
    unsigned char* chunks[2];

    __device__ __forceinline__ unsigned char* at(int chunk, int i, int panel) const {
      return chunks[chunk] + i * (kRowsAtOnce / 8) * KTile::kGroupBytes +
             panel * KTile::kPanelBytes;
    }
  };
  __device__ __forceinline__ Place place_of(const Stage& stage) const {
    unsigned char* const keys = shared.k[stage.stage];
    return Place{{keys + KTile::offset(row, 2 * lane), keys + KTile::offset(row, 2 * lane + 1)}};
  }

  // Starts the copies of a tile's rows as their places become free. Rows that do not exist become
  // zeros.
  __device__ __forceinline__ void copy_tile(const Item& item, int tile, const Stage& stage,
                                            const Pages& pages, Scales& scales) const {
    Rows rows;
    find(rows, item, tile, pages);
    load_scales(scales, item, tile, pages, rows);
    const Place to = place_of(stage);
    // mutate: wide-converter-place-not-awaited
    await_phase(shared.empty[stage.stage][Traits::kOfFollower], stage.parity ^ 1);
    if constexpr (Traits::kSparse) mark_keys(stage, rows);
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      if (i == kFollowers) {
        ptx::cp_async_commit();
        await_phase(shared.empty[stage.stage][Traits::kOfLeader], stage.parity ^ 1);
      }
      copy(to, rows, panel_at(i));
    }
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void copy(const Place& to, const Rows& rows, int panel) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const unsigned char* const from =
          panel == kRope ? rows.rope[i] : rows.latent[i] + 64 * panel;
      const bool exists = rows.latent[i] != nullptr;  // mutate: wide-converter-absent-key-read
      ptx::cp_async_16(ptx::shared_address(to.at(0, i, panel)), from, exists);
      if (kRowScales && panel == kRope) {
        ptx::cp_async_16(ptx::shared_address(to.at(1, i, panel)), from + 16, exists);
      }
    }
  }

  // Says which keys of a stage are there.
  __device__ __forceinline__ void mark_keys(const Stage& stage, const Rows& rows) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool exists = rows.latent[i] != nullptr;  // mutate: wide-converter-hidden-keys-marked
      if (lane == 0) shared.exists[stage.stage][row + i * kRowsAtOnce] = exists;
    }
  }

  // --- Conversions ---

  // Converts what this thread has copied, and passes the pieces on.
  __device__ __forceinline__ void convert_tile(const Stage& stage, const Scales& scales) const {
    const Place place = place_of(stage);
    ptx::cp_async_wait_group<1>();  // mutate: wide-converter-copies-not-awaited
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      if (i == kFollowers) {
        pass_on(shared.full[stage.stage][Traits::kOfFollower]);
        ptx::cp_async_wait_group<0>();
      }
      convert_panel(place, scales, panel_at(i));
    }
    pass_on(shared.full[stage.stage][Traits::kOfLeader]);
  }
  __device__ __forceinline__ void pass_on(uint64_t& full) const {
    ptx::fence_proxy_async();
    ptx::warp_sync();
    ptx::mbarrier_arrive_if(threadIdx.x % kWarpSize == 0, ptx::shared_address(&full));
  }
  __device__ __forceinline__ void convert_panel(const Place& place, const Scales& scales,
                                                int panel) const {
    const bool is_rope = panel == kRope;
    if (kRowScales && is_rope) return;  // they have 16 bits
    Vector16 bytes[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      bytes[i] = *reinterpret_cast<const Vector16*>(place.at(0, i, panel));
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        constexpr bool kScaled = kTokenScales || kRowScales;
        const Vector16 converted =
            is_rope ? convert<true>(bytes[i], half, latent.rope_scale)
                    : convert<kScaled>(bytes[i], half, scale_of(scales, i, panel));
        *reinterpret_cast<Vector16*>(place.at(half, i, panel)) = converted;
      }
    }
  }
  // Of a row's columns of a panel.
  static __device__ __forceinline__ float scale_of(const Scales& scales, int i, int panel) {
    if constexpr (kTokenScales) return scales.of_token[i];
    if constexpr (!kRowScales) return 1.0f;
    const float4& of = scales.in_row[kRowScales ? i : 0];
    // mutate: wide-converter-scale-of-the-first-columns
    return panel < 2 ? of.x : panel < 4 ? of.y : panel < 6 ? of.z : of.w;
  }
  // Eight of sixteen bytes as elements of 16 bits.
  template <bool kScaled>
  static __device__ __forceinline__ Vector16 convert(const Vector16& bytes, int half, float scale) {
    Vector16 converted;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const uint32_t word = bytes.word[2 * half + w];
      converted.word[2 * w] = pair_of<kScaled, 0, 1>(word, scale);
      converted.word[2 * w + 1] = pair_of<kScaled, 2, 3>(word, scale);
    }
    return converted;
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
