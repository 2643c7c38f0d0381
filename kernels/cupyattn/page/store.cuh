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

// Blocks of one head: its scale is read once, and no row has to be divided by the heads.
template <typename Config>
__device__ __forceinline__ void store_rows(const StoreKvParams& params, int which) {
  const AppendedRows& rows = params.rows[which];
  const float* scales = params.scales[which];
  const int lane = threadIdx.x & ((1 << params.lane_bits) - 1);
  const int64_t rows_per_block = Config::kThreads >> params.lane_bits;
  for (int head = blockIdx.z; head < params.num_kv_heads; head += gridDim.z) {
    const Quotients by_scale(scales == nullptr ? rows.scale
                                               : scales[head * params.scale_strides[which]]);
    int64_t token = blockIdx.x * rows_per_block + (threadIdx.x >> params.lane_bits);
    for (; token < params.nnz; token += gridDim.x * rows_per_block) {
      const int64_t slot = find_stored_slot(params, token);
      if (slot < 0) continue;
      Slot place = {slot, 0};
      if (params.page_size > 1) {
        place.page = divide(slot, params.page_size);
        place.offset = static_cast<int32_t>(slot - place.page * params.page_size);
      }
      copy_row<Config>(rows, {token, head}, place, lane, params.lane_bits, by_scale);
    }
  }
}

}  // namespace cupyattn
