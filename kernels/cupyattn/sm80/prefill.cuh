// Prefill and append attention on mma.sync: one block takes a tile of packed query rows of one KV
// head and walks the key tiles that the rows see. With one buffer, V of a tile loads while
// S = Q K^T runs, and K of the next tile while O += P V runs. With two, both load a tile ahead.
#pragma once

#include "cupyattn/sm80/traits.cuh"

namespace cupyattn {

template <typename Config>
struct PrefillSm80 {
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kTileQ = 16 * Config::kMmaQ * Config::kWarps, kTileKV = Config::kTileKV;
  static constexpr int kTilesS = kTileKV / 8, kBuffers = Config::kBuffers;
  static constexpr int kExpGroup = Config::kKeysPerExp / 16;
  using Traits = TraitsSm80<Config, kTileQ, kTileKV, kThreads>;
  using DTypeK = typename Traits::DTypeK;
  using DTypeKV = typename Traits::DTypeKV;
  using DTypeO = typename Traits::DTypeO;
  using QTile = typename Traits::QTile;
  using KSourceTile = typename Traits::KSourceTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using KCopier = typename Traits::KCopier;
  using VCopier = typename Traits::VCopier;
  using Mask = typename Traits::Mask;
  using LogitsVariant = typename Traits::LogitsVariant;
  static constexpr int kHeadDimVO = Config::kHeadDimVO, kMmaQ = Config::kMmaQ;
  static constexpr bool kPaged = Config::kPaged, kOwnValuePages = Config::kOwnValuePages;
  static constexpr bool kFp8 = Traits::kFp8, kWidenKeys = Traits::kWidenKeys;

  struct SharedMemory {
    alignas(16) RowInfo rows[kTileQ];
    LogitConstants logits;
    int64_t q_offset[kTileQ];
    // The loop reads these once a tile, so they take no registers.
    alignas(16) BlockWork work;
    KeyRange range;
    TileSpan tiles;
    int end_key;
    NonFiniteKeys nonfinite_keys;
    alignas(QTile::kAlign) unsigned char q[QTile::kBytes];
    alignas(KSourceTile::kAlign) unsigned char k_source[kBuffers][KSourceTile::kBytes];
    alignas(VTile::kAlign) unsigned char v[kBuffers][VTile::kBytes];
    alignas(KTile::kAlign) unsigned char k_wide[kWidenKeys ? KTile::kBytes : 16];
    conditional<kPaged, PagedTiles<kTileKV, kOwnValuePages>, int64_t> pages;
    conditional<Config::kCustomMask, MaskTileMap<kTileKV>, uint32_t> mask_map;
    typename Traits::Rope rope;
  };

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles/select.py) must agree");
  static_assert(kBuffers == 1 || (kBuffers == 2 && !kWidenKeys), "widened keys have one buffer");
  static_assert(kTileKV % 16 == 0 && kTileKV <= 64, "products take 16 keys, mask words hold 64");

  const AttentionParams& params;
  SharedMemory& shared;
  const int thread, warp, lane;
  typename Traits::Accumulators o = {};
  OnlineSoftmax<kMmaQ> softmax;

  __device__ __forceinline__ PrefillSm80(const AttentionParams& params, SharedMemory& shared)
      : params(params),
        shared(shared),
        thread(threadIdx.x),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ int warp_row() const { return 16 * kMmaQ * warp; }

  // Describes the rows and starts the copy of Q; for a custom mask, finds the tiles to visit.
  __device__ __forceinline__ void begin(const BlockWork& work, const KeyRange& range,
                                        const TileSpan& tiles) {
    fill_rows<LogitsVariant, Mask::kKeyShare>(shared.rows, shared.q_offset, kTileQ, params,
                                              work.request, work.tile, thread, kThreads);
    if (thread == 0) {
      shared.logits = LogitsVariant::make_constants(params);
      shared.nonfinite_keys = NonFiniteKeys{};
    }
    if constexpr (Config::kRope) shared.rope.fill(params, thread, kThreads);
    if constexpr (Config::kCustomMask) shared.mask_map.clear(thread, kThreads);
    ptx::block_sync();  // mutate: row-table-read-before-barrier
    Traits::copy_q(shared, params, work.tile.num_rows, thread);
    if constexpr (Config::kCustomMask) {
      shared.mask_map.template scan<Mask>(params, work, range.first_token, range.last_token, tiles,
                                          thread, kThreads);
      ptx::block_sync();
    }
  }

