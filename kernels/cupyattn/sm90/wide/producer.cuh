// The producer warpgroup of wide_sm90: copies rows of queries and keys by 16-byte cp.async, so that
// a page may have any size.
#pragma once

#include "cupyattn/shared/key_rows.cuh"
#include "cupyattn/sm90/wide/traits.cuh"

namespace cupyattn {

template <typename Traits>
struct WideSm90Producer {
  using DTypeKV = typename Traits::DTypeKV;
  using DTypeQ = typename Traits::DTypeQ;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using Item = typename Traits::Item;
  using Block = WideSm90Block<Traits>;
  static constexpr int kTileKV = Traits::kTileKV;
  // Eight lanes copy a row at a time, of kRows neighbouring rows; a lane knows where one of them
  // is.
  static constexpr int kGroups = Traits::kWarpgroup / 8;

  // Where a row begins in two arrays: its latent and its rope part, or K and V. nullptr for a row
  // that does not exist.
  struct Row {
    const void *first, *second;
    int64_t token;  // of the cache, where each has a scale
  };

  const Block& block;
  const typename Traits::Params& all_params;
  const AttentionParams& params;
  typename Traits::SharedMemory& shared;
  const int group, lane;

  __device__ __forceinline__ explicit WideSm90Producer(const Block& block)
      : block(block),
        all_params(block.all_params),
        params(block.params),
        shared(block.shared),
        group(threadIdx.x % Traits::kWarpgroup / 8),
        lane(threadIdx.x % 8) {}

  __device__ __forceinline__ void run() const {
    if constexpr (Traits::kAlternates) return run_lists();
    const Item& item = shared.items[0];
    if (!item.has_keys()) return;
    int page = page_of(item, item.tiles.end - 1);
    copy_queries(item);
    typename Block::Stage stage;
    for (int tile = item.tiles.end - 1; tile >= item.tiles.begin; --tile) {
      page = copy_tile(item, tile, page, stage);
      stage.advance();
    }
  }

  // Several items, of which each begins at the first stage. The first keys are under way before the
  // rows of Q, whose place is free when the item before has its last scores.
  __device__ __forceinline__ void run_lists() const {
    const bool publishes = ptx::warp_uniform(threadIdx.x / kWarpSize) == 0;
    uint32_t parities = 0, q_parity = 1;
    int count = 0;
    do {
      const Item& item = shared.items[Block::place_of(count)];
      const int last = item.tiles.end - 1;
      int page = page_of(item, last);
      for (int tile = last; tile >= item.tiles.begin; --tile) {
        const int place = (last - tile) & 1;
        page = copy_tile(item, tile, page, typename Block::Stage{place, parities >> place & 1});
        parities ^= 1u << place;
        if (tile == last) {
          await_phase(shared.empty_q, q_parity);
          q_parity ^= 1;
          copy_queries(item);
        }
      }
      if (publishes) {
        block.publish_next(item, count, threadIdx.x % kWarpSize);
      } else {
        block.release_item(count, threadIdx.x % kWarpSize);
      }
    } while (block.await_next(++count));
  }

  // Copies a tile, and returns the page of the next.
  __device__ __forceinline__ int copy_tile(const Item& item, int tile, int page,
                                           const typename Block::Stage& stage) const {
    const Row own = key_row(item, tile, page);
    // Looked up a tile ahead, because the page table is far away.
    page = page_of(item, tile - 1);  // mutate: wide-page-of-the-same-tile
    // In the order in which consumers want them.
    if constexpr (Traits::kAlternates) {
      copy_half_tile(stage, own);
    } else {
      if constexpr (!Traits::kLatent) copy_piece<Traits::kKeys>(stage, own);
      copy_piece<Traits::kOfFollower>(stage, own);
      copy_piece<Traits::kOfLeader>(stage, own);
    }
    return page;
  }

