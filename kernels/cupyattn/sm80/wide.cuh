// Attention on mma.sync with an O that one warp cannot hold: head dims up to 576, and latent
// attention. A block takes 16, 32 or 64 packed query rows of one KV head. Its warps share a tile of
// keys twice, in two ways:
//
//   S = Q K^T   a warp has 16 rows and some keys of the tile
//   O += P V    a warp has all rows and a slice of the columns
//
// P goes from the first to the second through shared memory, as do the maxima of rows. A value is
// read by one warp only. With latent keys the tile of keys is the tile of values too.
#pragma once

#include "cupyattn/sm80/traits.cuh"
#include "cupyattn/sm80/wide_keys.cuh"

namespace cupyattn {

template <typename Config>
struct WideSm80 {
  static constexpr int kWarps = Config::kWarps, kThreads = kWarps * kWarpSize;
  static constexpr int kMmaQ = Config::kMmaQ, kTileQ = 16 * kMmaQ, kTileKV = Config::kTileKV;
  static constexpr int kStages = Config::kStages;
  static constexpr int kHeadDimQK = Config::kHeadDimQK, kHeadDimVO = Config::kHeadDimVO;
  static constexpr bool kLatent = Config::kLatent, kSparse = Config::kSparse;
  // S is shared out to warps along the rows and along the keys; each has n-tiles of 8 keys.
  static constexpr int kRowWarps = min_of(kMmaQ, kWarps), kKeyWarps = kWarps / kRowWarps;
  static constexpr int kTilesS = kTileKV / 8 / kKeyWarps;
  // O is shared out by columns; a warp has groups of 16 of them.
  static constexpr int kColumns = kHeadDimVO / kWarps, kColumnGroups = kColumns / 16;

  using Traits = TraitsSm80<Config, kTileQ, kTileKV, kThreads>;
  using DTypeQ = typename Traits::DTypeQ;
  using DTypeKV = typename Traits::DTypeKV;
  using DTypeO = typename Traits::DTypeO;
  using DTypeS = typename Traits::DTypeS;
  using DTypeP = typename Traits::DTypeP;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KSourceTile;
  using VTile = conditional<kLatent, KTile, typename Traits::VTile>;
  using PTile = SharedTile<DTypeP, kTileQ, kTileKV>;
  using Mask = typename Traits::Mask;
  using LogitsVariant = typename Traits::LogitsVariant;
  using Params = WideParams<Config>;
  static constexpr bool kFp8 = Traits::kFp8;

  struct SharedMemory {
    alignas(16) RowInfo rows[kTileQ];
    LogitConstants logits;
    int64_t q_offset[kTileQ], q_rope_offset[kLatent ? kTileQ : 1];
    WideRows<Config, kTileKV> keys;  // of the tile that is copied next
    float row_max[kKeyWarps][kTileQ], row_sum[kKeyWarps][kTileQ], factor[kTileQ];
    NonFiniteKeys nonfinite_keys;
    uint8_t is_hidden[kStages + 1][kSparse ? kTileKV : 4];
    uint32_t flag;
    typename Traits::Rope rope;
    alignas(QTile::kAlign) unsigned char q[QTile::kBytes];
    alignas(KTile::kAlign) unsigned char k[kStages][KTile::kBytes];
    alignas(VTile::kAlign) unsigned char v[kLatent ? 1 : kStages][kLatent ? 128 : VTile::kBytes];
    alignas(PTile::kAlign) unsigned char p[PTile::kBytes];
  };

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles/wide_sm80.py) must agree");
  static_assert(kStages >= 2, "one stage is loaded while another is used");
  static_assert(kTilesS >= 1 && kTileKV == 8 * kTilesS * kKeyWarps, "each warp has whole n-tiles");
  static_assert(kTileKV <= kThreads && kTileKV <= 64, "a thread finds a key, mask words hold 64");
  static_assert(kColumns % (kFp8 ? 32 : 16) == 0, "a warp's columns are whole loads");
  static_assert(kHeadDimQK % 64 == 0, "fragments of 8 keys take four chunks");
  static_assert(!kLatent || (Config::kPaged && kHeadDimQK == kHeadDimVO + Config::kHeadDimRope),
                "a latent key is its value and the rope part, in pages");
  static_assert(!kSparse || kLatent, "only latent keys come in lists");
  static_assert(!Config::kRope || (!kLatent && !kFp8), "keys are rotated in place, in 16 bits");

