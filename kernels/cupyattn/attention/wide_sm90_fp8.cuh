// The two consumer warpgroups of wide_sm90 where keys have 8 bits and no scales of their own. Keys
// become float16 in the registers from which products take their 64 rows, as in wide_decode_sm90
// (wide_decode_sm90_fp8.cuh), so none is written to shared memory again. Products are transposed:
// keys, and then columns of values, are their rows, and the tile's 64 rows are their columns.
//
// Both consumers do the same, for two tiles of keys a turn. "<-" names what a phase waits for.
//   make_scores     S^T = K Q^T of its own tile, the first or the second <- producer: K
//   publish         P of its own tile goes to shared memory <- the other's O of the turn before
//   raise_maxima    in the rare turn in which a row needs a larger maximum: of all keys of the turn
//   make_output     O^T += V^T P^T of both tiles, its own 256 columns <- the other's P; releases K
// A thread has the logits of two keys, 16 warp + lane / 4 (+ 8), and eight neighbouring columns of O,
// for rows 8 n + 2 (lane % 4) (+ 1).
#pragma once

#include "cupyattn/attention/wide_decode_sm90_fp8.cuh"

namespace cupyattn {

template <typename Config>
struct WideSm90Fp8Traits : WideSm90Tiles<Config> {
  using Tiles = WideSm90Tiles<Config>;
  using Tiles::kPieces, Tiles::kStages, Tiles::kTileKV, Tiles::kTileQ, Tiles::kWarpgroup;
  using typename Tiles::Item;
  using typename Tiles::KeyMarks;
  using typename Tiles::KTile;
  using typename Tiles::PTile;
  using typename Tiles::QTile;
  static constexpr int kProducers = 1, kConsumers = 2, kThreads = 3 * kWarpgroup;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;
  static constexpr int kReaders = kConsumerThreads / kWarpSize;  // warps that release a stage
  static constexpr bool kMergesSplits = false;

  // What turns a row's products into exponents: product * scale + shift, in base 2.
  struct alignas(8) RowScale {
    float scale, shift;
  };

  struct SharedMemory {
    alignas(QTile::kAlign) unsigned char q[QTile::kBytes];
    alignas(KTile::kAlign) unsigned char k[kStages][KTile::kBytes];
    alignas(PTile::kAlign) unsigned char p[kConsumers][PTile::kBytes];
    // Of each warp: a row's largest product of a turn, and in the end its sum.
    alignas(16) float of_warps[kTileQ][kReaders];
    alignas(16) RowScale row_scale[kTileQ];
    alignas(16) uint32_t raised[kReaders];  // whether a warp asks for larger maxima
    float row_scales[kTileQ];               // of logits (QueryScale)
    float factors[kTileQ];                  // by which O is multiplied
    NonFiniteKeys nonfinite_keys[kConsumers][2];  // of each tile of a turn
    alignas(4) KeyMarks exists;
    alignas(8) Item items[1];
    alignas(8) uint64_t full_q, empty_p;
    uint64_t full[kStages][kPieces], empty[kStages][kPieces];

    __device__ __forceinline__ unsigned char* values(int stage) { return k[stage]; }
  };

  static_assert(Tiles::kFp8 && Tiles::kKeyScales == kNoScales && kTileQ == 64 && kTileKV == 64,
                "keys of 8 bits, which are the rows of products");
  static_assert(Config::kProducerRegisters + 2 * Config::kConsumerRegisters <=
                    3 * (65536 / kThreads / 8 * 8),
                "registers come from what the block was launched with");
};

template <typename Traits>
struct WideSm90Fp8Consumer {
  using DTypeKV = typename Traits::DTypeKV;
  using DTypeO = typename Traits::DTypeO;
  using Item = typename Traits::Item;
  using KTile = typename Traits::KTile;
  using QTile = typename Traits::QTile;
  using PTile = typename Traits::PTile;
  using RowScale = typename Traits::RowScale;
  using Fp8 = WideDecodeSm90Fp8<Traits>;
  using Stage = PipelineState<Traits::kStages>;
  static constexpr int kTileQ = Traits::kTileQ, kTilesQ = kTileQ / 8, kTileKV = Traits::kTileKV;
  static constexpr int kHeadDimVO = Traits::kHeadDimVO, kColumns = kHeadDimVO / 2;
  static constexpr int kBlocks = kColumns / 64;  // of 64 rows of O^T
  static constexpr int kBarrier = 1;             // of the first consumer, then the second, then of both
  using Scores = float[1][kTilesQ][4];
  using OfRows = float[kTilesQ][2];  // a thread's rows
  // The shift of a row that has seen no key: any logit asks for a maximum.
  static constexpr float kNoMaximum = 3e38f;

