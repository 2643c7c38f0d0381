// The converter warps of prefill_sm90: convert fp8 tiles of keys and values, once they have landed,
// to panels of the type that the consumers multiply.
#pragma once

#include "cupyattn/ptx/tensor_copy.cuh"
#include "cupyattn/shared/block_scales.cuh"
#include "cupyattn/shared/hidden_values.cuh"
#include "cupyattn/shared/key_type.cuh"
#include "cupyattn/sm90/roles/traits.cuh"

namespace cupyattn {

template <typename Traits>
struct PrefillSm90Converter {
  using DTypeKV = typename Traits::DTypeKV;
  using DTypeK = typename KeyType<Traits>::type;
  using Item = typename Traits::Item;
  static constexpr int kThreads = Traits::kConverters * kWarpSize;
  // Four threads have a row.
  static constexpr int kRowsAtOnce = kThreads / 4;
  static constexpr bool kScalesBlocks = HasBlockScales<Traits>::kValue;

  const PrefillSm90Block<Traits>& block;
  typename Traits::SharedMemory& shared;
  const int thread, lane;
  PipelineState<Traits::kStages> k, v;
  PipelineState<Traits::kFp8Stages> full_fp8_k, full_fp8_v;

  __device__ __forceinline__ explicit PrefillSm90Converter(const PrefillSm90Block<Traits>& block)
      : block(block),
        shared(block.shared),
        thread(threadIdx.x % kThreads),  // the last warps of their warpgroup
        lane(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ void run() {
    PipelineState<Traits::kItems> place;
    for (;;) {
      const Item& item = block.await_item(place);
      if (!item.exists) return;
      item.for_tiles([&](const KeyTile& tile, int) { convert_keys(item, tile); },
                     [&](const KeyTile& tile) { convert_values(item, tile); });
      block.release_item(place, lane);
    }
  }

  __device__ __forceinline__ void convert_keys(const Item& item, const KeyTile& tile) {
    const RowFactors factors = factors_of(BlockScales::kKeys, item, tile);
    await_phase(shared.full_fp8_k[full_fp8_k.stage], full_fp8_k.parity);
    await_phase(shared.empty_k[k.stage], k.parity ^ 1);  // mutate: converted-before-empty
    convert<DTypeK, typename Traits::KLoadTile, typename Traits::KTile>(
        shared.fp8_k[full_fp8_k.stage], shared.k[k.stage], factors);
    if constexpr (Traits::kMasked) {
      if (thread == 0) shared.row_bits.tiles[k.stage] = tile;
    }
    pass_on(shared.empty_fp8_k[full_fp8_k.stage], shared.full_k[k.stage]);
    full_fp8_k.advance();
    k.advance();
  }

  __device__ __forceinline__ void convert_values(const Item& item, const KeyTile& tile) {
    using Landing = typename Traits::VLoadTile;
    unsigned char* const landing = shared.fp8_v[full_fp8_v.stage];
    const RowFactors factors = factors_of(BlockScales::kValues, item, tile);
    await_phase(shared.full_fp8_v[full_fp8_v.stage], full_fp8_v.parity);
    await_phase(shared.empty_v[v.stage], v.parity ^ 1);
    if constexpr (Traits::kMasked) {
      shared.row_bits.template fill<typename Traits::Mask>(v, block.params, item, tile, thread,
                                                           kThreads);
    }
    if (tile.needs_mask) {
      zero_nonfinite<Landing>(landing, shared.nonfinite_keys[v.stage],
                              item.range.end - item.first_key(tile.tile));
    }
    convert<DTypeKV, Landing, typename Traits::VTile>(landing, shared.v[v.stage], factors);
    pass_on(shared.empty_fp8_v[full_fp8_v.stage], shared.full_v[v.stage]);
    full_fp8_v.advance();
    v.advance();
  }

  __device__ __forceinline__ void pass_on(uint64_t& taken, uint64_t& full) const {
    ptx::fence_proxy_async();
    ptx::warp_sync();
    if (lane == 0) {
      arrive(taken);
      arrive(full);
    }
  }

  // What the rows of a tile that a thread converts are multiplied by.
  struct RowFactors {
    float row[kScalesBlocks ? Traits::kTileKV / kRowsAtOnce : 1];
  };
  __device__ __forceinline__ RowFactors factors_of(BlockScales::Place place, const Item& item,
                                                   const KeyTile& tile) const {
    RowFactors factors = {};
    if constexpr (kScalesBlocks) {
      const BlockScales scales = BlockScales::of(block.params, place);
      const BlockWork& work = item.work;
      const int last = work.request.kv_len - 1;
#pragma unroll
      for (int i = 0; i < Traits::kTileKV / kRowsAtOnce; ++i) {
        const int key = item.first_key(tile.tile) + thread / 4 + i * kRowsAtOnce;
        factors.row[i] = scales.template of_key<Traits::kPaged>(
            block.params, work.request, max_of(min_of(key, last), 0), work.tile.kv_head);
      }
    }
    return factors;
  }

  // Converts a tile. Each 16-byte chunk of a row becomes two chunks of a panel. A thread has the
  // same chunk of every four, in the same row of every kRowsAtOnce. Eight threads that access
  // memory together have two rows; if rows are whole lines, the second row's groups of four chunks
  // are swapped, so that the eight read and write different banks.
  template <typename From, typename Landing, typename Tile>
  __device__ __forceinline__ void convert(const unsigned char* landing, unsigned char* tile,
                                          [[maybe_unused]] const RowFactors& factors) const {
    constexpr int kFours = ceil_div(Landing::kChunks, 4);
    constexpr int kSteps = Landing::kRows / kRowsAtOnce * kFours;
    static_assert(Landing::kRows % kRowsAtOnce == 0, "all threads have as many rows");
    const int row = thread / 4, chunk = thread % 4;
    const int swap = Landing::kRowBytes % 128 == 0 ? row & 1 : 0;
    const unsigned char* const from = landing + Landing::offset(row, chunk);
    unsigned char* const to[2] = {tile + Tile::offset(row, 2 * chunk),
                                  tile + Tile::offset(row, 2 * chunk + 1)};
    const auto load = [&](int step) {
      const int rows = step / kFours * kRowsAtOnce, four = step % kFours ^ swap;
      return *reinterpret_cast<const Vector16*>(from + rows * Landing::kRowBytes + four * 64);
    };
    const auto exists = [&](int step) {
      return Landing::kChunks % 4 == 0 || 4 * (step % kFours) + chunk < Landing::kChunks;
    };
    // Loads one step ahead, because the compiler moves no load before a store.
    Vector16 next = exists(0) ? load(0) : Vector16{};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const Vector16 bytes = next;
      if (step + 1 < kSteps && exists(step + 1)) next = load(step + 1);
      if (!exists(step)) continue;
      const int rows = step / kFours * kRowsAtOnce, four = step % kFours ^ swap;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Vector16 converted;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          const uint32_t word = bytes.word[2 * half + w];
          converted.word[2 * w] = ptx::fp8_to_pair<typename Tile::T, From, 0, 1>(word);
          converted.word[2 * w + 1] = ptx::fp8_to_pair<typename Tile::T, From, 2, 3>(word);
        }
        if constexpr (kScalesBlocks) {
          // The factor in two f16 numbers, so that a product is rounded once.
          const float factor = factors.row[step / kFours];
          const uint32_t high = ptx::pack_pair<half_t>(factor, factor);
          float rounded, same;
          ptx::unpack_pair<half_t>(high, rounded, same);
          const uint32_t low = ptx::pack_pair<half_t>(factor - rounded, factor - rounded);
#pragma unroll
          for (uint32_t& pair : converted.word) {
            pair = ptx::multiply_add_pair<half_t>(pair, high, ptx::multiply_half_pair(pair, low));
          }
        }
        *reinterpret_cast<Vector16*>(to[half] + rows / 8 * Tile::kGroupBytes +
                                     four * Tile::kPanelBytes) = converted;
      }
    }
  }

  // Sets non-finite values of a masked tile to zero, and marks those of the first `num_keys` keys
  // that had them.
  template <typename Landing>
  __device__ __forceinline__ void zero_nonfinite(unsigned char* landing,
                                                 typename Traits::KeyMarks& nonfinite_keys,
                                                 int num_keys) const {
    if (thread == 0) nonfinite_keys = {};
    ptx::named_barrier_sync(Traits::kNonFiniteBarrier, kThreads);
    for (int index = thread; index < Landing::kBytes / 16; index += kThreads) {
      zero_nonfinite_chunk<DTypeKV>(reinterpret_cast<Vector16*>(landing)[index],
                                    nonfinite_keys.word, index / Landing::kChunks, num_keys);
    }
    ptx::named_barrier_sync(Traits::kNonFiniteBarrier, kThreads);
  }
};

}  // namespace cupyattn
