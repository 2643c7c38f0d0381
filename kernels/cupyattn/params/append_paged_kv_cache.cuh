// The argument of the append_paged_kv_cache kernel. launch/params.py mirrors it.
#pragma once

#include "cupyattn/common/types.cuh"
#include "cupyattn/params/page_table.cuh"

namespace cupyattn {

// One of K and V; strides in elements.
struct AppendedRows {
  const void* source;  // [nnz, num_kv_heads, head_dim] of Config::DType
  void* cache;         // [num_pages, page_size, num_kv_heads, head_dim] of Config::DTypeCache
  int64_t source_stride_n;
  int64_t source_stride_h;
  int64_t cache_stride_page;
  int64_t cache_stride_n;
  int64_t cache_stride_h;
  int32_t head_dim;
  float scale;  // what is stored is x / scale; 1 unless the cache is converted to
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

static_assert(sizeof(AppendPagedKvCacheParams) == 208,
              "AppendPagedKvCacheParams and its mirror in launch/params.py must agree");

}  // namespace cupyattn
