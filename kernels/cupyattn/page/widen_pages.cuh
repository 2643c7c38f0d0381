// Widens the pages of requests from 8 bits to 16, which hold all their numbers. A block has a page of
// keys or of values; a thread takes vectors of 8 elements.
#pragma once

#include "cupyattn/params/widen_pages.cuh"
#include "cupyattn/ptx/fp8.cuh"

namespace cupyattn {

// Each element by a factor, rounded once.
template <typename T>
__device__ __forceinline__ Vector16 scaled(const Vector16& vector, float factor) {
  Vector16 result;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float low, high;
    ptx::unpack_pair<T>(vector.word[w], low, high);
    result.word[w] = ptx::pack_pair<T>(low * factor, high * factor);
  }
  return result;
}

template <typename Config>
__device__ __forceinline__ void widen_page(const WidenPagesParams& params) {
  using From = typename Config::DType;
  using To = typename Config::DTypeTo;
  constexpr int kVector = 8;
  const int page = blockIdx.x, request = blockIdx.y, array = blockIdx.z;
  const int32_t* kv_lens = params.kv_lens + request * params.len_step;
  int kv_len = kv_lens[0];
  if (params.kv_lens_are_steps) kv_len = kv_lens[params.len_step] - kv_len;
  if (page * params.page_size >= kv_len) return;  // mutate: last-page-not-widened
  const int entry = params.table[static_cast<int64_t>(request) * params.table_step + page];
  // What no list names may be no page.
  if (static_cast<uint32_t>(entry) >= static_cast<uint32_t>(params.num_pages)) return;
  const int columns = params.columns[array], vectors = columns / kVector;
  const int count = params.page_size * params.heads * vectors;
  const From* source = static_cast<const From*>(params.source[array]) + entry * params.page_stride[array];
  const int64_t own = static_cast<int64_t>(request) * params.pages + page;
  To* target = static_cast<To*>(params.target[array]) + own * count * kVector;
  for (int index = threadIdx.x; index < count; index += Config::kThreads) {
    const int row_and_head = index / vectors, vector = index - row_and_head * vectors;
    const int row = row_and_head / params.heads, head = row_and_head - row * params.heads;
    const From* from = source + row * params.row_stride[array] + head * params.head_stride[array] +
                       vector * kVector;
    Vector16 wide = ptx::fp8_to_vector<To, From>(*reinterpret_cast<const uint64_t*>(from));
    if (params.scales[array] != nullptr) {
      // mutate: widened-scales-of-the-first-head
      const int at = request * params.scale_request_step[array] + head * params.scale_step[array];
      wide = scaled<To>(wide, params.scales[array][at]);
    }
    *reinterpret_cast<Vector16*>(target + static_cast<int64_t>(index) * kVector) = wide;
  }
}

}  // namespace cupyattn
