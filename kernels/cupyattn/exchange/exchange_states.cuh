// Exchanges attention states among the ranks of one host, and merges those of a rank's own heads.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/params/exchange_states.cuh"
#include "cupyattn/ptx/grid_dependency.cuh"
#include "cupyattn/ptx/math.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/ptx/system.cuh"
#include "cupyattn/ptx/warp.cuh"
#include "cupyattn/tile/elements.cuh"

namespace cupyattn {

// Three states are sent together, because three vectors of 16 bytes fill four words.
constexpr int kSentStates = 3, kSentWords = 4;

// A word is twelve bytes of states and the epoch of the exchange that they belong to. It is stored
// and loaded as a whole, so who finds this exchange's epoch in it has its bytes: no fence and no
// counter has to follow them, and what an earlier or a later exchange wrote is never taken for them.
__device__ __forceinline__ Vector16 tagged(uint32_t a, uint32_t b, uint32_t c, uint32_t epoch) {
  return Vector16{{a, b, c, epoch}};
}

// What a thread sends, and gets from each rank: a vector of each of three states, and their LSE.
struct SentStates {
  Vector16 v[kSentStates];
  float lse[kSentStates];
};

// The same on its way.
struct SentWords {
  Vector16 of_v[kSentWords], of_lse;

  __device__ __forceinline__ bool is_here(uint32_t epoch) const {
    bool all = of_lse.word[3] == epoch;
#pragma unroll
    for (int w = 0; w < kSentWords; ++w) all = all && of_v[w].word[3] == epoch;
    return all;
  }

