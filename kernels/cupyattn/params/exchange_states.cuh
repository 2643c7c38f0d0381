// The argument of the exchange_states kernel. launch/driver/params.py mirrors it.
#pragma once

#include "cupyattn/params/peer_windows.cuh"

namespace cupyattn {

// The states of all heads over this rank's keys become those of its own heads over all keys: rank r
// owns heads [r * own_heads, (r + 1) * own_heads). A state is a row of a head; states of an owner
// are counted row by row, and sent three at a time.
struct ExchangeStatesParams {
  const void* o;             // [rows, num_ranks * own_heads, head_dim] of Config::DType
  const float* lse;          // [rows, num_ranks * own_heads]
  void* out;                 // [rows, own_heads, head_dim] of Config::DTypeO
  float* out_lse;            // [rows, own_heads]; may be nullptr
  int64_t lse_words;         // where LSE lie among the words of a source
  int64_t o_stride_n;
  int64_t o_stride_h;
  int64_t lse_stride_n;
  int64_t lse_stride_h;
  int64_t out_stride_n;
  int64_t out_stride_h;
  int64_t out_lse_stride_n;
  int64_t out_lse_stride_h;
  int32_t num_states;  // rows * own_heads
  int32_t own_heads;
  uint32_t heads_magic;  // i / own_heads is the high half of 2 i * heads_magic, >> heads_shift
  int32_t heads_shift;
  float to_base2;  // LSE times this is in base 2
  float from_base2;
  PeerWindows peers;
};

static_assert(sizeof(ExchangeStatesParams) == 424,
              "ExchangeStatesParams and its mirror in launch/driver/params.py must agree");

}  // namespace cupyattn