  // Widens and rotates the keys of a tile where the options ask for it.
  __device__ __forceinline__ void prepare_k(int first_key, int buffer) {
    unsigned char* keys = shared.k_source[buffer];
    if constexpr (kWidenKeys) {
      convert_tile<KSourceTile, KTile, kThreads>(keys, shared.k_wide, thread);
      keys = shared.k_wide;
      ptx::block_sync();
    }
    if constexpr (Config::kRotateKeys) {
      rotate_tile<KTile, Config::kHeadDimQK, kThreads>(keys, shared.rope, thread,
                                                       [&](int row) { return first_key + row; });
      ptx::block_sync();  // mutate: rotated-keys-read-early
    }
  }

  // The first key of the first tile worth visiting from the one that starts at `key` on.
  __device__ __forceinline__ int next_key(int key) const {
    if constexpr (Config::kCustomMask) {
      const TileSpan& tiles = shared.tiles;
      return tiles.origin + kTileKV * shared.mask_map.next((key - tiles.origin) / kTileKV, tiles);
    }
    return key;
  }

  __device__ __forceinline__ bool is_partial(int first_key) const {
    if constexpr (Config::kCustomMask) {
      const TileSpan& tiles = shared.tiles;
      return shared.mask_map.is_partial((first_key - tiles.origin) / kTileKV);
    }
    return false;
  }

  // Whether some key of a tile is hidden from some row.
  __device__ __forceinline__ bool hides_keys(int first_key) const {
    return is_partial(first_key) || shared.range.cuts(first_key, kTileKV);
  }

  template <typename Form>
  __device__ __forceinline__ void hide_keys(float (&s)[kMmaQ][kTilesS][4], int first_key) const {
    apply_mask<Mask, Form>(s, params, shared.work.request, shared.range, is_partial(first_key),
                           shared.rows + warp_row(), first_key, lane);
  }

  // Sets non-finite values of a masked tile to zero, once the tile has landed, and adds them by
  // hand to the rows that see their keys.
  template <typename Form>
  __device__ __forceinline__ void clean_hidden_values(const float (&s)[kMmaQ][kTilesS][4],
                                                      const Form& form, float scale, int first_key,
                                                      int buffer) {
    if (!ptx::block_any(!are_values_finite<VTile, kThreads>(shared.v[buffer], thread))) return;
    zero_nonfinite_values<VTile, kThreads>(shared.v[buffer], shared.nonfinite_keys, thread);
    ptx::block_sync();  // mutate: bad-keys-read-early
    const BlockWork& work = shared.work;
    const DTypeKV* const values = values_of<DTypeKV>(params, work.tile.kv_head);
    for (int key = 0; key < kTileKV; ++key) {
      if ((shared.nonfinite_keys.word[key / 32] >> (key % 32)) & 1) {
        add_nonfinite_key<kHeadDimVO>(
            o, s, softmax, form, scale, key,
            values + value_row<kPaged, kOwnValuePages>(params, work.request, first_key + key),
            lane);
      }
    }
    ptx::block_sync();
    if (thread == 0) shared.nonfinite_keys = NonFiniteKeys{};
  }

  // Where a block is in its keys, and what it needs for the next tile.
  struct KeyLoop {
    KCopier k_copier;
    VCopier v_copier;
    int first_key, buffer;
    int place;         // of this tile's rows in shared.pages; the next tile has the other place
    uint32_t q, k, v;  // lane addresses
    uint32_t q_registers[Config::kQInRegisters ? Traits::kStepsQK : 1][kMmaQ][4];
  };

  __device__ __forceinline__ void copy_keys(KeyLoop& loop, int first_key, int end, int place,
                                            int buffer) const {
    const int64_t* rows = nullptr;
    if constexpr (kPaged) rows = shared.pages.rows[place].k;
    loop.k_copier.copy(first_key, end, buffer * KSourceTile::kBytes, rows);
  }
  __device__ __forceinline__ void copy_values(KeyLoop& loop, int first_key, int end, int place,
                                              int buffer) const {
    const int64_t* rows = nullptr;
    if constexpr (kPaged) rows = shared.pages.rows[place].v;
    loop.v_copier.copy(first_key, end, buffer * VTile::kBytes, rows);
  }

