// Finds the request and the position of every new token. New tokens are the last of their request.
// Where several GPUs share the keys, positions are those in the rank's own, and tokens of other
// ranks belong to no request.
#include "cupyattn/page/key_share.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  static constexpr int kThreads = 256;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kThreads) cupyattn_get_batch_indices_positions(
    const __grid_constant__ cupyattn::GetBatchIndicesPositionsParams params) {
  using namespace cupyattn;
  using cupyattn::int64_t;  // a host's <cstdint> has another one
  const int64_t token = static_cast<int64_t>(blockIdx.x) * Config::kThreads + threadIdx.x;
  if (token >= params.nnz) return;

  // Find the last request that starts at or before the token. An empty request starts where its
  // successor does, so the search skips it.
  int64_t low = 0, high = params.batch_size;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (params.append_indptr[middle] <= token ? low : high) = middle;
  }
  int32_t request = -1, position = 0;
  if (params.batch_size > 0 && params.append_indptr[low] <= token) {
    const int64_t end = params.append_indptr[low + 1];
    if (token < end) {
      request = static_cast<int32_t>(low);
      position = static_cast<int32_t>(token - end + params.seq_lens[low]);
    }
  }
  if (params.share.world > 1 && request >= 0 && position >= 0) {
    const int64_t own = index_of_share(params.share, position);
    // mutate: tokens-of-others-appended
    if (own < 0) request = -1;
    position = static_cast<int32_t>(max_of<int64_t>(own, 0));
  }
  params.batch_indices[token] = request;
  params.positions[token] = position;
}
