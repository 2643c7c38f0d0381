// The warps of prefill_sm90 that turn keys and values of fp8, once they have landed, into the
// panels of q's type that others multiply. See prefill_sm90.cuh.
#pragma once

#include "cupyattn/attention/hidden_values.cuh"
#include "cupyattn/attention/mask_sm90.cuh"
#include "cupyattn/attention/ring.cuh"
#include "cupyattn/common/math.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/ptx/mbarrier.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/ptx/tensor_copy.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

template <typename Kernel>
struct PrefillSm90Converter {
  using DTypeQ = typename Kernel::DTypeQ;
  using DTypeKV = typename Kernel::DTypeKV;
  using Item = typename Kernel::Item;
  using SharedMemory = typename Kernel::SharedMemory;
  static constexpr int kTileKV = Kernel::kTileKV;
  static constexpr int kThreads = Kernel::kConverters * kWarpSize;

  const Kernel& kernel;
  SharedMemory& shared;
  const int thread, lane;
  RingPlace<Kernel::kStages> k, v;
  RingPlace<Kernel::kLandings> landed_k, landed_v;

  __device__ __forceinline__ explicit PrefillSm90Converter(const Kernel& kernel)
      : kernel(kernel),
        shared(kernel.shared),
        thread(threadIdx.x % kThreads),  // the last warps of their warpgroup
        lane(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ void run() {
    RingPlace<Kernel::kItems> place;
    for (;;) {
      const Item& item = kernel.await_item(place);
      if (!item.exists) return;
      Kernel::for_tiles(
          item, [&](const KeyTile& tile, int) { convert_keys(tile); },
          [&](const KeyTile& tile) { convert_values(item, tile); });
      kernel.release_item(place, lane);
    }
  }

  __device__ __forceinline__ void convert_keys(const KeyTile& tile) {
    Kernel::wait(shared.landed_k[landed_k.stage], landed_k.parity);
    Kernel::wait(shared.empty_k[k.stage], k.parity ^ 1);
    convert<typename Kernel::KLanding, typename Kernel::KTile>(shared.landing_k[landed_k.stage],
                                                               shared.k[k.stage]);
    if constexpr (Kernel::kMasked) {
      if (thread == 0) shared.row_bits.tiles[k.stage] = tile;
    }
    pass_on(shared.taken_k[landed_k.stage], shared.full_k[k.stage]);
    landed_k.advance();
    k.advance();
  }

  __device__ __forceinline__ void convert_values(const Item& item, const KeyTile& tile) {
    using Landing = typename Kernel::VLanding;
    unsigned char* const landing = shared.landing_v[landed_v.stage];
    Kernel::wait(shared.landed_v[landed_v.stage], landed_v.parity);
    Kernel::wait(shared.empty_v[v.stage], v.parity ^ 1);
    if constexpr (Kernel::kMasked) {
      shared.row_bits.template fill<typename Kernel::Mask>(v, kernel.params, item, tile, thread,
                                                           kThreads);
    }
    if (tile.hides) {
      clean<Landing>(landing, shared.bad_keys[v.stage], item.range.end - item.first_key(tile.tile));
    }
    convert<Landing, typename Kernel::VTile>(landing, shared.v[v.stage]);
    pass_on(shared.taken_v[landed_v.stage], shared.full_v[v.stage]);
    landed_v.advance();
    v.advance();
  }

  __device__ __forceinline__ void pass_on(uint64_t& taken, uint64_t& full) const {
    ptx::fence_proxy_async();
    ptx::warp_sync();
    if (lane == 0) {
      Kernel::arrive(taken);
      Kernel::arrive(full);
    }
  }

  // A thread's chunks of a tile, each 16 bytes of a row, become two chunks of a panel's. It has the
  // same place in every 32 rows and in every four chunks. Eight threads that go together have two
  // rows, and where a row is whole lines the second one's fours are in another order: so what they
  // read, and what they write at a time, is in banks of their own.
  template <typename Landing, typename Tile>
  __device__ __forceinline__ void convert(const unsigned char* landing, unsigned char* tile) const {
    constexpr int kRowsAtOnce = kThreads / 4, kFours = ceil_div(Landing::kChunks, 4);
    constexpr int kSteps = Landing::kRows / kRowsAtOnce * kFours;
    static_assert(Landing::kRows % kRowsAtOnce == 0, "threads have as many rows each");
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
    // Stores would keep the compiler from loading ahead.
    Vector16 next = load(0);
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
          converted.word[2 * w] = ptx::fp8_to_pair<DTypeQ, DTypeKV, 0, 1>(word);
          converted.word[2 * w + 1] = ptx::fp8_to_pair<DTypeQ, DTypeKV, 2, 3>(word);
        }
        *reinterpret_cast<Vector16*>(to[half] + rows / 8 * Tile::kGroupBytes +
                                     four * Tile::kPanelBytes) = converted;
      }
    }
  }

  // Values of a tile that hides keys: takes out what is not finite, and marks whose it was of the
  // first `num_keys`.
  template <typename Landing>
  __device__ __forceinline__ void clean(unsigned char* landing, Vector16& bad_keys,
                                        int num_keys) const {
    if (thread == 0) bad_keys = Vector16{};
    ptx::named_barrier_sync(Kernel::kCleaned, kThreads);
    for (int index = thread; index < Landing::kBytes / 16; index += kThreads) {
      zero_nonfinite_chunk<DTypeKV>(reinterpret_cast<Vector16*>(landing)[index], bad_keys.word,
                            index / Landing::kChunks, num_keys);
    }
    ptx::named_barrier_sync(Kernel::kCleaned, kThreads);
  }
};

}  // namespace cupyattn
