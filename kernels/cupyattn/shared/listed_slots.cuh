// Which slots of a cache a token lists, and scales that are exponents there.
#pragma once

#include "cupyattn/params/listed_keys.cuh"

namespace cupyattn {

// A power of two as its exponent's byte.
__device__ __forceinline__ float scale_of_exponent(uint32_t exponent) {
  if (exponent == 255u) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(exponent == 0u ? 0x00400000u : exponent << 23);
}

// The slot that a list names at an entry; -1 for none.
__device__ __forceinline__ int32_t listed_slot(const ListedKeys& list, int64_t request,
                                               int64_t token, int32_t entry) {
  // mutate: entries-beyond-the-count
  if (list.lens != nullptr && entry >= list.lens[request]) return -1;
  const int32_t slot = list.entries[request * list.request_step + token * list.token_step + entry];
  return slot >= 0 && slot < list.num_slots ? slot : -1;
}

}  // namespace cupyattn
