// Exchanges attention states among the ranks of one host, and merges those of a rank's own heads.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/exchange/mailbox.cuh"
#include "cupyattn/params/exchange_states.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/tile/elements.cuh"

namespace cupyattn {

// What a thread sends, and gets from each rank: a vector of each of three states, and their LSE.
struct SentStates {
  Vector16 v[kSentVectors];
  float lse[kSentVectors];
};

// The same on its way.
struct StateWords {
  SentWords of_v;
  Vector16 of_lse;

  __device__ __forceinline__ bool are_here(uint32_t epoch) const {
    return of_lse.word[3] == epoch && of_v.are_here(epoch);
  }
};

// Columns of a state over the keys of all ranks so far: numerators over weights 2^(lse - max).
template <typename DType>
struct MergedState {
  static constexpr int kCount = static_cast<int>(sizeof(Vector16) / sizeof(DType));
  float max, sum;
  float value[kCount];

  __device__ __forceinline__ void add(const Vector16& v, float lse, float to_base2) {
    // An empty state weighs nothing, whatever its v holds.
    if (lse == -ptx::infinity()) return;  // mutate: empty-rank-weighs
    const float new_max = fmaxf(max, lse);
    const float factor = new_max == max ? 1.0f : ptx::ex2_approx((max - new_max) * to_base2);
    const float weight = ptx::ex2_approx((lse - new_max) * to_base2);
    float added[kCount];
    to_floats<DType>(v, added);
    max = new_max;
    sum = sum * factor + weight;  // mutate: rank-sum-not-rescaled
#pragma unroll
    for (int c = 0; c < kCount; ++c) value[c] = value[c] * factor + weight * added[c];
  }
};

template <typename Config>
struct StateExchanger {
  using DType = typename Config::DType;
  using DTypeO = typename Config::DTypeO;
  using State = MergedState<DType>;
  static constexpr int kVectors = Config::kHeadDim / State::kCount;  // of a state
  static constexpr int kGroups = Config::kGroups;                    // of three states, in a block
  static constexpr int kBatch = Config::kBatch;  // peers whose loads are under way together

  const ExchangeStatesParams& params;
  Mailbox mail;
  int column;  // of vectors

  __device__ __forceinline__ explicit StateExchanger(const ExchangeStatesParams& params)
      : params(params), mail(params.peers), column(threadIdx.x % kVectors) {}

  __device__ __forceinline__ void run() {
    const int num_groups = ceil_div(params.num_states, kSentVectors);
    const int own = static_cast<int>(threadIdx.x) / kVectors;  // of this thread, in the block
    const int first = blockIdx.x * kGroups + own, step = gridDim.x * kGroups;
    // What a failed rank has is not good, and peers find out by its silence.
    if (!mail.is_failed && own < kGroups) {
      for (int group = first; group < num_groups; group += step) send(group);
    }
    mail.raise_epoch();
    if (own < kGroups) {
      for (int group = first; group < num_groups; group += step) merge(group);
    }
  }

  // Three states of this rank: where each of their rows and heads begins.
  struct Places {
    int64_t o[kSentVectors], lse[kSentVectors];
  };

  __device__ __forceinline__ void place_of(int state, uint32_t& row, uint32_t& head) const {
    row = ptx::multiply_high(2 * static_cast<uint32_t>(state), params.heads_magic) >>
          params.heads_shift;
    head = state - row * params.own_heads;
  }

  // States past the last repeat it.
  __device__ __forceinline__ Places places(int group) const {
    Places found;
#pragma unroll
    for (int i = 0; i < kSentVectors; ++i) {
      uint32_t row, head;
      place_of(min_of(kSentVectors * group + i, params.num_states - 1), row, head);
      found.o[i] = row * params.o_stride_n + head * params.o_stride_h + State::kCount * column;
      found.lse[i] = row * params.lse_stride_n + head * params.lse_stride_h;
    }
    return found;
  }

  // The states of this rank's keys, of heads that `owner` has.
  __device__ __forceinline__ SentStates load(const Places& places, int owner) const {
    const int64_t head = static_cast<int64_t>(owner) * params.own_heads;
    const DType* const o = static_cast<const DType*>(params.o) + head * params.o_stride_h;
    const float* const lse = params.lse + head * params.lse_stride_h;
    SentStates loaded;
#pragma unroll
    for (int i = 0; i < kSentVectors; ++i) {
      loaded.v[i] = ptx::load_no_allocate(reinterpret_cast<const Vector16*>(o + places.o[i]));
      loaded.lse[i] = lse[places.lse[i]];
    }
    return loaded;
  }

