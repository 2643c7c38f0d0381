// The result of attention over some keys is a state (o, lse); states over disjoint keys merge
// exactly. This header normalises and writes states, and merges the partial states of tiles whose
// keys are split over several blocks.
#pragma once

#include "cupyattn/params/latent.cuh"
#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/shared/output_gate.cuh"
#include "cupyattn/shared/rows.cuh"

namespace cupyattn {

// One softmax row: sum of 2^(logit - max) over its keys.
struct RowState {
  float max, sum;

  // A sink is one more logit that carries no value (arXiv 2309.17453); it is not scaled.
  __device__ __forceinline__ void add_sink(float sink_base2) {
    const float new_max = fmaxf(max, sink_base2);
    if (new_max == -ptx::infinity()) return;
    // A sink of +inf leaves nothing but itself.
    const float weight = sink_base2 == new_max ? 1.0f : ptx::ex2_approx(sink_base2 - new_max);
    // mutate: sink-not-in-sum
    sum = sum * ptx::ex2_approx(max - new_max) + weight;
    max = new_max;
  }
  __device__ __forceinline__ float lse() const {
    return sum == 0.0f ? -ptx::infinity() : max + log2f(sum);
  }
  // The factor that turns numerators over `old_max` into the output. A row of NaN has seen keys
  // although its maximum is -inf; its sum is NaN and stays so.
  __device__ __forceinline__ float normaliser(float old_max) const {
    // mutate: no-keys-divides-by-zero
    if (sum == 0.0f || (old_max == -ptx::infinity() && sum == sum)) return 0.0f;
    if (old_max == max) return ptx::rcp_approx(sum);
    return ptx::ex2_approx(old_max - max) * ptx::rcp_approx(sum);
  }
};

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lane_mask = 1; lane_mask < kWarpSize; lane_mask *= 2) {
    x = fmaxf(x, ptx::shuffle_xor(x, lane_mask));
  }
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lane_mask = 1; lane_mask < kWarpSize; lane_mask *= 2) {
    x += ptx::shuffle_xor(x, lane_mask);
  }
  return x;
}

__device__ __forceinline__ void scale_by(float4& x, float factor) {
  x = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}

__device__ __forceinline__ void add_scaled(float4& sum, const float4& x, float factor) {
  sum = make_float4(fmaf(x.x, factor, sum.x), fmaf(x.y, factor, sum.y), fmaf(x.z, factor, sum.z),
                    fmaf(x.w, factor, sum.w));
}

__device__ __forceinline__ float sink_of(const AttentionParams& params, int head) {
  return params.sinks == nullptr ? -ptx::infinity() : params.sinks[head] * kLog2e;
}

__device__ __forceinline__ void store_lse(const AttentionParams& params, int64_t token, int head,
                                          float lse) {
  // mutate: lse-in-base-2
  params.lse[token * params.lse_stride_n + head * params.lse_stride_h] = lse * params.lse_scale;
}

// Tells a row's largest logit, in base 2, of those that this block has seen. Keys of others may
// raise it further.
__device__ __forceinline__ void raise_max_logit(const LatentParams& params, int64_t token, int head,
                                                float max) {
  if (params.max_logits == nullptr) return;
  const int num_heads = params.attention.num_kv_heads * params.attention.group_size;
  // mutate: largest-logit-in-base-2
  ptx::atomic_max(params.max_logits + token * num_heads + head, max * kLn2);
}

// Stores the LSE of a row in the form that is asked for; `keys` is its state without its sink.
__device__ __forceinline__ void store_lse(const AttentionParams& params, int64_t token, int head,
                                          const RowState& keys, const RowState& state) {
  const bool omits_sink = (params.lse_form & kLseWithoutSinks) != 0;
  float lse = RowState{omits_sink ? keys.max : state.max, omits_sink ? keys.sum : state.sum}.lse();
  if ((params.lse_form & kLseOfNoKeysIsInfinite) != 0 && lse == -ptx::infinity()) {
    lse = ptx::infinity();
  }
  store_lse(params, token, head, lse);
}

// What multiplies the output of a head, but for a scale that requests have of their own.
__device__ __forceinline__ float output_scale_of(const AttentionParams& params, int kv_head) {
  return params.scale_v == nullptr || params.steps.scale_v != 0
             ? params.output_scale
             : params.output_scale * params.scale_v[kv_head];
}

// The scale of a request's own values, which is in all that leaves a block: so a merge of states
// need not know requests.
template <typename LogitsVariant>
__device__ __forceinline__ float request_scale_of(const AttentionParams& params,
                                                  const Request& request, int kv_head) {
  if constexpr (!LogitsVariant::kHasRowScales) return 1.0f;
  if (params.scale_v == nullptr || params.steps.scale_v == 0) return 1.0f;
  // mutate: value-scales-of-first-request
  return params.scale_v[request.mask_start * params.steps.scale_v + kv_head];
}

