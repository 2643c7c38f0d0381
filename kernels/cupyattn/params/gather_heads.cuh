// The argument of the gather_heads kernel. launch/driver/params.py mirrors it.
#pragma once

#include "cupyattn/params/peer_windows.cuh"

namespace cupyattn {

// Heads of each rank become those of all ranks: rank r has heads [r * own_heads, (r + 1) *
// own_heads). A row of a head is whole vectors of 16 bytes, in which strides count.
struct GatherHeadsParams {
  const Vector16* x;  // [rows, own_heads]
  Vector16* out;      // [rows, num_ranks * own_heads]
  int64_t x_stride_n;
  int64_t x_stride_h;
  int64_t out_stride_n;
  int64_t out_stride_h;
  int32_t num_states;  // rows * own_heads
  int32_t own_heads;
  uint32_t heads_magic;  // i / own_heads is the high half of 2 i * heads_magic, >> heads_shift
  int32_t heads_shift;
  PeerWindows peers;
};

static_assert(sizeof(GatherHeadsParams) == 360,
              "GatherHeadsParams and its mirror in launch/driver/params.py must agree");

}  // namespace cupyattn
