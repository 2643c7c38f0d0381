// The argument of the widen_rows kernel. launch/attention/widen_queries.py mirrors it.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

// Rows [num_rows, heads, columns] of 8 bits, and where they go in 16 bits without gaps; strides in
// elements.
struct WidenRowsParams {
  const void* source;  // of Config::DType
  half_t* target;
  const int32_t* row_count;  // null: num_rows; else those that there are, at most num_rows
  int64_t row_stride, head_stride;
  int32_t num_rows, heads, columns, unused;
};

static_assert(sizeof(WidenRowsParams) == 56,
              "WidenRowsParams and its mirror in launch/attention/widen_queries.py must agree");

}  // namespace cupyattn
