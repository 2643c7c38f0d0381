// Which keys of a request a rank holds, where several GPUs hold the keys of every request.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/params/page.cuh"

namespace cupyattn {

// How many of a request's first `tokens` tokens the rank holds.
__device__ __forceinline__ int64_t count_of_share(const KeyShareNumbers& share, int64_t tokens) {
  const int64_t run = share.run, period = run * share.world;
  const int64_t whole = max_of<int64_t>(tokens, 0);
  const int64_t rest = whole % period - share.rank * run;
  // mutate: share-counts-runs-of-others
  return whole / period * run + min_of(max_of<int64_t>(rest, 0), run);
}

// Which of the rank's keys lies at a place in the whole request; -1 for other ranks' and for
// negative places.
__device__ __forceinline__ int64_t index_of_share(const KeyShareNumbers& share, int64_t position) {
  if (position < 0 || position / share.run % share.world != share.rank) return -1;
  return count_of_share(share, position);
}

}  // namespace cupyattn
