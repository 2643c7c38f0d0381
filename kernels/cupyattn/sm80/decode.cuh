// Decode attention on mma.sync: 16 or 32 packed query rows of one KV head against many keys. Each
// warp takes its share of the block's keys and has its own ring of stages, so only a warp barrier
// stands between a load and its use. The warps' states merge at the end. Where few requests leave
// most SMs idle, the blocks of a cluster share the keys of one block and merge likewise.
#pragma once

#include "cupyattn/plan/split_finder.cuh"
#include "cupyattn/ptx/cluster.cuh"
#include "cupyattn/sm80/decode_keys.cuh"

namespace cupyattn {

// Whether the keys and the values of a tile take turns in one ring. Few kernels say so.
template <typename Config, typename = void>
struct TakesTurns {
  enum : bool { kValue = false };
};
template <typename Config>
struct TakesTurns<Config, typename AnyValue<Config::kTakesTurns>::type> {
  enum : bool { kValue = Config::kTakesTurns };
};

// Whether a warp has so few tiles that its code is short rather than fast.
template <typename Config, typename = void>
struct RunsOnce {
  enum : bool { kValue = false };
};
template <typename Config>
struct RunsOnce<Config, typename AnyValue<Config::kRunsOnce>::type> {
  enum : bool { kValue = Config::kRunsOnce };
};

template <typename Config>
using DecodeParams =
    conditional<HasKeyLists<Config>::kValue, ListedAttentionParams, FoundAttentionParams>;

template <typename Config>
struct DecodeSm80 {
  static constexpr int kWarps = Config::kWarps, kTileQ = 16 * Config::kMmaQ;
  static constexpr int kKeys = Config::kKeysPerWarp, kTileKV = kWarps * kKeys;
  static constexpr int kStages = Config::kStages;
  using Traits = TraitsSm80<Config, kTileQ, kKeys, kWarpSize>;
  using DTypeK = typename Traits::DTypeK;
  using DTypeKV = typename Traits::DTypeKV;
  using DTypeO = typename Traits::DTypeO;
  using QTile = typename Traits::QTile;
  using KSourceTile = typename Traits::KSourceTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using LogitsVariant = typename Traits::LogitsVariant;
  static constexpr int kHeadDimVO = Config::kHeadDimVO, kMmaQ = Config::kMmaQ;
  static constexpr int kVectors = kHeadDimVO / 4;  // of a row of O
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kMergedWarps = kWarps % 2 == 0 ? 2 : 1;  // at a time
  static constexpr int kMergeVectors = ceil_div(kHeadDimVO, 4 * kWarpSize);  // of a lane
  static constexpr bool kPaged = Config::kPaged, kOwnValuePages = Config::kOwnValuePages;
  static constexpr bool kLists = HasKeyLists<Config>::kValue;
  using Keys = conditional<kLists, ListedKeys<DecodeSm80>, RangeKeys<DecodeSm80>>;
  static constexpr uint32_t kAllKeys = ~0u >> (kWarpSize - min_of(kKeys, kWarpSize));
  // Enumerators, as of HasKeyShare. kAhead: how many tiles ahead keys are loaded.
  enum : bool { kTakesTurns = TakesTurns<Config>::kValue, kRunsOnce = RunsOnce<Config>::kValue };
  enum : int { kAhead = kTakesTurns ? (kStages - 1) / 2 : kStages - 1 };

  struct WholeStage {
    alignas(KSourceTile::kAlign) unsigned char k[KSourceTile::kBytes];
    alignas(VTile::kAlign) unsigned char v[VTile::kBytes];
  };
  union HalfStage {
    alignas(KSourceTile::kAlign) unsigned char k[KSourceTile::kBytes];
    alignas(VTile::kAlign) unsigned char v[VTile::kBytes];
  };
  using Stage = conditional<kTakesTurns, HalfStage, WholeStage>;
  struct WarpStates {
    // Rows are padded so that neighbouring rows start in different banks.
    float o[kWarps][kTileQ][kHeadDimVO + 8];
    float row_max[kWarps][kTileQ];
    float row_sum[kWarps][kTileQ];
  };
  struct SharedMemory {
    alignas(16) RowInfo rows[kTileQ];
    LogitConstants logits;
    int64_t q_offset[kTileQ];
    NonFiniteKeys nonfinite_keys[kWarps];
    conditional<kPaged, typename Keys::Rows[kWarps], int64_t> pages;
    union {
      alignas(QTile::kAlign) unsigned char q[QTile::kBytes];
      float2 block_states[kTileQ];  // maximum and sum of each row, for the blocks of the cluster
    };
    alignas(KTile::kAlign) unsigned char k_wide[Traits::kWidenKeys ? kWarps * KTile::kBytes : 16];
    union {
      Stage ring[kWarps][kStages];
      WarpStates states;
    };
    typename Traits::Rope rope;
    uint32_t flag;
  };

