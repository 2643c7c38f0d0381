// Which keys of a sequence this rank holds, where several GPUs share the keys of every request: tokens
// go round the ranks in runs. Lengths and indices of keys are the rank's own; positions are those in
// the whole sequence. core/key_share.py has the same arithmetic. A Config that has kKeyShare serves
// such requests; kernels of others have no code of it.
#pragma once

#include "cupyattn/shared/work.cuh"

namespace cupyattn {

template <bool>
struct AnyValue {
  using type = void;
};
// An enumerator, because constants of other kinds would be data of every kernel.
template <typename Config, typename = void>
struct HasKeyShare {
  enum : bool { kValue = false };
};
template <typename Config>
struct HasKeyShare<Config, typename AnyValue<Config::kKeyShare>::type> {
  enum : bool { kValue = Config::kKeyShare };
};

// The numbers take the place of those of user-written logits (launch/driver/params.py).
struct KeyShare {
  const uint32_t (&numbers)[kMaxLogitsNumbers];

  static __device__ __forceinline__ KeyShare of(const AttentionParams& params) {
    return KeyShare{params.logits_numbers};
  }
  __device__ __forceinline__ int run() const { return static_cast<int>(numbers[0]); }
  __device__ __forceinline__ int period() const { return static_cast<int>(numbers[1]); }
  __device__ __forceinline__ int first() const { return static_cast<int>(numbers[2]); }

  // How many of the first `tokens` tokens this rank holds.
  __device__ __forceinline__ int count(int tokens) const {
    const int whole = max_of(tokens, 0);
    const int periods = divide(whole, numbers[3], static_cast<int>(numbers[4]));
    const int rest = whole - periods * period();
    // mutate: key-share-counts-others
    return periods * run() + min_of(max_of(rest - first(), 0), run());
  }

  // The place in the whole sequence of this rank's key `index`.
  __device__ __forceinline__ int position(int index) const {
    const int runs = divide(index, numbers[5], static_cast<int>(numbers[6]));
    return index + runs * (period() - run()) + first();  // mutate: key-share-starts-at-zero
  }
};

}  // namespace cupyattn
