// Makes lists of blocks of requests lists of slots of a cache, ahead of latent attention by lists.
#include "cupyattn/select/slots.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  static constexpr int kThreads = 256;
};
#endif

// Grid: blocks of places × tokens.
extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_list_slots(const __grid_constant__ cupyattn::ListSlotsParams params) {
  cupyattn::list_slots<Config>(params);
}
