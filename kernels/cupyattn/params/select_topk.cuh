// The arguments of the select_topk kernel. launch/ops/select_topk.py mirrors them.
#pragma once

#include "cupyattn/params/select.cuh"

namespace cupyattn {

// Strides are in elements.
struct SelectTopkParams {
  const void* scores;  // [num_rows, row_stride] of Config::DType; row = token * num_groups + group
  int32_t* out;        // [tokens, num_groups, topk + tail]
  float* values;       // like out; may be nullptr
  SelectTokens tokens;
  int64_t row_stride;
  int64_t out_stride_n;
  int64_t out_stride_group;
  int64_t values_stride_n;
  int64_t values_stride_group;
  int32_t num_rows;
  int32_t num_groups;
  int32_t topk;
  int32_t first;      // blocks at the beginning, and at the end, that are always chosen
  int32_t last;
  int32_t has_tail;   // 1: one more entry, for keys that no index row stands for
  int32_t warp_room;  // keys that a warp keeps in shared memory, a multiple of 128
  int32_t unused;
};

static_assert(sizeof(SelectTopkParams) == 144,
              "the struct and its mirror in launch/ops/select_topk.py must agree");

}  // namespace cupyattn