  // What a warp's merge of splits copies in a step, two of which have its share of the dead ring:
  // states of 16 bytes for each lane and vector.
  static constexpr int kDeadBytes =
      max_of(static_cast<int>(sizeof(SharedMemory::ring)), static_cast<int>(sizeof(WarpStates)));
  static constexpr int kMergeShare = kDeadBytes / (2 * kWarps);
  static constexpr int kMostMerged = kMergeShare / (512 * kMergeVectors);
  static constexpr int kMergedStates = kMostMerged >= 16 ? 16 : kMostMerged >= 8 ? 8 : 4;
  static constexpr int kMergeBytes = kMergedStates * kMergeVectors * 512;

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles/select.py) must agree");
  static_assert(kMergeBytes <= kMergeShare, "splits merge in the ring");
  static_assert(kStages >= 2, "one stage is loaded while another is used");
  static_assert(!kPaged || kKeys <= kWarpSize, "a lane looks up one key's page");
  static_assert(!kLists || kPaged, "listed keys are found one by one, as those in pages");
  static_assert(!kLists || !(Config::kRope || Config::kCustomMask || Config::kAlibi),
                "keys of a list do not follow one another");
  static_assert(!kTakesTurns || (kLists && kStages % 2 == 1 && !Traits::kWidenRows),
                "listed keys take turns with their values, which are loaded behind them");
  static_assert(kKeys % 16 == 0 && kKeys <= 64, "a warp takes 16, 32, 48 or 64 keys at a time");

  const AttentionParams& params;
  SharedMemory& shared;
  const int thread, warp, lane;
  const Request request;
  const TileWork work;
  const KeyLists* const lists;  // in kernels that have them

  __device__ __forceinline__ DecodeSm80(const AttentionParams& params, SharedMemory& shared)
      : DecodeSm80(params, shared, BlockWork::of(params, kTileQ, ptx::cluster_index())) {}

