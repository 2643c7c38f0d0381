// The keys, index rows and blocks that a token of a selection sees.
#pragma once

#include "cupyattn/params/select.cuh"
#include "cupyattn/shared/token_place.cuh"

namespace cupyattn {

// The keys of a request.
__device__ __forceinline__ int select_kv_len(const SelectTokens& tokens, int request) {
  if (tokens.kv_lens_are_steps) {
    const int rows = tokens.kv_lens[request + 1] - tokens.kv_lens[request];
    return min_of(max_of(rows, 0), tokens.max_kv_len >> tokens.ratio_shift) << tokens.ratio_shift;
  }
  return min_of(max_of(tokens.kv_lens[request], 0), tokens.max_kv_len);
}

// seen: keys. rows: whole index rows of them. blocks: the last of them may be cut. All are 0 for a
// token of no request.
struct SelectedToken {
  int request, seen, rows, blocks;

  // Finds what a token of the launch sees; a whole warp calls this.
  static __device__ __forceinline__ SelectedToken of(const SelectTokens& tokens, int token,
                                                     int lane) {
    const TokenPlace at = TokenPlace::of(tokens, tokens.first_token + token, lane);
    int seen = 0;
    if (at.rest > 0) {
      seen = select_kv_len(tokens, at.request);
      // mutate: selection-sees-the-future
      if (tokens.is_causal) seen = max_of(seen - (at.rest - 1), 0);
    }
    const int rows = seen >> tokens.ratio_shift;
    const int block = 1 << tokens.block_shift;
    return SelectedToken{at.request, seen, rows, (rows + block - 1) >> tokens.block_shift};
  }
};

}  // namespace cupyattn
