// Unions of the lists of neighbouring tokens, which prefill_sm90 attends by: what the launch that
// makes them is told, and what it leaves. launch/attention/key_unions.py packs both.
#pragma once

#include "cupyattn/params/device_lengths.cuh"
#include "cupyattn/params/key_lists.cuh"

namespace cupyattn {

// Keys of which all tokens of an item see the same part of a list: half a tile of keys.
enum : int { kUnionKeys = 64 };

// A tile of keys of a union, in two halves.
struct alignas(16) UnionTile {
  uint32_t tokens[2];    // a bit for each token of the item whose list names the half's block
  int32_t first_key[2];  // the half's first key in the request
};

// The same where tiles have windows, or keys that are in no pages.
struct alignas(16) CutUnionTile : UnionTile {
  // From where on in the request the half's keys count. Its complement, which is negative: they are
  // keys of windows.
  int32_t begin[2];
  int32_t unused[2];
};

// A tile of a union of small blocks, in units of kUnitKeys keys, each of which has one block.
enum : int { kUnitKeys = 4, kMaxUnits = 32 };
struct alignas(16) SmallUnionTile {
  uint32_t units[32];            // of each token of the item: a bit for each unit that its list names
  int32_t first_key[kMaxUnits];  // the unit's first key in the request
};

struct UnionListsParams {
  const int32_t* entries;  // [tokens, groups, length]
  const int32_t* table;    // [num_requests, kv_step] pages; nullptr: a request's keys are rows, one
                           // behind the other
  WorkItem* items;         // [items, groups], see `item_of` in plan/union_lists.cuh
  int32_t* chunks;         // [items, groups, group_tokens * length * chunks_a_block]
  void* tiles;             // [items, groups, tiles], UnionTile, CutUnionTile or SmallUnionTile
  int64_t stride_n, stride_group;  // from a token's list to the next one's, and from a group's
  int32_t length, block_shift;     // a block has 1 << block_shift keys
  int32_t group_tokens;            // of an item
  int32_t num_tiles;               // room for tiles of an item
  int32_t page_size, chunk_shift;  // a chunk has 1 << chunk_shift keys, of a block and of a page
  int32_t page_step;               // chunks from a page to the next one
  int32_t is_causal;
  LengthSteps steps;
  int32_t window;         // so many last keys that a token sees come besides those of its list
  int32_t window_blocks;  // that a window may reach into
  // Rows of keys, where chunks may begin at any: chunks past the last that is whole begin with it.
  // 0: chunks are those of pages.
  int32_t num_rows;
  uint32_t tokens_of[2];  // tokens that have rows in each half of a tile's rows
  // What a block of a union takes, and an entry of a list that is read by itself, if that may be less.
  int32_t block_cost, entry_cost;
  int32_t* alone;  // [tokens, groups] 1: lists that are read by themselves, since their tokens' union
                   // would take longer; nullptr: there are none
  DeviceLengths lengths;  // tokens are its rows
};

static_assert(sizeof(UnionListsParams) == 136 + 80,
              "UnionListsParams and its mirror in launch/driver/params.py must agree");

// What prefill_sm90 is told of unions.
struct KeyUnions {
  const void* tiles;
  int32_t groups;  // 1: all heads have one list; else each key head has its own
  int32_t window;  // as in UnionListsParams
};

}  // namespace cupyattn
