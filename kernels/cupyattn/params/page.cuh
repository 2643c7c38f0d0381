// The arguments of the page kernels: append_paged_kv_cache, get_batch_indices_positions and
// get_seq_lens. launch/driver/params.py mirrors them.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

// The page table of a batch (CSR).
struct PageTable {
  const int32_t* kv_indices;  // [num_indices] pages
  const int32_t* kv_indptr;   // [batch_size + 1] into kv_indices
  int64_t num_indices;
  int64_t num_pages;  // in the pool
  int32_t batch_size;
  int32_t page_size;
};

// New rows of K or of V, and the cache that they go to; strides in elements.
struct AppendedRows {
  const void* source;  // [nnz, num_kv_heads, head_dim] of Config::DType
  void* cache;         // [num_pages, page_size, num_kv_heads, head_dim] of Config::DTypeCache
  int64_t source_stride_n;
  int64_t source_stride_h;
  int64_t cache_stride_page;
  int64_t cache_stride_n;
  int64_t cache_stride_h;
  int32_t head_dim;
  float scale;  // the cache stores x / scale; 1 if it has the type of the rows
};

struct AppendPagedKvCacheParams {
  AppendedRows rows[2];          // of K, of V
  const int32_t* batch_indices;  // [nnz], negative: skip
  const int32_t* positions;      // [nnz]
  PageTable table;
  uint32_t* num_refused;  // counts tokens without a slot; may be nullptr
  int64_t nnz;
  int32_t num_kv_heads;
  int32_t lane_bits;  // 2^lane_bits threads copy one head of one token
};

struct GetBatchIndicesPositionsParams {
  const int32_t* append_indptr;  // [batch_size + 1], never falling
  const int32_t* seq_lens;       // [batch_size], the new tokens included
  int32_t* batch_indices;        // [nnz]
  int32_t* positions;            // [nnz]
  int64_t nnz;
  int64_t batch_size;
};

struct GetSeqLensParams {
  const int32_t* kv_indptr;         // [batch_size + 1]
  const int32_t* kv_last_page_len;  // [batch_size]
  int32_t* seq_lens;                // [batch_size]
  int64_t batch_size;
  int64_t page_size;
};

static_assert(sizeof(AppendPagedKvCacheParams) == 208 &&
                  sizeof(GetBatchIndicesPositionsParams) == 48 && sizeof(GetSeqLensParams) == 40,
              "the structs and their mirrors in launch/driver/params.py must agree");

}  // namespace cupyattn
