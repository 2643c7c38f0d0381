// Where wide_decode_sm90 writes the rows of a tile, and how: from shared memory, 16 bytes a thread.
#pragma once

#include "cupyattn/sm90/wide_decode/fp8.cuh"

namespace cupyattn {

template <typename Traits>
struct WideDecodeSm90Rows {
  using Item = typename Traits::Item;
  static constexpr int kTileQ = Traits::kTileQ, kHeadDimVO = Traits::kHeadDimVO;

  const AttentionParams& params;
  typename Traits::SharedMemory& shared;

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

  // Rows of O in the place of keys, four words apart, so that rows begin in different banks.
  static constexpr int kStagedRow = kHeadDimVO + 4;
  static_assert(kTileQ * kStagedRow * 4 <= sizeof(Traits::SharedMemory::k),
                "O fits the place of keys");
  __device__ __forceinline__ float* staged(int r) const {
    return reinterpret_cast<float*>(shared.k[0]) + r * kStagedRow;
  }

  // Writes the staged rows as a state, whose rows follow each other.
  __device__ __forceinline__ void write_state(const Item& item, int thread) const {
    constexpr int kThreads = kHeadDimVO / 4, kRowsAtOnce = Traits::kConsumerThreads / kThreads;
    const int first = thread / kThreads, column = thread % kThreads * 4;
    const float* const from = staged(first) + column;
    float* const to = params.partial_o + place_of(item, first).state * kHeadDimVO + column;
    constexpr int kBatch = 4;
#pragma unroll
    for (int begin = 0; begin < kTileQ / kRowsAtOnce; begin += kBatch) {
      float4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int step = (begin + i) * kRowsAtOnce;
        x[i] = *reinterpret_cast<const float4*>(from + step * kStagedRow);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int step = (begin + i) * kRowsAtOnce;
        if (first + step >= item.work.tile.num_rows) continue;
        *reinterpret_cast<float4*>(to + step * kHeadDimVO) = x[i];
      }
    }
  }

  // Writes the staged rows of the answer, 16 bytes a thread; `at` says where a row begins.
  template <typename T, typename At>
  __device__ __forceinline__ void write(const Item& item, int thread, At&& at) const {
    constexpr int kColumns = 16 / sizeof(T), kThreads = kHeadDimVO / kColumns;
    constexpr int kRowsAtOnce = Traits::kConsumerThreads / kThreads;
    const int column = thread % kThreads * kColumns;
#pragma unroll 2
    for (int r = thread / kThreads; r < item.work.tile.num_rows; r += kRowsAtOnce) {
      const float4* const from = reinterpret_cast<const float4*>(staged(r) + column);
      T* const to = at(place_of(item, r)) + column;
      if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<float4*>(to) = from[0];
      } else if constexpr (is_fp8<T>) {
        Vector16 packed;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t low = ptx::floats_to_fp8_pair<T>(from[i].x, from[i].y);
          packed.word[i] = low | ptx::floats_to_fp8_pair<T>(from[i].z, from[i].w) << 16;
        }
        *reinterpret_cast<Vector16*>(to) = packed;
      } else {
        Vector16 packed;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          packed.word[2 * i] = ptx::pack_pair<T>(from[i].x, from[i].y);
          packed.word[2 * i + 1] = ptx::pack_pair<T>(from[i].z, from[i].w);
        }
        *reinterpret_cast<Vector16*>(to) = packed;
      }
    }
  }
};

}  // namespace cupyattn
