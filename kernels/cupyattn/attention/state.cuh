// The result of attention over some keys is a state (o, lse); states over disjoint keys merge
// exactly. This header normalises states, writes them, and merges the partial states of tiles whose
// keys are split over several blocks.
#pragma once

#include "cupyattn/attention/rows.cuh"
#include "cupyattn/common/math.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/params/attention.cuh"
#include "cupyattn/ptx/convert.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

// One softmax row: sum of 2^(logit - max) over its keys.
struct RowState {
  float max, sum;

  // A sink is one more logit that carries no value (arXiv 2309.17453); it is not scaled.
  __device__ __forceinline__ void add_sink(float sink_base2) {
    const float new_max = fmaxf(max, sink_base2);
    if (new_max == -ptx::infinity()) return;
    sum = sum * ptx::ex2_approx(max - new_max) + ptx::ex2_approx(sink_base2 - new_max);
    max = new_max;
  }
  __device__ __forceinline__ float lse() const {
    return sum == 0.0f ? -ptx::infinity() : max + log2f(sum);
  }
  // What numerators over `old_max` are multiplied by to become the output. A row of NaN has seen
  // keys though its maximum is -inf: its sum is NaN and stays so.
  __device__ __forceinline__ float normaliser(float old_max) const {
    if (sum == 0.0f || (old_max == -ptx::infinity() && sum == sum)) return 0.0f;
    if (old_max == max) return ptx::rcp_approx(sum);
    return ptx::ex2_approx(old_max - max) * ptx::rcp_approx(sum);
  }
};

__device__ __forceinline__ float sink_of(const AttentionParams& params, int head) {
  return params.sinks == nullptr ? -ptx::infinity() : params.sinks[head] * kLog2e;
}

__device__ __forceinline__ float output_scale_of(const AttentionParams& params, int kv_head) {
  return params.scale_v == nullptr ? params.output_scale
                                   : params.output_scale * params.scale_v[kv_head];
}

template <typename DTypeO>
__device__ __forceinline__ void store_element(DTypeO* pointer, float value) {
  if constexpr (is_same<DTypeO, float>::value) {
    *pointer = value;
  } else {
    pointer->bits = static_cast<uint16_t>(ptx::pack_pair<DTypeO>(value, 0.0f) & 0xffffu);
  }
}

// Two neighbouring elements; `kAligned` says that the row starts on a 16-byte boundary.
template <typename DTypeO, bool kAligned>
__device__ __forceinline__ void store_pair(DTypeO* pointer, float first, float second) {
  if constexpr (!kAligned) {
    store_element(pointer, first);
    store_element(pointer + 1, second);
  } else if constexpr (is_same<DTypeO, float>::value) {
    *reinterpret_cast<float2*>(pointer) = make_float2(first, second);
  } else {
    *reinterpret_cast<uint32_t*>(pointer) = ptx::pack_pair<DTypeO>(first, second);
  }
}

// Writes one row of accumulators, times `factor`; `at(column)` is where an even column goes. With
// fp8 values the columns of two neighbouring n-tiles interleave (see fragments.cuh).
template <typename DTypeO, int kHeadDim, bool kFp8Values, bool kAligned, int kTilesO, typename At>
__device__ __forceinline__ void store_output_row(At&& at, const float (&o)[kTilesO][4], int h,
                                                 float factor, int lane) {
  const int t = lane & 3;
#pragma unroll
  for (int n = 0; n < kTilesO; ++n) {
    const int pair = n & 1;
    const int column = kFp8Values ? 8 * (n - pair) + 4 * t + 2 * pair : 8 * n + 2 * t;
    const float first = kFp8Values ? o[n - pair][2 * h + pair] : o[n][2 * h];
    const float second = kFp8Values ? o[n - pair + 1][2 * h + pair] : o[n][2 * h + 1];
    if (kHeadDim % 16 == 0 || column < kHeadDim) {
      store_pair<DTypeO, kAligned>(at(column), first * factor, second * factor);
    }
  }
}

