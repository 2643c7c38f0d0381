// The lengths of one request of a batch, read where they are in device memory. Nothing here trusts
// them: rows and keys are cut to what the arrays hold.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/params/plan_batch.cuh"

namespace cupyattn {

__device__ __forceinline__ int64_t load_index(const void* data, const IndexFormat& format,
                                              int index) {
  const int64_t place = index * format.stride;
  if (format.kind == IndexKind::kInt64) return static_cast<const int64_t*>(data)[place];
  if (format.kind == IndexKind::kUint32) return static_cast<const uint32_t*>(data)[place];
  return static_cast<const int32_t*>(data)[place];
}

// The same in tokens.
__device__ __forceinline__ int64_t load_offset(const void* data, const IndexFormat& format,
                                               int index) {
  const int64_t offset = load_index(data, format, index);
  return format.unit == 1 ? offset : offset / format.unit;
}

__device__ __forceinline__ int clamp(int64_t x, int64_t most) {
  return static_cast<int>(min_of(max_of<int64_t>(x, 0), most));
}

struct PlannedRequest {
  int q_start, qo_len, kv_start, kv_len;

  static __device__ __forceinline__ PlannedRequest of(const PlanBatchParams& params, int index) {
    int64_t q_start = static_cast<int64_t>(index) * params.qo_len;
    if (params.qo_offsets != nullptr) {
      q_start = load_offset(params.qo_offsets, params.qo_offsets_format, index);
    }
    q_start = clamp(q_start, params.num_rows);
    int64_t qo_len = params.qo_len;
    if (params.qo_lens != nullptr) {
      qo_len = load_index(params.qo_lens, params.qo_lens_format, index);
    } else if (qo_len < 0) {
      const int64_t end = load_offset(params.qo_offsets, params.qo_offsets_format, index + 1);
      qo_len = clamp(end, params.num_rows) - q_start;
    }
    int64_t kv_start = static_cast<int64_t>(index) * params.kv_step, room = params.max_kv_len;
    if (params.kv_offsets != nullptr) {
      kv_start = clamp(load_offset(params.kv_offsets, params.kv_offsets_format, index), room);
      room -= kv_start;
    }
    PlannedRequest request;
    request.q_start = static_cast<int>(q_start);
    request.qo_len = clamp(qo_len, params.num_rows - q_start);
    request.kv_start = static_cast<int>(kv_start);
    request.kv_len = clamp(load_index(params.kv_lens, params.kv_lens_format, index), room);
    return request;
  }

  __device__ __forceinline__ int num_tiles(const PlanBatchParams& params) const {
    return ceil_div(qo_len * params.group_size, params.tile_q);
  }

  // How many tiles of keys the tile of rows from first_row on visits: KeyRange and TileSpan of
  // attention/mask.cuh.
  __device__ __forceinline__ int key_tiles(const PlanBatchParams& params, int first_row) const {
    const int last_row = min_of(first_row + params.tile_q, qo_len * params.group_size) - 1;
    const int offset = kv_len - qo_len;
    int begin = 0, end = kv_len;
    if (params.causal) end = min_of(kv_len, last_row / params.group_size + offset + 1);
    if (params.window_left >= 0) {
      begin = max_of(0, first_row / params.group_size + offset - params.window_left);
    }
    return ceil_div(max_of(end - begin, 0), params.tile_kv);
  }
};

}  // namespace cupyattn
