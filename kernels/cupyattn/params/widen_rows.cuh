// The argument of the widen_rows kernel. launch/attention/widen_rows.py mirrors it.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

// Rows [num_rows, heads, columns] of 8 bits of q, k and v, and where they go in 16 bits without
// gaps; strides in elements. Grids of one layer know q alone.
struct WidenRowsParams {
  const void* source[3];  // q and k of Config::DType, v of Config::DTypeV
  void* target[3];        // of Config::DTypeWide
  const int32_t* row_count;  // null: num_rows; else the rows of q that there are, at most num_rows
  int64_t row_stride[3], head_stride[3];
  int32_t num_rows[3], heads[3], columns[3], unused;
};

static_assert(sizeof(WidenRowsParams) == 144,
              "WidenRowsParams and its mirror in launch/attention/widen_rows.py must agree");

}  // namespace cupyattn