  // Paged keys: publishes the row offsets of the tile kBuffers ahead, before the barrier that
  // precedes its copy, and fetches the pages of the tile after that.
  __device__ __forceinline__ void advance_pages(const KeyLoop& loop) {
    int key = loop.first_key;
#pragma unroll
    for (int i = 0; i < kBuffers; ++i) key = next_key(key + kTileKV);
    const int place = (loop.place + kBuffers) & 1;  // mutate: pages-of-last-tile
    shared.pages.publish(params, shared.work.request, key, shared.range.end, place, thread);
    fetch_pages(next_key(key + kTileKV), place ^ 1);
  }
  __device__ __forceinline__ void fetch_pages(int first_key, int place) {
    shared.pages.fetch(params, shared.work.request, first_key, shared.range.end, place, thread);
  }

  // Starts the copies of the tile after this one; returns its first key.
  __device__ __forceinline__ int advance(KeyLoop& loop) const {
    const int key = next_key(loop.first_key + kTileKV);
    if constexpr (Config::kCustomMask) {
      loop.k_copier.skip(key - loop.first_key - kTileKV);
      loop.v_copier.skip(key - loop.first_key - kTileKV);
    }
    if (key < shared.end_key) {
      const int other = kBuffers == 2 ? loop.buffer ^ 1 : 0;
      copy_keys(loop, key, shared.range.end, loop.place ^ 1, other);
      if constexpr (kBuffers == 2) {
        copy_values(loop, key, shared.range.end, loop.place ^ 1, other);
      }
    }
    ptx::cp_async_commit();
    return key;
  }

  // Processes one tile of keys. Tiles that hide keys have their own copy of this function: what
  // they need would cost the others, which are nearly all, registers and instruction cache.
  template <bool kHides>
  __device__ __forceinline__ void process_tile(KeyLoop& loop) {
    const int first_key = loop.first_key;
    const float scale = LogitsVariant::softmax_scale(params);
    // Wait for K, with two buffers also for V, and for all warps to be done with the last tile.
    int next = first_key;
    ptx::cp_async_wait_group<0>();
    ptx::block_sync();  // mutate: keys-used-before-barrier
    if constexpr (kPaged) advance_pages(loop);
    if constexpr (kBuffers == 2) {
      next = advance(loop);
    } else {
      // A tile that hides no keys is whole. Only paged kernels gain from that: without pages,
      // fragments would load in the middle of the copies.
      const bool has_all = kPaged && !kHides;
      copy_values(loop, first_key, has_all ? first_key + kTileKV : shared.range.end, loop.place, 0);
      ptx::cp_async_commit();
    }
    prepare_k(first_key, loop.buffer);

    // S = Q K^T, as logits under the running maximum.
    float s[kMmaQ][kTilesS][4];
    const auto load_q = [&](uint32_t (&a)[4], int m, int step) {
      if constexpr (Config::kQInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = loop.q_registers[step][m][i];
      } else {
        load_q_fragment<QTile>(a, loop.q, 16 * m, step);
      }
    };
    multiply_qk<typename Traits::DTypeS, KTile, Traits::kStepsQK, kMmaQ, kTileKV>(
        s, load_q, loop.k + loop.buffer * KTile::kBytes);
    const auto form = LogitsVariant::apply(s, softmax.row_max, shared.rows + warp_row(),
                                           shared.logits, params, shared.work.request, first_key,
                                           lane, kHides);
    if constexpr (kHides) hide_keys<decltype(form)>(s, first_key);
    if (!form.keeps_max()) {
      softmax.raise_max(s, o, form, scale, LogitsVariant::softmax_slack(params));
    }

    if constexpr (kBuffers == 1) {
      // Wait for V, and for all warps to be done with K.
      ptx::cp_async_wait_group<0>();  // mutate: prefill-values-not-awaited
      ptx::block_sync();              // mutate: values-used-before-barrier
      next = advance(loop);
    }
    if constexpr (kHides) clean_hidden_values(s, form, scale, first_key, loop.buffer);

    // O += P V. The exponentials of one group of keys run beside the products of the last group.
    using DTypeP = typename Traits::DTypeP;
#pragma unroll
    for (int first = 0; first < kTileKV / 16; first += kExpGroup) {
      uint32_t p[kExpGroup][kMmaQ][4];
#pragma unroll
      for (int i = 0; i < kExpGroup; ++i) {
        softmax.template exponentiate<DTypeP>(p[i], s, first + i, form, scale);
      }
#pragma unroll
      for (int i = 0; i < kExpGroup; ++i) {
        multiply_pv<DTypeP, VTile, Traits::kColumnGroups, kMmaQ>(
            o, p[i], loop.v + loop.buffer * VTile::kBytes, 16 * (first + i));
      }
    }
    loop.first_key = next;
    if constexpr (kBuffers == 2) loop.buffer ^= 1;
    if constexpr (kPaged) loop.place ^= 1;
  }