template <typename DTypeO>
__device__ __forceinline__ void store_element(DTypeO* pointer, float value) {
  if constexpr (is_same<DTypeO, float>) {
    *pointer = value;
  } else if constexpr (is_fp8<DTypeO>) {
    pointer->bits = static_cast<uint8_t>(ptx::floats_to_fp8_pair<DTypeO>(value, 0.0f));
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
  } else if constexpr (is_same<DTypeO, float>) {
    *reinterpret_cast<float2*>(pointer) = make_float2(first, second);
  } else if constexpr (is_fp8<DTypeO>) {
    *reinterpret_cast<uint16_t*>(pointer) =
        static_cast<uint16_t>(ptx::floats_to_fp8_pair<DTypeO>(first, second));
  } else {
    *reinterpret_cast<uint32_t*>(pointer) = ptx::pack_pair<DTypeO>(first, second);
  }
}

// Writes one row of accumulators, times `factor`; `at(column)` is where an even column goes.
template <typename DTypeO, int kHeadDim, bool kFp8Values, bool kAligned, int kTilesO, typename At>
__device__ __forceinline__ void store_output_row(At&& at, const float (&o)[kTilesO][4], int h,
                                                 float factor, int lane) {
  for_output_pairs<kHeadDim, kFp8Values>(o, h, lane, [&](int column, float first, float second) {
    store_pair<DTypeO, kAligned>(at(column), first * factor, second * factor);
  });
}

// Writes one row of 16-bit outputs on 16-byte boundaries, 16 bytes a lane: the lanes of a quad
// exchange their parts of four neighbouring n-tiles, so that each lane gets one n-tile whole. All
// lanes take part.
template <typename DTypeO, int kHeadDim, int kTilesO>
__device__ __forceinline__ void store_output_vectors(DTypeO* row, const float (&o)[kTilesO][4],
                                                     int h, float factor, bool exists, int lane) {
  static_assert(kHeadDim % 8 == 0 && kTilesO == kHeadDim / 8, "each n-tile is one lane's");
  const auto exchange = [](uint32_t word, int mask) {
    return __float_as_uint(ptx::shuffle_xor(__uint_as_float(word), mask));
  };
  const bool is_odd = (lane & 1) != 0, is_upper = (lane & 2) != 0;
#pragma unroll
  for (int n = 0; n < kTilesO; n += 4) {
    uint32_t own[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      own[i] = 0;  // of the last n-tiles, which may be fewer than four
      if (n + i >= kTilesO) continue;
      own[i] = ptx::pack_pair<DTypeO>(o[n + i][2 * h] * factor, o[n + i][2 * h + 1] * factor);
    }
    // Exchange between even and odd lanes, then between the halves of the quad.
    uint32_t pair[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t kept = is_odd ? own[2 * i + 1] : own[2 * i];
      const uint32_t got = exchange(is_odd ? own[2 * i] : own[2 * i + 1], 1);
      pair[i][0] = is_odd ? got : kept;
      pair[i][1] = is_odd ? kept : got;
    }
    Vector16 whole;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t kept = is_upper ? pair[1][i] : pair[0][i];
      const uint32_t got = exchange(is_upper ? pair[0][i] : pair[1][i], 2);
      whole.word[i] = is_upper ? got : kept;  // mutate: quad-halves-swapped
      whole.word[2 + i] = is_upper ? kept : got;
    }
    const bool is_tile = kTilesO % 4 == 0 || n + (lane & 3) < kTilesO;
    // mutate: output-past-the-head-dim
    if (exists && is_tile) *reinterpret_cast<Vector16*>(row + 8 * (n + (lane & 3))) = whole;
  }
}

// Announces this block's partial states; true in the last of `count` blocks only. One thread orders
// the memory of all: barriers of the block pass its order on to the others.
__device__ __forceinline__ bool arrive_last(uint32_t* counter, int count, int thread,
                                            uint32_t* shared_flag) {
  ptx::block_sync();
  if (thread == 0) {
    const uint32_t last = static_cast<uint32_t>(count - 1);
    *shared_flag = ptx::atomic_inc_wrap_acq_rel(counter, last) == last;
  }
  ptx::block_sync();  // mutate: last-block-flag-read-early
  return *shared_flag != 0;
}

