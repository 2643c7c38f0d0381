// Prefill and append attention on Hopper: starts the roles of a persistent block. Warp 0 produces K
// and V, warp 1 schedules, warps 2 and 3 sweep non-finite values (or convert, or gather). Two or
// three consumer warpgroups share the key tiles, each for 64 rows of its own. One more warpgroup
// converts or gathers if the Config asks for it.
#pragma once

#include "cupyattn/sm90/prefill/consumer.cuh"
#include "cupyattn/sm90/prefill/converter.cuh"
#include "cupyattn/sm90/prefill/gatherer.cuh"
#include "cupyattn/sm90/prefill/transposer.cuh"
#include "cupyattn/sm90/roles/scheduler.cuh"

namespace cupyattn {

template <typename Config>
struct PrefillSm90 {
  using Traits = PrefillSm90Traits<Config>;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kThreads = Traits::kThreads;

  static_assert(sizeof(SharedMemory) == Config::kSharedBytes,
                "the host's shared-memory arithmetic (launch/tiles/prefill_sm90.py) must agree");

  static __device__ __forceinline__ void run(const PrefillSm90Params& params,
                                             SharedMemory& shared) {
    // A local variable whose address is taken: otherwise ptxas loses track of whole warps and
    // spills.
    const PrefillSm90Block<Traits> block(params, shared);
    if constexpr (!Traits::kPersistent) return run_only_item(block);
    if (threadIdx.x == 0) init_barriers(params, shared);
    if constexpr (Traits::kRope) shared.rope.fill(params.attention, threadIdx.x, Traits::kThreads);
    if constexpr (Traits::kMultipliesBytes && Traits::kItemsFollow) clear_keys(shared);
    ptx::block_sync();
    // warp_uniform tells the compiler that the role is the same for a whole warp.
    const int warpgroup = ptx::warp_uniform(threadIdx.x / Traits::kWarpgroup);
    if (warpgroup > 0 && warpgroup <= Traits::kConsumers) {
      ptx::set_max_registers_up<Traits::kConsumerRegisters>();
      PrefillSm90Consumer<Traits>(block, warpgroup - 1).run();
    } else if (warpgroup > 0) {
      ptx::set_max_registers_down<Traits::kProducerRegisters>();
      if constexpr (Traits::kHasConverterWarpgroup) {
        run_converter(block);
      } else if constexpr (Traits::kHasGathererWarpgroup) {
        const int warp = ptx::warp_uniform(threadIdx.x / kWarpSize);
        PrefillSm90Gatherer<Traits>(block, warp % 4).run();
      }
    } else {
      ptx::set_max_registers_down<Traits::kProducerRegisters>();
      const int warp = ptx::warp_uniform(threadIdx.x / kWarpSize);
      if (warp == 1) {
        PrefillSm90Scheduler<Traits>{block}.run();
      } else if constexpr (Traits::kGatherers == 3) {
        PrefillSm90Gatherer<Traits>(block, warp == 0 ? 0 : warp - 1).run();
      } else if (warp == 0) {
        if constexpr (!Traits::kGathers) PrefillSm90Producer<Traits>{block}.run();
      } else if constexpr (!Traits::kLandsValues) {
        PrefillSm90NonFinite<Traits>{block}.run();
      } else if constexpr (!Traits::kHasConverterWarpgroup) {
        run_converter(block);
      }
    }
  }

