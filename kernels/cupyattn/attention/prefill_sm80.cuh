// Prefill and append attention on mma.sync: one block takes a tile of packed query rows of one KV
// head and walks the key tiles it may see. K and V have one buffer each and load in turn: V of this
// tile while S = Q K^T runs, K of the next while O += P V runs.
#pragma once

#include "cupyattn/attention/mask.cuh"
#include "cupyattn/attention/rope.cuh"
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
  static constexpr bool kWidenKeys = kFp8 && Config::kRope;
  static constexpr int kStepsQK = ceil_div(kHeadDimQK, 16);
  static constexpr int kColumnGroups = ceil_div(kHeadDimVO, 16);
  static constexpr int kTilesS = kTileKV / 8;

  using QTile = SharedTile<DTypeQ, kTileQ, kHeadDimQK>;
  using KSourceTile = SharedTile<DTypeKV, kTileKV, kHeadDimQK>;
  using KTile = typename conditional<kWidenKeys, SharedTile<DTypeQ, kTileKV, kHeadDimQK>,
                                     KSourceTile>::type;
  using VTile = SharedTile<DTypeKV, kTileKV, kHeadDimVO>;
  using LogitsVariant =
      typename Logits<Config::kTransformed, Config::kAlibi, Config::kSoftCap>::type;

  struct SharedMemory {
    alignas(16) unsigned char q[QTile::kBytes];
    alignas(16) unsigned char k_source[KSourceTile::kBytes];
    alignas(16) unsigned char v[VTile::kBytes];
    alignas(16) unsigned char k_wide[kWidenKeys ? KTile::kBytes : 16];
    typename conditional<Config::kCustomMask, MaskTileMap<kTileKV>, NoMaskTileMap>::type mask_map;
    uint32_t flag;
  };

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles.py) must agree");
  static_assert(kTileKV % 16 == 0 && kTileKV <= 64, "a key tile is 16, 32, 48 or 64 keys");

  const AttentionParams& params;
  SharedMemory& shared;
  const int thread, warp, lane;
  TileOutput tile_output;
  RowSpan span;

  __device__ __forceinline__ PrefillSm80(const AttentionParams& params, SharedMemory& shared)
      : params(params),
        shared(shared),
        thread(threadIdx.x),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize) {
    // The longest causal tiles come first, so that short ones fill the end of the grid.
    int work = blockIdx.x;
    tile_output.split = work % params.num_splits;
    work /= params.num_splits;
    tile_output.kv_head = work % params.num_kv_heads;
    tile_output.q_tile = params.num_q_tiles - 1 - work / params.num_kv_heads;
    tile_output.first_row = tile_output.q_tile * kTileQ;
    tile_output.num_rows =
        min_of(kTileQ, params.qo_len * params.group_size - tile_output.first_row);
  }

  __device__ __forceinline__ int warp_row() const { return 16 * kMmaQ * warp; }

  __device__ __forceinline__ void load_q() {
    const DTypeQ* first_head = static_cast<const DTypeQ*>(params.q) +
                               tile_output.kv_head * params.group_size * params.q_stride_h;
    copy_packed_rows<QTile, kHeadDimQK, Config::kAligned, kThreads>(
        shared.q, first_head, params.q_stride_n, params.q_stride_h, params.group_size,
        tile_output.first_row, tile_output.num_rows, thread);
  }

  __device__ __forceinline__ void load_k(int tile) {
    const DTypeKV* keys =
        static_cast<const DTypeKV*>(params.k) + tile_output.kv_head * params.k_stride_h;
    copy_rows<KSourceTile, kHeadDimQK, Config::kAligned, kThreads>(
        shared.k_source, keys, params.k_stride_n, tile * kTileKV, span, thread);
  }

  __device__ __forceinline__ void load_v(int tile) {
    const DTypeKV* values =
        static_cast<const DTypeKV*>(params.v) + tile_output.kv_head * params.v_stride_h;
    copy_rows<VTile, kHeadDimVO, Config::kAligned, kThreads>(
        shared.v, values, params.v_stride_n, tile * kTileKV, span, thread);
  }

  // Rotation and column order of Q, once it is in shared memory.
  __device__ __forceinline__ void prepare_q() {
    if constexpr (Config::kRope) {
      const int offset = params.kv_len - params.qo_len;
      rotate_tile<QTile, kHeadDimQK, kThreads>(shared.q, params, thread, [&](int row) {
        return (tile_output.first_row + row) / params.group_size + offset;
      });
      ptx::block_sync();
    } else if constexpr (kFp8) {
      permute_for_fp8_keys<QTile, kThreads>(shared.q, thread);
      ptx::block_sync();
    }
  }

  __device__ __forceinline__ void prepare_k(int tile) {
    if constexpr (kWidenKeys) {
      convert_tile<KSourceTile, KTile, kThreads>(shared.k_source, shared.k_wide, thread);
      ptx::block_sync();
    }
    if constexpr (Config::kRope) {
      unsigned char* keys = kWidenKeys ? shared.k_wide : shared.k_source;
      rotate_tile<KTile, kHeadDimQK, kThreads>(keys, params, thread,
                                               [&](int row) { return tile * kTileKV + row; });
      ptx::block_sync();
    }
  }

  __device__ __forceinline__ void run() {
    const int group = params.group_size;
    const int last_row = tile_output.first_row + tile_output.num_rows - 1;
    const int first_token = tile_output.first_row / group;
    const int last_token = last_row / group;
    const KeyRange range = KeyRange::of<Config::kCustomMask>(params, first_token, last_token);

    const TileSpan tiles =
        TileSpan::of(range, kTileKV, tile_output.split, params.num_splits);
    span = range.span();
    load_q();
    if constexpr (Config::kCustomMask) {
      shared.mask_map.clear(thread, kThreads);
      ptx::block_sync();
      shared.mask_map.scan(params, first_token, last_token, tiles, thread, kThreads);
      ptx::block_sync();
    }
    const auto next_tile = [&](int tile) {
      if constexpr (Config::kCustomMask) return shared.mask_map.next(tile, tiles);
      return tile;
    };
    int tile = next_tile(tiles.begin);
    if (tile < tiles.end) load_k(tile);
    ptx::cp_async_commit();
    ptx::cp_async_wait_group<0>();
    ptx::block_sync();
    prepare_q();

    const uint32_t q_base = ptx::shared_address(shared.q);
    const uint32_t k_base = ptx::shared_address(kWidenKeys ? shared.k_wide : shared.k_source);
    const uint32_t v_base = ptx::shared_address(shared.v);
    uint32_t q_registers[Config::kQInRegisters ? kStepsQK : 1][kMmaQ][4];
    if constexpr (Config::kQInRegisters) {
#pragma unroll
      for (int step = 0; step < kStepsQK; ++step) {
#pragma unroll
        for (int m = 0; m < kMmaQ; ++m) {
          load_q_fragment<QTile>(q_registers[step][m], q_base, warp_row() + 16 * m, step, lane);
        }
      }
    }
    const auto load_q_operand = [&](uint32_t(&a)[4], int m, int step) {
      if constexpr (Config::kQInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = q_registers[step][m][i];
      } else {
        load_q_fragment<QTile>(a, q_base, warp_row() + 16 * m, step, lane);
      }
    };

    float o[kMmaQ][2 * kColumnGroups][4] = {};
    OnlineSoftmax<kMmaQ> softmax(
        LogitsVariant(params, 0, tile_output.kv_head * group, tile_output.kv_head)
            .softmax_scale());

    while (tile < tiles.end) {
      // K has landed; everybody is done with V of the last tile.
      ptx::cp_async_wait_group<0>();
      ptx::block_sync();
      load_v(tile);
      ptx::cp_async_commit();
      prepare_k(tile);

      float s[kMmaQ][kTilesS][4] = {};
      multiply_qk<DTypeQ, KTile, kStepsQK, kMmaQ, kTileKV>(s, load_q_operand, k_base, 0, lane);
      transform_logits(s, tile * kTileKV);
      bool masked = range.needs_mask(tile * kTileKV, kTileKV);
      if constexpr (Config::kCustomMask) masked |= shared.mask_map.is_partial(tile, tiles);
      if (masked) {
        apply_mask<Config::kCustomMask>(s, params, tile_output.first_row + warp_row(),
                                        tile * kTileKV, lane);
      }
      softmax.update(s, o);
      uint32_t p[kMmaQ][kTileKV / 16][4];
      convert_p<DTypeQ>(p, s);

      // V has landed; everybody is done with K.
      const int next = next_tile(tile + 1);
      ptx::cp_async_wait_group<0>();
      ptx::block_sync();
      if (next < tiles.end) load_k(next);
      ptx::cp_async_commit();
      multiply_pv<DTypeQ, VTile, kColumnGroups, kMmaQ, kTileKV>(o, p, v_base, 0, lane);
      tile = next;
    }
    finish(softmax, o);
  }

  __device__ __forceinline__ void transform_logits(float (&s)[kMmaQ][kTilesS][4], int first_key) {
    if constexpr (Config::kTransformed) {
#pragma unroll
      for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = warp_row() + 16 * m + 8 * h + (lane >> 2);
          const LogitsVariant logits(params, tile_output.token(params, row),
                                     tile_output.head(params, row), tile_output.kv_head);
#pragma unroll
          for (int n = 0; n < kTilesS; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int key = first_key + 8 * n + 2 * (lane & 3) + e;
              s[m][n][2 * h + e] = logits(s[m][n][2 * h + e], key);
            }
          }
        }
      }
    }
  }

  // Normalises and writes this warp's rows; split tiles are merged by the last block to arrive.
  __device__ __forceinline__ void finish(const OnlineSoftmax<kMmaQ>& softmax,
                                         float (&o)[kMmaQ][2 * kColumnGroups][4]) {
    const bool is_split = params.num_splits > 1;
    const float output_scale = output_scale_of(params, tile_output.kv_head);
#pragma unroll
    for (int m = 0; m < kMmaQ; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp_row() + 16 * m + 8 * h + (lane >> 2);
        const float old_max = softmax.base2_max(m, h);
        RowState state{old_max, quad_sum(softmax.row_sum[m][h])};
        if (row >= tile_output.num_rows) continue;
        const int head = tile_output.head(params, row);
        const int token = tile_output.token(params, row);
        if (is_split) {
          const int64_t index =
              (static_cast<int64_t>(tile_output.slot(params)) * params.num_splits +
               tile_output.split) * kTileQ + row;
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
    if (is_split && arrive_last(params, tile_output, thread, &shared.flag)) {
      merge_partials<DTypeO, kHeadDimVO, kTileQ, Config::kAligned>(params, tile_output, thread,
                                                                   kThreads);
    }
  }

  template <typename T, bool kAligned>
  __device__ __forceinline__ void store_row(T* out, const float (&o)[2 * kColumnGroups][4], int h,
                                            float factor) {
    store_output_row<T, kHeadDimVO, kFp8, kAligned>(out, o, h, factor, lane);
  }
};

}  // namespace cupyattn
