// The argument of the list_slots kernel. launch/ops/list_slots.py mirrors it.
#pragma once

#include "cupyattn/params/select.cuh"

namespace cupyattn {

// Lists of blocks of requests, and the slots of the keys that they name.
struct ListSlotsParams {
  const int32_t* lists;  // [tokens, length]
  const int32_t* table;  // pages of each request
  int32_t* slots;        // [tokens, (length << block_shift) + window], -1 for none
  int64_t list_stride, table_stride;
  SelectTokens tokens;  // with index rows of one key
  int32_t num_tokens, length, block_shift, window, page_size, unused;
};

static_assert(sizeof(ListSlotsParams) == 112,
              "ListSlotsParams and its mirror in launch/ops/list_slots.py must agree");

}  // namespace cupyattn
