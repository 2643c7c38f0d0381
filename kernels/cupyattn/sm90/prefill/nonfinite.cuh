// Warps 2 and 3 of prefill_sm90: set non-finite values of masked tiles to zero before the tiles are
// multiplied, and write the bits of a custom mask.
#pragma once

#include "cupyattn/ptx/tensor_copy.cuh"
#include "cupyattn/shared/hidden_values.cuh"
#include "cupyattn/sm90/roles/traits.cuh"

namespace cupyattn {

template <typename Traits>
struct PrefillSm90NonFinite {
  using DTypeKV = typename Traits::DTypeKV;
  using VTile = typename Traits::VTile;
  using Item = typename Traits::Item;
  using Stage = PipelineState<Traits::kStages>;
  static constexpr int kNonFiniteThreads = 2 * kWarpSize;

  const PrefillSm90Block<Traits>& block;
  typename Traits::SharedMemory& shared = block.shared;

  __device__ __forceinline__ void run() {
    PipelineState<Traits::kItems> place;
    Stage v;
    uint32_t unchecked_parities = 0;
    const int thread = threadIdx.x - 2 * kWarpSize;
    for (;;) {
      const Item& item = block.await_item(place);
      if (!item.exists) return;
      item.for_tiles([](const KeyTile&, int) {},
                     [&](const KeyTile& tile) {
                       if constexpr (Traits::kMasked) {
                         // mutate: mask-bits-before-empty
                         await_phase(shared.empty_v[v.stage], v.parity ^ 1);
                         shared.row_bits.template fill<typename Traits::Mask>(
                             v, block.params, item, tile, thread, kNonFiniteThreads);
                       }
                       zero_nonfinite_tile(v, item, tile, unchecked_parities);
                       if constexpr (Traits::kMasked) {
                         // Only masked tiles wait for the bits, so the stage stays occupied until
                         // these warps are done: a warp two rounds late would mistake the phase.
                         ptx::warp_sync();
                         if (thread % kWarpSize == 0) arrive(shared.empty_v[v.stage]);
                       }
                       v.advance();
                     });
      if constexpr (!Traits::kPersistent) return;
      block.release_item(place, thread % kWarpSize);
    }
  }

  // Sweeps a masked tile and hands it on to `full_v`. unchecked_parities has a bit for each stage.
  __device__ __forceinline__ void zero_nonfinite_tile(const Stage& v, const Item& item,
                                                      const KeyTile& tile,
                                                      uint32_t& unchecked_parities) const {
    if (!tile.needs_mask) return;
    const int thread = threadIdx.x - 2 * kWarpSize;
    await_phase(shared.unchecked_v[v.stage], (unchecked_parities >> v.stage) & 1);
    unchecked_parities ^= 1u << v.stage;
    zero_nonfinite_values(v.stage, item.range.end - item.first_key(tile.tile), thread);
    const uint32_t full = ptx::shared_address(&shared.full_v[v.stage]);
    if constexpr (Traits::kGathers) {
      // Each thread arrives for what it has read: the copies that fill the stage next are behind
      // these arrivals, by those of the consumers. One arrival behind the barrier of all would say
      // the same, but racecheck loses that order (CONTRIBUTING.md, "Sanitizers").
      constexpr int kEach = Traits::kArrivals / kNonFiniteThreads;
      constexpr int kMore = Traits::kArrivals % kNonFiniteThreads;
      ptx::mbarrier_arrive(full, kEach + (thread < kMore ? 1 : 0));
    } else if (thread == 0) {
      ptx::mbarrier_arrive(full);
    }
  }

  // Sets non-finite values to zero, because a hidden one would give 0 * NaN, and marks those of the
  // first `num_keys` keys that had them.
  __device__ __forceinline__ void zero_nonfinite_values(int stage, int num_keys, int thread) const {
    constexpr int kChunks = VTile::kBytes / (16 * kNonFiniteThreads);
    constexpr int kBatch = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
    constexpr bool kHasTail = VTile::kHasTail;
    static_assert(VTile::kBytes == 16 * kNonFiniteThreads * kChunks && kChunks % kBatch == 0,
                  "batches are whole");
    Vector16* chunks = reinterpret_cast<Vector16*>(shared.v[stage]);
    if (thread == 0) shared.nonfinite_keys[stage] = {};
    ptx::named_barrier_sync(Traits::kNonFiniteBarrier, kNonFiniteThreads);
    for (int first = thread; first < VTile::kBytes / 16; first += kBatch * kNonFiniteThreads) {
      uint32_t seen[4] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int index = first + i * kNonFiniteThreads;
        if (kHasTail && !VTile::is_copied(index)) continue;
        const Vector16 values = chunks[index];
        // Zero times a value that is not finite is NaN, and a sum keeps it.
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          seen[w] = ptx::multiply_add_pair<DTypeKV>(values.word[w], 0u, seen[w]);
        }
      }
      if (((seen[0] | seen[1] | seen[2] | seen[3]) & 0x7fff7fffu) == 0) continue;
#pragma unroll 1
      for (int index = first; index < first + kBatch * kNonFiniteThreads;
           index += kNonFiniteThreads) {
        if (kHasTail && !VTile::is_copied(index)) continue;
        zero_nonfinite_chunk<DTypeKV>(chunks[index], shared.nonfinite_keys[stage].word,
                                      VTile::row_at(16 * index), num_keys);
      }
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(Traits::kNonFiniteBarrier, kNonFiniteThreads);
  }
};

}  // namespace cupyattn
