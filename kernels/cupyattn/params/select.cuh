// The arguments of the kernels of select/. launch/ops/select.py mirrors them.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

// The tokens of a selection, and what each of them sees.
struct SelectTokens {
  const int32_t* kv_lens;     // [num_requests] keys
  const int32_t* qo_offsets;  // [num_requests + 1] first tokens; nullptr: request_tokens each
  int32_t num_requests;
  int32_t request_tokens;
  int32_t max_kv_len;         // keys a request has room for
  int32_t is_causal;          // 1: a token sees no key behind its own
  int32_t kv_lens_are_steps;  // 1: kv_lens are offsets [num_requests + 1] of index rows
  int32_t ratio_shift;        // an index row stands for 1 << ratio_shift keys
  int32_t block_shift;        // a block has 1 << block_shift index rows
  int32_t unused;
};

static_assert(sizeof(SelectTokens) == 48,
              "the struct and its mirror in launch/ops/select.py must agree");

}  // namespace cupyattn
