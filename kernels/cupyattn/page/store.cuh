// Copies rows into the slots of a cache that the caller names: a group of threads takes one head of
// one token.
#pragma once

#include "cupyattn/page/append.cuh"

namespace cupyattn {

// The slot of the cache for a token's slot; -1 for none, whatever values come.
__device__ __forceinline__ int64_t find_stored_slot(const StoreKvParams& params, int64_t token) {
  int64_t slot = params.slots[token];
  if (params.slot_map.data != nullptr) {
    if (slot < 0 || slot >= params.map_size) return -1;
    slot = params.slot_map[slot];
  }
  return slot < params.num_slots ? slot : -1;  // mutate: slot-past-the-cache
}

template <typename Config>
__device__ __forceinline__ void store_rows(const StoreKvParams& params, int which) {
  const AppendedRows& rows = params.rows[which];
  const float* scales = params.scales[which];
  const int lane = threadIdx.x & ((1 << params.lane_bits) - 1);
  const int64_t rows_per_block = Config::kThreads >> params.lane_bits;
  const int64_t num_rows = params.nnz * params.num_kv_heads;
  int64_t row = blockIdx.x * rows_per_block + (threadIdx.x >> params.lane_bits);
  for (; row < num_rows; row += gridDim.x * rows_per_block) {
    const int64_t token = divide(row, params.num_kv_heads);
    const int64_t head = row - token * params.num_kv_heads;
    const int64_t slot = find_stored_slot(params, token);
    if (slot < 0) continue;
    const int64_t page = divide(slot, params.page_size);
    const Slot place = {page, static_cast<int32_t>(slot - page * params.page_size)};
    const float scale =
        scales == nullptr ? rows.scale : scales[head * params.scale_strides[which]];
    copy_row<Config>(rows, {token, head}, place, lane, params.lane_bits, scale);
  }
}

}  // namespace cupyattn
