// The arguments of the select_topk kernel. launch/ops/select_topk.py mirrors them.
#pragma once

#include "cupyattn/params/select.cuh"

namespace cupyattn {

// Rows of scores that a caller gives, in place of those of tokens: a row's columns, and what its list
// says of them. Strides are in elements.
struct GivenRows {
  const int32_t* counts;       // [tokens] columns that count; nullptr: all
  const int32_t* begins;       // [tokens] the first of them; nullptr: 0
  const int32_t* owners;       // [tokens] rows of the table; nullptr: as the tokens
  const int32_t* page_begins;  // [tokens] where in its row of the table a token's pages begin
  const int32_t* offsets;      // [tokens], added to what is chosen; nullptr: 0
  const int32_t* table;        // [num_tables, table_width] pages; nullptr: lists are of columns
  int32_t* columns;            // like out: what is chosen, without table and offsets; may be nullptr
  int64_t stride_group;        // of the scores
  int64_t stride_column;
  int64_t table_stride;
  int32_t num_columns;
  int32_t num_tables;
  int32_t table_width;
  int32_t page_shift;
  int32_t has_late_ties;  // 1: of equal scores the later ones
  int32_t unused;
};

// Strides are in elements.
struct SelectTopkParams {
  const void* scores;  // [num_rows, row_stride] of Config::DType; row = token * num_groups + group.
                       // Given rows: [tokens, num_groups, num_columns], row_stride of a token
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
  GivenRows given;  // of Config::kGiven
};

static_assert(sizeof(GivenRows) == 104 && sizeof(SelectTopkParams) == 248,
              "the struct and its mirror in launch/ops/select_topk.py must agree");

}  // namespace cupyattn
