// Where a request's position is in the pool of pages.
#pragma once

#include "cupyattn/common/types.cuh"
#include "cupyattn/params/page_table.cuh"

namespace cupyattn {

struct Slot {
  int64_t page;    // -1: none
  int32_t offset;  // in the page
};

// Any values may come: what is not within the table, the request's pages or the pool has no slot.
__device__ __forceinline__ Slot find_slot(const PageTable& table, int32_t request,
                                          int32_t position) {
  constexpr Slot kNone = {-1, 0};
  if (request < 0 || request >= table.batch_size || position < 0) return kNone;
  const int64_t first = table.kv_indptr[request];
  const int64_t end = table.kv_indptr[request + 1];
  const int64_t index = first + position / table.page_size;
  if (first < 0 || index >= end || index >= table.num_indices) return kNone;
  const int64_t page = table.kv_indices[index];
  if (page < 0 || page >= table.num_pages) return kNone;  // mutate: page-past-the-pool
  return {page, position % table.page_size};  // mutate: page-offset-of-next-position
}

}  // namespace cupyattn