  const WideSm90Block<Traits>& block;
  const AttentionParams& params;
  typename Traits::SharedMemory& shared;
  const int index;  // of the consumer
  const int warp = ptx::warp_uniform(threadIdx.x % Traits::kWarpgroup / kWarpSize);
  const int lane = threadIdx.x % kWarpSize;
  const int reader = index * (Traits::kWarpgroup / kWarpSize) + warp;
  uint32_t p_parity = 0;
  float o[kBlocks][kTilesQ][4];
  float row_sum[2] = {};  // of rows 2 lane and 2 lane + 1, over the warp's keys

  __device__ __forceinline__ WideSm90Fp8Consumer(const WideSm90Block<Traits>& block, int index)
      : block(block), params(block.params), shared(block.shared), index(index) {}

  __device__ __forceinline__ int row_of(int n, int e) const { return 8 * n + 2 * (lane & 3) + e; }
  __device__ __forceinline__ int key_of(int h) const { return 16 * warp + 8 * h + (lane >> 2); }
  __device__ __forceinline__ int first_column() const {
    return kColumns * index + 64 * warp + 8 * (lane >> 2);
  }
  __device__ __forceinline__ void sync() const {
    ptx::named_barrier_sync(kBarrier + index, Traits::kWarpgroup);
  }
  __device__ __forceinline__ void sync_consumers() const {
    ptx::named_barrier_sync(kBarrier + Traits::kConsumers, Traits::kConsumerThreads);
  }
  __device__ __forceinline__ void release(uint64_t& barrier) const {
    ptx::mbarrier_arrive_if(lane == 0, ptx::shared_address(&barrier));
  }

  __device__ __forceinline__ void run() {
    const Item& item = shared.items[0];
    clear();
    prepare_rows(item);
    if (item.has_keys()) {
      Stage stage;
      const int begin = ptx::warp_uniform(item.tiles.begin);
      for (int tile = ptx::warp_uniform(item.tiles.end) - 1; tile >= begin; tile -= 2) {
        process_turn(item, tile, tile > begin, stage);
        stage.advance();
        stage.advance();
      }
    }
    finish(item);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][n][e] = 0.0f;
      }
    }
  }

  // Queries become float16, and rows begin without a maximum.
  __device__ __forceinline__ void prepare_rows(const Item& item) {
    if (item.has_keys()) {
      await_phase(shared.full_q, 0);
      Fp8::prepare_queries(shared.q, shared.row_scales, latent_of(block.all_params).rope_scale,
                           reader, lane);
      ptx::fence_proxy_async();
      sync_consumers();  // mutate: wide-fp8-rows-read-early
    }
    const int row = consumer_thread();
    if (row < kTileQ) {
      const float scale = item.has_keys() ? shared.row_scales[row] : 1.0f;
      shared.row_scale[row] = RowScale{params.softmax_scale * scale, kNoMaximum};
    }
    sync_consumers();
  }
  __device__ __forceinline__ int consumer_thread() const {
    return threadIdx.x - (Traits::kThreads - Traits::kConsumerThreads);
  }

  // Two tiles of keys, or one.
  __device__ __forceinline__ void process_turn(const Item& item, int tile, bool has_second,
                                               const Stage& first) {
    Stage second = first;
    second.advance();
    Scores s;
    if (index == 0 || has_second) {
      const Stage own = index == 0 ? first : second;
      make_scores(s, own);
      if constexpr (Traits::kSparse) hide_missing_keys(s, own);
      const int first_key = item.first_key(tile - index);
      if (unlikely(item.range.cuts(first_key, kTileKV))) hide_keys(s, item, first_key);
    } else {
      hide_all(s);
    }
    OfRows tile_sum;
    publish(s, tile_sum);
    uint32_t swept = make_output(item, tile, first, 0);
    add_sums(tile_sum);  // while products run
    if (has_second) swept |= make_output(item, tile - 1, second, 1);
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(reinterpret_cast<float (&)[kBlocks * kTilesQ * 4]>(o));
    if (unlikely(swept != 0)) add_nonfinite_values(item, tile, swept);
    release(shared.empty_p);
    p_parity ^= 1;
  }

  // --- Phases ---

  __device__ __forceinline__ void make_scores(Scores& s, const Stage& stage) const {
    const uint64_t queries = ptx::opaque_copy(operand_at<QTile>(ptx::shared_address(shared.q)));
    float (&d)[kTileQ / 2] = reinterpret_cast<float (&)[kTileQ / 2]>(s);
    typename Fp8::Fragments fragments[2];
    // The rope columns and those of the follower's piece come first.
    constexpr int kHalf = (Fp8::kGroups - 1) / 2;
    const auto load = [&](int i) {
      const int group = i == 0 ? Fp8::kGroups - 1 : (i - 1 + kHalf) % (2 * kHalf);
      // mutate: wide-fp8-keys-not-awaited
      if (i == 0) await_phase(shared.full[stage.stage][Traits::kOfFollower], stage.parity);
      if (i == kHalf + 1) await_phase(shared.full[stage.stage][Traits::kOfLeader], stage.parity);
      return Fp8::load_key_bytes(shared.k[stage.stage], group, warp, lane);
    };
    // Bytes are loaded a group ahead, while products run.
    typename Fp8::KeyBytes bytes = load(0);
#pragma unroll
    for (int i = 0; i < Fp8::kGroups; ++i) {
      const int group = i == 0 ? Fp8::kGroups - 1 : (i - 1 + kHalf) % (2 * kHalf);
      if (i >= 2) ptx::wgmma_wait<1>();
      Fp8::convert_keys(fragments[i % 2], bytes);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::Wgmma<kTileQ>::template multiply_rs_k_major<half_t>(
            d, fragments[i % 2][step],
            operand_behind<QTile>(queries, group * (QTile::kPanelBytes / 16) + 2 * step),
            i > 0 || step > 0);
      }
      ptx::wgmma_commit();
      if (i + 1 < Fp8::kGroups) bytes = load(i + 1);
    }
    ptx::wgmma_wait<0>();
    take_results(s);
  }

  __device__ __forceinline__ void hide_all(Scores& s) const {
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][n][e] = -ptx::infinity();
    }
  }
  // Hides the keys that a sparse list lacks.
  __device__ __forceinline__ void hide_missing_keys(Scores& s, const Stage& stage) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (shared.exists[stage.stage][key_of(h)] != 0) continue;  // mutate: wide-fp8-missing-keys-seen
