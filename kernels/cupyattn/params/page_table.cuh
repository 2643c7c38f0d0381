// The page table of a batch (CSR), a part of the Params of the kernels that read or fill pages.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

struct PageTable {
  const int32_t* kv_indices;  // [num_indices] pages
  const int32_t* kv_indptr;   // [batch_size + 1] into kv_indices
  int64_t num_indices;
  int64_t num_pages;  // in the pool
  int32_t batch_size;
  int32_t page_size;
};

}  // namespace cupyattn
