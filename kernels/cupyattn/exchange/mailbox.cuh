// What ranks of one host send each other: words in windows, and the number of the exchange.
#pragma once

#include "cupyattn/params/peer_windows.cuh"
#include "cupyattn/ptx/grid_dependency.cuh"
#include "cupyattn/ptx/memory.cuh"
#include "cupyattn/ptx/system.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

// Vectors are sent by threes, because three vectors of 16 bytes fill four words.
constexpr int kSentVectors = 3, kSentWords = 4;

// A word is twelve bytes of data and the epoch of the exchange that they belong to. It is stored
// and loaded as a whole, so who finds this exchange's epoch in it has its bytes: no fence and no
// counter has to follow them, and what an earlier or a later exchange wrote is never taken for them.
__device__ __forceinline__ Vector16 tagged(uint32_t a, uint32_t b, uint32_t c, uint32_t epoch) {
  return Vector16{{a, b, c, epoch}};
}

// Three vectors on their way.
struct SentWords {
  Vector16 word[kSentWords];

  __device__ __forceinline__ bool are_here(uint32_t epoch) const {
    bool all = true;
#pragma unroll
    for (int w = 0; w < kSentWords; ++w) all = all && word[w].word[3] == epoch;
    return all;
  }

  __device__ __forceinline__ Vector16 vector(int i) const {
    Vector16 found;
#pragma unroll
    for (int k = 0; k < 4; ++k) found.word[k] = word[(4 * i + k) / 3].word[(4 * i + k) % 3];
    return found;
  }
};

// A thread's part of an exchange. Every block first sends all that it has for peers, then takes what
// the same block of every peer has sent: no block waits for one of its own grid, or for a peer's
// later blocks.
struct Mailbox {
  static constexpr int kPollsBetweenLooks = 64;  // at the clock

  const PeerWindows& peers;
  uint32_t epoch;
  bool is_failed;
  uint64_t deadline = 0;  // 0: nobody was waited for so far

  __device__ __forceinline__ explicit Mailbox(const PeerWindows& peers) : peers(peers) {
    ptx::grid_dependency_wait();
    epoch = peers.control->epoch;
    is_failed = peers.control->num_failed != 0;
  }

  // Where `source` writes into a window; windows have two halves, for even and odd epochs. A rank
  // that writes a half again has taken what every peer wrote in between, which peers did only after
  // they had read that half.
  __device__ __forceinline__ Vector16* window(int of_rank, int source) const {
    const int half = epoch & 1;  // mutate: one-half-for-all-epochs
    return reinterpret_cast<Vector16*>(peers.windows[of_rank]) +
           (half * peers.num_ranks + source) * peers.source_words;
  }

  // The ranks behind this one, so that not all write to the same one first.
  __device__ __forceinline__ int behind(int distance) const {
    const int found = peers.rank + distance;
    return found < peers.num_ranks ? found : found - peers.num_ranks;
  }

  // Peers in the order of ranks.
  __device__ __forceinline__ int peer(int index) const { return index + (index >= peers.rank); }

  __device__ __forceinline__ void send(const Vector16 (&v)[kSentVectors], Vector16* words,
                                       int step) const {
    const auto word = [&](int i) { return v[i / 4].word[i % 4]; };
#pragma unroll
    for (int w = 0; w < kSentWords; ++w) {
      ptx::store_whole(words + w * step,
                       tagged(word(3 * w), word(3 * w + 1), word(3 * w + 2), epoch));
    }
  }

  static __device__ __forceinline__ SentWords load(const Vector16* words, int step) {
    SentWords sent;
#pragma unroll
    for (int w = 0; w < kSentWords; ++w) sent.word[w] = ptx::load_whole(words + w * step);
    return sent;
  }

  // The last block that has read the epoch raises it for the next launch. The barrier also says that
  // all of a block's words are on their way before one of its threads waits.
  __device__ __forceinline__ void raise_epoch() const {
    ptx::block_sync();
    if (threadIdx.x != 0) return;
    const uint32_t last = gridDim.x - 1;
    if (ptx::atomic_inc_wrap(&peers.control->arrivals, last) == last) {
      // 0 is what windows hold at first.
      peers.control->epoch = epoch == 0xffffffffu ? 2 : epoch + 1;  // mutate: epoch-stays
    }
  }

  // Asks `missing()` for a rank whose words are not here until it answers -1. False if one is late.
  template <typename Missing>
  __device__ __forceinline__ bool await(Missing&& missing) {
    for (int polls = 1;; ++polls) {
      const int source = missing();
      if (source < 0) return true;
      if (is_failed) return false;
      if (polls % kPollsBetweenLooks == 0 && is_late()) {
        fail(source);
        return false;
      }
    }
  }

  // Whether the time is over in which peers may come. It begins with the first wait of a launch.
  __device__ __forceinline__ bool is_late() {
    const uint64_t now = ptx::global_timer();
    if (deadline == 0) deadline = now + peers.limit_ns;
    return now > deadline;
  }

  __device__ __forceinline__ void fail(int source) {
    is_failed = true;
    const uint32_t num_failed = ptx::atomic_inc_wrap(&peers.control->num_failed, 0xfffffffeu);
    if (num_failed == 0) ptx::store_system(peers.status, source + 1);  // mutate: lateness-untold
  }
};

}  // namespace cupyattn
