// The argument of the get_seq_lens kernel. launch/params.py mirrors it.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

struct GetSeqLensParams {
  const int32_t* kv_indptr;         // [batch_size + 1]
  const int32_t* kv_last_page_len;  // [batch_size]
  int32_t* seq_lens;                // [batch_size]
  int64_t batch_size;
  int64_t page_size;
};

static_assert(sizeof(GetSeqLensParams) == 40,
              "GetSeqLensParams and its mirror in launch/params.py must agree");

}  // namespace cupyattn
