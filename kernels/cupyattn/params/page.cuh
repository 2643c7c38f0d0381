// The arguments of the page kernels: append_paged_kv_cache, store_kv, get_batch_indices_positions,
// get_seq_lens and share_indices. launch/driver/params.py mirrors them.
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

// Indices of either width.
struct IndexArray {
  const void* data;  // may be nullptr
  int64_t is_wide;   // int64 elements, else int32

  __device__ __forceinline__ int64_t operator[](int64_t index) const {
    return is_wide ? static_cast<const int64_t*>(data)[index]
                   : static_cast<const int32_t*>(data)[index];
  }
};

struct StoreKvParams {
  AppendedRows rows[2];    // of K, of V; their scale counts where there is no array of scales
  const float* scales[2];  // [num_kv_heads], or one for all heads; may be nullptr
  IndexArray slots;        // [nnz], negative: skip
  IndexArray slot_map;     // [map_size] from slots to those of the cache; data may be nullptr
  int64_t map_size;
  int64_t num_slots;  // in the cache
  int64_t nnz;
  int32_t scale_strides[2];  // from the scale of a head to the next one's, 0 for one scale
  int32_t num_kv_heads;
  int32_t page_size;
  int32_t lane_bits;  // 2^lane_bits threads copy one head of one token
  int32_t unused;
};

// How keys go round ranks: token t lies on rank t / run % world. See core/key_share.py.
struct KeyShareNumbers {
  int32_t world;
  int32_t rank;
  int32_t run;
  int32_t unused;
};

struct GetBatchIndicesPositionsParams {
  const int32_t* append_indptr;  // [batch_size + 1], never falling
  const int32_t* seq_lens;       // [batch_size], the new tokens included
  int32_t* batch_indices;        // [nnz]
  int32_t* positions;            // [nnz]
  int64_t nnz;
  int64_t batch_size;
  KeyShareNumbers share;
};

struct GetSeqLensParams {
  const int32_t* kv_indptr;         // [batch_size + 1]
  const int32_t* kv_last_page_len;  // [batch_size]
  int32_t* seq_lens;                // [batch_size]
  int64_t batch_size;
  int64_t page_size;
};

// What share_indices makes of numbers that count all ranks' tokens.
enum class ShareForm {
  kLengths,  // how many of so many tokens the rank holds
  kIndices,  // which of the rank's keys this is, -1 for others'
  kLists,    // the same of rows of indices, the rank's own first
};

struct ShareIndicesParams {
  IndexArray given;   // [num_rows, num_columns], or as many numbers
  IndexArray lens;    // [num_rows] of lists: indices that count; may be nullptr
  IndexArray tables;  // [num_rows / rows_of_table, table_width] the rank's pages; may be nullptr
  int32_t* out;       // as many as given
  int32_t* counts;    // [num_rows] of lists: the rank's own
  int64_t num_rows;
  int64_t num_columns;
  int64_t lens_stride;
  int64_t table_stride;
  int64_t rows_of_table;
  int32_t table_width;
  int32_t page_size;
  KeyShareNumbers share;
};

static_assert(sizeof(AppendPagedKvCacheParams) == 208 && sizeof(StoreKvParams) == 224 &&
                  sizeof(GetBatchIndicesPositionsParams) == 64 && sizeof(GetSeqLensParams) == 40 &&
                  sizeof(ShareIndicesParams) == 128,
              "the structs and their mirrors in launch/driver/params.py must agree");

}  // namespace cupyattn