  __device__ __forceinline__ void copy_queries(const Item& item) const {
    constexpr int kRows = QTile::kRows / kGroups;
    const TileWork& work = item.work.tile;
    const int r = kRows * group + lane % kRows;
    const PackGqaRow row = PackGqaRow::of(params, work.first_row + r);
    const int64_t token = static_cast<int64_t>(item.work.request.q_start) + row.token;
    const int head = work.kv_head * params.group_size + row.group_head;
    Row own{};
    // mutate: wide-query-past-the-last
    if (r < work.num_rows) {
      own.first = static_cast<const DTypeQ*>(params.q) + token * params.q_stride_n +
                  head * params.q_stride_h;
      if constexpr (Traits::kLatent) {
        const LatentParams& latent = latent_of(all_params);
        const int in_all = item.work.request.q_start + row.token;
        own.first = static_cast<const DTypeQ*>(own.first) + latent.gaps_before(in_all, latent.q_gap);
        own.second = static_cast<const DTypeQ*>(latent.q_rope) + token * latent.q_rope_stride_n +
                     latent.gaps_before(in_all, latent.q_rope_gap) +
                     head * latent.q_rope_stride_h;  // mutate: wide-rope-of-first-head
      }
    }
    constexpr int kLatentPanels =
        Traits::kLatent ? Traits::kHeadDimVO / QTile::kPanelColumns : QTile::kPanels;
    copy_rows<QTile, 0, QTile::kPanels, kLatentPanels>(shared.q, own);
    ptx::cp_async_mbarrier_arrive_noinc(ptx::shared_address(&shared.full_q));
  }

  // --- Keys ---

  static constexpr int kKeyRows = kTileKV / kGroups;
  static_assert(kTileKV % kGroups == 0 && 8 % kKeyRows == 0, "lanes have equal shares of a tile");

  // The key whose place this lane knows.
  __device__ __forceinline__ int own_key(const Item& item, int tile) const {
    return item.first_key(tile) + kKeyRows * group + lane % kKeyRows;
  }
  // Its page, or the entry of a sparse list as it is: whoever looks at it waits for it. Negative
  // for none.
  __device__ __forceinline__ int page_of(const Item& item, int tile) const {
    const int key = own_key(item, tile);
    if (tile < item.tiles.begin || key >= item.range.end) return -1;
    if constexpr (!Traits::kPaged) return 0;
    const int entry = Traits::kSparse ? key : PageSlot::of(params, key).page;
    return params.kv_indices[item.work.request.kv_start + entry];
  }
  __device__ __forceinline__ Row key_row(const Item& item, int tile, int page) const {
    if constexpr (Traits::kSparse) page = latent_of(all_params).slot(page);
    // mutate: wide-keys-past-the-end
    if (page < 0) return Row{};
    const int key = own_key(item, tile);
    PageSlot at{0, item.work.request.kv_start + key};
    if constexpr (Traits::kSparse) {
      at = PageSlot::of(params, page);
    } else if constexpr (Traits::kPaged) {
      at = PageSlot{page, PageSlot::of(params, key).slot};
    }
    const int kv_head = item.work.tile.kv_head;
    Row row{keys_of<DTypeKV>(params, kv_head) +
                paged_row(at.page, at.slot, params.k_stride_page, params.k_stride_n),
            nullptr, static_cast<int64_t>(at.page) * params.page_size + at.slot};
    if constexpr (Traits::kLatent) {
      const LatentParams& latent = latent_of(all_params);
      // mutate: wide-rope-page-by-latent-stride
      const int64_t stride_page = latent.k_rope_stride_page;
      row.second = static_cast<const DTypeKV*>(latent.k_rope) +
                   paged_row(at.page, at.slot, stride_page, latent.k_rope_stride_n);
    } else {
      row.second = values_of<DTypeKV>(params, kv_head) +
                   // mutate: wide-values-by-stride-of-keys
                   paged_row(at.page, at.slot, params.v_stride_page, params.v_stride_n);
    }
    return row;
  }

