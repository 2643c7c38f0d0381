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

struct PrefillSm90Params {
  AttentionParams attention;
  int32_t num_items;          // tiles times splits, or the length of the work list
  int32_t heads_per_section;  // KV heads whose items come one after another, as L2 likes
  int32_t box_rows;           // keys that one tensor copy brings
  int32_t query_box_rows;     // rows of Q that one copy brings: those of a warpgroup, a tile, or none
  PageUnits k_units, v_units;
  int32_t output_box_rows;  // the same of O
  // [rows, num_qo_heads, head_dim]
  alignas(64) TensorMap q;
  // [num_kv_heads, rows, head_dim]; of pages: [pages and heads, page_size / 8, head_dim / 64, 8,
  // 64]
  TensorMap k, v;
  // As q.
  TensorMap o;
};

static_assert(sizeof(PrefillSm90Params) == 896 + 512,
              "PrefillSm90Params and its mirror in launch/params.py must agree");

}  // namespace cupyattn
