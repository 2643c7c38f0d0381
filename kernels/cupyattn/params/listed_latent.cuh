// The argument of wide_sm90 over lists of one or two caches whose rows have scales behind all rows of
// a page: both caches besides.
#pragma once

#include "cupyattn/params/latent.cuh"
#include "cupyattn/params/listed_keys.cuh"

namespace cupyattn {

struct ListedLatentParams {
  LatentParams latent;
  ListedKeys lists[2];  // a token's keys are those of the first, then those of the second
};

static_assert(sizeof(ListedLatentParams) == sizeof(LatentParams) + 2 * sizeof(ListedKeys),
              "ListedLatentParams and its mirror in engine/listed_rows.py must agree");

}  // namespace cupyattn
