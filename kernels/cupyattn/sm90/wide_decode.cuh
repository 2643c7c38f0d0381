// Latent attention of few rows of queries, on Hopper: starts the roles of a block. Keys are the
// rows of products and queries their columns, so 16 or 32 rows of queries do not pay for the 64 rows
// of wide_sm90, and one warpgroup holds all of O. Where 16 rows have fp8 keys, two warpgroups do, each
// for every other tile.
#pragma once

#include "cupyattn/sm90/wide/merge.cuh"
#include "cupyattn/sm90/wide/set_up.cuh"
#include "cupyattn/sm90/wide/tma_producer.cuh"
#include "cupyattn/sm90/wide_decode/consumer.cuh"

namespace cupyattn {

template <typename Config>
struct WideDecodeSm90 : WideSm90SetUp<WideDecodeSm90<Config>, WideDecodeSm90Traits<Config>> {
  using Traits = WideDecodeSm90Traits<Config>;
  using SetUp = WideSm90SetUp<WideDecodeSm90, Traits>;
  using typename SetUp::Params;
  using typename SetUp::SharedMemory;

  static __device__ __forceinline__ void run(const Params& params, SharedMemory& shared) {
    // A variable whose address is taken, as in prefill_sm90.
    const WideSm90Block<Traits> block(params, shared);
    if (ptx::warp_uniform(threadIdx.x / kWarpSize) == 0) block.await_item();
    SetUp::begin(params, shared);
    if (shared.items[0].work.tile.num_rows <= 0) return;
    const int warpgroup = ptx::warp_uniform(threadIdx.x / Traits::kWarpgroup);
    if (warpgroup == 0) {
      if constexpr (Traits::kTma) {
        WideSm90TmaProducer<Traits>(block).run();
      } else {
        WideSm90Producer<Traits>(block).run();
      }
    } else {
      WideDecodeSm90Consumer<Traits>(block, warpgroup - 1).run();
    }
    if (Traits::kConsumers == 1 || warpgroup > 0) WideMergeSm90<Traits>(block).run();
  }

  // The items, queries and stages of all kernels of wide heads are all it has.
  static __device__ __forceinline__ void init_own_barriers(SharedMemory&) {}
};

}  // namespace cupyattn