// Announces the states of a split; true in the last block of its tile only.
__device__ __forceinline__ bool arrive_last(const AttentionParams& params, const TileWork& work,
                                            int thread, uint32_t* shared_flag) {
  uint32_t* const counter = params.counters + work.counter(params);
  return arrive_last(counter, work.num_splits, thread, shared_flag);
}

// A row of states under way: numerators over the maximum, in the columns of this lane.
template <int kVectors>
struct RowMerge {
  RowState state{-ptx::infinity(), 0.0f};
  float4 sum[kVectors] = {};

  __device__ __forceinline__ void rescale(float new_max) {
    const float factor = new_max == state.max ? 1.0f : ptx::ex2_approx(state.max - new_max);
    state.max = new_max;
    state.sum *= factor;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) scale_by(sum[i], factor);
  }
};

// Adds the states [begin, end) of one row; a whole warp takes part. All lanes call `row_of(i)`
// together; it returns the row of partial_o that holds state i. A lane weighs one state of each 32
// and holds the row's columns 4 * lane (+ 128) and on, of `kColumns` from `first_column` on.
//
// The time of a merge is round trips to L2, so a lane asks for many states before it uses the first.
// What does not exist is read too, from an address that does: ptxas gives predicated loads the same
// registers, and then each waits for the one before. `kWeighsLate` weighs states while their O are
// under way, which takes more registers.
template <int kHeadDim, int kColumns, int kBatch, bool kWeighsLate, int kVectors, typename RowOf>
__device__ __forceinline__ void add_states(RowMerge<kVectors>& merged,
                                           const AttentionParams& params, int begin_state,
                                           int end_state, int lane, RowOf&& row_of,
                                           int first_column) {
  for (int first = begin_state; first < end_state; first += kWarpSize) {
    const int count = min_of(end_state - first, kWarpSize);
    const int found = row_of(first + lane);
    const int row = ptx::shuffle(found, min_of(lane, count - 1));
    const float loaded = ptx::load_l2(params.partial_lse + row);
    float weight = 0.0f;
    const auto weigh = [&] {
      const float lse = lane < count ? loaded : -ptx::infinity();
      merged.rescale(fmaxf(merged.state.max, warp_max(lse)));
      // An empty state weighs nothing, even if all states are empty.
      // mutate: split-weights-inverted
      weight = lse == -ptx::infinity() ? 0.0f : ptx::ex2_approx(lse - merged.state.max);
      merged.state.sum += warp_sum(weight);
    };
    if constexpr (!kWeighsLate) weigh();
    for (int begin = 0; begin < count; begin += kBatch) {
      float4 part[kBatch][kVectors];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int64_t place = ptx::shuffle(row, (begin + k) % kWarpSize);
        const float* o = params.partial_o + place * kHeadDim + first_column;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const int column = 4 * (lane + kWarpSize * i);
          const bool exists = begin + k < count && (kColumns % 128 == 0 || column < kColumns);
          part[k][i] = ptx::load_l2(reinterpret_cast<const float4*>(o + (exists ? column : 0)));
        }
      }
      // ptxas moves no load below a barrier; without one it uses some before it asks for others.
      ptx::warp_sync();
      if (kWeighsLate && begin == 0) weigh();
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const float w = ptx::shuffle(weight, (begin + k) % kWarpSize);
        if (begin + k >= count) continue;  // 0 * NaN is NaN
#pragma unroll
        for (int i = 0; i < kVectors; ++i) add_scaled(merged.sum[i], part[k][i], w);
      }
    }
  }
}

// Writes the result of a row, or of columns of it.
template <typename Config, int kColumns, int kVectors>
__device__ __forceinline__ void write_merged(RowMerge<kVectors>& merged,
                                             const AttentionParams& params, int64_t token, int head,
                                             int kv_head, int lane, int first_column) {
  using DTypeO = typename Config::DTypeO;
  RowState& state = merged.state;
  const RowState keys = state;
  state.add_sink(sink_of(params, head));
  const float factor = state.normaliser(keys.max) * output_scale_of(params, kv_head);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = 4 * (lane + kWarpSize * i);
    if (column >= kColumns) continue;
    float4& sum = merged.sum[i];
    gate_columns<Config, Config::kAligned>(sum, params, token, head, first_column + column);
    DTypeO* out = static_cast<DTypeO*>(params.o) + token * params.o_stride_n +
                  head * params.o_stride_h + first_column + column;
    store_pair<DTypeO, Config::kAligned>(out, sum.x * factor, sum.y * factor);
    store_pair<DTypeO, Config::kAligned>(out + 2, sum.z * factor, sum.w * factor);
  }
  if (lane == 0 && first_column == 0 && params.lse != nullptr) {
    store_lse(params, token, head, keys, state);
  }
}

