// Copies packed rows of LSE (base 2) to the padded rows of each request (natural log). Rows that a
// request lacks become -inf.
#include "cupyattn/plan/planned_request.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  static constexpr int kThreads = 256;
};
#endif

// Grid: blocks of (token, head) × requests, or as many requests as a grid may have.
extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_pad_lse(const __grid_constant__ cupyattn::PadLseParams params) {
  using namespace cupyattn;
  using cupyattn::int64_t;  // a host's <cstdint> has another one
  const int64_t index = static_cast<int64_t>(blockIdx.x) * Config::kThreads + threadIdx.x;
  const int64_t token = index / params.num_heads, head = index % params.num_heads;
  if (token >= params.max_qo_len) return;
  for (int b = blockIdx.y; b < params.plan.num_requests; b += gridDim.y) {
    const PlannedRequest request = PlannedRequest::of<true>(params.plan, b);
    float lse = -ptx::infinity();
    if (token < request.qo_len) {
      // mutate: pad-lse-stays-base2
      // mutate: pad-lse-of-another-request
      lse = params.rows[(request.q_start + token) * params.num_heads + head] * (1.0f / kLog2e);
    }
    params.padded[b * params.stride_request + token * params.stride_n + head * params.stride_h] =
        lse;
  }
}
