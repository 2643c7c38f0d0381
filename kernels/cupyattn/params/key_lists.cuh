// The argument of decode_sm80 where each token has lists of its keys: the one of all attention
// kernels, and the lists. launch/attention/key_lists.py packs it.
#pragma once

#include "cupyattn/params/attention.cuh"

namespace cupyattn {

// Lengths and offsets may lie apart, or have 64 bits, whose low words are read: words of 32 bits from
// each to the next.
struct LengthSteps {
  int32_t kv_lens, qo_offsets, kv_offsets;
};

// Each token is a request of its own to the kernel. Its list has numbers of blocks of the keys of
// the caller's request that the token belongs to. AttentionParams::kv_len is the keys of a list, and
// those of the window behind them.
struct KeyLists {
  const int32_t* entries;     // [tokens, groups, length]; a number of no block is no key
  const int32_t* kv_lens;     // [num_requests] keys
  const int32_t* qo_offsets;  // [num_requests + 1] first tokens; nullptr: request_tokens each
  const int32_t* kv_offsets;  // [num_requests] first entries of kv_indices, or first rows of keys
                              // where there are no pages; nullptr: steps of kv_step
  int64_t stride_n, stride_group;  // from a token's list to the next one's, and from a group's
  int32_t length;
  int32_t block_shift;     // a block has 1 << block_shift keys
  int32_t window;          // so many last keys that a token sees come besides those of its list
  int32_t num_requests;
  int32_t request_tokens;
  int32_t kv_step;
  int32_t max_kv_len;      // keys a request has room for
  int32_t is_causal;       // 1: a token sees no key behind its own
  int32_t heads_a_key;     // heads that share a key head and have lists of their own
  uint32_t heads_magic;    // divides by that, see shared/work.cuh
  int32_t heads_shift;
  int32_t kv_lens_are_steps;  // 1: kv_lens are offsets [num_requests + 1], whose steps count
  LengthSteps steps;
  // From a scale of a key head to the next one's, 0 if all share one; and of values from a request's
  // to the next one's. AttentionParams has those of keys, but none of values: merges take no lists.
  int32_t k_scale_step, v_scale_step, v_scale_request_step;
  const float* value_scales;  // [num_requests, key heads], in these steps; nullptr: 1
  // Lists that unions serve are not read: [tokens, alone_groups], 0 for these. nullptr: all are read.
  const int32_t* alone;
  int32_t alone_groups;
  int32_t unused;
};

struct ListedAttentionParams {
  AttentionParams attention;
  KeyLists lists;
};

static_assert(sizeof(KeyLists) == 144 &&
                  sizeof(ListedAttentionParams) == sizeof(AttentionParams) + sizeof(KeyLists),
              "KeyLists and its mirror in launch/driver/params.py must agree");

}  // namespace cupyattn