  __device__ __forceinline__ DecodeSm80(const AttentionParams& params, SharedMemory& shared,
                                        const BlockWork& block, const KeyLists* lists = nullptr)
      : params(params),
        shared(shared),
        thread(threadIdx.x),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize),
        request(block.request),
        work(block.tile),
        lists(lists) {}

  static __device__ __forceinline__ const KeyLists* lists_of(const DecodeParams<Config>& all_params) {
    if constexpr (kLists) return &all_params.lists;
    return nullptr;
  }

  static __device__ __forceinline__ BlockWork work_of(const DecodeParams<Config>& all_params) {
    const AttentionParams& params = all_params.attention;
    const int kv_head = ptx::cluster_index();
    if constexpr (kLists) {
      return listed_work(all_params, kv_head, kTileQ);
    } else if constexpr (FindsItems<Config>::kValue) {
      const ItemFinder<false> items{all_params.found.lengths, params.group_size, kTileQ,
                                    static_cast<int>(threadIdx.x % kWarpSize)};
      const SplitFinder<false> finder{all_params.found.splits, items};
      const int place = params.first_q_tile + static_cast<int>(blockIdx.y);
      const WorkItem item = finder.find(params, place);
      const bool is_first = kv_head == 0 && ptx::cluster_rank() == 0 && threadIdx.x < kWarpSize;
      if (is_first) finder.list(params, place, item);
      return BlockWork::of_listed(params, item, kv_head, kTileQ);
    } else {
      return BlockWork::of(params, kTileQ, kv_head);
    }
  }

  // Whose scale of keys or values a block takes. To kernels of lists, heads that have lists of their
  // own are key heads, and all heads may share a scale.
  __device__ __forceinline__ int scale_head(int step) const {
    return divide(work.kv_head, lists->heads_magic, lists->heads_shift) * step;
  }
  // What is in all that leaves a block.
  __device__ __forceinline__ float own_value_scale() const {
    if constexpr (kLists) {
      if (lists->value_scales == nullptr) return 1.0f;
      const int64_t place = request.mask_start * lists->v_scale_request_step;
      return lists->value_scales[place + scale_head(lists->v_scale_step)];
    }
    return request_scale_of<LogitsVariant>(params, request, work.kv_head);
  }

  // Describes the rows, then starts the copy of Q. Rows that are widened come behind what is copied
  // meanwhile.
  __device__ __forceinline__ void load_q() {
    fill_rows<LogitsVariant, Traits::Mask::kKeyShare>(shared.rows, shared.q_offset, kTileQ, params,
                                                      request, work, thread, kThreads,
                                                      kLists ? scale_head(lists->k_scale_step) : -1);
    if (thread == 0) shared.logits = LogitsVariant::make_constants(params);
    if (lane == 0) shared.nonfinite_keys[warp] = NonFiniteKeys{};
    if constexpr (Config::kRope) shared.rope.fill(params, thread, kThreads);
    ptx::block_sync();
    if constexpr (!Traits::kWidenRows) Traits::copy_q(shared, params, work.num_rows, thread);
  }

  // What copies a head's keys, or values, from `first_row` on to the ring of this warp.
  __device__ __forceinline__ auto k_copier(int head, int64_t first_row) const {
    return typename Traits::KCopier(keys_of<DTypeK>(params, head), params.k_stride_n, first_row,
                                    ptx::shared_address(shared.ring[warp][0].k), lane);
  }
  __device__ __forceinline__ auto v_copier(int head, int64_t first_row) const {
    return typename Traits::VCopier(values_of<DTypeKV>(params, head), params.v_stride_n, first_row,
                                    ptx::shared_address(shared.ring[warp][0].v), lane);
  }

  // Widens and rotates this warp's keys where the options ask for it; returns where they are.
  __device__ __forceinline__ uint32_t prepare_k(Stage& stage, int first_key) {
    unsigned char* keys = stage.k;
    if constexpr (Traits::kWidenKeys) {
      keys = shared.k_wide + warp * KTile::kBytes;
      convert_tile<KSourceTile, KTile, kWarpSize>(stage.k, keys, lane);
      ptx::warp_sync();
    }
    if constexpr (Config::kRotateKeys) {
      rotate_tile<KTile, Config::kHeadDimQK, kWarpSize>(keys, shared.rope, lane,
                                                        [&](int row) { return first_key + row; });
      ptx::warp_sync();
    }
    return ptx::shared_address(keys);
  }

  // Starts the copies of Q, while pages are looked up, and then of all stages but one: Q is
  // prepared while the first keys arrive. Returns this lane's page of the next tile.
  __device__ __forceinline__ typename Keys::Place fill_pipeline(const TileSpan& tiles, Keys& keys) {
    typename Keys::Place places[kPaged ? kStages : 1] = {};
    if constexpr (kPaged) keys.find_all(tiles.begin, places);
    load_q();
    ptx::cp_async_commit();
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      const int load_tile = tiles.begin + stage;
      if (load_tile < tiles.end) {
        keys.load(stage, load_tile, places[kPaged ? stage : 0]);
        // The next tile's offsets overwrite these.
        if constexpr (kPaged) ptx::warp_sync();
      }
      ptx::cp_async_commit();
    }
    if constexpr (Traits::kWidenRows) Traits::copy_q(shared, params, work.num_rows, thread);
    return places[kPaged ? kStages - 1 : 0];
  }

  using QRegisters = uint32_t[Config::kQInRegisters ? Traits::kStepsQK : 1][kMmaQ][4];

  __device__ __forceinline__ static void load_q_registers(QRegisters& q, uint32_t q_lane) {
#pragma unroll
    for (int step = 0; step < Traits::kStepsQK; ++step) {
#pragma unroll
      for (int m = 0; m < kMmaQ; ++m) load_q_fragment<QTile>(q[step][m], q_lane, 16 * m, step);
    }
  }

  // The fragment of 16 rows of Q at a step: kept, or loaded anew for each tile.
  __device__ __forceinline__ static void take_q(uint32_t (&a)[4], int m, int step,
                                                const QRegisters& q_registers, uint32_t q_lane) {
    if constexpr (Config::kQInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = q_registers[step][m][i];
    } else {
      load_q_fragment<QTile>(a, q_lane, 16 * m, step);
    }
  }

  // Turns products into logits and hides what the range and the mask exclude, or which keys of a
  // list there are not. `hides_keys` says whether this may have hidden any key of the tile that has
  // values: absent ones are zeros.
  template <typename Logits>
  __device__ __forceinline__ auto transform_and_mask(Logits& s, OnlineSoftmax<kMmaQ>& softmax,
                                                     const KeyRange& range, int first_key,
                                                     uint32_t present, bool& hides_keys) {
    using Mask = typename Traits::Mask;
    if constexpr (kLists) {
      const bool is_partial = present != kAllKeys;
      const auto form = LogitsVariant::apply(s, softmax.row_max, shared.rows, shared.logits, params,
                                             request, first_key, lane, is_partial);
      if (is_partial) hide_absent_keys<decltype(form)>(s, present, lane);
      return form;
    }
    bool is_partial = Config::kCustomMask;
    if constexpr (Mask::kOfRows) {
      // mutate: first-masked-tile-unmasked
      is_partial = first_key + kKeys > Mask::first_key(params, request);
    }
    const bool is_masked = is_partial || range.cuts(first_key, kKeys);
    const auto form = LogitsVariant::apply(s, softmax.row_max, shared.rows, shared.logits, params,
                                           request, first_key, lane, is_masked);
    hides_keys = is_masked;
    if (is_masked) {
      const bool hides = apply_mask<Mask, decltype(form)>(s, params, request, range, is_partial,
                                                          shared.rows, first_key, lane);
      // No map says which tiles an expression leaves whole, and values are swept for the others.
      if constexpr (Mask::kIsExpression) hides_keys = ptx::warp_any(hides);
    }
    return form;
  }

  // Values that are not finite leave the stage, and are added to the rows that see them one by one.
  template <typename Logits, typename Form>
  __device__ __forceinline__ void clean_hidden_values(
      Stage& stage, typename Traits::Accumulators& o, const Logits& s,
      const OnlineSoftmax<kMmaQ>& softmax, const Form& form, float scale, int first_key) {
    zero_nonfinite_values<VTile, kWarpSize>(stage.v, shared.nonfinite_keys[warp], lane);
    ptx::warp_sync();
    const DTypeKV* const values = values_of<DTypeKV>(params, work.kv_head);
    for (int key = 0; key < kKeys; ++key) {
      if ((shared.nonfinite_keys[warp].word[key / 32] >> (key % 32)) & 1) {
        add_nonfinite_key<kHeadDimVO>(
            o, s, softmax, form, scale, key,
            values + value_row<kPaged, kOwnValuePages>(params, request, first_key + key), lane);
      }
    }
    ptx::warp_sync();
    if (lane == 0) shared.nonfinite_keys[warp] = NonFiniteKeys{};
  }

  __device__ __forceinline__ void run() {
    if (work.num_rows <= 0) return;
    // By the time that the block has its state, its counter is in L2.
    if (merges() && thread == 0) ptx::prefetch_l2(counter());
    const KeyRange range = Keys::range_of(*this);
    const TileSpan tiles = TileSpan::of<Config::kCustomMask>(range, kTileKV, share_of_block());
    Stage* ring = shared.ring[warp];
    Keys keys(*this, range, tiles);
    if constexpr (kTakesTurns) {
      run_in_turns(tiles, keys);
      return;
    }
    typename Keys::Place next = fill_pipeline(tiles, keys);
    ptx::cp_async_wait_group<kStages - 1>();  // mutate: q-awaited-too-late
    ptx::block_sync();
    Traits::prepare_q(shared, work.num_rows, thread, warp, lane);
    const uint32_t q_lane = lane_address<QTile>(ptx::shared_address(shared.q), lane);
    QRegisters q_registers;
    if constexpr (Config::kQInRegisters) load_q_registers(q_registers, q_lane);
    const auto q = [&](uint32_t (&a)[4], int m, int step) {
      if constexpr (Config::kQInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = q_registers[step][m][i];
      } else {
        load_q_fragment<QTile>(a, q_lane, 16 * m, step);
      }
    };

    typename Traits::Accumulators o = {};
    OnlineSoftmax<kMmaQ> softmax;
    const float scale = LogitsVariant::softmax_scale(params);
    int stage = 0;
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int first_key = keys.first_key(tile);
      const int load_tile = tile + kStages - 1;
      // Wait for this stage, and for all lanes to be done with the stage before it.
      ptx::cp_async_wait_group<kStages - 2>();  // mutate: stage-awaited-too-late
      ptx::warp_sync();                         // mutate: lanes-not-awaited
      const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
      if (load_tile < tiles.end) keys.load(free_stage, load_tile, next);
      ptx::cp_async_commit();  // mutate: stage-not-committed
      if constexpr (kPaged) next = keys.find(load_tile + 1);
      const uint32_t present = keys.present(stage);
      if (present == 0) {
        stage = next_stage(stage);
        continue;
      }

      // S = Q K^T, as logits.
      const uint32_t k = k_lane_address<KTile>(prepare_k(ring[stage], first_key), lane);
      float s[kMmaQ][kKeys / 8][4];
      multiply_qk<typename Traits::DTypeS, KTile, Traits::kStepsQK, kMmaQ, kKeys>(s, q, k);
      bool hides_keys = false;
      const auto form = transform_and_mask(s, softmax, range, first_key, present, hides_keys);
      // Memory limits decode, so every maximum can be taken; its probability is 1, unrounded.
      // mutate: decode-maximum-is-lazy
      if (!form.keeps_max()) softmax.raise_max(s, o, form, scale, 0.0f);
      if (hides_keys && ptx::warp_any(!are_values_finite<VTile, kWarpSize>(ring[stage].v, lane))) {
        clean_hidden_values(ring[stage], o, s, softmax, form, scale, first_key);
      }
      // O += P V.
      const uint32_t v = lane_address<VTile>(ptx::shared_address(ring[stage].v), lane);
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
        using DTypeP = typename Traits::DTypeP;
        uint32_t p[kMmaQ][4];
        softmax.template exponentiate<DTypeP>(p, s, step, form, scale);
        multiply_pv<DTypeP, VTile, Traits::kColumnGroups, kMmaQ>(o, p, v, 16 * step);
      }
      stage = next_stage(stage);
    }
    finish(softmax, o);
  }

  // Multiplies the tiles of a list whose keys and values take turns: a stage that has been read is
  // filled at once with the half that comes kStages - 1 halves later, so few bytes of shared memory
  // have many on their way. Tiles before the first are loaded for alone: few lists run all of this
  // code once, so there is one copy of it.
  __device__ __forceinline__ void run_in_turns(const TileSpan& tiles, Keys& keys) {
    Stage* const ring = shared.ring[warp];
    typename Keys::Place found[1];
    keys.find_all(tiles.begin, found);
    load_q();
    ptx::cp_async_commit();
    const uint32_t q_lane = lane_address<QTile>(ptx::shared_address(shared.q), lane);
    QRegisters q_registers = {};
    const auto q = [&](uint32_t (&a)[4], int m, int step) { take_q(a, m, step, q_registers, q_lane); };

    typename Traits::Accumulators o = {};
    OnlineSoftmax<kMmaQ> softmax;
    const float scale = LogitsVariant::softmax_scale(params);
    int stage = 1;  // of the tile's keys; those of the first tile have stage 0
    [[maybe_unused]] bool has_output = false;
#pragma unroll 1
    for (int tile = tiles.begin - kAhead; tile < tiles.end; ++tile) {
      const bool loads = tile + kAhead < tiles.end;
      ptx::cp_async_wait_group<kStages - 2>();  // mutate: listed-keys-awaited-too-late
      ptx::warp_sync();
      if (loads) keys.load_keys(stage == 0 ? kStages - 1 : stage - 1, found[0]);
      ptx::cp_async_commit();
      found[0] = keys.find(tile + kAhead + 1);
      if (tile == tiles.begin) {
        ptx::block_sync();  // Q has landed with the first keys
        Traits::prepare_q(shared, work.num_rows, thread, warp, lane);
        if constexpr (Config::kQInRegisters) load_q_registers(q_registers, q_lane);
      }
      const uint32_t present = tile < tiles.begin ? 0 : keys.present(stage);
      uint32_t p[kKeys / 16][kMmaQ][4];
      if (present != 0) {
        const uint32_t k = k_lane_address<KTile>(prepare_k(ring[stage], 0), lane);
        float s[kMmaQ][kKeys / 8][4];
        multiply_qk<typename Traits::DTypeS, KTile, Traits::kStepsQK, kMmaQ, kKeys>(s, q, k);
        bool hides_keys = false;
        const auto form = transform_and_mask(s, softmax, KeyRange{}, 0, present, hides_keys);
        if (kRunsOnce && !has_output) {
          float nothing[kMmaQ][1][4] = {};
          if (!form.keeps_max()) softmax.raise_max(s, nothing, form, scale, 0.0f);
          has_output = true;
        } else if (!form.keeps_max()) {
          softmax.raise_max(s, o, form, scale, 0.0f);
        }
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
          softmax.template exponentiate<typename Traits::DTypeP>(p[step], s, step, form, scale);
        }
      }
      // The values have come, and others take the place of the keys.
      ptx::cp_async_wait_group<kStages - 2>();  // mutate: listed-values-awaited-too-late
      ptx::warp_sync();                         // mutate: values-overwrite-listed-keys
      if (loads) keys.load_values(stage);
      ptx::cp_async_commit();
      stage = next_stage(stage);
      if (present != 0) {
        const uint32_t v = lane_address<VTile>(ptx::shared_address(ring[stage].v), lane);
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
          multiply_pv<typename Traits::DTypeP, VTile, Traits::kColumnGroups, kMmaQ>(o, p[step], v,
                                                                                   16 * step);
        }
      }
      stage = next_stage(stage);
    }
    finish(softmax, o);
  }

  static __device__ __forceinline__ int next_stage(int stage) {
    return stage + 1 == kStages ? 0 : stage + 1;
  }

  // Whether the last block of the tile merges its states, and no later launch does.
  __device__ __forceinline__ bool merges() const {
    return work.num_splits > 1 && work.split_tile >= 0 && params.counters != nullptr;
  }

  // The work of this block: a cluster's is divided like a tile's, into one split for each block.
  __device__ __forceinline__ TileWork share_of_block() const {
    TileWork share = work;
    share.split = work.split * ptx::cluster_size() + ptx::cluster_rank();
    share.num_splits = work.num_splits * ptx::cluster_size();
    return share;
  }

  // Merges the warps' states, then writes the result, or this split's part of it.
  __device__ __forceinline__ void finish(const OnlineSoftmax<kMmaQ>& softmax,
                                         const typename Traits::Accumulators& o) {
    // The states overwrite the ring once every warp has left its loop.
    ptx::cp_async_wait_group<0>();
    ptx::block_sync();  // mutate: states-overwrite-ring
    WarpStates& states = shared.states;
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (16 * m + 8 * h >= work.num_rows) continue;
        const int row = 16 * m + 8 * h + (lane >> 2);
        const float sum = quad_sum(softmax.row_sum[m][h]);
        if ((lane & 3) == 0) {
          states.row_max[warp][row] = softmax.template base2_max<LogitsVariant>(m, h, params);
          states.row_sum[warp][row] = sum;
        }
        float* out = states.o[warp][row];
        store_output_row<float, kHeadDimVO, Traits::kFp8, true>(
            [&](int column) { return out + column; }, o[m], h, 1.0f, lane);
      }
    }
    ptx::block_sync();  // mutate: warp-states-read-early
    const int size = ptx::cluster_size(), rank = ptx::cluster_rank();
    if (size > 1) {
      finish_cluster(states, size, rank);
    } else {
      for (int index = thread; index < work.num_rows * kVectors; index += kThreads) {
        const int row = index / kVectors, column = 4 * (index % kVectors);
        float4 sum;
        const RowState state = merge_warps(states, row, column, sum);
        write_columns(row, column, state, sum);
      }
    }
    // The last block of a split merges the rows that it has written a state of.
    if (merges() && arrive_last(counter(), work.num_splits, thread, &shared.flag)) {
      merge_splits(rank, size);
    }
  }

  // What finish() does where blocks form a cluster: each block merges its warps' states, and then
  // all blocks' states of its share of the rows.
  __device__ __forceinline__ void finish_cluster(WarpStates& states, int size, int rank) {
    // --- the block's state of a row takes the place of the first warp's ---
    for (int index = thread; index < work.num_rows * kVectors; index += kThreads) {
      const int row = index / kVectors, column = 4 * (index % kVectors);
      float4 sum;
      const RowState state = merge_warps(states, row, column, sum);
      *reinterpret_cast<float4*>(&states.o[0][row][column]) = sum;
      if (column == 0) shared.block_states[row] = make_float2(state.max, state.sum);
    }
    ptx::cluster_arrive();
    ptx::cluster_wait();  // mutate: block-states-read-early
    // --- a share of the result ---
    for (int index = thread; rank + size * (index / kVectors) < work.num_rows; index += kThreads) {
      const int row = rank + size * (index / kVectors), column = 4 * (index % kVectors);
      float4 sum;
      const RowState state = merge_blocks<4>(states, row, column, size, sum);
      write_columns(row, column, state, sum);
    }
    // No block ends, or merges splits in their place, while another reads its states.
    ptx::cluster_arrive();
    ptx::cluster_wait();  // mutate: block-ends-early
  }

  // Counts the splits of the tile whose blocks of this rank have arrived: they merge the same rows.
  __device__ __forceinline__ uint32_t* counter() const {
    return params.counters + work.counter(params) * ptx::cluster_size() + ptx::cluster_rank();
  }

  // Merges the states of rows `first`, first + step and on, a row a warp, and writes the result.
  // The time of a merge is round trips to L2, and code that comes from memory, for it runs once. So
  // short loops copy states into the ring, which is dead: those of the next step while this one's
  // are added. A lane weighs one state of a step, and copies what it adds itself.
  __device__ __forceinline__ void merge_splits(int first, int step) {
    unsigned char* const own =
        reinterpret_cast<unsigned char*>(&shared.states) + warp * (2 * kMergeBytes) + 16 * lane;
    int next_row = first + step * warp, next_split = 0;
    // Starts the next step's copies to one half of the ring; returns the LSE of this lane's state.
    const auto start_step = [&](int half) {
      float lse = -ptx::infinity();
      if (next_row < work.num_rows) {
        const int count = min_of(work.num_splits - next_split, kMergedStates);
        const int64_t row = (work.state(params) + next_split) * kTileQ + next_row;
        const int own_state = min_of(lane, count - 1);
        // mutate: fused-state-of-another-row
        const float found = ptx::load_l2(params.partial_lse + row + own_state * kTileQ);
        if (lane < count) lse = found;
        const float* o = params.partial_o + row * kHeadDimVO + 4 * lane;
        uint32_t to = ptx::shared_address(own) + half * kMergeBytes;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
#pragma unroll
          for (int v = 0; v < kMergeVectors; ++v) {
            const bool exists = kHeadDimVO % 128 == 0 || 4 * (lane + kWarpSize * v) < kHeadDimVO;
            ptx::cp_async_16(to + 512 * v, exists ? o + 128 * v : params.partial_o, exists);
          }
          o += kTileQ * kHeadDimVO;
          to += 512 * kMergeVectors;
        }
      }
      ptx::cp_async_commit();
      next_split += kMergedStates;
      if (next_split >= work.num_splits) {
        next_split = 0;
        next_row += step * kWarps;
      }
      return lse;
    };

    RowMerge<kMergeVectors> merged;
    int split = 0, half = 0;
    float lse = start_step(0);