  const Params& all;
  const AttentionParams& params;
  SharedMemory& shared;
  const int thread, warp, lane, row_warp, key_warp;
  const BlockWork work;
  float o[kMmaQ][2 * kColumnGroups][4] = {};
  OnlineSoftmax<1> softmax;  // of the warp's 16 rows of S; all key warps have the same maxima

  __device__ __forceinline__ WideSm80(const Params& all, SharedMemory& shared)
      : all(all),
        params(attention_of(all)),
        shared(shared),
        thread(threadIdx.x),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize),
        row_warp(warp / kKeyWarps),
        key_warp(warp % kKeyWarps),
        work(BlockWork::of(params, kTileQ)) {}

  // --- Copies ---

  __device__ __forceinline__ void describe_rows() {
    fill_rows<LogitsVariant, Mask::kKeyShare>(shared.rows, shared.q_offset, kTileQ, params,
                                              work.request, work.tile, thread, kThreads);
    if constexpr (Config::kRope) {
      for (int i = thread; i < kHeadDimQK / 2; i += kThreads) {
        shared.rope.step[i] = i < kMaxRopePairs ? params.rope_step[i]
                                                : all.more_rope_steps[i - kMaxRopePairs];
      }
    }
    if (thread == 0) {
      shared.logits = LogitsVariant::make_constants(params);
      shared.nonfinite_keys = NonFiniteKeys{};
    }
    if constexpr (kLatent) {
      for (int r = thread; r < kTileQ; r += kThreads) {
        const PackGqaRow row =
            PackGqaRow::of(params, work.tile.first_row + min_of(r, work.tile.num_rows - 1));
        // mutate: rope-part-of-another-head
        shared.q_rope_offset[r] =
            (static_cast<int64_t>(work.request.q_start) + row.token) * all.q_rope_stride_n +
            row.group_head * all.q_rope_stride_h;
        const int token = work.request.q_start + row.token;
        shared.q_offset[r] += all.gaps_before(token, all.q_gap);  // this thread has written it
        shared.q_rope_offset[r] += all.gaps_before(token, all.q_rope_gap);
      }
    }
  }

  // Starts the copy of kCount columns of Q, which become those from kFirst on.
  template <int kFirst, int kCount>
  __device__ __forceinline__ void copy_query_columns(const void* source, const int64_t* offsets) {
    constexpr int kPerChunk = QTile::kElementsPerChunk, kChunks = kCount / kPerChunk;
    const uint32_t tile = ptx::shared_address(shared.q);
#pragma unroll 4
    for (int index = thread; index < kTileQ * kChunks; index += kThreads) {
      const int row = index / kChunks, chunk = index % kChunks;
      copy_chunk<QTile, kHeadDimQK, Config::kAligned>(
          QTile::address(tile, row, kFirst / kPerChunk + chunk), kFirst / kPerChunk + chunk,
          static_cast<const DTypeQ*>(source) + offsets[row] + chunk * kPerChunk,
          row < work.tile.num_rows);
    }
  }

  __device__ __forceinline__ void copy_queries() {
    if constexpr (kLatent) {
      copy_query_columns<0, kHeadDimVO>(params.q, shared.q_offset);
      if constexpr (Config::kHeadDimRope > 0) {
        copy_query_columns<kHeadDimVO, Config::kHeadDimRope>(all.q_rope, shared.q_rope_offset);
      }
    } else {
      copy_query_columns<0, kHeadDimQK>(params.q, shared.q_offset);
    }
  }

  // Starts the copy of the tile that shared.keys describes.
  __device__ __forceinline__ void copy_keys(int stage) {
    const uint32_t k = ptx::shared_address(shared.k[stage]);
    const DTypeKV* keys = keys_of<DTypeKV>(params, work.tile.kv_head);
    if constexpr (kLatent) {
      copy_columns<KTile, 0, kHeadDimVO, Config::kAligned, kThreads>(k, keys, shared.keys.k,
                                                                     thread);
      if constexpr (Config::kHeadDimRope > 0) {
        copy_columns<KTile, kHeadDimVO, Config::kHeadDimRope, Config::kAligned, kThreads>(
            k, static_cast<const DTypeKV*>(all.k_rope), shared.keys.second, thread);
      }
    } else {
      copy_all_columns<KTile, 0, kHeadDimQK, Config::kAligned, kThreads>(k, keys, shared.keys.k,
                                                                         thread);
      copy_columns<VTile, 0, kHeadDimVO, Config::kAligned, kThreads>(
          ptx::shared_address(shared.v[stage]), values_of<DTypeKV>(params, work.tile.kv_head),
          shared.keys.second, thread);
    }
  }

  __device__ __forceinline__ unsigned char* values(int stage) {
    if constexpr (kLatent) return shared.k[stage];
    return shared.v[stage];
  }

  // Scales the rope part of Q, rotates and converts Q as the options ask for it.
  __device__ __forceinline__ void prepare_queries() {
    if constexpr (kLatent && kFp8 && Config::kHeadDimRope > 0) {
      if (all.rope_scale != 1.0f) {
        constexpr int kWords = Config::kHeadDimRope / 2;
        for (int index = thread; index < kTileQ * kWords; index += kThreads) {
          const int row = index / kWords, word = index % kWords;
          uint32_t& pair = *reinterpret_cast<uint32_t*>(
              shared.q + QTile::offset(row, kHeadDimVO / 8 + word / 4) + word % 4 * 4);
          float low, high;
          ptx::unpack_pair<DTypeQ>(pair, low, high);
          pair = ptx::pack_pair<DTypeQ>(low * all.rope_scale, high * all.rope_scale);
        }
        ptx::block_sync();
      }
    }
    Traits::prepare_q(shared, work.tile.num_rows, thread, warp, lane);
  }

  // --- S = Q K^T ---

  // The logits of the warp's rows and keys, as products.
  __device__ __forceinline__ void multiply_keys(float (&s)[1][kTilesS][4], uint32_t q,
                                                uint32_t k) {
    constexpr int kSteps = kHeadDimQK / 16;
    if constexpr (kTilesS % 2 == 0) {
      multiply_qk<DTypeS, KTile, kSteps, 1, 8 * kTilesS>(
          s, [=](uint32_t (&a)[4], int, int step) { load_q_fragment<QTile>(a, q, 0, step); }, k);
    } else {
      static_assert(kTilesS % 2 == 0 || kTilesS == 1, "n-tiles come in pairs, or alone");
      // One load brings four chunks of 8 keys: two steps, or four of fp8. Even and odd steps have
      // accumulators of their own, because products of one accumulator wait for each other.
      constexpr int kLoaded = 2 * kStepsPerLoad<KTile>;
      float odd[4];
#pragma unroll
      for (int step = 0; step < kSteps; step += kLoaded) {
        uint32_t loaded[4], b[kLoaded][2];
        ptx::ldmatrix_x4(loaded, KTile::advance(k, 0, 2 * step / kStepsPerLoad<KTile>));
#pragma unroll
        for (int i = 0; i < kLoaded; ++i) {
          if constexpr (kFp8) {
            b[i][0] = ptx::fp8_to_pair<DTypeS, DTypeKV, 0, 1>(loaded[i]);
            b[i][1] = ptx::fp8_to_pair<DTypeS, DTypeKV, 2, 3>(loaded[i]);
          } else {
            b[i][0] = loaded[2 * i];  // mutate: wide-k-fragment-swapped
            b[i][1] = loaded[2 * i + 1];
          }
        }
#pragma unroll
        for (int i = 0; i < kLoaded; ++i) {
          uint32_t a[4];
          load_q_fragment<QTile>(a, q, 0, step + i);
          float (&d)[4] = i % 2 == 0 ? s[0][0] : odd;
          ptx::mma_m16n8k16<DTypeS>(d, a, b[i][0], b[i][1], step + i < 2);
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][0][e] += odd[e];  // mutate: odd-steps-lost
    }
  }

  // Hides the logits of entries of a list that are no keys.
  template <typename Form>
  __device__ __forceinline__ void hide_absent(float (&s)[1][kTilesS][4], int place) {
#pragma unroll
    for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = 8 * (kTilesS * key_warp + n) + 2 * (lane & 3) + e;
        if (shared.is_hidden[place][key]) {  // mutate: absent-keys-count
          s[0][n][e] = s[0][n][2 + e] = Form::hidden();
        }
      }
    }
  }

  // --- Softmax ---

  __device__ __forceinline__ int row_of(int h) const { return 16 * row_warp + 8 * h + (lane >> 2); }

  // Announces the largest logits of the warp's keys.
  template <typename Form>
  __device__ __forceinline__ void publish_max(const float (&s)[1][kTilesS][4], const Form& form) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest =
          form.keeps_max() ? -ptx::infinity() : quad_max(form.value(largest_of(s[0], h)));
      if ((lane & 3) == 0) shared.row_max[key_warp][row_of(h)] = largest;
    }
  }

  // Raises the maxima to those of all warps; one of them says how O must be scaled.
  __device__ __forceinline__ void raise_max(float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = shared.row_max[0][row_of(h)];
#pragma unroll
      // mutate: maximum-of-one-warp
      for (int w = 1; w < kKeyWarps; ++w) largest = fmaxf(largest, shared.row_max[w][row_of(h)]);
      const float factor = softmax.raise_row(0, h, largest, scale);
      if (key_warp == 0 && (lane & 3) == 0) shared.factor[row_of(h)] = factor;
    }
  }

  // Leaves the probabilities of the warp's rows and keys in shared memory.
  template <typename Form>
  __device__ __forceinline__ void publish_probabilities(const float (&s)[1][kTilesS][4],
                                                        const Form& form, float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float shift = softmax.shift_of(0, h, form, scale);
#pragma unroll
      for (int n = 0; n < kTilesS; ++n) {
        const float first = ptx::ex2_approx(form.exponent(s[0][n][2 * h], shift));
        const float second = ptx::ex2_approx(form.exponent(s[0][n][2 * h + 1], shift));
        softmax.row_sum[0][h] += first + second;
        const uint32_t at = PTile::offset(row_of(h), kTilesS * key_warp + n) + 4 * (lane & 3);
        *reinterpret_cast<uint32_t*>(shared.p + at) = ptx::pack_pair<DTypeP>(first, second);
      }
    }
  }

  // --- O += P V ---

  __device__ __forceinline__ void rescale_output() {
    float factors[kMmaQ][2];
    bool moves = false;
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factors[m][h] = shared.factor[16 * m + 8 * h + (lane >> 2)];
        moves |= factors[m][h] != 1.0f;
      }
    }
    if (ptx::warp_any(moves)) multiply_rows(o, factors);  // mutate: wide-output-not-rescaled
  }

  __device__ __forceinline__ void multiply_values(int stage) {
    constexpr int kChunksOfWarp = kColumns / VTile::kElementsPerChunk;
    const uint32_t p = lane_address<PTile>(ptx::shared_address(shared.p), lane);
    // mutate: columns-of-another-warp
    const uint32_t v = ptx::shared_address(values(stage)) +
                       VTile::offset(lane & 15, (lane >> 4) + kChunksOfWarp * warp);
#pragma unroll
    for (int step = 0; step < kTileKV / 16; ++step) {
      uint32_t probabilities[kMmaQ][4];
#pragma unroll
      for (int m = 0; m < kMmaQ; ++m) load_q_fragment<PTile>(probabilities[m], p, 16 * m, step);
      multiply_pv<DTypeP, VTile, kColumnGroups, kMmaQ>(o, probabilities, v, 16 * step);
    }
  }

  // Sets non-finite values of a tile that hides keys to zero, and adds them by hand to the rows
  // that see their keys. All warps are done with S, so that the tile need not stay as it was.
  __device__ __forceinline__ void clean_hidden_values(int stage, int first_key) {
    if (!ptx::block_any(!are_values_finite<VTile, kThreads>(values(stage), thread))) return;
    zero_nonfinite_values<VTile, kThreads>(values(stage), shared.nonfinite_keys, thread);
    ptx::block_sync();  // mutate: wide-bad-keys-read-early
    for (int key = 0; key < kTileKV; ++key) {
      if ((shared.nonfinite_keys.word[key / 32] >> (key % 32)) & 1) {
        add_nonfinite_values(key, value_of(first_key + key));
      }
    }
    ptx::block_sync();
    if (thread == 0) shared.nonfinite_keys = NonFiniteKeys{};
  }

  // The value of a key in global memory.
  __device__ __forceinline__ const DTypeKV* value_of(int key) const {
    if constexpr (kLatent) {
      const PageSlot at = PageSlot::of(params, key);
      const int page = params.kv_indices[work.request.kv_start + at.page];
      return static_cast<const DTypeKV*>(params.k) +
             paged_row(page, at.slot, params.k_stride_page, params.k_stride_n);
    } else {
      return values_of<DTypeKV>(params, work.tile.kv_head) +
             value_row<Config::kPaged, Config::kOwnValuePages>(params, work.request, key);
    }
  }

  __device__ __forceinline__ void add_nonfinite_values(int key, const DTypeKV* value_row) {
    float probabilities[kMmaQ][2];
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * m + 8 * h + (lane >> 2);
        const auto* p = reinterpret_cast<const DTypeP*>(shared.p + PTile::offset(row, key / 8));
        probabilities[m][h] = element_to_float(p[key % 8]);
      }
    }
    const int t = lane & 3;
