// The argument of the gather_keys kernel. launch/ops/gather_keys.py mirrors it.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

// Rows of latent keys: as attention reads them, or in fp8 with scales (reference/latent_rows.py).
// launch/ops/gather_keys.py has the same numbers.
enum class KeyForm { kPlain, kScaledRows, kScaledPages };

// A cache, and the slots of it that tokens list.
struct ListedKeys {
  const void* keys;
  const int32_t* entries;  // [requests, tokens of each, length]
  const int32_t* lens;     // entries of a request's lists that count; null: all
  int64_t page_bytes, row_bytes;     // from a page, and from a row within it, to the next
  int64_t request_step, token_step;  // elements from the lists of a request, and a token, to the next
  int32_t length, num_slots, page_size, unused;
};

// The keys of both lists of each token come side by side, without gaps; entries say which are keys.
struct GatherKeysParams {
  ListedKeys lists[2];  // the second one may be empty
  void* target;
  int32_t* entries;  // of the target, or -1: [tokens, both lengths]
  int32_t num_tokens, tokens_of_request;
  int32_t key_vectors, row_vectors;  // 16 bytes each, of a key and of a target's row: zeros follow
};

static_assert(sizeof(GatherKeysParams) == 176,
              "GatherKeysParams and its mirror in launch/ops/gather_keys.py must agree");

}  // namespace cupyattn
