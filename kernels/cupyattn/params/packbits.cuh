// The argument of the packbits kernel. launch/driver/params.py mirrors it.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

struct PackbitsParams {
  const uint8_t* bits;           // [num_bits] in rows, one byte each, any nonzero value is a 1
  uint8_t* packed;               // [packed_indptr[num_segments]]
  const int64_t* bit_indptr;     // [num_segments + 1] into `bits`; nullptr: segments of one length
  const int64_t* packed_indptr;  // [num_segments + 1] into `packed`; nullptr likewise
  int64_t num_bits;
  int64_t num_packed;
  int64_t row_length;  // bit i is at (i / row_length) * row_stride + i % row_length
  int64_t row_stride;
  int32_t num_segments;
  int32_t little_endian;  // 0: the first bit of a byte is its highest
};

static_assert(sizeof(PackbitsParams) == 72,
              "PackbitsParams and its mirror in launch/driver/params.py must agree");

}  // namespace cupyattn
