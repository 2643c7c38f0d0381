// Merges states (v, s) into the state over all their keys: v is the output of attention over some
// keys, s its LSE.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/params/merge_states.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/ptx/warp.cuh"
#include "cupyattn/tile/elements.cuh"

namespace cupyattn {

// The index of a row of [n, num_heads], split into n and head.
struct MergedRow {
  uint32_t index, n, head;

  __device__ __forceinline__ MergedRow(const MergeStatesParams& params, uint32_t row) : index(row) {
    // mutate: merge-head-of-another-row
    n = ptx::multiply_high(2 * row, params.heads_magic) >> params.heads_shift;
    head = row - n * params.num_heads;
  }
};

// The states that become one row. Each state of a pair has a pointer of its own, into two arrays or
// one; other states are walked from the first.
template <typename Config>
struct RowStates {
  using DType = typename Config::DType;
  using DTypeS = typename Config::DTypeS;
  static constexpr int kArrays = Config::kPairs ? 2 : 1;

  const DType* v[kArrays];
  const DTypeS* s[kArrays];
  int32_t count;
  bool is_valid;  // false where the offsets of a row fall, or leave the states

  __device__ __forceinline__ RowStates(const MergeStatesParams& params, const MergedRow& row) {
    int64_t first = 0;
    count = Config::kPairs ? 2 : static_cast<int32_t>(params.num_states);
    is_valid = true;
    if (!Config::kPairs && params.indptr != nullptr) {
      first = params.indptr[row.n];
      const int64_t end = params.indptr[row.n + 1];
      // mutate: absent-state-read
      is_valid = 0 <= first && first <= end && end <= params.num_states;
      count = is_valid ? static_cast<int32_t>(end - first) : 0;
    }
#pragma unroll
    for (int i = 0; i < kArrays; ++i) {
      const int array = Config::kPairs && params.v[1] != nullptr ? i : 0;
      const StateStrides& of_v = params.v_strides[i];
      const StateStrides& of_s = params.s_strides[i];
      const int64_t state = Config::kPairs ? i : first;  // mutate: second-state-is-first
      v[i] = static_cast<const DType*>(params.v[array]) + row.n * of_v.n + state * of_v.m +
             row.head * of_v.h;
      // mutate: lse-of-first-row
      s[i] = static_cast<const DTypeS*>(params.s[array]) + row.n * of_s.n + state * of_s.m +
             row.head * of_s.h;
    }
  }
};

template <typename Config>
struct StateMerger {
  using DType = typename Config::DType;
  using DTypeO = typename Config::DTypeO;
  using Chunk = conditional<Config::kAligned, Vector16, DType>;
  static constexpr bool kPairs = Config::kPairs;
  static constexpr int kCount = static_cast<int>(sizeof(Chunk) / sizeof(DType));
  // How many states are loaded at once, because the time of a merge is round trips to memory.
  static constexpr int kBatch = kPairs ? 2 : 4;

  const MergeStatesParams& params;

  __device__ __forceinline__ void run() const {
    const int lane = threadIdx.x & ((1 << params.lane_bits) - 1);
    const uint32_t thread = blockIdx.x * static_cast<uint32_t>(Config::kThreads) + threadIdx.x;
    const MergedRow row(params, thread >> params.lane_bits);
    const bool is_merged = row.index < static_cast<uint32_t>(params.num_rows) &&
                           // mutate: merge-mask-inverted
                           (params.mask == nullptr || params.mask[row.n] != 0);
    float lse = 0.0f;
    if (is_merged) lse = merge(row, lane);
    // In a merge in place other lanes may still have to read the LSE that is overwritten here.
    ptx::warp_sync();  // mutate: lse-overwritten-early
    if (is_merged && lane == 0) {
      params.lse[row.n * params.lse_stride_n + row.head * params.lse_stride_h] = lse;
    }
  }

  // Writes a lane's columns of a row. Returns the LSE; lanes without columns do not know it.
  __device__ __forceinline__ float merge(const MergedRow& row, int lane) const {
    const RowStates<Config> states(params, row);
    DTypeO* out = static_cast<DTypeO*>(params.out) + row.n * params.out_stride_n +
                  row.head * params.out_stride_h;
    float max = 0.0f, sum = 0.0f;
    for (int column = kCount * lane; column < params.head_dim;  // mutate: lanes-past-the-row
         column += kCount << params.lane_bits) {
      float merged[kCount] = {};
      max = -ptx::infinity();
      sum = states.is_valid ? 0.0f : ptx::nan();
      RowStates<Config> next = states;
      while (next.count > 0) add(next, column, merged, max, sum);  // mutate: later-states-lost
      float factor = sum == 0.0f ? 0.0f : ptx::rcp_approx(sum);
      if constexpr (is_fp8<DTypeO>) factor *= out_factor();
#pragma unroll
      for (int c = 0; c < kCount; ++c) merged[c] *= factor;
      store_floats(out + column, merged);
      if constexpr (Config::kOneChunk) break;  // mutate: long-row-chunks-left-out
    }
    // mutate: lse-stays-base2
    return sum == 0.0f ? -ptx::infinity() : max + log2f(sum) * params.from_base2;
  }

  // What an fp8 answer is multiplied by.
  __device__ __forceinline__ float out_factor() const {
    return params.out_scale == nullptr ? params.out_factor
                                       : ptx::divide_rn(params.out_factor, *params.out_scale);
  }

  // Adds the next kBatch states to sums over weights 2^(s - max).
  __device__ __forceinline__ void add(RowStates<Config>& next, int column, float (&merged)[kCount],
                                      float& max, float& sum) const {
    float s[kBatch];
    Chunk v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = kPairs ? i : 0;
      const bool exists = kPairs || i < next.count;
      s[i] = exists ? ptx::to_float(*next.s[at]) : -ptx::infinity();
      v[i] = exists ? load(next.v[at] + column) : Chunk{};
      if constexpr (!kPairs) {
        next.v[0] += params.v_strides[0].m;
        next.s[0] += params.s_strides[0].m;
      }
    }
    next.count -= kBatch;

    const float old_max = max;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) max = fmaxf(max, s[i]);
    if constexpr (!kPairs) {
      const float factor =
          old_max == max ? 1.0f : ptx::ex2_approx((old_max - max) * params.to_base2);
      sum *= factor;  // mutate: merged-sum-not-rescaled
#pragma unroll
      for (int c = 0; c < kCount; ++c) merged[c] *= factor;  // mutate: merged-values-not-rescaled
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      // An empty state weighs nothing, whatever its v holds, even if all states are empty.
      const bool is_empty = s[i] == -ptx::infinity();
      // mutate: empty-state-weighs
      const float weight = is_empty ? 0.0f : ptx::ex2_approx((s[i] - max) * params.to_base2);
      sum += weight;
      float value[kCount];
      to_floats<DType>(is_empty ? Chunk{} : v[i], value);  // mutate: empty-state-counts
#pragma unroll
      for (int c = 0; c < kCount; ++c) merged[c] += weight * value[c];
    }
  }

  // Values are read once. In L1 they would only displace LSE, which many lanes read.
  static __device__ __forceinline__ Chunk load(const DType* source) {
    if constexpr (Config::kAligned) {
      return ptx::load_no_allocate(reinterpret_cast<const Vector16*>(source));
    } else {
      return *source;
    }
  }
};

}  // namespace cupyattn
