// The argument of prefill_sm90: that of all attention kernels, and what only this one needs.
#pragma once

#include "cupyattn/params/attention.cuh"
#include "cupyattn/params/tensor_map.cuh"

namespace cupyattn {

// How far it is from a page to the next, and from a head to the next, along the last dimension of a
// map of pages, or that of heads. Where rows are gathered: from a
// page, and from a row of one head, to the next, in units of so many bytes.
struct PageUnits {
  int32_t page, head, row;
  uint32_t bytes;
};

// Tiles of keys that a custom mask leaves of an item, a bit each, from the first that it reaches.
struct MaskMap {
  static constexpr int kCapacity = 2048;
  uint32_t any[kCapacity / 32];    // some row sees some key
  uint32_t mixed[kCapacity / 32];  // some row does not see some key
};

struct PrefillSm90Params {
  AttentionParams attention;
  int32_t num_items;          // tiles times splits, or the length of the work list
  int32_t heads_per_section;  // KV heads whose items come one after another, as L2 likes
  int32_t box_rows;           // keys that one tensor copy brings
  int32_t query_box_rows;  // rows of Q that one copy brings: those of a warpgroup, a tile, or none
  PageUnits k_units, v_units;
  int32_t output_box_rows;  // the same of O
  int32_t num_last;         // items at the end that come after those of all sections
  MaskMap* mask_maps;       // of each item, where there is a custom mask
  // [rows, num_qo_heads, head_dim]
  alignas(64) TensorMap q;
  // [num_kv_heads, rows, head_dim]; of pages: [pages and heads, page_size / 8, head_dim / 64, 8,
  // 64]
  TensorMap k, v;
  // As q.
  TensorMap o;
};

static_assert(sizeof(PrefillSm90Params) == 960 + 512,
              "PrefillSm90Params and its mirror in launch/params.py must agree");

}  // namespace cupyattn