  __device__ __forceinline__ SentStates states() const {
    SentStates sent;
#pragma unroll
    for (int i = 0; i < 4 * kSentStates; ++i) {
      sent.v[i / 4].word[i % 4] = of_v[i / 3].word[i % 3];
    }
#pragma unroll
    for (int i = 0; i < kSentStates; ++i) sent.lse[i] = __uint_as_float(of_lse.word[i]);
    return sent;
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

// Every block first sends all that it has for peers, then takes and merges what the same block of
// every peer has sent: no block waits for one of its own grid, or for a peer's later blocks.
template <typename Config>
struct StateExchanger {
  using DType = typename Config::DType;
  using DTypeO = typename Config::DTypeO;
  using State = MergedState<DType>;
  static constexpr int kVectors = Config::kHeadDim / State::kCount;  // of a state
  static constexpr int kGroups = Config::kGroups;                    // of three states, in a block
  static constexpr int kBatch = Config::kBatch;  // peers whose loads are under way together
  static constexpr int kPollsBetweenLooks = 64;  // at the clock

  const ExchangeStatesParams& params;
  int column;       // of vectors
  uint32_t epoch;
  bool is_failed;
  uint64_t deadline = 0;  // 0: nobody was waited for so far

  __device__ __forceinline__ explicit StateExchanger(const ExchangeStatesParams& params)
      : params(params), column(threadIdx.x % kVectors) {
    ptx::grid_dependency_wait();
    epoch = params.control->epoch;
    is_failed = params.control->num_failed != 0;
  }

  __device__ __forceinline__ void run() {
    const int num_groups = ceil_div(params.num_states, kSentStates);
    const int own = static_cast<int>(threadIdx.x) / kVectors;  // of this thread, in the block
    const int first = blockIdx.x * kGroups + own, step = gridDim.x * kGroups;
    // What a failed rank has is not good, and peers find out by its silence.
    if (!is_failed && own < kGroups) {
      for (int group = first; group < num_groups; group += step) send(group);
    }
    raise_epoch();
    if (own < kGroups) {
      for (int group = first; group < num_groups; group += step) merge(group);
    }
  }

  // Three states of this rank: where each of their rows and heads begins.
  struct Places {
    int64_t o[kSentStates], lse[kSentStates];
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
    for (int i = 0; i < kSentStates; ++i) {
      uint32_t row, head;
      place_of(min_of(kSentStates * group + i, params.num_states - 1), row, head);
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
    for (int i = 0; i < kSentStates; ++i) {
      loaded.v[i] = ptx::load_no_allocate(reinterpret_cast<const Vector16*>(o + places.o[i]));
      loaded.lse[i] = lse[places.lse[i]];
    }
    return loaded;
  }

  // Where `source` writes a group into a window; windows have two halves, for even and odd epochs.
  // A rank that writes a half again has taken what every peer wrote in between, which peers did only
  // after they had read that half.
  __device__ __forceinline__ Vector16* window(int of_rank, int source) const {
    const int half = epoch & 1;  // mutate: one-half-for-all-epochs
    return reinterpret_cast<Vector16*>(params.windows[of_rank]) +
           (half * params.num_ranks + source) * params.source_words;
  }
  static __device__ __forceinline__ Vector16* words_of(Vector16* window, int group, int column) {
    return window + static_cast<int64_t>(group) * (kSentWords * kVectors) + column;
  }

  __device__ __forceinline__ void send(int group) const {
    const Places from = places(group);
    for (int begin = 1; begin < params.num_ranks; begin += kBatch) {
      SentStates sent[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (begin + k < params.num_ranks) sent[k] = load(from, peer(begin + k));
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (begin + k < params.num_ranks) send(sent[k], group, peer(begin + k));
      }
    }
  }

  // The ranks behind this one, so that not all write to the same one first.
  __device__ __forceinline__ int peer(int distance) const {
    const int found = params.rank + distance;
    return found < params.num_ranks ? found : found - params.num_ranks;
  }

  __device__ __forceinline__ void send(const SentStates& sent, int group, int owner) const {
    Vector16* const target = window(owner, params.rank);
    Vector16* const words = words_of(target, group, column);
    const auto word = [&](int i) { return sent.v[i / 4].word[i % 4]; };
#pragma unroll
    for (int w = 0; w < kSentWords; ++w) {
      ptx::store_whole(words + w * kVectors,
                       tagged(word(3 * w), word(3 * w + 1), word(3 * w + 2), epoch));
    }
    if (column == 0) {
      ptx::store_whole(target + params.lse_words + group,
                       tagged(__float_as_uint(sent.lse[0]), __float_as_uint(sent.lse[1]),
                              __float_as_uint(sent.lse[2]), epoch));
    }
  }

  // The last block that has read the epoch raises it for the next launch. The barrier also says that
  // all of a block's words are on their way before one of its threads waits.
  __device__ __forceinline__ void raise_epoch() const {
    ptx::block_sync();
    if (threadIdx.x != 0) return;
    const uint32_t last = gridDim.x - 1;
    if (ptx::atomic_inc_wrap(&params.control->arrivals, last) == last) {
      // 0 is what windows hold at first.
      params.control->epoch = epoch == 0xffffffffu ? 2 : epoch + 1;  // mutate: epoch-stays
    }
  }

  __device__ __forceinline__ void merge(int group) {
    const SentStates own = load(places(group), params.rank);
    State merged[kSentStates];
#pragma unroll
    for (int i = 0; i < kSentStates; ++i) merged[i] = State{-ptx::infinity(), 0.0f, {}};
    const auto add = [&](const SentStates& sent) {
#pragma unroll
      for (int i = 0; i < kSentStates; ++i) merged[i].add(sent.v[i], sent.lse[i], params.to_base2);
    };
    // Peers in the order of ranks, and this rank at its place among them.
    const int num_peers = params.num_ranks - 1;
    for (int begin = 0; begin < num_peers; begin += kBatch) {
      SentWords words[kBatch];
      const bool is_whole = await(group, begin, words);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (begin + k >= num_peers) continue;
        if (begin + k == params.rank) add(own);
        add(words[k].states());
      }
      if (!is_whole) {
#pragma unroll
        for (int i = 0; i < kSentStates; ++i) merged[i].sum = ptx::nan();  // mutate: late-peer-hidden
      }
    }
    if (params.rank == num_peers) add(own);
#pragma unroll
    for (int i = 0; i < kSentStates; ++i) store(merged[i], kSentStates * group + i);
  }

  // Loads a group of kBatch peers' states until all are here. False if one is late.
  __device__ __forceinline__ bool await(int group, int begin, SentWords (&words)[kBatch]) {
    const int num_peers = params.num_ranks - 1;
    const auto source = [&](int k) { return begin + k + (begin + k >= params.rank); };
    for (int polls = 1;; ++polls) {
      int missing = -1;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (begin + k < num_peers) words[k] = load_words(group, source(k));
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (begin + k < num_peers && !words[k].is_here(epoch)) missing = source(k);
      }
      if (missing < 0) return true;
      if (is_failed) return false;
      if (polls % kPollsBetweenLooks == 0 && is_late()) {
        fail(missing);
        return false;
      }
    }
  }

  __device__ __forceinline__ SentWords load_words(int group, int source) const {
    Vector16* const from = window(params.rank, source);
    SentWords words;
#pragma unroll
    for (int w = 0; w < kSentWords; ++w) {
      words.of_v[w] = ptx::load_whole(words_of(from, group, column) + w * kVectors);
    }
    words.of_lse = ptx::load_whole(from + params.lse_words + group);
    return words;
  }

  // Whether the time is over in which peers may come. It begins with the first wait of a launch.
  __device__ __forceinline__ bool is_late() {
    const uint64_t now = ptx::global_timer();
    if (deadline == 0) deadline = now + params.limit_ns;
    return now > deadline;
  }

  __device__ __forceinline__ void fail(int source) {
    is_failed = true;
    const uint32_t num_failed = ptx::atomic_inc_wrap(&params.control->num_failed, 0xfffffffeu);
    if (num_failed == 0) ptx::store_system(params.status, source + 1);  // mutate: lateness-untold
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
