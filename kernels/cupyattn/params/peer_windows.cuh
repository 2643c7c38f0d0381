// What kernels that exchange with peers know of these. launch/driver/params.py mirrors it.
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

struct PeerWindows {
  ExchangeControl* control;  // of this rank
  int32_t* status;           // on the host: 0, or 1 + a rank that did not come in time
  int64_t limit_ns;          // how long a peer is waited for
  int64_t source_words;      // words of a window that one rank writes in an exchange
  int32_t rank;
  int32_t num_ranks;
  uint64_t windows[kMaxRanks];  // where this rank writes into the window of each
};

}  // namespace cupyattn
