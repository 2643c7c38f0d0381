// A cache of which tokens list slots. launch/ops/gather_keys.py mirrors it.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

// A cache, and the slots of it that tokens list.
struct ListedKeys {
  const void* keys;
  const int32_t* entries;  // [requests, tokens of each, length]
  const int32_t* lens;     // entries of a request's lists that count; null: all
  int64_t page_bytes, row_bytes;     // from a page, and from a row within it, to the next
  int64_t request_step, token_step;  // elements from the lists of a request, and a token, to the next
  int32_t length, num_slots, page_size, unused;
};

static_assert(sizeof(ListedKeys) == 72, "ListedKeys and its mirror must agree");

}  // namespace cupyattn
