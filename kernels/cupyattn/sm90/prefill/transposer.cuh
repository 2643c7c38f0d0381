// The warps of prefill_sm90 that transpose values of 8 bits, once they have landed: products of
// such values take them K-major. They also sweep non-finite values of tiles that need masking and
// write the bits of a custom mask.
#pragma once

#include "cupyattn/ptx/ldmatrix.cuh"
#include "cupyattn/ptx/tensor_copy.cuh"
#include "cupyattn/shared/byte_fragments.cuh"
#include "cupyattn/sm90/roles/traits.cuh"

namespace cupyattn {

template <typename Traits>
struct PrefillSm90Transposer {
  using DTypeV = typename Traits::DTypeKV;
  using Item = typename Traits::Item;
  using Landing = typename Traits::VLoadTile;
  using VTile = typename Traits::VTile;
  using KeyMarks = typename Traits::KeyMarks;
  static constexpr int kWarps = Traits::kConverters, kThreads = kWarps * kWarpSize;

  const PrefillSm90Block<Traits>& block;
  typename Traits::SharedMemory& shared;
  const int thread, warp, lane;
  PipelineState<Traits::kStages> v;
  PipelineState<Traits::kFp8Stages> landed;

  __device__ __forceinline__ explicit PrefillSm90Transposer(const PrefillSm90Block<Traits>& block)
      : block(block),
        shared(block.shared),
        thread(threadIdx.x % kThreads),  // the last warps of their warpgroup
        warp(ptx::warp_uniform(threadIdx.x % kThreads / kWarpSize)),
        lane(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ void run() {
    PipelineState<Traits::kItems> place;
    for (;;) {
      const Item& item = block.await_item(place);
      if (!item.exists) return;
      item.for_tiles([](const KeyTile&, int) {},
                     [&](const KeyTile& tile) { transpose_values(item, tile); });
      block.release_item(place, lane);
    }
  }

  __device__ __forceinline__ void transpose_values(const Item& item, const KeyTile& tile) {
    unsigned char* const landing = shared.fp8_v[landed.stage];
    await_phase(shared.full_fp8_v[landed.stage], landed.parity);
    await_phase(shared.empty_v[v.stage], v.parity ^ 1);  // mutate: turned-before-empty
    if constexpr (Traits::kMasked) {
      shared.row_bits.template fill<typename Traits::Mask>(v, block.params, item, tile, thread,
                                                           kThreads);
    }
    if (tile.needs_mask) {  // mutate: 8-bit-values-not-swept
      zero_nonfinite(landing, shared.nonfinite_keys[v.stage],
                     item.range.end - item.first_key(tile.tile));
    }
    ptx::warp_sync();
    transpose(ptx::shared_address(landing), ptx::shared_address(shared.v[v.stage]));
    ptx::fence_proxy_async();
    ptx::warp_sync();
    if (lane == 0) {
      arrive(shared.empty_fp8_v[landed.stage]);
      arrive(shared.full_v[v.stage]);
    }
    landed.advance();
    v.advance();
  }

  // Transposes a tile, 32 columns of 16 keys at a time. ldmatrix moves pairs of bytes: a thread has
  // two columns of two keys, and of two more in the next register. Bytes of one column of these four
  // keys are four places of a row of V^T (byte_fragments.cuh).
  __device__ __forceinline__ void transpose(uint32_t from, uint32_t to) const {
    constexpr int kPairs = Landing::kChunks / 2, kGroups = Traits::kTileKV / 16;
    constexpr int kBatch = kGroups % 3 == 0 ? 3 : 2;
    static_assert(Landing::kChunks % 2 == 0 && kGroups % kBatch == 0, "batches are whole");
    const int matrix = lane / 8, line = lane % 8, place = row_of_even_column(line);
#pragma unroll 1
    for (int pair = warp; pair < kPairs; pair += kWarps) {
      const uint32_t source =
          from + Landing::offset(8 * (matrix & 1) + line, 2 * pair + matrix / 2);
      const uint32_t target =
          to + VTile::offset(32 * pair + 16 * (matrix / 2) + 8 * (matrix & 1) + place, 0);
#pragma unroll
      for (int first = 0; first < kGroups; first += kBatch) {
        uint32_t words[kBatch][4];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          ptx::ldmatrix_x4_trans(words[i], source + (first + i) * 2 * Landing::kGroupBytes);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          uint32_t columns[4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t near = words[i][2 * half], far = words[i][2 * half + 1];
            columns[2 * half] = ptx::permute_bytes(near, far, 0x6420u);
            // mutate: turned-keys-swapped
            columns[2 * half + 1] = ptx::permute_bytes(near, far, 0x7531u);
          }
          ptx::stmatrix_x4(VTile::of_chunk(target, first + i), columns);
        }
      }
    }
  }

  // Sets non-finite values of a masked tile to zero, and marks those of the first `num_keys` keys
  // that had them.
  __device__ __forceinline__ void zero_nonfinite(unsigned char* landing, KeyMarks& nonfinite_keys,
                                                 int num_keys) const {
    if (thread == 0) nonfinite_keys = KeyMarks{};
    ptx::named_barrier_sync(Traits::kNonFiniteBarrier, kThreads);
#pragma unroll 2
    for (int index = thread; index < Landing::kBytes / 16; index += kThreads) {
      if (Landing::kHasTail && !Landing::is_copied(index)) continue;
      zero_nonfinite_chunk<DTypeV>(reinterpret_cast<Vector16*>(landing)[index],
                                   nonfinite_keys.word, Landing::row_at(16 * index), num_keys);
    }
    ptx::named_barrier_sync(Traits::kNonFiniteBarrier, kThreads);
  }
};

}  // namespace cupyattn
