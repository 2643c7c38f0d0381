// Attention whose O is too wide for one warpgroup, on Hopper: starts the roles of a block. Three
// warpgroups: a producer, or two that gather keys and convert them, and two consumers that hold
// half of the columns of O each. Multi-head latent attention (absorbed) is grouped-query attention
// with one key head whose values are the first columns of its keys, so a tile of keys is read once
// for both products.
#pragma once

#include "cupyattn/sm90/wide/consumer.cuh"
#include "cupyattn/sm90/wide/converter.cuh"
#include "cupyattn/sm90/wide/merge.cuh"

namespace cupyattn {

template <typename Config>
struct WideSm90 {
  using Traits = WideSm90Traits<Config>;
  using SharedMemory = typename Traits::SharedMemory;
  using Params = typename Traits::Params;
  static constexpr int kThreads = Traits::kThreads;

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles/wide_sm90.py) must agree");

  static __device__ __forceinline__ void run(const Params& params, SharedMemory& shared) {
    // Variables whose address is taken, as in prefill_sm90.
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
    if (warpgroup < Traits::kProducers) {
      ptx::set_max_registers_down<Traits::kProducerRegisters>();
      if constexpr (Traits::kLands) {
        WideSm90TmaConverter<Traits>(block).run();
      } else if constexpr (Traits::kTma) {
        WideSm90TmaProducer<Traits>(block).run();
      } else if constexpr (Traits::kConverts) {
        WideSm90Converter<Traits>(block, warpgroup).run();
      } else {
        WideSm90Producer<Traits>(block).run();
      }
    } else {
      ptx::set_max_registers_up<Traits::kConsumerRegisters>();
      if (warpgroup == Traits::kProducers) {
        WideSm90Leader<Traits>(block).run();
      } else {
        WideSm90Follower<Traits>(block).run();
      }
      if constexpr (Traits::kFusedSplits > 0) WideMergeSm90<Traits>(block).run();
    }
  }

  static __device__ __forceinline__ void init_barriers(SharedMemory& shared) {
    const auto init = [](uint64_t& barrier, int count) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), count);
    };
    init(shared.full_q, Traits::kWarpgroup);
    init(shared.full_p, 4);
    init(shared.empty_p, 4);
    init(shared.full_normalisers, 4);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      for (int piece = 0; piece < Traits::kPieces; ++piece) {
        const bool is_marked = piece == Traits::kOfFollower;
        init(shared.full[stage][piece], Traits::kArrivals + (is_marked ? Traits::kMarkers : 0));
        init(shared.empty[stage][piece], 4);
        if constexpr (Traits::kLands) init(shared.landed[stage][piece], 1);
      }
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace cupyattn
