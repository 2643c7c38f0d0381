// How many of a sequence's first tokens a rank holds, where runs of tokens go round the ranks.
#pragma once

#include "cupyattn/common/math.cuh"

namespace cupyattn {

// A rank's runs begin at `first`, one each `period` tokens. tokens: 0 or more.
template <typename Int>
__device__ __forceinline__ Int count_in_runs(Int tokens, Int run, Int period, Int first) {
  const Int periods = tokens / period;
  // mutate: share-counts-runs-of-others
  return periods * run + min_of(max_of<Int>(tokens - periods * period - first, 0), run);
}

}  // namespace cupyattn
