// Finds the number of keys of every request of a page table.
#include "cupyattn/common/math.cuh"
#include "cupyattn/params/page.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  static constexpr int kThreads = 256;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_get_seq_lens(const __grid_constant__ cupyattn::GetSeqLensParams params) {
  using namespace cupyattn;
  using cupyattn::int64_t;  // a host's <cstdint> has another one
  const int64_t request = static_cast<int64_t>(blockIdx.x) * Config::kThreads + threadIdx.x;
  if (request >= params.batch_size) return;
  const int64_t num_pages =
      static_cast<int64_t>(params.kv_indptr[request + 1]) - params.kv_indptr[request];
  const int64_t full_pages = max_of<int64_t>(num_pages - 1, 0);
  params.seq_lens[request] =
      static_cast<int32_t>(full_pages * params.page_size + params.kv_last_page_len[request]);
}