  // Copies a piece of a stage once its place is free.
  template <int kPiece>
  __device__ __forceinline__ void copy_piece(const typename Block::Stage& stage,
                                             const Row& own) const {
    // mutate: wide-piece-not-awaited
    await_phase(shared.empty[stage.stage][kPiece], stage.parity ^ 1);
    if constexpr (Traits::kMarkers > 0 && kPiece == Traits::kOfFollower) mark_keys(stage, own);
    if constexpr (kPiece == Traits::kKeys) {
      copy_rows<KTile, 0, KTile::kPanels, KTile::kPanels>(shared.k[stage.stage], own);
    } else {
      constexpr int kFirst = Traits::template kFirstPanel<kPiece>;
      constexpr int kEnd = Traits::template kEndPanel<kPiece>;
      constexpr int kSecond = Traits::kLatent ? Traits::kLatentPanels : 0;
      constexpr bool kHasFp8Rope = Traits::kFp8 && kPiece == Traits::kOfFollower;
      copy_rows<VTile, kFirst, kHasFp8Rope ? kSecond : kEnd, kSecond>(shared.values(stage.stage),
                                                                     own);
      if constexpr (kHasFp8Rope && Traits::kKeyScales == kScalesInRows) {
        copy_scaled_rope(shared.k[stage.stage], own);
      } else if constexpr (kHasFp8Rope) {
        copy_fp8_rope(shared.k[stage.stage], own);
      }
    }
    ptx::cp_async_mbarrier_arrive_noinc(ptx::shared_address(&shared.full[stage.stage][kPiece]));
  }

  // A tile of one of two halves, which begins with the piece that it releases itself, and sooner.
  __device__ __forceinline__ void copy_half_tile(const typename Block::Stage& stage,
                                                 const Row& own) const {
    const LatentRows rows = latent_rows(own);
    if (stage.stage == 0) {
      copy_latent<Traits::kOfLeader>(stage, own, rows);
      copy_latent<Traits::kOfFollower>(stage, own, rows);
    } else {
      copy_latent<Traits::kOfFollower>(stage, own, rows);
      copy_latent<Traits::kOfLeader>(stage, own, rows);
    }
  }

  // Where a thread's chunk of each of its rows begins, in both arrays. All are in registers while a
  // tile is copied: a copy reads its address late, and the next would wait for the register.
  struct LatentRows {
    uint64_t first[kKeyRows], second[kKeyRows];
    uint32_t exist;  // a bit a row
  };
  __device__ __forceinline__ LatentRows latent_rows(const Row& own) const {
    LatentRows rows{};
#pragma unroll
    for (int i = 0; i < kKeyRows; ++i) {
      const uint64_t first = reinterpret_cast<uint64_t>(of_lane(own.first, i));
      const uint64_t second = reinterpret_cast<uint64_t>(of_lane(own.second, i));
      rows.exist |= first != 0 ? 1u << i : 0u;
      rows.first[i] = ptx::opaque_copy(first + 16 * lane);
      rows.second[i] = ptx::opaque_copy(second + 16 * lane);
    }
    return rows;
  }
  template <int kPiece>
  __device__ __forceinline__ void copy_latent(const typename Block::Stage& stage, const Row& own,
                                              const LatentRows& rows) const {
    // mutate: lists-piece-not-awaited
    await_phase(shared.empty[stage.stage][kPiece], stage.parity ^ 1);
    if constexpr (kPiece == Traits::kOfFollower) mark_keys(stage, own);
    const uint32_t to =
        ptx::shared_address(shared.k[stage.stage]) + KTile::offset(kKeyRows * group, lane);
#pragma unroll
    for (int i = 0; i < kKeyRows; ++i) {
      const bool exists = (rows.exist >> i & 1) != 0;
      const uint32_t to_row = KTile::further(to, i);
#pragma unroll
      for (int panel = Traits::template kFirstPanel<kPiece>;
           panel < Traits::template kEndPanel<kPiece>; ++panel) {
        constexpr int kRope = Traits::kLatentPanels;
        const uint64_t from =
            panel < kRope ? rows.first[i] + panel * KTile::kRowBytes
                          : rows.second[i] + (panel - kRope) * KTile::kRowBytes;
        ptx::cp_async_16(to_row + panel * KTile::kPanelBytes,
                         reinterpret_cast<const void*>(from), exists);
      }
    }
    ptx::cp_async_mbarrier_arrive_noinc(ptx::shared_address(&shared.full[stage.stage][kPiece]));
  }

