// Slots of a cache that lists of blocks name: what attention over lists of slots reads.
#pragma once

#include "cupyattn/params/list_slots.cuh"
#include "cupyattn/select/tokens.cuh"

namespace cupyattn {

// The key of a token at a place of its list, or in its window; -1 for none. Keys of the window are
// not listed besides.
__device__ __forceinline__ int listed_key(const ListSlotsParams& params, int64_t token, int seen,
                                          int place) {
  const int begin = max_of(seen - params.window, 0);
  const int listed = params.length << params.block_shift;
  if (place >= listed) {
    const int key = begin + place - listed;
    return key < seen ? key : -1;
  }
  const int entry = params.lists[token * params.list_stride + (place >> params.block_shift)];
  if (entry < 0 || entry > (begin >> params.block_shift)) return -1;
  const int key = (entry << params.block_shift) + (place & ((1 << params.block_shift) - 1));
  return key < begin ? key : -1;  // mutate: slots-of-keys-unseen
}

template <typename Config>
__device__ __forceinline__ void list_slots(const ListSlotsParams& params) {
  const int lane = threadIdx.x % kWarpSize;
  const int count = (params.length << params.block_shift) + params.window;
  const int step = static_cast<int>(gridDim.x) * Config::kThreads;
#pragma unroll 1
  for (int64_t token = blockIdx.y; token < params.num_tokens; token += gridDim.y) {
    const SelectedToken at = SelectedToken::of(params.tokens, static_cast<int>(token), lane);
    const int32_t* table = params.table + at.request * params.table_stride;
#pragma unroll 1
    for (int place = blockIdx.x * Config::kThreads + threadIdx.x; place < count; place += step) {
      const int key = listed_key(params, token, at.seen, place);
      int64_t slot = -1;
      if (key >= 0) {
        const int page = key / params.page_size, offset = key - page * params.page_size;
        const int64_t number = table[page];
        slot = number < 0 ? -1 : number * params.page_size + offset;
      }
      params.slots[token * count + place] = static_cast<int32_t>(min_of<int64_t>(slot, 0x7fffffff));
    }
  }
}

}  // namespace cupyattn
