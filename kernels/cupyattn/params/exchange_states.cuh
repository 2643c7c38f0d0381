// The argument of the exchange_states kernel. launch/driver/params.py mirrors it.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

// Ranks whose memory is written directly: those of one host.
constexpr int kMaxRanks = 32;

// What launches leave for the next ones, in the memory of a rank's own GPU.
struct ExchangeControl {
  uint32_t epoch;       // number of the exchange that comes next, from 1 on
  uint32_t arrivals;    // blocks of this launch that have read the epoch
  uint32_t num_failed;  // threads that found a peer late: from then on nobody is waited for
  uint32_t padding;
};

// The states of all heads over this rank's keys become those of its own heads over all keys: rank r
// owns heads [r * own_heads, (r + 1) * own_heads). A state is a row of a head; states of an owner
// are counted row by row, and sent three at a time.
struct ExchangeStatesParams {
  const void* o;             // [rows, num_ranks * own_heads, head_dim] of Config::DType
  const float* lse;          // [rows, num_ranks * own_heads]
  void* out;                 // [rows, own_heads, head_dim] of Config::DTypeO
  float* out_lse;            // [rows, own_heads]; may be nullptr
  ExchangeControl* control;  // of this rank
  int32_t* status;           // on the host: 0, or 1 + a rank whose states did not come in time
  int64_t limit_ns;          // how long a peer is waited for
  int64_t source_words;      // words of a window that one rank writes in an exchange
  int64_t lse_words;         // where LSE lie among these
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
  int32_t rank;
  int32_t num_ranks;
  float to_base2;  // LSE times this is in base 2
  float from_base2;
  uint64_t windows[kMaxRanks];  // where this rank writes into the window of each
};

static_assert(sizeof(ExchangeStatesParams) == 424,
              "ExchangeStatesParams and its mirror in launch/driver/params.py must agree");

}  // namespace cupyattn
