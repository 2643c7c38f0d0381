// A token's list of keys: which keys of its request the token attends to, in place of a range. The
// kernel counts keys as the list has them: key i is key i % block of the block that entry i / block
// names. The last keys of the request may follow those of the list, as its window.
#pragma once

#include "cupyattn/params/key_lists.cuh"
#include "cupyattn/shared/key_rows.cuh"
#include "cupyattn/shared/token_place.cuh"

namespace cupyattn {

// Whether keys of ordinary heads come in lists. Few kernels say so.
template <typename Config, typename = void>
struct HasKeyLists {
  enum : bool { kValue = false };
};
template <typename Config>
struct HasKeyLists<Config, typename AnyValue<Config::kSparse>::type> {
  enum : bool { kValue = Config::kSparse };
};

struct TokenList {
  const int32_t* entries;
  int num_listed;   // keys of the list
  int block_shift;
  int num_blocks;   // of the request
  int listed_end;   // keys from here on are the window's, or the token does not see them
  int end;          // keys that the token sees

  static __device__ __forceinline__ TokenList of(const KeyLists& lists, const Request& request,
                                                 int kv_head) {
    const int end = request.kv_len;
    const int block = 1 << lists.block_shift;
    return TokenList{
        lists.entries + request.q_start * lists.stride_n + kv_head * lists.stride_group,
        lists.length << lists.block_shift, lists.block_shift, (end + block - 1) >> lists.block_shift,
        max_of(end - lists.window, 0), end};  // mutate: window-keys-twice
  }

  // The entry of key `index`; -1 where it is none of the list's.
  __device__ __forceinline__ int entry(int index) const {
    return index < num_listed ? entries[index >> block_shift] : -1;
  }

  // The place in the request of key `index`, whose entry this is; negative for no key.
  __device__ __forceinline__ int key(int index, int entry) const {
    if (index >= num_listed) {
      const int key = listed_end + index - num_listed;
      return key < end ? key : -1;
    }
    const int offset = index & ((1 << block_shift) - 1);
    // mutate: entries-beyond-the-request
    if (static_cast<uint32_t>(entry) >= static_cast<uint32_t>(num_blocks)) return -1;
    const int key = (entry << block_shift) + offset;
    return key < listed_end ? key : -1;  // mutate: last-block-not-cut
  }
};

// The work of a block of a grid that has all tokens' tiles of rows; none past the last token.
__device__ __forceinline__ BlockWork listed_work(const ListedAttentionParams& all, int kv_head,
                                                 int tile_rows) {
  const AttentionParams& params = all.attention;
  const KeyLists& lists = all.lists;
  const int place = params.first_q_tile + static_cast<int>(blockIdx.y);
  BlockWork work =
      BlockWork::of_equal(params, place, kv_head, static_cast<int>(blockIdx.z), tile_rows, 0);
  // Ahead of all else, since most blocks of such a launch end here.
  if (lists.alone != nullptr) {
    const int group = lists.alone_groups > 1 ? kv_head : 0;  // mutate: alone-as-the-first-head
    const int64_t own = static_cast<int64_t>(work.request.q_start) * lists.alone_groups + group;
    if (lists.alone[own] == 0) {
      work.tile.num_rows = 0;
      return work;
    }
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const TokenPlace at = TokenPlace::of(lists, work.request.q_start, lane, lists.steps.qo_offsets);
  if (at.rest == 0) work.tile.num_rows = 0;
  const int32_t* kv_lens = lists.kv_lens + at.request * lists.steps.kv_lens;
  int kv_len = kv_lens[0];
  if (lists.kv_lens_are_steps) kv_len = kv_lens[lists.steps.kv_lens] - kv_len;
  kv_len = min_of(kv_len, lists.max_kv_len);
  // mutate: drafts-see-the-future
  if (lists.is_causal) kv_len -= at.rest - 1;
  // No shuffle waits for these: entries of the list are asked for meanwhile.
  work.request.kv_len = max_of(kv_len, 0);
  work.request.kv_start = lists.kv_offsets == nullptr ? at.request * lists.kv_step
                                                      : lists.kv_offsets[at.request * lists.steps.kv_offsets];
  work.request.mask_start = at.request;  // mutate: listed-scales-of-tokens
  return work;
}

}  // namespace cupyattn
