// The argument of the gather_keys kernel. launch/ops/gather_keys.py mirrors it.
#pragma once

#include "cupyattn/params/listed_keys.cuh"

namespace cupyattn {

// Rows of latent keys: as attention reads them, or in fp8 with scales (reference/latent_rows.py).
// launch/ops/gather_keys.py has the same numbers.
enum class KeyForm { kPlain, kScaledRows, kScaledPages };

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
