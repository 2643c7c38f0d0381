// The argument of the widen_pages kernel. launch/attention/widen_pages.py mirrors it.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

// Pages of keys and values of 8 bits that requests have in a table, and where they go: a request's
// one behind the other, without gaps. Strides are in elements.
struct WidenPagesParams {
  const void* source[2];   // pages of Config::DType
  void* target[2];         // [num_requests, pages, page_size, heads, columns] of Config::DTypeTo
  const int32_t* table;    // [num_requests, table_step]
  const int32_t* kv_lens;  // [num_requests], or offsets [num_requests + 1] whose steps they are
  int64_t page_stride[2], row_stride[2], head_stride[2];
  int32_t columns[2];
  int32_t table_step;
  int32_t len_step;          // words of 32 bits from a length to the next one
  int32_t kv_lens_are_steps;
  int32_t pages, page_size;  // a request has room for so many
  int32_t num_pages;         // of the cache: entries beyond are no pages
  int32_t heads, unused;
  // By which keys and values are multiplied: float32, or nullptr; from a head's to the next one's,
  // and from a request's.
  const float* scales[2];
  int32_t scale_step[2], scale_request_step[2];
};

static_assert(sizeof(WidenPagesParams) == 168,
              "WidenPagesParams and its mirror in launch/attention/widen_pages.py must agree");

}  // namespace cupyattn
