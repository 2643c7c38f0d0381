// Latent attention of few rows of queries, on Hopper: starts the roles of a block. Keys are the
// rows of products and queries their columns, so 16 or 32 rows of queries do not pay for the 64 rows
// of wide_sm90, and one warpgroup holds all of O. Where 16 rows have fp8 keys, two warpgroups do, each
// for every other tile.
#pragma once

#include "cupyattn/sm90/wide/merge.cuh"
#include "cupyattn/sm90/wide/tma_producer.cuh"
#include "cupyattn/sm90/wide_decode/consumer.cuh"

namespace cupyattn {

template <typename Config>
struct WideDecodeSm90 {
  using Traits = WideDecodeSm90Traits<Config>;
  using SharedMemory = typename Traits::SharedMemory;
  using Params = typename Traits::Params;
  static constexpr int kThreads = Traits::kThreads;

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles/wide_decode_sm90.py) must agree");

  static __device__ __forceinline__ void run(const Params& params, SharedMemory& shared) {
    const WideSm90Block<Traits> block(params, shared);
    const int warp = ptx::warp_uniform(threadIdx.x / kWarpSize);
    if (warp == 0) block.await_item();
    if (threadIdx.x == kWarpSize) {
      init_barriers(shared);
      if constexpr (Traits::kTma) {
        ptx::prefetch_tensor_map(params.k);
        ptx::prefetch_tensor_map(params.k_rope);
      }
    }
    ptx::block_sync();
    // A merge reads the work list too, so it begins no sooner.
    ptx::launch_dependents();
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

  static __device__ __forceinline__ void init_barriers(SharedMemory& shared) {
    const auto init = [](uint64_t& barrier, int count) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), count);
    };
    init(shared.full_q, Traits::kWarpgroup);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      for (int piece = 0; piece < Traits::kPieces; ++piece) {
        const bool is_marked = piece == Traits::kOfFollower;
        init(shared.full[stage][piece], Traits::kArrivals + (is_marked ? Traits::kMarkers : 0));
        init(shared.empty[stage][piece], 4);
      }
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace cupyattn