#pragma unroll
    for (int n = 0; n < 2 * kColumnGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        // fp8 fragments leave columns in another order (see fragments.cuh).
        const int column = kFp8 ? 8 * (n & ~1) + 4 * t + (n & 1) + 2 * e : 8 * n + 2 * t + e;
        const float value = element_to_float(value_row[kColumns * warp + column]);
        // A branch, so that values are not loaded all at once, for which there are no registers.
        if (!is_finite(value)) add_nonfinite_value(o, n, e, probabilities, value);
      }
    }
  }

  // --- The loop over the keys ---

  __device__ __forceinline__ void run() {
    if (work.tile.num_rows <= 0) return;
    const KeyRange range = KeyRange::of<Mask::kKeyShare>(params, work);
    const TileSpan tiles = TileSpan::of<Config::kCustomMask>(range, kTileKV, work.tile);
    const auto key_of = [&](int tile) { return tiles.origin + tile * kTileKV + thread; };
    const auto look_up = [&](int tile) {
      if (thread >= kTileKV) return -1;
      return WideRows<Config, kTileKV>::look_up(all, work.request, key_of(tile), range.end);
    };
    // Describes the rows of a tile; lists have a place for each tile in use.
    const auto publish_rows = [&](int tile, int found) {
      if (thread >= kTileKV) return;
      shared.keys.set(all, work.request, thread, key_of(tile), range.end, found);
      if constexpr (kSparse) {
        shared.is_hidden[(tile - tiles.begin) % (kStages + 1)][thread] = found < 0;
      }
    };

    // Fill the pipeline; Q travels with the first tile.
    describe_rows();
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      publish_rows(tiles.begin + stage, look_up(tiles.begin + stage));
      ptx::block_sync();
      if (stage == 0) copy_queries();
      if (tiles.begin + stage < tiles.end) copy_keys(stage);
      ptx::cp_async_commit();
      ptx::block_sync();  // the next tile's rows overwrite these
    }
    publish_rows(tiles.begin + kStages - 1, look_up(tiles.begin + kStages - 1));
    int found = look_up(tiles.begin + kStages);
    ptx::cp_async_wait_group<kStages - 2>();
    ptx::block_sync();
    prepare_queries();

    const float scale = LogitsVariant::softmax_scale(params);
    const uint32_t q = lane_address<QTile>(ptx::shared_address(shared.q), lane, 16 * row_warp);
    const RowInfo* rows = shared.rows + 16 * row_warp;
    int stage = 0;
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int first_key = tiles.origin + tile * kTileKV;
      // Wait for this tile, and for all warps to be done with the tile before it.
      ptx::cp_async_wait_group<kStages - 2>();  // mutate: wide-stage-awaited-too-late
      ptx::block_sync();                        // mutate: wide-warps-not-awaited
      const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
      if (tile + kStages - 1 < tiles.end) copy_keys(free_stage);
      ptx::cp_async_commit();

      if constexpr (Config::kRope) {
        rotate_tile<KTile, kHeadDimQK, kThreads>(shared.k[stage], shared.rope, thread,
                                                 [=](int row) { return first_key + row; });
        ptx::block_sync();
      }

      // S = Q K^T, as logits.
      float s[1][kTilesS][4];
      const int own_key = first_key + 8 * kTilesS * key_warp;
      const uint32_t keys =
          ptx::shared_address(shared.k[stage]) + 8 * kTilesS * key_warp * KTile::kRowBytes;
      if constexpr (kTilesS == 1) {
        multiply_keys(s, q, keys + KTile::offset(lane & 7, lane >> 3));
      } else {
        multiply_keys(s, q, k_lane_address<KTile>(keys, lane));
      }
      bool is_partial = Config::kCustomMask;
      if constexpr (Mask::kOfRows) {
        is_partial = first_key + kTileKV > Mask::first_key(params, work.request);
      }
      const bool is_masked = is_partial || range.cuts(first_key, kTileKV);
      const auto form = LogitsVariant::apply(s, softmax.row_max, rows, shared.logits, params,
                                             work.request, own_key, lane, is_masked || kSparse);
      using Form = decltype(form);
      if (is_masked) {
        apply_mask<Mask, Form>(s, params, work.request, range, is_partial, rows, own_key, lane);
      }
      if constexpr (kSparse) hide_absent<Form>(s, (tile - tiles.begin) % (kStages + 1));

      // Softmax: every maximum is taken, and its probability is 1, unrounded.
      publish_max(s, form);
      ptx::block_sync();  // mutate: maxima-read-early
      publish_rows(tile + kStages, found);
      found = look_up(tile + kStages + 1);
      raise_max(scale);
      publish_probabilities(s, form, scale);
      ptx::block_sync();  // mutate: probabilities-read-early

      // O += P V.
      rescale_output();
      if (is_masked) clean_hidden_values(stage, first_key);
      multiply_values(stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    finish();
  }

  // --- The end ---

  // Writes the result, or this split's part of it; every warp its columns of all rows.
  __device__ __forceinline__ void finish() {
    ptx::cp_async_wait_group<0>();
    ptx::block_sync();  // the maxima of the last tile have been read
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(softmax.row_sum[0][h]);
      if ((lane & 3) != 0) continue;
      shared.row_sum[key_warp][row_of(h)] = sum;
      if (key_warp == 0) {
        shared.row_max[0][row_of(h)] = softmax.template base2_max<LogitsVariant>(0, h, params);
      }
    }
    ptx::block_sync();  // mutate: wide-states-read-early
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) write_row(m, h);
    }
    // Blocks count unless a launch merges.
    const bool merges = work.tile.num_splits > 1 && work.tile.split_tile >= 0 &&
                        params.counters != nullptr;
    if (Config::kFusedMerge && merges && arrive_last(params, work.tile, thread, &shared.flag)) {
      for (int row = warp; row < work.tile.num_rows; row += kWarps) {
        merge_row<Config, kHeadDimVO, kTileQ>(
            params, work.tile, row, work.request.q_start + shared.rows[row].token,
            shared.rows[row].head, lane);
      }
    }
  }

  __device__ __forceinline__ void write_row(int m, int h) {
    const int row = 16 * m + 8 * h + (lane >> 2);
    RowState state{shared.row_max[0][row], 0.0f};
#pragma unroll
    // mutate: sums-of-one-warp
    for (int w = 0; w < kKeyWarps; ++w) state.sum += shared.row_sum[w][row];
    const RowState keys = state;
    const bool exists = row < work.tile.num_rows, is_first = warp == 0 && (lane & 3) == 0;
    const int head = shared.rows[row].head;
    const int64_t token = work.request.q_start + shared.rows[row].token;
    if (work.tile.leaves_state()) {
      const int64_t index = (work.tile.state(params) + work.tile.split) * kTileQ + row;
      if (!exists) return;
      float* out = params.partial_o + index * kHeadDimVO + kColumns * warp;
      store_output_row<float, kColumns, kFp8, true>([&](int column) { return out + column; }, o[m],
                                                    h, state.normaliser(keys.max), lane);
      if (is_first) {
        params.partial_lse[index] = state.lse();
        if constexpr (kSparse) raise_max_logit(all, token, head, keys.max);
      }
      return;
    }
    state.add_sink(sink_of(params, head));
    const float factor = state.normaliser(keys.max) * output_scale_of(params, work.tile.kv_head);
    if (exists) {
      gate_row<Config, kColumns, kFp8, Config::kAligned>(o[m], h, params, token, head, lane,
                                                         kColumns * warp);
    }
    DTypeO* out = static_cast<DTypeO*>(params.o) + token * params.o_stride_n +
                  head * params.o_stride_h + kColumns * warp;
    if constexpr (Config::kAligned && sizeof(DTypeO) == 2 && !kFp8 && kColumns % 32 == 0) {
      store_output_vectors<DTypeO, kColumns>(out, o[m], h, factor, exists, lane);
    } else if (exists) {
      store_output_row<DTypeO, kColumns, kFp8, Config::kAligned>(
          [&](int column) { return out + column; }, o[m], h, factor, lane);
    }
    if constexpr (kSparse) {
      if (exists && is_first) raise_max_logit(all, token, head, keys.max);
    }
    if (exists && is_first && params.lse != nullptr) {
      store_lse(params, token, head, keys, state);
    }
  }
};

}  // namespace cupyattn