// Announces this block's partial states; true in exactly one block of the tile, the last one.
__device__ __forceinline__ bool arrive_last(const AttentionParams& params, const TileWork& work,
                                            int thread, uint32_t* shared_flag) {
  ptx::device_fence();
  ptx::block_sync();
  if (thread == 0) {
    const uint32_t last = static_cast<uint32_t>(work.num_splits - 1);
    *shared_flag = ptx::atomic_inc_wrap(params.counters + work.counter(params), last) == last;
  }
  ptx::block_sync();
  const bool is_last = *shared_flag != 0;
  if (is_last) ptx::device_fence();
  return is_last;
}

// Four columns of a row, as a lane merges them from partial states. It reads many states before it
// uses the first: what a merge takes is round trips to L2.
struct MergedColumns {
  float4 sum;
  float max, weights;

  static __device__ __forceinline__ MergedColumns empty() {
    return MergedColumns{make_float4(0.0f, 0.0f, 0.0f, 0.0f), -ptx::infinity(), 0.0f};
  }

  // Adds `count` states, `lse_stride` and `o_stride` elements apart; the columns count from `o`.
  __device__ __forceinline__ void add(const float* lse, const float* o, int count,
                                      int64_t lse_stride, int64_t o_stride, bool has_columns) {
    constexpr int kBatch = 16;
    for (int first = 0; first < count; first += kBatch) {
      float part_lse[kBatch];
      float4 part[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t split = first + i;
        const bool exists = split < count;
        part_lse[i] = exists ? ptx::load_l2(lse + split * lse_stride) : -ptx::infinity();
        part[i] = exists && has_columns
                      ? ptx::load_l2(reinterpret_cast<const float4*>(o + split * o_stride))
                      : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      const float old_max = max;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) max = fmaxf(max, part_lse[i]);
      const float factor = old_max == max ? 1.0f : ptx::ex2_approx(old_max - max);
      weights *= factor;
      sum = make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        // An empty split weighs nothing, even beside nothing else.
        const float weight =
            part_lse[i] == -ptx::infinity() ? 0.0f : ptx::ex2_approx(part_lse[i] - max);
        weights += weight;
        sum.x += weight * part[i].x;
        sum.y += weight * part[i].y;
        sum.z += weight * part[i].z;
        sum.w += weight * part[i].w;
      }
    }
  }
};

// Merges the states of one row and writes the answer; a whole warp takes part. A lane holds
// kHeadDim / 32 columns, four at a time. `add_states(columns, column, has_columns)` adds the states
// of the lane's columns from `column` on.
template <typename DTypeO, int kHeadDim, bool kAligned, typename AddStates>
__device__ __forceinline__ void merge_columns(const AttentionParams& params, int64_t token,
                                              int head, int kv_head, int lane,
                                              AddStates&& add_states) {
  RowState state{-ptx::infinity(), 0.0f};
  for (int column = 4 * lane; column < round_up(kHeadDim, 4 * kWarpSize); column += 4 * kWarpSize) {
    MergedColumns columns = MergedColumns::empty();
    add_states(columns, column, column < kHeadDim);
    state = RowState{columns.max, columns.weights};
    state.add_sink(sink_of(params, head));
    if (column < kHeadDim) {
      const float factor = state.normaliser(columns.max) * output_scale_of(params, kv_head);
      DTypeO* out = static_cast<DTypeO*>(params.o) + token * params.o_stride_n +
                    head * params.o_stride_h + column;
      store_pair<DTypeO, kAligned>(out, columns.sum.x * factor, columns.sum.y * factor);
      store_pair<DTypeO, kAligned>(out + 2, columns.sum.z * factor, columns.sum.w * factor);
    }
  }
  if (lane == 0 && params.lse != nullptr) {
    params.lse[token * params.lse_stride_n + head * params.lse_stride_h] = state.lse();
  }
}

// The splits of one packed row of a tile.
template <typename DTypeO, int kHeadDim, int kTileRows, bool kAligned>
__device__ __forceinline__ void merge_row(const AttentionParams& params, const TileWork& work,
                                          int row, int64_t token, int head, int lane) {
  const int64_t first = work.state(params) * kTileRows + row;
  merge_columns<DTypeO, kHeadDim, kAligned>(
      params, token, head, work.kv_head, lane,
      [&](MergedColumns& columns, int column, bool has_columns) {
        columns.add(params.partial_lse + first, params.partial_o + first * kHeadDim + column,
                    work.num_splits, kTileRows, static_cast<int64_t>(kTileRows) * kHeadDim,
                    has_columns);
      });
}

}  // namespace cupyattn
