// Which keys of a request a rank holds, where several GPUs hold the keys of every request.
#pragma once

#include "cupyattn/common/key_share.cuh"
#include "cupyattn/params/page.cuh"

namespace cupyattn {

// How many of a request's first `tokens` tokens the rank holds.
__device__ __forceinline__ int64_t count_of_share(const KeyShareNumbers& share, int64_t tokens) {
  const int64_t run = share.run;
  return count_in_runs(max_of<int64_t>(tokens, 0), run, run * share.world, run * share.rank);
}

// Which of the rank's keys lies at a place in the whole request; -1 for other ranks' and for
// negative places.
__device__ __forceinline__ int64_t index_of_share(const KeyShareNumbers& share, int64_t position) {
  if (position < 0 || position / share.run % share.world != share.rank) return -1;
  return count_of_share(share, position);
}

}  // namespace cupyattn