#pragma unroll 1
    for (int row = first + step * warp; row < work.num_rows;) {
      const float next_lse = start_step(half ^ 1);
      merged.rescale(fmaxf(merged.state.max, warp_max(lse)));
      // An empty state weighs nothing, even if all states are empty.
      const float weight =
          lse == -ptx::infinity() ? 0.0f : ptx::ex2_approx(lse - merged.state.max);
      merged.state.sum += warp_sum(weight);
      ptx::cp_async_wait_group<1>();  // mutate: fused-states-read-early
      const int count = min_of(work.num_splits - split, kMergedStates);
      const unsigned char* from = own + half * kMergeBytes;
#pragma unroll 2
      for (int i = 0; i < count; ++i) {
        const float w = ptx::shuffle(weight, i);
#pragma unroll
        for (int v = 0; v < kMergeVectors; ++v) {
          add_scaled(merged.sum[v], *reinterpret_cast<const float4*>(from + 512 * v), w);
        }
        from += 512 * kMergeVectors;
      }
      split += kMergedStates;
      if (split >= work.num_splits) {
        write_merged<Config, kHeadDimVO>(merged, params, request.q_start + shared.rows[row].token,
                                         shared.rows[row].head, work.kv_head, lane, 0);
        merged = RowMerge<kMergeVectors>{};
        split = 0;
        row += step * kWarps;
      }
      lse = next_lse;
      half ^= 1;
    }
  }

  // Four columns of the block's state of a row: numerators over the maximum, which with the sum is
  // the answer.
  __device__ __forceinline__ RowState merge_warps(const WarpStates& states, int row, int column,
                                                  float4& sum) const {
    RowState state{-ptx::infinity(), 0.0f};
    sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    // A loop of the warps in pairs: this runs once, so its instructions come from memory.
#pragma unroll 1
    for (int w = 0; w < kWarps; w += kMergedWarps) {
      float2 of_warp[kMergedWarps];
      float4 part[kMergedWarps];
#pragma unroll
      for (int i = 0; i < kMergedWarps; ++i) {
        of_warp[i] = make_float2(states.row_max[w + i][row], states.row_sum[w + i][row]);
        part[i] = *reinterpret_cast<const float4*>(&states.o[w + i][row][column]);
      }
      add_parts(state, sum, of_warp, part);
    }
    return state;
  }

  // Four columns of the cluster's state of a row. A lane loads the states of kBatch blocks before
  // it uses the first.
  template <int kBatch>
  __device__ __forceinline__ RowState merge_blocks(const WarpStates& states, int row, int column,
                                                   int size, float4& sum) const {
    const uint32_t state_address = ptx::shared_address(&shared.block_states[row]);
    const uint32_t o_address = ptx::shared_address(&states.o[0][row][column]);
    RowState state{-ptx::infinity(), 0.0f};
    sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int first = 0; first < size; first += kBatch) {
      float2 of_block[kBatch];
      float4 part[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int block = min_of(first + i, size - 1);
        of_block[i] = ptx::load_cluster_pair(state_address, block);
        part[i] = ptx::load_cluster_vector(o_address, block);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= size) of_block[i] = make_float2(-ptx::infinity(), 0.0f);
      }
      add_parts(state, sum, of_block, part);
    }
    return state;
  }

  // Adds parts of a row, given their maxima and sums. No branch depends on a part: it would wait
  // for that part alone.
  template <int kCount>
  static __device__ __forceinline__ void add_parts(RowState& state, float4& sum,
                                                   const float2 (&of_part)[kCount],
                                                   const float4 (&part)[kCount]) {
    const float old_max = state.max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) state.max = fmaxf(state.max, of_part[i].x);
    const float factor = old_max == state.max ? 1.0f : ptx::ex2_approx(old_max - state.max);
    state.sum *= factor;
    scale_by(sum, factor);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float own_max = of_part[i].x, own_sum = of_part[i].y;
      const bool is_empty = own_sum == 0.0f;
      const float known = own_max == state.max ? 1.0f : ptx::ex2_approx(own_max - state.max);
      const float weight = is_empty ? 0.0f : known;
      state.sum += weight * own_sum;  // mutate: warp-sums-not-weighted
      const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      add_scaled(sum, is_empty ? zero : part[i], weight);
    }
  }

  // Writes four columns of a state, or of the result.
  __device__ __forceinline__ void write_columns(int row, int column, RowState state, float4& sum) {
    const float old_max = state.max;
    const int head = shared.rows[row].head;
    const int token = request.q_start + shared.rows[row].token;  // mutate: requests-overlap
    const float own = own_value_scale();
    if (work.leaves_state()) {
      const int64_t index = (work.state(params) + work.split) * kTileQ + row;
      const float factor = state.normaliser(old_max) * own;
      float* out = params.partial_o + index * kHeadDimVO + column;
      *reinterpret_cast<float4*>(out) =
          make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
      if (column == 0) params.partial_lse[index] = state.lse();
    } else {
      state.add_sink(sink_of(params, head));
      const float factor = state.normaliser(old_max) * own * output_scale_of(params, work.kv_head);
      gate_columns<Config, Config::kAligned>(sum, params, token, head, column);
      DTypeO* out = static_cast<DTypeO*>(params.o) + token * params.o_stride_n +
                    head * params.o_stride_h + column;
      store_pair<DTypeO, Config::kAligned>(out, sum.x * factor, sum.y * factor);
      store_pair<DTypeO, Config::kAligned>(out + 2, sum.z * factor, sum.w * factor);
      if (column == 0 && params.lse != nullptr) {
        store_lse(params, token, head, state.lse());
      }
    }
  }
};

}  // namespace cupyattn