  // The first product of values in a block takes keys for them, also where rows have fewer columns
  // than a line: what is not copied there is never written again.
  static __device__ __forceinline__ void clear_keys(SharedMemory& shared) {
    if constexpr (Traits::KTile::kChunks % 8 == 0) return;
    Vector16* const keys = reinterpret_cast<Vector16*>(shared.k[0]);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(shared.k) / 16); i += Traits::kThreads) {
      keys[i] = Vector16{};
    }
    ptx::fence_proxy_async();
  }

  // The warps that turn what has landed into what is multiplied.
  static __device__ __forceinline__ void run_converter(const PrefillSm90Block<Traits>& block) {
    if constexpr (Traits::kMultipliesBytes) {
      PrefillSm90Transposer<Traits>(block).run();
    } else {
      PrefillSm90Converter<Traits>(block).run();
    }
  }

  // Runs a block of one item, which launches of few waves have. Most of its time passes before its
  // first copy. So warp 1 finds the item while warp 2 makes the barriers, and warps 0 and 1 begin
  // to copy while the consumers still get their registers; warp 2 tells all others of both.
  static __device__ __forceinline__ void run_only_item(const PrefillSm90Block<Traits>& block) {
    constexpr int kCopying = 3 * kWarpSize, kOthers = Traits::kThreads - 2 * kWarpSize;
    const int warpgroup = ptx::warp_uniform(threadIdx.x / Traits::kWarpgroup);
    if (warpgroup > 0) {
      ptx::set_max_registers_up<Traits::kConsumerRegisters>();
      ptx::named_barrier_sync_unaligned(Traits::kItemFound, kOthers);
      return PrefillSm90Consumer<Traits>(block, warpgroup - 1).run();
    }
    ptx::set_max_registers_down<Traits::kProducerRegisters>();
    const int warp = ptx::warp_uniform(threadIdx.x / kWarpSize);
    PrefillSm90Scheduler<Traits> scheduler{block};
    if (warp < 2) {
      if (warp == 1) scheduler.find_only_item();
      ptx::named_barrier_sync_unaligned(Traits::kMayCopy, kCopying);
      if (warp == 1) return scheduler.run();
      return PrefillSm90Producer<Traits>{block}.run();
    }
    if (threadIdx.x == 2 * kWarpSize) init_barriers(block.all_params, block.shared);
    ptx::warp_sync();
    if (warp == 2) ptx::named_barrier_sync_unaligned(Traits::kMayCopy, kCopying);
    ptx::warp_sync();
    ptx::named_barrier_sync_unaligned(Traits::kItemFound, kOthers);
    PrefillSm90NonFinite<Traits>{block}.run();
  }

  static __device__ __forceinline__ void init_barriers(const PrefillSm90Params& params,
                                                       SharedMemory& shared) {
    constexpr bool kConverts = Traits::kConverts, kLandsValues = Traits::kLandsValues;
    constexpr bool kMasked = Traits::kMasked;
    constexpr int kConverters = Traits::kConverters, kGatherers = Traits::kGatherers;
    constexpr int kConsumerWarps = 4 * Traits::kConsumers, kArrivals = Traits::kArrivals;
    ptx::prefetch_tensor_map(params.q);
    if constexpr (!Traits::kGathers) {
      ptx::prefetch_tensor_map(params.k);
      ptx::prefetch_tensor_map(params.v);
      if constexpr (Traits::KLoadTile::kHasTail) ptx::prefetch_tensor_map(params.k_tail);
      if constexpr (Traits::VLoadTile::kHasTail) ptx::prefetch_tensor_map(params.v_tail);
    }
    ptx::prefetch_tensor_map(params.o);
    for (int place = 0; place < Traits::kItems; ++place) {
      init_barrier(shared.full_item[place], 1);
      // The arrivals of warps that copy or gather, sweep, multiply, and convert.
      const int readers =
          max_of(1, kGatherers) + (kLandsValues || kGatherers == 3 ? 0 : 2) + kConverters;
      init_barrier(shared.empty_item[place], kConsumerWarps + (Traits::kPersistent ? readers : 0));
    }
    init_barrier(shared.near_end, 1);
    for (int slot = 0; slot < Traits::kSlots; ++slot) {
      init_barrier(shared.full_q[slot], 1);
      init_barrier(shared.empty_q[slot], kConsumerWarps);
    }
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      if constexpr (kMasked) init_barrier(shared.row_bits.full[stage], kLandsValues ? kConverters : 2);
      init_barrier(shared.full_k[stage],
           kConverts ? kConverters : kArrivals + ((kMasked || Traits::kOfUnions) && Traits::kGathers ? 1 : 0));
      init_barrier(shared.empty_k[stage], kConsumerWarps);
    }
    for (int stage = 0; stage < Traits::kValueStages; ++stage) {
      init_barrier(shared.unchecked_v[stage], kArrivals);
      init_barrier(shared.full_v[stage], kLandsValues ? kConverters : kArrivals);
      init_barrier(shared.empty_v[stage], kConsumerWarps + (kMasked && !kLandsValues ? 2 : 0));
    }
    if constexpr (kLandsValues) {
      for (int place = 0; place < Traits::kFp8Stages; ++place) {
        init_barrier(shared.full_fp8_k[place], kArrivals);
        init_barrier(shared.full_fp8_v[place], kArrivals);
        init_barrier(shared.empty_fp8_k[place], kConverters);
        init_barrier(shared.empty_fp8_v[place], kConverters);
      }
    }
    shared.logits = Traits::LogitsVariant::make_constants(params.attention);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace cupyattn
