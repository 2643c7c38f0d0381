// The lengths of one request of a batch, read from device memory. They are not trusted: rows and
// keys are cut to what the arrays hold.
#pragma once

#include "cupyattn/common/key_share.cuh"
#include "cupyattn/params/plan_batch.cuh"
#include "cupyattn/shared/work.cuh"

namespace cupyattn {

__device__ __forceinline__ int64_t load_index(const void* data, const IndexFormat& format,
                                              int index) {
  const int64_t place = index * format.stride;
  if (format.kind == IndexKind::kInt64) return static_cast<const int64_t*>(data)[place];
  const int32_t word = static_cast<const int32_t*>(data)[place];
  return format.kind == IndexKind::kInt32 ? word
                                          : static_cast<int64_t>(static_cast<uint32_t>(word));
}

// An offset in tokens.
__device__ __forceinline__ int64_t load_offset(const void* data, const IndexFormat& format,
                                               int index) {
  const int64_t offset = load_index(data, format, index);
  return format.unit == 1 ? offset : offset / format.unit;  // mutate: element-offsets-as-tokens
}

// MAX_LENGTH of core/problem.py.
constexpr int kMaxWholeLength = 0x7fffffff - 64;

__device__ __forceinline__ int clamp(int64_t x, int64_t most) {
  return static_cast<int>(min_of(max_of<int64_t>(x, 0), most));
}

// kv_begin: the first key that rows see; where ranks share keys, how many the others hold.
struct PlannedRequest {
  int q_start, qo_len, kv_start, kv_len, kv_begin;

  static __device__ __forceinline__ PlannedRequest by_steps(const PlanBatchParams& params,
                                                            int index, int kv_len) {
    int kv_start = index * params.kv_step;
    // mutate: lists-without-their-gaps
    if (params.list_gap != 0) kv_start += index / params.request_tokens * params.list_gap;
    return PlannedRequest{index * params.qo_len, params.qo_len, kv_start, kv_len, 0};
  }

  // The keys of a request, as the caller says.
  template <bool kRagged, bool kShared>
  static __device__ __forceinline__ int64_t load_keys(const PlanBatchParams& params, int index) {
    const IndexFormat& format = params.kv_lens_format;
    if (!kShared && params.request_tokens > 1) {
      const int of_caller = index / params.request_tokens;
      const int later = (of_caller + 1) * params.request_tokens - 1 - index;
      // mutate: planned-lists-count-later-tokens
      return load_index(params.kv_lens, format, of_caller) - (params.counts_later ? later : 0);
    }
    const int64_t first = load_index(params.kv_lens, format, index);
    if (!kRagged || format.unit > 0) return first;
    // mutate: key-steps-as-lengths
    const int64_t step = load_index(params.kv_lens, format, index + 1) - first;
    return format.unit == -1 ? step : step / -format.unit;
  }

  // kRagged: the batch may have offsets and lengths of q; else all requests have equal steps.
  // kShared: ranks share keys.
  template <bool kRagged, bool kShared = false>
  static __device__ __forceinline__ PlannedRequest of(const PlanBatchParams& params, int index) {
    PlannedRequest request{index * params.qo_len, params.qo_len, index * params.kv_step, 0, 0};
    if constexpr (!kShared) request = by_steps(params, index, 0);
    int room = params.max_kv_len;
    if constexpr (kRagged) {
      int64_t q_start = 0, qo_len = params.qo_len;
      if (params.qo_offsets != nullptr) {
        q_start = load_offset(params.qo_offsets, params.qo_offsets_format, index);
      } else if (params.qo_len > 0) {
        q_start = request.q_start;
      }
      request.q_start = clamp(q_start, params.num_rows);
      if (params.qo_lens != nullptr) {
        qo_len = load_index(params.qo_lens, params.qo_lens_format, index);
      } else if (params.qo_len < 0) {
        const int64_t end = load_offset(params.qo_offsets, params.qo_offsets_format, index + 1);
        qo_len = clamp(end, params.num_rows) - request.q_start;  // mutate: rows-beyond-q
      }
      request.qo_len = clamp(qo_len, params.num_rows - request.q_start);
      if (params.kv_offsets != nullptr) {
        const int64_t begin = load_offset(params.kv_offsets, params.kv_offsets_format, index);
        request.kv_start = clamp(begin, params.kv_room);
        room = min_of(room, params.kv_room - request.kv_start);  // mutate: keys-beyond-k
      }
    }
    request.kv_len = clamp(load_keys<kRagged, kShared>(params, index), room);
    if constexpr (kShared) {
      int64_t whole = load_index(params.kv_begin, params.kv_begin_format, index);
      // mutate: share-without-its-rows
      if (params.kv_begin_format.unit < 0) whole += request.qo_len;
      request.kv_begin = clamp(whole - request.kv_len, kMaxWholeLength - request.kv_len);
    } else if constexpr (kRagged) {
      if (params.kv_begin != nullptr) {
        const int64_t begin = load_index(params.kv_begin, params.kv_begin_format, index);
        request.kv_begin = clamp(begin, request.kv_len);  // mutate: first-key-beyond-keys
      }
    }
    return request;
  }

  __device__ __forceinline__ int num_tiles(const PlanBatchParams& params) const {
    // mutate: tile-rows-as-power-of-two
    return divide(qo_len * params.group_size + params.tile_q - 1, params.tile_q_magic,
                  params.tile_q_shift);
  }

  // How many key tiles the tile of rows from first_row on visits. KeyRange and TileSpan of
  // shared/mask.cuh are the same arithmetic.
  template <bool kShared = false>
  __device__ __forceinline__ int key_tiles(const PlanBatchParams& params, int first_row) const {
    const auto token = [&](int row) { return divide(row, params.group_magic, params.group_shift); };
    const int whole = kShared ? kv_len + kv_begin : kv_len, offset = whole - qo_len;
    int begin = kShared ? 0 : kv_begin, end = kv_len;
    if (params.window_right >= 0) {
      const int last = min_of(first_row + params.tile_q, qo_len * params.group_size) - 1;
      const int position = token(last) + offset;
      end = position + 1 + min_of(whole - 1 - position, params.window_right);
      if constexpr (kShared) end = min_of(own_keys(params, end), kv_len);
    }
    if (params.window_left >= 0) {
      const int low = token(first_row) + offset - params.window_left;
      begin = kShared ? own_keys(params, low) : max_of(kv_begin, low);
    }
    return divide_up(params, max_of(end - begin, 0));
  }

  // How many of the first `tokens` tokens of a request this rank holds.
  static __device__ __forceinline__ int own_keys(const PlanBatchParams& params, int tokens) {
    return count_in_runs(max_of(tokens, 0), params.share_run(), params.share_period(),
                         params.share_first());
  }

  template <typename Params>
  static __device__ __forceinline__ int divide_up(const Params& params, int keys) {
    return divide(keys + params.tile_kv - 1, params.tile_kv_magic, params.tile_kv_shift);
  }
};

}  // namespace cupyattn
