// Scales of blocks of tokens beside 8-bit queries, keys and values. Those of queries are factors of
// rows of logits; keys and values are multiplied by theirs where they are converted to f16. Block b
// of a request has the tokens from b << shift on.
#pragma once

#include "cupyattn/shared/key_rows.cuh"

namespace cupyattn {

// An enumerator, as of HasKeyShare.
template <bool>
struct AnyFlag {
  using type = void;
};
template <typename Config, typename = void>
struct HasBlockScales {
  enum : bool { kValue = false };
};
template <typename Config>
struct HasBlockScales<Config, typename AnyFlag<Config::kBlockScales>::type> {
  enum : bool { kValue = Config::kBlockScales };
};

// Where scales lie: [blocks, heads], or pages [pages, blocks of a page, heads]. They take the places
// of arrays of user-written logits, as launch/driver/params.py says.
struct BlockScales {
  enum Place { kQueries, kKeys, kValues };

  const float* data;  // nullptr: all are 1
  int stride_block, stride_head, stride_page, shift;

  static __device__ __forceinline__ BlockScales of(const AttentionParams& params, Place place) {
    const LogitsArray& array = params.logits_arrays[place];
    return BlockScales{static_cast<const float*>(array.data), array.extent[0], array.extent[1],
                       array.extent[2], array.extent[3]};
  }

  // The scale of a token of a request whose rows begin at `start`. Blocks of a request have places
  // of their own: none is shared with the next one's.
  __device__ __forceinline__ float of_row(const Request& request, int start, int token,
                                          int head) const {
    if (data == nullptr) return 1.0f;
    // mutate: block-scales-of-first-request
    const int64_t block = (start >> shift) + request.mask_start + (token >> shift);
    return data[block * stride_block + head * stride_head];
  }

  template <bool kPaged>
  __device__ __forceinline__ float of_key(const AttentionParams& params, const Request& request,
                                          int key, int head) const {
    if constexpr (!kPaged) {
      return of_row(request, request.kv_start, key, head);
    } else {
      if (data == nullptr) return 1.0f;
      const PageSlot place = PageSlot::of(params, key);
      const int64_t page = params.kv_indices[request.kv_start + place.page];
      // mutate: block-scale-of-the-page
      return data[page * stride_page + (place.slot >> shift) * stride_block + head * stride_head];
    }
  }
};

}  // namespace cupyattn