#pragma unroll
      for (int n = 0; n < kTilesQ; ++n) s[0][n][2 * h] = s[0][n][2 * h + 1] = -ptx::infinity();
    }
  }
  // Hides the keys that causality or a window hides from rows, and those past the last.
  __device__ __forceinline__ void hide_keys(Scores& s, const Item& item, int first_key) const {
    const TileWork& work = item.work.tile;
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = work.first_row + min_of(row_of(n, e), work.num_rows - 1);
        const int token = PackGqaRow::of(params, row).token;
        const KeyLimits limits = KeyLimits::of(params, item.work.request,
                                               item.work.request.position(params, token));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = first_key + key_of(h);
          // mutate: wide-fp8-hidden-keys-seen
          if (key < limits.begin || key >= limits.end) s[0][n][2 * h + e] = -ptx::infinity();
        }
      }
    }
  }

  // Makes the probabilities of the own tile under the present maxima. Where a row asks for a larger
  // one, in any warp, all take it and make them again.
  __device__ __forceinline__ void publish(const Scores& s, OfRows& tile_sum) {
    await_phase(shared.empty_p, p_parity ^ 1);  // mutate: wide-fp8-p-overwritten
    exponentiate(s, tile_sum);
    // Two probabilities with that sum have one whose exponent is beyond kRescaleThreshold.
    constexpr float kMostOfTwo = 512.0f;
    float most = 0.0f;
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) most = fmaxf(most, fmaxf(tile_sum[n][0], tile_sum[n][1]));
    const bool asks = ptx::warp_any(most > kMostOfTwo);
    if (lane == 0) shared.raised[reader] = asks;
    ptx::fence_proxy_async();
    sync_consumers();  // mutate: wide-fp8-p-read-early
    uint32_t raised = 0;