  static __device__ __forceinline__ Vector16* words_of(Vector16* window, int group, int column) {
    return window + static_cast<int64_t>(group) * (kSentWords * kVectors) + column;
  }

  __device__ __forceinline__ void send(int group) const {
    const Places from = places(group);
    for (int begin = 1; begin < params.peers.num_ranks; begin += kBatch) {
      SentStates sent[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (begin + k < params.peers.num_ranks) sent[k] = load(from, mail.behind(begin + k));
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (begin + k < params.peers.num_ranks) send(sent[k], group, mail.behind(begin + k));
      }
    }
  }

  __device__ __forceinline__ void send(const SentStates& sent, int group, int owner) const {
    Vector16* const target = mail.window(owner, params.peers.rank);
    mail.send(sent.v, words_of(target, group, column), kVectors);
    if (column == 0) {
      ptx::store_whole(target + params.lse_words + group,
                       tagged(__float_as_uint(sent.lse[0]), __float_as_uint(sent.lse[1]),
                              __float_as_uint(sent.lse[2]), mail.epoch));
    }
  }

  __device__ __forceinline__ void merge(int group) {
    const SentStates own = load(places(group), params.peers.rank);
    State merged[kSentVectors];
#pragma unroll
    for (int i = 0; i < kSentVectors; ++i) merged[i] = State{-ptx::infinity(), 0.0f, {}};
    const auto add_own = [&] {
#pragma unroll
      for (int i = 0; i < kSentVectors; ++i) merged[i].add(own.v[i], own.lse[i], params.to_base2);
    };
    // Peers in the order of ranks, and this rank at its place among them.
    const int num_peers = params.peers.num_ranks - 1;
    for (int begin = 0; begin < num_peers; begin += kBatch) {
      StateWords words[kBatch];
      const bool is_whole = await(group, begin, words);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (begin + k >= num_peers) continue;
        if (begin + k == params.peers.rank) add_own();
#pragma unroll
        for (int i = 0; i < kSentVectors; ++i) {
          merged[i].add(words[k].of_v.vector(i), __uint_as_float(words[k].of_lse.word[i]),
                        params.to_base2);
        }
      }
      if (!is_whole) {
#pragma unroll
        for (int i = 0; i < kSentVectors; ++i) merged[i].sum = ptx::nan();  // mutate: late-peer-hidden
      }
    }
    if (params.peers.rank == num_peers) add_own();
#pragma unroll
    for (int i = 0; i < kSentVectors; ++i) store(merged[i], kSentVectors * group + i);
  }

  // Loads a group of kBatch peers' states until all are here. False if one is late.
  __device__ __forceinline__ bool await(int group, int begin, StateWords (&words)[kBatch]) {
    const int num_peers = params.peers.num_ranks - 1;
    return mail.await([&] {
      int missing = -1;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (begin + k < num_peers) words[k] = load_words(group, mail.peer(begin + k));
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (begin + k < num_peers && !words[k].are_here(mail.epoch)) missing = mail.peer(begin + k);
      }
      return missing;
    });
  }

  __device__ __forceinline__ StateWords load_words(int group, int source) const {
    Vector16* const from = mail.window(params.peers.rank, source);
    return {Mailbox::load(words_of(from, group, column), kVectors),
            ptx::load_whole(from + params.lse_words + group)};
  }

  __device__ __forceinline__ void store(State& merged, int state) const {
    if (state >= params.num_states) return;  // mutate: states-past-the-last
    uint32_t row, head;
    place_of(state, row, head);
    const float factor = merged.sum == 0.0f ? 0.0f : ptx::rcp_approx(merged.sum);
#pragma unroll
    for (int c = 0; c < State::kCount; ++c) merged.value[c] *= factor;
    DTypeO* const out = static_cast<DTypeO*>(params.out) + row * params.out_stride_n +
                        head * params.out_stride_h + State::kCount * column;
    store_floats(out, merged.value);
    if (column != 0 || params.out_lse == nullptr) return;
    params.out_lse[row * params.out_lse_stride_n + head * params.out_lse_stride_h] =
        merged.sum == 0.0f ? -ptx::infinity()
                           : merged.max + log2f(merged.sum) * params.from_base2;
  }
};

}  // namespace cupyattn
