// Gathers the heads of all ranks of a host, such as those of their queries.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/exchange/mailbox.cuh"
#include "cupyattn/params/gather_heads.cuh"
#include "cupyattn/ptx/math.cuh"

namespace cupyattn {

template <typename Config>
struct HeadGatherer {
  static constexpr int kVectors = Config::kVectors;  // of a head's row
  static constexpr int kGroups = Config::kGroups;    // of three heads' rows, in a block
  static constexpr int kBatch = Config::kBatch;      // peers whose loads are under way together

  const GatherHeadsParams& params;
  Mailbox mail;
  int column;  // of vectors

  __device__ __forceinline__ explicit HeadGatherer(const GatherHeadsParams& params)
      : params(params), mail(params.peers), column(threadIdx.x % kVectors) {}

  __device__ __forceinline__ void run() {
    const int num_groups = ceil_div(params.num_states, kSentVectors);
    const int own = static_cast<int>(threadIdx.x) / kVectors;  // of this thread, in the block
    const int first = blockIdx.x * kGroups + own, step = gridDim.x * kGroups;
    if (own < kGroups) {
      for (int group = first; group < num_groups; group += step) give(group);
    }
    mail.raise_epoch();
    if (own < kGroups) {
      for (int group = first; group < num_groups; group += step) take(group);
    }
  }

  // The places of row i of a group, in x and in `out`. Rows past the last repeat it.
  struct Place {
    int64_t x, out;
  };
  __device__ __forceinline__ Place place(int group, int i) const {
    const uint32_t state = min_of(kSentVectors * group + i, params.num_states - 1);
    const uint32_t row = ptx::multiply_high(2 * state, params.heads_magic) >> params.heads_shift;
    const uint32_t head = state - row * params.own_heads;
    return {row * params.x_stride_n + head * params.x_stride_h + column,
            row * params.out_stride_n + head * params.out_stride_h + column};
  }

  __device__ __forceinline__ Vector16* words_of(Vector16* window, int group) const {
    return window + static_cast<int64_t>(group) * (kSentWords * kVectors) + column;
  }

  // Sends a group to all peers, and keeps it.
  __device__ __forceinline__ void give(int group) const {
    Vector16 v[kSentVectors];
#pragma unroll
    for (int i = 0; i < kSentVectors; ++i) {
      v[i] = ptx::load_no_allocate(params.x + place(group, i).x);
    }
    for (int distance = 1; distance < params.peers.num_ranks && !mail.is_failed; ++distance) {
      mail.send(v, words_of(mail.window(mail.behind(distance), params.peers.rank), group),
                kVectors);
    }
#pragma unroll
    for (int i = 0; i < kSentVectors; ++i) put(group, i, params.peers.rank, v[i]);
  }

  __device__ __forceinline__ void put(int group, int i, int source, const Vector16& v) const {
    if (kSentVectors * group + i >= params.num_states) return;
    const int64_t head = static_cast<int64_t>(source) * params.own_heads;
    params.out[place(group, i).out + head * params.out_stride_h] = v;
  }

  __device__ __forceinline__ void take(int group) {
    const int num_peers = params.peers.num_ranks - 1;
    for (int begin = 0; begin < num_peers; begin += kBatch) {
      SentWords words[kBatch];
      const bool is_whole = mail.await([&] {
        int missing = -1;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (begin + k >= num_peers) continue;
          words[k] = Mailbox::load(
              words_of(mail.window(params.peers.rank, mail.peer(begin + k)), group), kVectors);
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (begin + k < num_peers && !words[k].are_here(mail.epoch)) missing = mail.peer(begin + k);
        }
        return missing;
      });
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (begin + k >= num_peers) continue;
#pragma unroll
        for (int i = 0; i < kSentVectors; ++i) {
          // All ones are a NaN in every format.
          const Vector16 absent{{~0u, ~0u, ~0u, ~0u}};
          // mutate: late-heads-hidden
          put(group, i, mail.peer(begin + k), is_whole ? words[k].vector(i) : absent);
        }
      }
    }
  }
};

}  // namespace cupyattn
