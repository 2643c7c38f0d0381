// The argument of the copy_rows kernel. launch/ops/copy_rows.py mirrors it.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

// Rows of an array [.., middle, inner, columns] and where they go; strides in elements.
struct CopiedRows {
  const void* source;         // of Config::DType
  void* target;               // of Config::DTypeTarget
  int64_t source_strides[3];  // of the axes before the columns
  int64_t target_strides[3];
  int64_t num_rows;
  int32_t middle, inner;  // extents
  int32_t columns;        // that are copied
  int32_t filled;         // that are written: those behind are zeros
};

struct CopyRowsParams {
  CopiedRows arrays[2];
  int64_t lane_bits;  // 2^lane_bits threads copy a row
};

static_assert(sizeof(CopyRowsParams) == 184,
              "CopyRowsParams and its mirror in launch/ops/copy_rows.py must agree");

}  // namespace cupyattn
