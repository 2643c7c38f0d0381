// Which request a token belongs to, where tokens of requests follow one another.
#pragma once

#include "cupyattn/common/math.cuh"
#include "cupyattn/ptx/warp.cuh"

namespace cupyattn {

// The request of a token, and the token's place in it; a whole warp calls this. `rest` counts the
// tokens from this one to the last, 0 for a token of no request.
struct TokenPlace {
  int request, rest;

  // lists: has qo_offsets [num_requests + 1], which may be nullptr: request_tokens each;
  // offset_step: words from one to the next.
  template <typename Lists>
  static __device__ __forceinline__ TokenPlace of(const Lists& lists, int token, int lane,
                                                  int offset_step = 1) {
    if (lists.qo_offsets == nullptr) {
      const int request = lists.request_tokens == 1 ? token : token / lists.request_tokens;
      return TokenPlace{request, (request + 1) * lists.request_tokens - token};
    }
    // The last request that begins at this token or before, of which 32 are looked at at a time.
    int first = 0, step = lists.num_requests;
#pragma unroll 1
    while (step > 1) {
      step = ceil_div(step, kWarpSize);
      const int index = first + lane * step;
      const bool begins = index < lists.num_requests && lists.qo_offsets[index * offset_step] <= token;
      first += step * (max_of(__popc(ptx::warp_ballot(begins)), 1) - 1);
    }
    // mutate: padded-tokens-attend
    return TokenPlace{first, max_of(lists.qo_offsets[(first + 1) * offset_step] - token, 0)};
  }
};

}  // namespace cupyattn
