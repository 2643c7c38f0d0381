// The warps of prefill_sm90 that transpose values of 8 bits where they have landed: products of
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
  PipelineState<Traits::kValueStages> v;

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
    unsigned char* const values = shared.v[v.stage];
    await_phase(shared.unchecked_v[v.stage], v.parity);  // mutate: turned-before-landed
    if constexpr (Traits::kMasked) {
      shared.row_bits.template fill<typename Traits::Mask>(v, block.params, item, tile, thread,
                                                           kThreads);
    }
    if (tile.needs_mask) {  // mutate: 8-bit-values-not-swept
      zero_nonfinite(values, shared.nonfinite_keys[v.stage],
                     item.range.end - item.first_key(tile.tile));
    }
    ptx::warp_sync();
    transpose(ptx::shared_address(values));
    ptx::fence_proxy_async();
    ptx::warp_sync();
    if (lane == 0) arrive(shared.full_v[v.stage]);
    v.advance();
  }

  // Transposes a tile, 32 keys at a time: their rows become a panel of V^T of as many bytes, in the
  // same place, so all are read before any is written. A warp takes 32 columns of 16 keys at a time.
  // ldmatrix moves pairs of bytes: a thread has two columns of two keys, and of two more in the next
  // register. Bytes of one column of these four keys are four places of a row of V^T
  // (byte_fragments.cuh).
  __device__ __forceinline__ void transpose(uint32_t tile) const {
    constexpr int kEach = Landing::kChunks / 2;  // times 32 columns
    static_assert(4 * Landing::kGroupBytes == VTile::kPanelBytes && Landing::kPanels == 1 &&
                      VTile::kPanels * VTile::kPanelBytes == Landing::kBytes,
                  "32 rows become a panel");
    static_assert(Landing::kChunks % 2 == 0 && kWarps == 2, "each warp has 16 keys");
    const int matrix = lane / 8, line = lane % 8, place = row_of_even_column(line);
    const uint32_t first =
        tile + Landing::offset(16 * warp + 8 * (matrix & 1) + line, matrix / 2);
    const uint32_t target =
        tile + VTile::offset(16 * (matrix / 2) + 8 * (matrix & 1) + place, warp);
#pragma unroll 1
    for (int panel = 0; panel < VTile::kPanels; ++panel) {
      uint32_t words[kEach][4];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        ptx::ldmatrix_x4_trans(words[i], (first ^ (32 * i)) + panel * VTile::kPanelBytes);
      }
      ptx::named_barrier_sync(Traits::kNonFiniteBarrier, kThreads);  // mutate: turned-before-read
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        uint32_t columns[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t near = words[i][2 * half], far = words[i][2 * half + 1];
          columns[2 * half] = ptx::permute_bytes(near, far, 0x6420u);
          // mutate: turned-keys-swapped
          columns[2 * half + 1] = ptx::permute_bytes(near, far, 0x7531u);
        }
        ptx::stmatrix_x4(target + panel * VTile::kPanelBytes + 32 * i * VTile::kRowBytes, columns);
      }
    }
  }

  // Sets non-finite values of a masked tile to zero, and marks those of the first `num_keys` keys
  // that had them. A warp sweeps the keys that it transposes, so no warp waits for the other.
  __device__ __forceinline__ void zero_nonfinite(unsigned char* landing, KeyMarks& nonfinite_keys,
                                                 int num_keys) const {
    constexpr int kEach = Landing::kChunks / 2;  // of a lane, of 16 keys
    constexpr int kWords = sizeof(KeyMarks) / 4;
    uint16_t* const marks = reinterpret_cast<uint16_t*>(nonfinite_keys.word);
    // Those of no keys are read with the others.
    if (VTile::kPanels + thread < kWords) nonfinite_keys.word[VTile::kPanels + thread] = 0;
#pragma unroll 1
    for (int panel = 0; panel < VTile::kPanels; ++panel) {
      const int first_key = 32 * panel + 16 * warp;
      const auto chunk_at = [&](int i) {
        const int index = kWarpSize * i + lane;
        return reinterpret_cast<Vector16*>(
            landing + Landing::offset(first_key + index / Landing::kChunks, index % Landing::kChunks));
      };
      uint32_t holes = 0, marked = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const Vector16 values = *chunk_at(i);
#pragma unroll
        for (int w = 0; w < 4; ++w) holes |= not_finite<DTypeV>(values.word[w]);
      }
      if (unlikely(ptx::warp_any(holes != 0))) {
        uint32_t own = 0;
#pragma unroll 1
        for (int i = 0; i < kEach; ++i) {
          if (zero_nonfinite_chunk<DTypeV>(*chunk_at(i))) {
            own |= 1u << ((kWarpSize * i + lane) / Landing::kChunks);
          }
        }
#pragma unroll 1
        for (int key = 0; key < 16; ++key) {
          const bool is_key = first_key + key < num_keys;
          if (ptx::warp_any((own >> key & 1) != 0) && is_key) marked |= 1u << key;
        }
      }
      if (lane == 0) marks[2 * panel + warp] = static_cast<uint16_t>(marked);
    }
  }
};

}  // namespace cupyattn