  // Says which keys of a stage are there, and by what they are multiplied. An arrival of its own for
  // each warp, because those of the copies do not order these writes.
  __device__ __forceinline__ void mark_keys(const typename Block::Stage& stage,
                                            const Row& own) const {
    const bool exists = own.first != nullptr;  // mutate: wide-hidden-keys-marked
    if constexpr (Traits::kSparse) {
      if (lane < kKeyRows) shared.exists[stage.stage][kKeyRows * group + lane] = exists;
    }
    if constexpr (Traits::kHasTokenScales) {
      if (lane < kKeyRows) {
        // mutate: wide-scales-of-the-first-token
        const float scale = exists ? params.scale_k[own.token] : 0.0f;
        shared.token_scales[stage.stage][kKeyRows * group + lane] = scale;
      }
    }
    ptx::warp_sync();
    ptx::mbarrier_arrive_if(threadIdx.x % kWarpSize == 0,
                            ptx::shared_address(&shared.full[stage.stage][Traits::kOfFollower]));
  }

  // Copies some panels of this thread's rows, from the second array from panel kSecond on. Rows
  // that do not exist become zeros: nothing that nobody owns is multiplied.
  template <typename Tile, int kFirst, int kEnd, int kSecond>
  __device__ __forceinline__ void copy_rows(unsigned char* tile, const Row& own) const {
    constexpr int kRows = Tile::kRows / kGroups;
    constexpr bool kHasFirst = kFirst<kSecond, kHasSecond = kEnd> kSecond;
    const uint32_t to = ptx::shared_address(tile) + Tile::offset(kRows * group, lane);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const char* const first = kHasFirst ? of_lane(own.first, i) : nullptr;
      const char* const second = kHasSecond ? of_lane(own.second, i) : nullptr;
      const bool exists = (kHasFirst ? first : second) != nullptr;
#pragma unroll
      for (int panel = kFirst; panel < kEnd; ++panel) {
        const char* const part = panel < kSecond ? first : second;
        const int line = panel < kSecond ? panel : panel - kSecond;
        const char* const from = part + line * Tile::kRowBytes + 16 * lane;
        ptx::cp_async_16(Tile::further(to, i) + panel * Tile::kPanelBytes, from, exists);
      }
    }
  }

  // Copies the rope parts of fp8 keys, four lanes a row.
  __device__ __forceinline__ void copy_fp8_rope(unsigned char* tile, const Row& own) const {
#pragma unroll
    for (int i = 0; i < kKeyRows; i += 2) {
      const int row = i + lane / 4, chunk = lane % 4;
      const char* const part = of_lane(own.second, row);
      const uint32_t to =
          ptx::shared_address(tile) + KTile::rope_offset(kKeyRows * group + row, chunk);
      ptx::cp_async_16(to, part + 16 * chunk, part != nullptr);
    }
  }

  // Copies the rope parts of rows that have scales, and these.
  __device__ __forceinline__ void copy_scaled_rope(unsigned char* tile, const Row& own) const {
    const uint32_t to = ptx::shared_address(tile);
#pragma unroll
    for (int i = 0; i < kKeyRows; ++i) {
      const char* const part = of_lane(own.second, i);
      ptx::cp_async_16(to + KTile::rope_offset(kKeyRows * group + i, lane), part + 16 * lane,
                    part != nullptr);
    }
    const char* const row = static_cast<const char*>(own.first);
    if (lane < kKeyRows) {
      ptx::cp_async_16(to + KTile::scales_offset(kKeyRows * group + lane),
                    row + Traits::kHeadDimVO, row != nullptr);
    }
  }

  // A pointer of another lane of the same eight.
  static __device__ __forceinline__ const char* of_lane(const void* pointer, int source) {
    const uint64_t bits = reinterpret_cast<uintptr_t>(pointer);
    const int low = ptx::shuffle_in_eight(static_cast<int>(bits), source);
    const int high = ptx::shuffle_in_eight(static_cast<int>(bits >> 32), source);
    return reinterpret_cast<const char*>(
        static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low));
  }
};

}  // namespace cupyattn
