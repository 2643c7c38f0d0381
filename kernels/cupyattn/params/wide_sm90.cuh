// The argument of wide_sm90 where the copy engine brings latent keys: tensor maps besides.
#pragma once

#include "cupyattn/params/latent.cuh"

namespace cupyattn {

struct WideSm90Params {
  LatentParams latent;
  // [pages, page_size, columns] of the two parts of keys, copied in boxes of 64 columns.
  alignas(64) TensorMap k, k_rope;
  int32_t box_rows;    // keys of one copy: 8, 16, 32 or 64
  int32_t box_shift;   // 64 >> box_shift is box_rows
  int32_t unused[14];  // 0
};

static_assert(sizeof(WideSm90Params) == (sizeof(LatentParams) + 63) / 64 * 64 + 256 + 64,
              "WideSm90Params and its mirror in launch/attention/tma_wide.py must agree");

}  // namespace cupyattn
