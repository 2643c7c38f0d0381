// What decode_sm80 and prefill_sm80 share: types, tiles in shared memory, and the way of Q
// from there to fragments.
#pragma once

#include "cupyattn/shared/hidden_values.cuh"
#include "cupyattn/shared/key_rows.cuh"
#include "cupyattn/shared/key_type.cuh"
#include "cupyattn/shared/mask.cuh"
#include "cupyattn/shared/rope.cuh"
#include "cupyattn/shared/state.cuh"
#include "cupyattn/sm80/fp8_query.cuh"
#include "cupyattn/tile/fragments.cuh"

namespace cupyattn {

// A tile is kTileRows rows of Q, or kTileKeys keys that kCopyThreads threads copy.
template <typename Config, int kTileRows, int kTileKeys, int kCopyThreads>
struct TraitsSm80 : Config {
  using Config::kHeadDimQK, Config::kHeadDimVO, Config::kMmaQ, Config::kPaged;
  using typename Config::DTypeKV;
  using typename Config::DTypeQ;
  using DTypeK = typename KeyType<Config>::type;
  using DTypeRows = typename RowType<Config>::type;
  static constexpr bool kWidenRows = !is_same<DTypeRows, DTypeQ>;
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr bool kFp8 = is_fp8<DTypeKV>;
  // Keys of fp8 that must be rotated are widened first; others stay fp8 up to the fragment.
  static constexpr bool kWidenKeys = kFp8 && Config::kRotateKeys;
  static constexpr int kStepsQK = ceil_div(kHeadDimQK, 16);
  static constexpr int kColumnGroups = ceil_div(kHeadDimVO, 16);
  // The types of the two products: fp8 converts to f16 in one instruction, whatever the type of q.
  using DTypeS = conditional<kFp8 && !kWidenKeys, half_t, DTypeQ>;
  using DTypeP = conditional<kFp8, half_t, DTypeQ>;

  using QTile = SharedTile<DTypeQ, kTileRows, kHeadDimQK>;
  using KSourceTile = SharedTile<DTypeK, kTileKeys, kHeadDimQK>;
  using KTile = conditional<kWidenKeys, SharedTile<DTypeQ, kTileKeys, kHeadDimQK>, KSourceTile>;
  using VTile = SharedTile<DTypeKV, kTileKeys, kHeadDimVO>;
  using KCopier = RowCopier<KSourceTile, kHeadDimQK, Config::kAligned, kCopyThreads, kPaged>;
  using VCopier = RowCopier<VTile, kHeadDimVO, Config::kAligned, kCopyThreads, kPaged>;
  using Mask = MaskOf<Config>;
  using LogitsVariant = Logits<Config>;
  using Rope = conditional<Config::kRope, RopeSteps<kHeadDimQK>, uint32_t>;
  using Accumulators = float[kMmaQ][2 * kColumnGroups][4];

  // Copies the rows of Q to shared memory: those of the products' type are awaited as copies.
  template <typename SharedMemory>
  static __device__ __forceinline__ void copy_q(SharedMemory& shared, const AttentionParams& params,
                                                int num_rows, int thread) {
    if constexpr (kWidenRows) {
      widen_query_rows<DTypeRows, QTile, kHeadDimQK, Config::kAligned, kThreads>(
          shared.q, params, shared.q_offset, num_rows, thread);
    } else {
      copy_query_rows<QTile, kHeadDimQK, Config::kAligned, kThreads>(
          ptx::shared_address(shared.q), params, shared.q_offset, num_rows, thread);
    }
  }

  // Rotates the rows of Q, converts them to the type of S and permutes their columns, as far as the
  // options ask for it. The whole block takes part once Q is in shared memory.
  template <typename SharedMemory>
  static __device__ __forceinline__ void prepare_q(SharedMemory& shared, const int& num_rows,
                                                   int thread, int warp, int lane) {
    if constexpr (Config::kRope) {
      rotate_tile<QTile, kHeadDimQK, kThreads>(shared.q, shared.rope, thread,
                                               // mutate: rope-position-of-token
                                               [&](int row) { return shared.rows[row].position; });
      ptx::block_sync();
    }
    if constexpr (!is_same<DTypeS, DTypeQ>) {
      static_assert(Config::kRowScales, "a row of Q has a scale of its own");
      scale_rows_to_half<QTile, Config::kWarps>(shared.q, shared.rows, num_rows, warp, lane);
      ptx::block_sync();
    }
    if constexpr (kFp8 && !kWidenKeys) {
      permute_for_fp8_keys<QTile, kThreads>(shared.q, num_rows, thread);
      ptx::block_sync();  // mutate: permuted-q-read-early
    }
  }
};

}  // namespace cupyattn