// How many states of a row, or of one of kParts parts of its columns, a warp has under way. Kernels
// that only merge have 80 registers. Those of parts have 64, so that as many warps run as can, or of
// few rows 160.
template <typename Config, int kParts, int kVectors>
__host__ __device__ constexpr int states_at_once() {
  if constexpr (kParts > 1) {
    return Config::kSharesRows ? 32 : 8;
  } else {
    return (kVectors > 1 ? 12 : 16) / kVectors;
  }
}

// Merges the states of one row, as add_states has them, and writes the result. kParts: a warp
// merges one part of the columns, from `first_column` on.
template <typename Config, int kHeadDim, bool kWeighsLate = false, int kParts = 1, typename RowOf>
__device__ __forceinline__ void merge_states(const AttentionParams& params, int64_t token, int head,
                                             int kv_head, int num_states, int lane, RowOf&& row_of,
                                             int first_column = 0) {
  constexpr int kColumns = kHeadDim / kParts, kVectors = ceil_div(kColumns, 4 * kWarpSize);
  constexpr int kBatch = states_at_once<Config, kParts, kVectors>();
  RowMerge<kVectors> merged;
  // Few states are the rule, and the many of a batch would be read for nothing.
  if (kBatch == 32 && num_states <= 4) {
    add_states<kHeadDim, kColumns, 4, kWeighsLate>(merged, params, 0, num_states, lane, row_of,
                                                   first_column);
  } else if (kBatch == 32 && num_states <= 12) {
    add_states<kHeadDim, kColumns, 12, kWeighsLate>(merged, params, 0, num_states, lane, row_of,
                                                    first_column);
  } else {
    add_states<kHeadDim, kColumns, kBatch, kWeighsLate>(merged, params, 0, num_states, lane, row_of,
                                                        first_column);
  }
  write_merged<Config, kColumns>(merged, params, token, head, kv_head, lane, first_column);
}

// What the warps of a block leave for the first, which writes the row that they merge together.
template <int kHeadDim, int kWarps>
struct SharedMerge {
  float4 sum[kWarps][ceil_div(kHeadDim, 4)];
  RowState state[kWarps];
};

// Merges the states of one row by all warps of a block, which take equal shares of them. Where
// there are few rows and many states, successive round trips to L2 would take most of the time.
template <typename Config, int kHeadDim, int kWarps, typename RowOf>
__device__ __forceinline__ void merge_states_together(SharedMerge<kHeadDim, kWarps>& shared,
                                                      const AttentionParams& params, int64_t token,
                                                      int head, int kv_head, int num_states,
                                                      int warp, int lane, RowOf&& row_of) {
  constexpr int kVectors = ceil_div(kHeadDim, 4 * kWarpSize);
  const int share = ceil_div(num_states, kWarps);
  const int begin = min_of(warp * share, num_states), end = min_of(begin + share, num_states);
  RowMerge<kVectors> merged;
  add_states<kHeadDim, kHeadDim, 8 / kVectors, false>(merged, params, begin, end, lane, row_of, 0);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (4 * (lane + kWarpSize * i) < kHeadDim) {
      shared.sum[warp][lane + kWarpSize * i] = merged.sum[i];
    }
  }
  if (lane == 0) shared.state[warp] = merged.state;
  ptx::block_sync();  // mutate: shares-read-early
  if (warp != 0) return;
  float max = merged.state.max;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) max = fmaxf(max, shared.state[w].max);
  merged.rescale(max);
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    const RowState other = shared.state[w];
    if (other.sum == 0.0f) continue;
    const float weight = other.max == max ? 1.0f : ptx::ex2_approx(other.max - max);
    merged.state.sum += weight * other.sum;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (4 * (lane + kWarpSize * i) < kHeadDim) {
        add_scaled(merged.sum[i], shared.sum[w][lane + kWarpSize * i], weight);
      }
    }
  }
  write_merged<Config, kHeadDim>(merged, params, token, head, kv_head, lane, 0);
}

// Merges the splits of one packed row of a tile, or a part of its columns.
template <typename Config, int kHeadDim, int kTileRows, bool kWeighsLate = false, int kParts = 1>
__device__ __forceinline__ void merge_row(const AttentionParams& params, const TileWork& work,
                                          int row, int64_t token, int head, int lane,
                                          int first_column = 0) {
  const int first = static_cast<int>(work.state(params) * kTileRows + row);
  merge_states<Config, kHeadDim, kWeighsLate, kParts>(
      params, token, head, work.kv_head, work.num_splits, lane,
      [=](int i) { return first + i * kTileRows; }, first_column);
}

}  // namespace cupyattn
