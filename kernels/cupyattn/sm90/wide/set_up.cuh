// How the blocks of wide_sm90 and of wide_decode_sm90 begin: constants, barriers and tensor maps. The
// warpgroups then part into roles, which are the kernel's own.
#pragma once

#include "cupyattn/sm90/wide/traits.cuh"

namespace cupyattn {

// Kernel: the struct that derives from this one. Its init_own_barriers(shared) makes those that only
// its roles have.
template <typename Kernel, typename KernelTraits>
struct WideSm90SetUp {
  using Traits = KernelTraits;
  using SharedMemory = typename Traits::SharedMemory;
  using Params = typename Traits::Params;
  static constexpr int kThreads = Traits::kThreads;

  static_assert(sizeof(SharedMemory) == Traits::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles/wide_sm90.py and "
                "launch/tiles/wide_decode_sm90.py) must agree");

  // Follows the search for the block's item, by its first warp; afterwards all warps may read it.
  static __device__ __forceinline__ void begin(const Params& params, SharedMemory& shared) {
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
  }

  static __device__ __forceinline__ void init_barriers(SharedMemory& shared) {
    init_barrier(shared.full_q, Traits::kWarpgroup);
    Kernel::init_own_barriers(shared);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      for (int piece = 0; piece < Traits::kPieces; ++piece) {
        const bool is_marked = piece == Traits::kOfFollower;
        init_barrier(shared.full[stage][piece],
                     Traits::kArrivals + (is_marked ? Traits::kMarkers : 0));
        // The first half reads P of the second.
        const bool holds_p = Traits::kAlternates && stage == 1 && piece == Traits::kOfFollower;
        init_barrier(shared.empty[stage][piece], holds_p ? 8 : 4);
        if constexpr (Traits::kLands) init_barrier(shared.landed[stage][piece], 1);
      }
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace cupyattn
