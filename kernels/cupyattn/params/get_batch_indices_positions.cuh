// The argument of the get_batch_indices_positions kernel. launch/params.py mirrors it.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

struct GetBatchIndicesPositionsParams {
  const int32_t* append_indptr;  // [batch_size + 1], never falling
  const int32_t* seq_lens;       // [batch_size], the new tokens included
  int32_t* batch_indices;        // [nnz]
  int32_t* positions;            // [nnz]
  int64_t nnz;
  int64_t batch_size;
};

static_assert(sizeof(GetBatchIndicesPositionsParams) == 48,
              "GetBatchIndicesPositionsParams and its mirror in launch/params.py must agree");

}  // namespace cupyattn
