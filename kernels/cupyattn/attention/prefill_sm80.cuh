// Prefill and append attention on mma.sync: one block takes a tile of packed query rows of one KV
// head and walks the key tiles it may see. K and V have one buffer each and load in turn: V of this
// tile while S = Q K^T runs, K of the next while O += P V runs.
#pragma once

#include "cupyattn/attention/mask.cuh"
#include "cupyattn/attention/rope.cuh"
#include "cupyattn/attention/rows.cuh"
#include "cupyattn/attention/softmax.cuh"
#include "cupyattn/attention/state.cuh"
#include "cupyattn/attention/variants.cuh"
#include "cupyattn/common/math.cuh"
#include "cupyattn/params/attention.cuh"
#include "cupyattn/tile/fragments.cuh"
#include "cupyattn/tile/shared_tile.cuh"

namespace cupyattn {

template <typename Config>
struct PrefillSm80 {
  using DTypeQ = typename Config::DTypeQ;
  using DTypeKV = typename Config::DTypeKV;
  using DTypeO = typename Config::DTypeO;
  static constexpr int kHeadDimQK = Config::kHeadDimQK;
  static constexpr int kHeadDimVO = Config::kHeadDimVO;
  static constexpr int kMmaQ = Config::kMmaQ;
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kTileQ = 16 * kMmaQ * Config::kWarps;
  static constexpr int kTileKV = Config::kTileKV;
  static constexpr bool kFp8 = is_fp8<DTypeKV>::value;
  // Keys of fp8 that must be rotated are widened first; others stay fp8 up to the fragment.
  static constexpr bool kWidenKeys = kFp8 && Config::kRotateKeys;
  static constexpr int kStepsQK = ceil_div(kHeadDimQK, 16);
  static constexpr int kColumnGroups = ceil_div(kHeadDimVO, 16);
  static constexpr int kBuffers = Config::kPipelined ? 2 : 1;
  // Keys whose logits are held at a time.
  static constexpr int kStep = kTileKV / kBuffers;

  using QTile = SharedTile<DTypeQ, kTileQ, kHeadDimQK>;
  using KSourceTile = SharedTile<DTypeKV, kTileKV, kHeadDimQK>;
  using KTile = typename conditional<kWidenKeys, SharedTile<DTypeQ, kTileKV, kHeadDimQK>,
                                     KSourceTile>::type;
  using VTile = SharedTile<DTypeKV, kTileKV, kHeadDimVO>;
  using LogitsVariant =
      typename Logits<Config::kTransformed, Config::kAlibi, Config::kSoftCap>::type;

  struct SharedMemory {
    alignas(16) RowInfo rows[kTileQ];
    alignas(16) unsigned char q[QTile::kBytes];
    alignas(16) unsigned char k_source[kBuffers][KSourceTile::kBytes];
    alignas(16) unsigned char v[kBuffers][VTile::kBytes];
    alignas(16) unsigned char k_wide[kWidenKeys ? KTile::kBytes : 16];
    typename conditional<Config::kCustomMask, MaskTileMap<kTileKV>, NoMaskTileMap>::type mask_map;
    typename conditional<Config::kRope, RopeSteps<kHeadDimQK>, NoRopeSteps>::type rope;
    // The loop over keys needs every register: what it rarely reads waits here.
    TileWork work;
    KeyRange range;
    TileSpan tiles;
    uint32_t flag;
  };

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles.py) must agree");
  static_assert(kStep % 16 == 0 && kTileKV <= 64, "products take 16 keys, mask words hold 64");
  static_assert(!(kWidenKeys && Config::kPipelined), "widened keys have one buffer");

  const AttentionParams& params;
  SharedMemory& shared;
  const int thread, warp, lane;
  const uint32_t q_lane, k_lane, v_lane;
  uint32_t q_registers[Config::kQInRegisters ? kStepsQK : 1][kMmaQ][4];
  float o[kMmaQ][2 * kColumnGroups][4] = {};
  OnlineSoftmax<kMmaQ> softmax;

