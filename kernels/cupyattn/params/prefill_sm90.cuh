// The argument of prefill_sm90: the one of all attention kernels, and what only this one needs.
#pragma once

#include "cupyattn/params/key_unions.cuh"

namespace cupyattn {

// Steps from page to page, head to head and row to row of K or V. TMA KV counts pages and heads
// along one dimension of the tensor map; cp.async KV counts pages and rows in units of `bytes`.
struct PageUnits {
  int32_t page, head, row;
  uint32_t bytes;
};

// What a custom mask leaves of the key tiles of an item: a bit for each tile, from the first tile
// that the mask reaches.
struct MaskMap {
  static constexpr int kCapacity = 2048;
  uint32_t any[kCapacity / 32];    // some row sees some key
  uint32_t mixed[kCapacity / 32];  // it hides some key from some row
};

struct PrefillSm90Params {
  AttentionParams attention;
  int32_t num_items;          // tiles times splits, or the length of the work list
  int32_t heads_per_swizzle;  // KV heads whose items run together, so that L2 holds their keys
  int32_t box_rows;           // keys of one tensor copy
  int32_t query_box_rows;     // rows of Q of one tensor copy: a warpgroup's, a tile's, or 0
  PageUnits k_units, v_units;
  int32_t output_box_rows;  // rows of O of one tensor copy, likewise
  int32_t num_tail_items;   // the last items, which run after the swizzled ones of all heads
  MaskMap* mask_maps;       // [num_items], if there is a custom mask
  // What a box is of the map's second outer dimension: tokens, or packed rows, which lie one after
  // another where one KV head has all heads of a token.
  int32_t query_box_step, output_box_step;
  // Lean blocks of one item: in launches of fewer blocks than so many, all warps of a block copy.
  uint32_t many_blocks;
  // [rows, num_qo_heads, head_dim], or [packed rows, 1, head_dim]
  alignas(64) TensorMap q;
  // [num_kv_heads, rows, head_dim]; pages: [pages and heads, page_size / 8, head_dim / 64, 8, 64]
  TensorMap k, v;
  // as q
  TensorMap o;
  // k and v in boxes of the columns that the last panel has, if those are not all
  TensorMap k_tail, v_tail;
  FoundItems found;  // where blocks find their items

  // What lies in its place where items have unions of lists for keys.
  __device__ __forceinline__ const KeyUnions& unions() const {
    return reinterpret_cast<const KeyUnions&>(found);
  }
};

static_assert(sizeof(PrefillSm90Params) == 1088 + 768 + 192,
              "PrefillSm90Params and its mirror in launch/driver/params.py must agree");

}  // namespace cupyattn
