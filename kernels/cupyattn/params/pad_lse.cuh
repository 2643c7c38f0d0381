// The argument of the pad_lse kernel, passed by value. launch/pad_lse.py packs it.
#pragma once

#include "cupyattn/common/types.cuh"
#include "cupyattn/params/plan_batch.cuh"

namespace cupyattn {

struct PadLseParams {
  PlanBatchParams plan;                        // where the rows of each request are
  const float* rows;                           // [num_rows, num_heads], base 2
  float* padded;                               // [num_requests, max_qo_len, num_heads], natural log
  int64_t stride_request, stride_n, stride_h;  // of `padded`, in elements
  int32_t num_heads, max_qo_len;
};

static_assert(sizeof(PadLseParams) == sizeof(PlanBatchParams) + 48,
              "PadLseParams and its mirror in launch/pad_lse.py must agree");

}  // namespace cupyattn