  __device__ __forceinline__ PrefillSm80(const AttentionParams& params, SharedMemory& shared)
      : params(params),
        shared(shared),
        thread(threadIdx.x),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize),
        q_lane(q_lane_address<QTile>(ptx::shared_address(shared.q), warp_row(), lane)),
        k_lane(k_lane_address<KTile>(
            kWidenKeys ? ptx::shared_address(shared.k_wide)
                       : ptx::shared_address(shared.k_source[0]), lane)),
        v_lane(v_lane_address<VTile>(ptx::shared_address(shared.v[0]), lane)) {}

  // The longest causal tiles come first, so that short ones fill the end of the grid.
  __device__ __forceinline__ TileWork choose_work() const {
    TileWork work;
    work.kv_head = blockIdx.x;
    work.q_tile = params.num_q_tiles - 1 - (params.first_q_tile + blockIdx.y);
    work.split = blockIdx.z;
    work.first_row = work.q_tile * kTileQ;
    work.num_rows = min_of(kTileQ, params.qo_len * params.group_size - work.first_row);
    return work;
  }

  __device__ __forceinline__ int warp_row() const { return 16 * kMmaQ * warp; }

  __device__ __forceinline__ void load_k(int tile, int buffer) {
    const DTypeKV* keys =
        static_cast<const DTypeKV*>(params.k) + shared.work.kv_head * params.k_stride_h;
    copy_rows<KSourceTile, kHeadDimQK, Config::kAligned, kThreads>(
        ptx::shared_address(shared.k_source[0]) + buffer * KSourceTile::kBytes, keys,
        params.k_stride_n, tile * kTileKV, shared.range.span(), thread);
  }

  __device__ __forceinline__ void load_v(int tile, int buffer) {
    const DTypeKV* values =
        static_cast<const DTypeKV*>(params.v) + shared.work.kv_head * params.v_stride_h;
    copy_rows<VTile, kHeadDimVO, Config::kAligned, kThreads>(
        ptx::shared_address(shared.v[0]) + buffer * VTile::kBytes, values, params.v_stride_n,
        tile * kTileKV, shared.range.span(), thread);
  }

  // Rotation and column order of Q, once it is in shared memory.
  __device__ __forceinline__ void prepare_q() {
    if constexpr (Config::kRope) {
      const int offset = params.kv_len - params.qo_len;
      rotate_tile<QTile, kHeadDimQK, kThreads>(
          shared.q, shared.rope, thread, [&](int row) { return shared.rows[row].token + offset; });
      ptx::block_sync();
    } else if constexpr (kFp8) {
      permute_for_fp8_keys<QTile, kThreads>(shared.q, thread);
      ptx::block_sync();
    }
  }

  __device__ __forceinline__ void prepare_k(int tile, int buffer) {
    unsigned char* keys = shared.k_source[buffer];
    if constexpr (kWidenKeys) {
      convert_tile<KSourceTile, KTile, kThreads>(keys, shared.k_wide, thread);
      keys = shared.k_wide;
      ptx::block_sync();
    }
    if constexpr (Config::kRotateKeys) {
      rotate_tile<KTile, kHeadDimQK, kThreads>(keys, shared.rope, thread,
                                               [&](int row) { return tile * kTileKV + row; });
      ptx::block_sync();
    }
  }

  // This block's rows and range of keys; starts the copy of Q.
  __device__ __forceinline__ void begin() {
    const TileWork work = choose_work();
    const int last_row = work.first_row + work.num_rows - 1;
    const int first_token = work.first_row / params.group_size;
    const int last_token = last_row / params.group_size;
    const KeyRange range = KeyRange::of<Config::kCustomMask>(params, first_token, last_token);
    const TileSpan tiles = TileSpan::of(range, kTileKV, work.split, params.num_splits);
    if (thread == 0) {
      shared.work = work;
      shared.range = range;
      shared.tiles = tiles;
    }
    fill_rows<LogitsVariant>(shared.rows, kTileQ, params, work, thread, kThreads);
    if constexpr (Config::kRope) shared.rope.fill(params, thread, kThreads);
    if constexpr (Config::kCustomMask) shared.mask_map.clear(thread, kThreads);
    ptx::block_sync();
    copy_query_rows<QTile, kHeadDimQK, Config::kAligned, kThreads>(
        ptx::shared_address(shared.q), params, shared.rows, work.num_rows, thread);
    if constexpr (Config::kCustomMask) {
      shared.mask_map.scan(params, first_token, last_token, tiles, thread, kThreads);
      ptx::block_sync();
    }
  }

  __device__ __forceinline__ int next_tile(int tile) const {
    if constexpr (Config::kCustomMask) return shared.mask_map.next(tile, shared.tiles);
    return tile;
  }

  __device__ __forceinline__ void fill_q_registers() {
    if constexpr (Config::kQInRegisters) {
#pragma unroll
      for (int step = 0; step < kStepsQK; ++step) {
#pragma unroll
        for (int m = 0; m < kMmaQ; ++m) {
          load_q_fragment<QTile>(q_registers[step][m], q_lane, 16 * m, step);
        }
      }
    }
  }

  // Raw products of kStep keys from key `offset` of a tile on.
  __device__ __forceinline__ void multiply_keys(float (&s)[kMmaQ][kStep / 8][4], int buffer,
                                                int offset) {
    const auto load_q_operand = [&](uint32_t(&a)[4], int m, int step) {
      if constexpr (Config::kQInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = q_registers[step][m][i];
      } else {
        load_q_fragment<QTile>(a, q_lane, 16 * m, step);
      }
    };
    multiply_qk<DTypeQ, KTile, kStepsQK, kMmaQ, kStep>(s, load_q_operand,
                                                       k_lane + buffer * KTile::kBytes, offset);
  }

  // From raw products to logits under the running maximum.
  __device__ __forceinline__ void finish_logits(float (&s)[kMmaQ][kStep / 8][4], int tile,
                                                int offset) {
    const RowInfo* rows = shared.rows + warp_row();
    const int first_key = tile * kTileKV + offset;
    LogitsVariant::apply(s, rows, first_key, params, lane);
    bool masked = shared.range.needs_mask(first_key, kStep);
    if constexpr (Config::kCustomMask) masked |= shared.mask_map.is_partial(tile, shared.tiles);
    if (masked) apply_mask<Config::kCustomMask>(s, params, rows, first_key, lane);
    softmax.raise_max(s, o, LogitsVariant::softmax_scale(params),
                      LogitsVariant::softmax_slack(params));
  }

  // O += P V for kStep keys from key `offset` of a tile on.
  __device__ __forceinline__ void accumulate(float (&s)[kMmaQ][kStep / 8][4], int buffer,
                                             int offset) {
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      uint32_t p[kMmaQ][4];
      softmax.template exponentiate<DTypeQ>(p, s, k, LogitsVariant::softmax_scale(params));
      multiply_pv<DTypeQ, VTile, kColumnGroups, kMmaQ>(o, p, v_lane + buffer * VTile::kBytes,
                                                       offset + 16 * k);
    }
  }

  __device__ __forceinline__ void run() {
    begin();
    int tile = next_tile(shared.tiles.begin);
    if (tile < shared.tiles.end) load_k(tile, 0);
    ptx::cp_async_commit();
    ptx::cp_async_wait_group<0>();
    ptx::block_sync();
    prepare_q();
    fill_q_registers();
    if constexpr (Config::kPipelined) {
      loop_pipelined(tile);
    } else {
      loop_alternating(tile);
    }
    finish();
  }

  __device__ __forceinline__ void loop_alternating(int tile) {
    while (tile < shared.tiles.end) {
      // K has landed; everybody is done with V of the last tile.
      ptx::cp_async_wait_group<0>();
      ptx::block_sync();
      load_v(tile, 0);
      ptx::cp_async_commit();
      prepare_k(tile, 0);

      float s[kMmaQ][kStep / 8][4];
      multiply_keys(s, 0, 0);
      finish_logits(s, tile, 0);

      // V has landed; everybody is done with K.
      const int next = next_tile(tile + 1);
      ptx::cp_async_wait_group<0>();
      ptx::block_sync();
      if (next < shared.tiles.end) load_k(next, 0);
      ptx::cp_async_commit();
      accumulate(s, 0, 0);
      tile = next;
    }
  }

  __device__ __forceinline__ void loop_pipelined(int tile) {
    if (tile >= shared.tiles.end) return;
    int buffer = 0;
    load_v(tile, buffer);
    ptx::cp_async_commit();
    prepare_k(tile, buffer);
    float first[kMmaQ][kStep / 8][4], second[kMmaQ][kStep / 8][4];
    multiply_keys(first, buffer, 0);
    finish_logits(first, tile, 0);
    while (true) {
      const int next = next_tile(tile + 1);
      // V has landed; everybody is done with the other buffers.
      ptx::cp_async_wait_group<0>();
      ptx::block_sync();
      if (next < shared.tiles.end) load_k(next, buffer ^ 1);
      ptx::cp_async_commit();
      multiply_keys(second, buffer, kStep);
      accumulate(first, buffer, 0);
      finish_logits(second, tile, kStep);
      if (next >= shared.tiles.end) break;

      // K of the next tile has landed.
      ptx::cp_async_wait_group<0>();
      ptx::block_sync();
      load_v(next, buffer ^ 1);
      ptx::cp_async_commit();
      prepare_k(next, buffer ^ 1);
      multiply_keys(first, buffer ^ 1, 0);
      accumulate(second, buffer, kStep);
      finish_logits(first, next, 0);
      tile = next;
      buffer ^= 1;
    }
    accumulate(second, buffer, kStep);
  }

  // Normalises and writes this warp's rows; split tiles are merged by the last block to arrive.
  __device__ __forceinline__ void finish() {
    const TileWork work = shared.work;
    const bool is_split = params.num_splits > 1;
    const float output_scale = output_scale_of(params, work.kv_head);
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp_row() + 16 * m + 8 * h + (lane >> 2);
        const float old_max = softmax.base2_max(m, h, LogitsVariant::softmax_scale(params));
        RowState state{old_max, quad_sum(softmax.row_sum[m][h])};
        if (row >= work.num_rows) continue;
        const int head = shared.rows[row].head;
        const int token = shared.rows[row].token;
        if (is_split) {
          const int64_t index =
              (static_cast<int64_t>(work.slot(params)) * params.num_splits +
               work.split) * kTileQ + row;
          const float factor = state.normaliser(old_max);
          store_row<float, true>(params.partial_o + index * kHeadDimVO, o[m], h, factor);
          if ((lane & 3) == 0) params.partial_lse[index] = state.lse();
        } else {
          state.add_sink(sink_of(params, head));
          const float factor = state.normaliser(old_max) * output_scale;
          DTypeO* out = static_cast<DTypeO*>(params.o) + token * params.o_stride_n +
                        head * params.o_stride_h;
          store_row<DTypeO, Config::kAligned>(out, o[m], h, factor);
          if (params.lse != nullptr && (lane & 3) == 0) {
            params.lse[token * params.lse_stride_n + head * params.lse_stride_h] = state.lse();
          }
        }
      }
    }
    if (is_split && arrive_last(params, work, thread, &shared.flag)) {
      merge_partials<DTypeO, kHeadDimVO, kTileQ, Config::kAligned>(params, work, shared.rows,
                                                                   thread, kThreads);
    }
  }

  template <typename T, bool kAligned>
  __device__ __forceinline__ void store_row(T* out, const float (&o)[2 * kColumnGroups][4], int h,
                                            float factor) {
    store_output_row<T, kHeadDimVO, kFp8, kAligned>(out, o, h, factor, lane);
  }
};

}  // namespace cupyattn