#pragma unroll
    for (int i = 0; i < Traits::kReaders; ++i) raised |= shared.raised[i];
    if (unlikely(raised != 0)) {
      raise_maxima(s);
      exponentiate(s, tile_sum);
      ptx::fence_proxy_async();
      sync_consumers();
    }
  }
  // Adds the sums of lanes that have the same rows. Lanes divide the rows: each hands half of what it
  // has to another, three times over, so that a sum needs no register for each of a thread's rows.
  __device__ __forceinline__ void add_sums(OfRows& tile_sum) {
#pragma unroll
    for (int half = kTilesQ / 2; half > 0; half /= 2) {
      const bool keeps_upper = (lane & 4 * half) != 0;
#pragma unroll
      for (int n = 0; n < half; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float lower = tile_sum[n][e], upper = tile_sum[n + half][e];
          // mutate: wide-fp8-sums-of-other-rows
          const float other = ptx::shuffle_xor(keeps_upper ? lower : upper, 4 * half);
          tile_sum[n][e] = (keeps_upper ? upper : lower) + other;
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) row_sum[e] += tile_sum[0][e];
  }
  // Writes P as rows of queries.
  __device__ __forceinline__ void exponentiate(const Scores& s, OfRows& tile_sum) const {
    // Lane 8 m + r gives the place of row r of the m-th matrix: rows of queries 8 (m / 2), keys
    // 16 warp + 8 (m % 2).
    const uint32_t to =
        ptx::shared_address(shared.p[index]) +
        PTile::offset(8 * (lane >> 4) + (lane & 7), 2 * warp + ((lane >> 3) & 1));
#pragma unroll
    for (int n = 0; n < kTilesQ; n += 2) {
      uint32_t p[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 rows =
            *reinterpret_cast<const float4*>(&shared.row_scale[row_of(n + i, 0)]);
        float pair[2][2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float scale = e == 0 ? rows.x : rows.z, shift = e == 0 ? rows.y : rows.w;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            pair[h][e] = ptx::ex2_approx(fmaf(s[0][n + i][2 * h + e], scale, shift));
          }
          tile_sum[n + i][e] = pair[0][e] + pair[1][e];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) p[2 * i + h] = ptx::pack_pair<half_t>(pair[h][0], pair[h][1]);
      }
      ptx::stmatrix_x4_trans(to + n * PTile::kPatternBytes, p);
    }
  }

  // Gives every row that asks for it the maximum of all keys of the turn. A row's maximum depends on
  // its own logits alone.
  __device__ __forceinline__ void raise_maxima(const Scores& s) {
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float largest = fmaxf(s[0][n][e], s[0][n][2 + e]);
#pragma unroll
        // mutate: wide-fp8-maximum-of-some-keys
        for (int mask = 4; mask < kWarpSize; mask *= 2) {
          largest = fmaxf(largest, ptx::shuffle_xor(largest, mask));
        }
        if (lane < 4) shared.of_warps[row_of(n, e)][reader] = largest;
      }
    }
    sync_consumers();  // mutate: wide-fp8-maxima-read-early
    if (const int row = consumer_thread(); row < kTileQ) {
      const float4* const of = reinterpret_cast<const float4*>(shared.of_warps[row]);
      const float4 a = of[0], b = of[1];
      const float largest = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)),
                                  fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
      const RowScale old = shared.row_scale[row];
      float factor = 1.0f;
      if (fmaf(largest, old.scale, old.shift) > kRescaleThreshold) {
        const float shift = -largest * old.scale;
        factor = ptx::ex2_approx(shift - old.shift);
        shared.row_scale[row].shift = shift;
      }
      shared.factors[row] = factor;
    }
    sync_consumers();  // mutate: wide-fp8-factors-read-early
