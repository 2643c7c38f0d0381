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
  int32_t first_token;        // of this launch, whose tokens count from here on
};

static_assert(sizeof(SelectTokens) == 48,
              "the struct and its mirror in launch/ops/select.py must agree");

// Strides of rows of 16-bit and 8-bit elements are in their 16 bytes.
struct SelectScoresParams {
  const void* q;              // [tokens, heads, head_dim] of Config::DTypeQ
  const void* k;              // index rows of Config::DTypeK, one head
  const float* k_scales;      // of each row, or of DeepGEMM's pages; nullptr: none
  const float* k_scale;       // [1], of all rows; nullptr: 1
  const void* weights;        // [tokens, heads] of Config::DTypeW; nullptr: ones
  const int32_t* table;       // pages of each request; nullptr: rows lie one after another
  const int32_t* kv_offsets;  // [num_requests + 1] first rows; nullptr: those of page `request`
  const int32_t* candidates;  // [tokens, groups or 1, num_candidates] blocks that alone have scores;
                              // nullptr: all
  float* scores;              // [tokens * groups, score_stride], from first_token on
  int64_t table_stride;
  int64_t weight_stride;      // of a token
  int64_t score_stride;
  int64_t scale_stride_page;  // in floats
  int64_t candidate_stride;   // of a token
  int64_t candidate_stride_group;
  SelectTokens tokens;
  uint32_t q_stride_n, q_stride_h;
  uint32_t k_stride_page, k_stride_n;
  int32_t num_tokens;         // of this launch
  int32_t request_tiles;      // tiles of tokens of each request; 0: as many as its tokens need
  int32_t page_size;
  uint32_t page_magic;        // divides by that, see shared/work.cuh
  int32_t page_shift;
  int32_t num_candidates;
  int32_t candidate_rows;     // of a block that a candidate names
  uint32_t candidate_magic;   // divides by that
  int32_t candidate_shift;
  float sm_scale;
  int32_t token_rows;         // rows of scores of a token, where it has candidates
  int32_t unused;
};

// Of the launch that makes scores of softmax of what each head has. Strides are in elements.
struct SelectSoftmaxParams {
  const float* logs;          // [tokens * heads, score_stride]: of a block's exponentials, base 2
  float* scores;              // [tokens * groups, score_stride]
  const void* weights;        // [tokens, heads] of Config::DTypeW; nullptr: ones
  const int32_t* candidates;  // [tokens, groups or 1, num_candidates]; nullptr: all blocks compete
  int64_t score_stride;
  int64_t weight_stride;      // of a token
  int64_t candidate_stride;   // of a token
  int64_t candidate_stride_group;
  SelectTokens tokens;
  int32_t num_heads;
  int32_t num_groups;
  int32_t num_candidates;
  int32_t candidate_blocks;   // of what a candidate names
};

static_assert(sizeof(SelectScoresParams) == 232 && sizeof(SelectSoftmaxParams) == 128,
              "the struct and its mirror in launch/ops/select.py must agree");

}  // namespace cupyattn
