// The argument of the merge_states kernel. launch/driver/params.py mirrors it.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

// Strides in elements: between rows, between the states of a row, between heads.
struct StateStrides {
  int64_t n, m, h;
};

// States [n, m, num_heads, head_dim] become one state a row, [n, num_heads, head_dim]. Pairs may be
// two arrays [n, num_heads, head_dim] with strides m of 0; other states lie in the first array
// alone. The fields that all blocks read come first, in two lines of constant memory.
struct MergeStatesParams {
  const void* v[2];       // of Config::DType
  const void* s[2];       // LSE of v, without its last dimension, of Config::DTypeS
  void* out;              // [n, num_heads, head_dim] of Config::DTypeO; may be v[0]
  float* lse;             // [n, num_heads]; may be s[0]
  const int32_t* indptr;  // [n + 1] into the states, whose stride n is then 0; may be nullptr
  const uint8_t* mask;    // [n], 0: leave the row alone; may be nullptr
  const float* out_scale;  // one number, by which an fp8 `out` is divided; may be nullptr
  int32_t num_rows;       // n * num_heads
  int32_t head_dim;
  int32_t lane_bits;  // 2^lane_bits threads merge a row
  float to_base2;     // LSE times this is in base 2
  float from_base2;
  int32_t num_heads;
  uint32_t heads_magic;  // i / num_heads is the high half of 2 i * heads_magic, >> heads_shift
  int32_t heads_shift;
  float out_factor;  // of an fp8 `out`
  int32_t padding;
  int64_t num_states;  // m; with indptr, the number of all states
  StateStrides v_strides[2];
  StateStrides s_strides[2];
  int64_t out_stride_n;
  int64_t out_stride_h;
  int64_t lse_stride_n;
  int64_t lse_stride_h;
};

static_assert(sizeof(MergeStatesParams) == 248,
              "MergeStatesParams and its mirror in launch/driver/params.py must agree");

}  // namespace cupyattn