#pragma unroll
    // mutate: wide-fp8-sum-not-rescaled
    for (int e = 0; e < 2; ++e) row_sum[e] *= shared.factors[2 * lane + e];
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
      const float2 factors = *reinterpret_cast<const float2*>(&shared.factors[row_of(n, 0)]);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = e == 0 ? factors.x : factors.y;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
          // mutate: wide-fp8-output-not-rescaled
          for (int h = 0; h < 2; ++h) o[i][n][2 * h + e] *= factor;
        }
      }
    }
  }

  // Adds V^T P^T of one tile of the turn to O^T, and releases the tile when its values are loaded.
  // Returns a bit for the tile if it hides keys.
  __device__ __forceinline__ uint32_t make_output(const Item& item, int tile, const Stage& stage,
                                              int of_turn) {
    // Scores have waited for one of the tiles only.
    await_phase(shared.full[stage.stage][Traits::kOfFollower], stage.parity);
    await_phase(shared.full[stage.stage][Traits::kOfLeader], stage.parity);
    const bool hides_keys = unlikely(block.hides_keys(item, tile));
    if (hides_keys) zero_nonfinite_values(item, tile, stage, of_turn);
    const uint64_t p =
        ptx::opaque_copy(operand_at<PTile>(ptx::shared_address(shared.p[of_turn])));
    uint32_t fragments[2][kBlocks][4];
    ValueBytes bytes = load_values(shared.k[stage.stage], 0);
#pragma unroll
    for (int step = 0; step < kTileKV / 16; ++step) {
      ptx::wgmma_wait<1>();
      convert_values(fragments[step % 2], bytes);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        ptx::Wgmma<kTileQ>::template multiply_rs_k_major<half_t>(
            reinterpret_cast<float (&)[kTileQ / 2]>(o[i]), fragments[step % 2][i],
            operand_behind<PTile>(p, 2 * step), true);
      }
      ptx::wgmma_commit();
      // A step ahead, while products run.
      if (step + 1 < kTileKV / 16) bytes = load_values(shared.k[stage.stage], 16 * (step + 1));
    }
    ptx::warp_sync();
    release(shared.empty[stage.stage][Traits::kOfFollower]);
    release(shared.empty[stage.stage][Traits::kOfLeader]);
    return hides_keys ? 1u << of_turn : 0u;
  }
  // A thread's eight columns of the four keys that it has of 16.
  struct ValueBytes {
    uint64_t of_key[4];
  };
  __device__ __forceinline__ ValueBytes load_values(const unsigned char* values,
                                                    int first_key) const {
    const int chunk = kColumns / 16 * index + 4 * warp + (lane >> 3);
    const uint32_t even = KTile::offset(2 * (lane & 3), chunk) + 8 * ((lane >> 2) & 1);
    ValueBytes bytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The next key's chunk lies behind another bit.
      const uint32_t own = i % 2 == 0 ? even : even ^ (KTile::kRowBytes | 16);
      const uint32_t below = (first_key + i / 2 * 8) * KTile::kRowBytes;
      bytes.of_key[i] = *reinterpret_cast<const uint64_t*>(values + own + below);
    }
    return bytes;
  }
  // Fragments of 16 keys: row lane / 4 (+ 8) of block i is the thread's column 2 i (+ 1).
  static __device__ __forceinline__ void convert_values(uint32_t (&to)[kBlocks][4],
                                                        const ValueBytes& from) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const uint32_t first = static_cast<uint32_t>(from.of_key[2 * pair] >> (32 * w));
        const uint32_t second = static_cast<uint32_t>(from.of_key[2 * pair + 1] >> (32 * w));
        // Bytes of the two keys, side by side, for two columns at a time.
        const uint32_t columns[2] = {ptx::permute_bytes(first, second, 0x5140u),
                                     ptx::permute_bytes(first, second, 0x7362u)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          to[2 * w + i][2 * pair] = ptx::opaque_copy(Fp8::low_pair(columns[i]));
          to[2 * w + i][2 * pair + 1] = ptx::opaque_copy(Fp8::high_pair(columns[i]));
        }
      }
    }
  }

  // --- Non-finite values of hidden keys (see hidden_values.cuh and WideSm90Output) ---

  // Sets those of the own columns to zero. Both consumers have made their scores.
  __device__ __forceinline__ void zero_nonfinite_values(const Item& item, int tile,
                                                        const Stage& stage, int of_turn) const {
    constexpr int kBytes = kColumns / KTile::kPanelColumns * KTile::kPanelBytes;
    const int thread = threadIdx.x % Traits::kWarpgroup;
    const int num_keys = item.range.end - item.first_key(tile);
    sync();
    NonFiniteKeys& keys = shared.nonfinite_keys[index][of_turn];
    if (thread == 0) keys = NonFiniteKeys{};
    sync();
    Vector16* chunks = reinterpret_cast<Vector16*>(shared.k[stage.stage] + index * kBytes);
#pragma unroll 1
    for (int i = thread; i < kBytes / 16; i += Traits::kWarpgroup) {
      zero_nonfinite_chunk<DTypeKV>(chunks[i], keys.word, KTile::row_at(16 * i), num_keys);
    }
    sync();
  }
  // Adds them, once O of the turn is complete, to rows that see their keys. swept: a bit for each
  // tile of the turn that hides keys.
  __device__ __forceinline__ void add_nonfinite_values(const Item& item, int tile, uint32_t swept) {
#pragma unroll 1
    for (int word = 0; word < 2 * (kTileKV / 32); ++word) {
      const int of_turn = word / 2;
      if ((swept >> of_turn & 1) == 0) continue;
      for (uint32_t bits = shared.nonfinite_keys[index][of_turn].word[word % 2]; bits != 0;
           bits &= bits - 1) {
        const int key = word % 2 * 32 + __ffs(static_cast<int>(bits)) - 1;
        const int first_key = item.first_key(tile - of_turn);
        add_nonfinite_key(block.value_of(item, first_key + key), key, of_turn);
      }
    }
    ptx::warp_sync();
  }
  __device__ __forceinline__ void add_nonfinite_key(const DTypeKV* values, int key, int of_turn) {
    const unsigned char* const p = shared.p[of_turn] + key % 8 * 2;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float value = element_to_float(values[first_column() + 2 * i + h]);
        if (is_finite(value)) continue;
#pragma unroll
        for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float seen = element_to_float(
                *reinterpret_cast<const half_t*>(p + PTile::offset(row_of(n, e), key / 8)));
            // mutate: wide-fp8-bad-values-reach-all-rows
            if (seen != 0.0f) o[i][n][2 * h + e] += seen * value;
          }
        }
      }
    }
  }

  // --- The end ---

  __device__ __forceinline__ void finish(const Item& item) {
#pragma unroll
    for (int e = 0; e < 2; ++e) shared.of_warps[2 * lane + e][reader] = row_sum[e];
    sync_consumers();  // mutate: wide-fp8-sums-read-early
    if (const int row = consumer_thread(); row < kTileQ) finish_row(item, row);
    sync_consumers();  // mutate: wide-fp8-normalisers-read-early
#pragma unroll
    for (int n = 0; n < kTilesQ; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int r = row_of(n, e);
        const Place place = place_of(item, r);
        if (!place.exists) continue;
        const float factor = shared.factors[r];
        float columns[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) columns[c] = o[c / 2][n][2 * (c % 2) + e] * factor;
        if (item.work.tile.leaves_state()) {
          store(params.partial_o + place.state * kHeadDimVO + first_column(), columns);
        } else {
          store(static_cast<DTypeO*>(params.o) + place.token * params.o_stride_n +
                    place.head * params.o_stride_h + first_column(),
                columns);
        }
      }
    }
  }
  template <typename T>
  static __device__ __forceinline__ void store(T* to, const float (&columns)[8]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        *reinterpret_cast<float4*>(to + i) =
            make_float4(columns[i], columns[i + 1], columns[i + 2], columns[i + 3]);
      }
    } else {
      Vector16 packed;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        packed.word[i] = ptx::pack_pair<T>(columns[2 * i], columns[2 * i + 1]);
      }
      *reinterpret_cast<Vector16*>(to) = packed;
    }
  }

  // Where a row lies in o, or among the states.
  struct Place {
    bool exists;
    int head;
    int64_t token, state;
  };
  __device__ __forceinline__ Place place_of(const Item& item, int r) const {
    const TileWork& work = item.work.tile;
    const PackGqaRow row = PackGqaRow::of(params, work.first_row + r);
    return Place{r < work.num_rows, work.kv_head * params.group_size + row.group_head,
                 static_cast<int64_t>(item.work.request.q_start) + row.token,
                 (work.state(params) + work.split) * kTileQ + r};
  }
  // Writes the log-sum-exp of a row, and leaves what its O is to be multiplied by.
  __device__ __forceinline__ void finish_row(const Item& item, int r) const {
    const bool leaves_state = item.work.tile.leaves_state();
    const Place place = place_of(item, r);
    const float4* const of = reinterpret_cast<const float4*>(shared.of_warps[r]);
    const float4 a = of[0], b = of[1];
    const float shift = shared.row_scale[r].shift;
    const float max = shift == kNoMaximum ? -ptx::infinity() : -shift;
    RowState state{max, (a.x + a.y + (a.z + a.w)) + (b.x + b.y + (b.z + b.w))};
    if (!leaves_state && place.exists) state.add_sink(sink_of(params, place.head));
    if (place.exists && leaves_state) {
      params.partial_lse[place.state] = state.lse();
    } else if (place.exists && params.lse != nullptr) {
      params.lse[place.token * params.lse_stride_n + place.head * params.lse_stride_h] =
          state.lse();
    }
    float factor = state.normaliser(max);
    if (!leaves_state) factor *= output_scale_of(params, item.work.tile.kv_head);
    shared.factors[r] = factor;
  }
};

}  // namespace cupyattn
