// Scores of softmax: what each head has of a block, over what it has of all blocks.
#pragma once

#include "cupyattn/params/select.cuh"
#include "cupyattn/ptx/fp8.cuh"
#include "cupyattn/ptx/grid_dependency.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/warp.cuh"
#include "cupyattn/select/score_totals.cuh"
#include "cupyattn/select/tokens.cuh"

namespace cupyattn {

template <typename Config>
struct SelectSoftmaxShared {
  ScoreExponentials parts[max_of(Config::kMaxHeads, Config::kThreads / kWarpSize)];
  float logs[Config::kMaxHeads], weights[Config::kMaxHeads];
};

// A list of a token, of which a block of the grid makes the scores.
template <typename Config>
struct SelectSoftmax {
  static constexpr int kThreads = Config::kThreads, kWarps = kThreads / kWarpSize;

  const SelectSoftmaxParams& params;
  SelectSoftmaxShared<Config>& shared;
  int token, group, share;  // share: heads of the group
  int num_blocks;
  const float* logs;  // of the group's first head

  __device__ __forceinline__ float log_of(int head, int block) const {
    return logs[head * params.score_stride + block];
  }

  // Of each head all blocks. Where there are fewer heads than warps, some warps share one.
  __device__ __forceinline__ void find_totals() const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = ptx::warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
    const int parts = max_of(kWarps / share, 1);
#pragma unroll 1
    for (int piece = warp; piece < share * parts; piece += kWarps) {
      const int head = piece / parts;
      ScoreExponentials total = ScoreExponentials::none();
#pragma unroll 4
      for (int block = piece % parts * kWarpSize + lane; block < num_blocks;
           block += parts * kWarpSize) {
        const float x[1] = {log_of(head, block)};
        total.add(x);
      }
#pragma unroll
      for (int mask = 1; mask < kWarpSize; mask *= 2) total.join_lane(mask);
      if (lane == 0) shared.parts[piece] = total;
    }
    ptx::block_sync();
    for (int head = threadIdx.x; head < share; head += kThreads) {
      ScoreExponentials total = shared.parts[head * parts];
      for (int i = 1; i < parts; ++i) {
        total.join(shared.parts[head * parts + i].largest, shared.parts[head * parts + i].sum);
      }
      shared.logs[head] = total.result();
      shared.weights[head] = weight_of(group * share + head);
    }
    ptx::block_sync();
  }

  __device__ __forceinline__ float weight_of(int head) const {
    using Weight = typename Config::DTypeW;
    if (params.weights == nullptr) return 1.0f;
    const int64_t row = params.tokens.first_token + token;
    return ptx::to_float(
        static_cast<const Weight*>(params.weights)[row * params.weight_stride + head]);
  }

  __device__ __forceinline__ void write(int block) const {
    float score = 0.0f;
#pragma unroll 4
    for (int head = 0; head < share; ++head) {
      // mutate: shares-of-unequal-totals
      const float log = log_of(head, block) - shared.logs[head];
      score += shared.weights[head] * ptx::ex2_approx(log);
    }
    const int64_t row = static_cast<int64_t>(token) * params.num_groups + group;
    // A NaN counts as no score at all.
    params.scores[row * params.score_stride + block] = score == score ? score : -ptx::infinity();
  }

  __device__ __forceinline__ void run() const {
    find_totals();
    if (params.candidates == nullptr) {
      for (int block = threadIdx.x; block < num_blocks; block += kThreads) write(block);
      return;
    }
    const int32_t* own = params.candidates +
                         (params.tokens.first_token + static_cast<int64_t>(token)) * params.candidate_stride +
                         group * params.candidate_stride_group;
    const int size = params.candidate_blocks, count = params.num_candidates * size;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int entry = own[i / size];  // mutate: shares-of-other-candidates
      const bool is_here = entry >= 0 && entry <= num_blocks / size;
      if (is_here && entry * size + i % size < num_blocks) write(entry * size + i % size);
    }
  }
};

// Grid: tokens × groups, a block each.
template <typename Config>
__device__ __forceinline__ void select_softmax(const SelectSoftmaxParams& params) {
  __shared__ SelectSoftmaxShared<Config> shared;
  ptx::grid_dependency_wait();
  // What comes next reads lengths before it waits for this launch.
  ptx::launch_dependents();
  const int row = static_cast<int>(blockIdx.x);
  const int token = row / params.num_groups, group = row - token * params.num_groups;
  const int share = params.num_heads / params.num_groups;
  const SelectedToken seen =
      SelectedToken::of(params.tokens, token, static_cast<int>(threadIdx.x) % kWarpSize);
  if (seen.blocks == 0) return;
  const int64_t first = static_cast<int64_t>(token) * params.num_heads + group * share;
  const SelectSoftmax<Config> own = {params, shared, token, group, share, seen.blocks,
                                     params.logs + first * params.score_stride};
  own.run();
}

}  // namespace cupyattn