  // Publishes the row offsets of the first tiles, before the barrier that precedes their copies.
  __device__ __forceinline__ void begin_pages(const Request& request, int end_key, int first_key) {
    int key = first_key;
#pragma unroll
    for (int place = 0; place < kBuffers; ++place) {
      shared.pages.look_up(params, request, key, end_key, place, thread);
      key = next_key(key + kTileKV);
    }
  }

  __device__ __forceinline__ void run() {
    const BlockWork work = BlockWork::of(params, kTileQ);
    if (work.tile.num_rows <= 0) return;
    const KeyRange range = KeyRange::of<Mask::kKeyShare>(params, work);
    const TileSpan tiles = TileSpan::of<Config::kCustomMask>(range, kTileKV, work.tile);
    const int end_key = tiles.origin + tiles.end * kTileKV;
    if (thread == 0) {
      shared.work = work;
      shared.range = range;
      shared.tiles = tiles;
      shared.end_key = end_key;
    }
    if constexpr (Config::kCustomMask) begin(work, range, tiles);
    const int first_key = next_key(tiles.origin + tiles.begin * kTileKV);
    const uint32_t k_tile = ptx::shared_address(kWidenKeys ? shared.k_wide : shared.k_source[0]);
    const int64_t first_row = static_cast<int64_t>(work.request.kv_start) + first_key;
    KeyLoop loop{KCopier(keys_of<DTypeK>(params, work.tile.kv_head), params.k_stride_n, first_row,
                         ptx::shared_address(shared.k_source), thread),
                 VCopier(values_of<DTypeKV>(params, work.tile.kv_head), params.v_stride_n,
                         first_row, ptx::shared_address(shared.v), thread),
                 first_key,
                 0,
                 0,
                 lane_address<QTile>(ptx::shared_address(shared.q), lane, warp_row()),
                 k_lane_address<KTile>(k_tile, lane),
                 lane_address<VTile>(ptx::shared_address(shared.v), lane),
                 {}};
    if constexpr (kPaged) begin_pages(work.request, range.end, first_key);
    if constexpr (kPaged && Config::kCustomMask) ptx::block_sync();
    // If no page must be looked up first, keys are copied while the rows are described.
    constexpr bool kCopiesFirst = !kPaged || Config::kCustomMask;
    if constexpr (kCopiesFirst) copy_first(loop, range, end_key);
    if constexpr (!Config::kCustomMask) begin(work, range, tiles);
    if constexpr (!kCopiesFirst) copy_first(loop, range, end_key);
    if constexpr (kPaged) {
      int key = first_key;
#pragma unroll
      for (int i = 0; i < kBuffers; ++i) key = next_key(key + kTileKV);
      fetch_pages(key, kBuffers & 1);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait_group<0>();
    ptx::block_sync();  // mutate: half-warp-skips-barrier
    Traits::prepare_q(shared, shared.work.tile.num_rows, thread, warp, lane);
    if constexpr (Config::kQInRegisters) {
#pragma unroll
      for (int step = 0; step < Traits::kStepsQK; ++step) {
#pragma unroll
        for (int m = 0; m < kMmaQ; ++m) {
          load_q_fragment<QTile>(loop.q_registers[step][m], loop.q, 16 * m, step);
        }
      }
    }
    while (loop.first_key < shared.end_key) {
      if (hides_keys(loop.first_key)) {
        process_tile<true>(loop);
      } else {
        process_tile<false>(loop);
      }
    }
    finish();
  }

  __device__ __forceinline__ void copy_first(KeyLoop& loop, const KeyRange& range, int end_key) {
    if (loop.first_key >= end_key) return;
    copy_keys(loop, loop.first_key, range.end, 0, 0);
    if constexpr (kBuffers == 2) copy_values(loop, loop.first_key, range.end, 0, 0);
  }

  // Fragments hold 4 bytes of a row; through shared memory a lane stores 16. O takes the place of
  // the warp's own rows of Q, which no other warp reads.
  static constexpr bool kStagesOutput =
      Config::kAligned && sizeof(DTypeO) == 2 && round_up(kHeadDimVO, 16) <= QTile::kColumns;

  // Normalises and writes this warp's rows, or, where the keys are split, its partial states.
  __device__ __forceinline__ void finish() {
    const TileWork& work = shared.work.tile;
    const int q_start = shared.work.request.q_start;
    const bool leaves_state = work.leaves_state();
    const float own =
        request_scale_of<LogitsVariant>(params, shared.work.request, work.kv_head);
    const float output_scale = output_scale_of(params, work.kv_head) * own;
    if constexpr (kStagesOutput) ptx::warp_sync();  // mutate: output-overwrites-q
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp_row() + 16 * m + 8 * h + (lane >> 2);
        const float old_max = softmax.template base2_max<LogitsVariant>(m, h, params);
        RowState state{old_max, quad_sum(softmax.row_sum[m][h])};
        const bool exists = row < work.num_rows;
        const int head = shared.rows[row].head;
        const int token = q_start + shared.rows[row].token;
        if (leaves_state) {
          const int64_t index = (work.state(params) + work.split) * kTileQ + row;
          if (exists) {
            float* out = params.partial_o + index * kHeadDimVO;
            store_output_row<float, kHeadDimVO, kFp8, true>(
                [&](int column) { return out + column; }, o[m], h,
                state.normaliser(old_max) * own, lane);
            if ((lane & 3) == 0) params.partial_lse[index] = state.lse();
          }
          continue;
        }
        state.add_sink(sink_of(params, head));
        const float factor = state.normaliser(old_max) * output_scale;
        if (exists) {
          gate_row<Config, kHeadDimVO, kFp8, Config::kAligned>(o[m], h, params, token, head, lane);
        }
        if constexpr (kStagesOutput) {
          const auto staged = [&](int column) {
            return reinterpret_cast<DTypeO*>(shared.q + QTile::offset(row, column / 8)) +
                   column % 8;
          };
          store_output_row<DTypeO, kHeadDimVO, kFp8, true>(staged, o[m], h, factor, lane);
        } else if (exists) {
          DTypeO* out =
              static_cast<DTypeO*>(params.o) + token * params.o_stride_n + head * params.o_stride_h;
          store_output_row<DTypeO, kHeadDimVO, kFp8, Config::kAligned>(
              [&](int column) { return out + column; }, o[m], h, factor, lane);
        }
        if (exists && params.lse != nullptr && (lane & 3) == 0) {
          store_lse(params, token, head, state.lse());
        }
      }
    }
    if (kStagesOutput && !leaves_state) store_staged(work, q_start);
  }

  __device__ __forceinline__ void store_staged(const TileWork& work, int q_start) {
    ptx::warp_sync();  // mutate: staged-output-read-early
    constexpr int kChunks = kHeadDimVO / 8;
    for (int index = lane; index < 16 * kMmaQ * kChunks; index += kWarpSize) {
      const int row = warp_row() + index / kChunks;
      const int chunk = index % kChunks;
      if (row >= work.num_rows) break;  // mutate: row-past-the-last-written
      DTypeO* out = static_cast<DTypeO*>(params.o) +
                    (q_start + shared.rows[row].token) * params.o_stride_n +
                    shared.rows[row].head * params.o_stride_h;
      reinterpret_cast<Vector16*>(out)[chunk] =
          *reinterpret_cast<const Vector16*>(shared.q + QTile::offset(row, chunk));
    }
  }
};

}  // namespace cupyattn
