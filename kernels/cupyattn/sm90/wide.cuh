// Attention whose O is too wide for one warpgroup, on Hopper: starts the roles of a block. Three
// warpgroups: a producer, or two that gather keys and convert them, and two consumers that hold
// half of the columns of O each. Multi-head latent attention (absorbed) is grouped-query attention
// with one key head whose values are the first columns of its keys, so a tile of keys is read once
// for both products.
#pragma once

#include "cupyattn/sm90/wide/consumer.cuh"
#include "cupyattn/sm90/wide/converter.cuh"
#include "cupyattn/sm90/wide/halves.cuh"
#include "cupyattn/sm90/wide/merge.cuh"
#include "cupyattn/sm90/wide/set_up.cuh"

namespace cupyattn {

template <typename Config>
struct WideSm90 : WideSm90SetUp<WideSm90<Config>, WideSm90Traits<Config>> {
  using Traits = WideSm90Traits<Config>;
  using SetUp = WideSm90SetUp<WideSm90, Traits>;
  using typename SetUp::Params;
  using typename SetUp::SharedMemory;

  static __device__ __forceinline__ void run(const Params& params, SharedMemory& shared) {
    // A variable whose address is taken, as in prefill_sm90.
    const WideSm90Block<Traits> block(params, shared);
    if (ptx::warp_uniform(threadIdx.x / kWarpSize) == 0) block.await_item();
    SetUp::begin(params, shared);
    if (shared.items[0].work.tile.num_rows <= 0) return;
    const int warpgroup = ptx::warp_uniform(threadIdx.x / Traits::kWarpgroup);
    // The compiler lays out the last branch first, and the first 64 KB of a kernel are fetched at its
    // launch: what all wait for comes last here.
    if (warpgroup >= Traits::kProducers) {
      ptx::set_max_registers_up<Traits::kConsumerRegisters>();
      const int consumer =
          ptx::warp_uniform(threadIdx.x / Traits::kWarpgroup - Traits::kProducers);
      if constexpr (Traits::kAlternates) {
        const int count = consume<WideSm90Half<Traits>>(block);
        // Blocks of several items have whole lists.
        if (count == 1) merge(block, 0);
      } else if (consumer > 0) {
        consume<WideSm90Follower<Traits>>(block);
      } else {
        consume<WideSm90Leader<Traits>>(block);
      }
      if constexpr (!Traits::kLinked && !Traits::kAlternates) merge(block, 0);
    } else {
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
    }
  }

  // The items of a consumer warpgroup, one after another; returns how many.
  template <typename Role>
  static __device__ __forceinline__ int consume(const WideSm90Block<Traits>& block) {
    typename WideSm90Block<Traits>::Turn turn;
    if constexpr (Traits::kLinked) {
      do {
        Role(block, turn).run();
        if constexpr (!Traits::kAlternates) merge(block, turn.place());
        block.release_item(turn.count, threadIdx.x % kWarpSize);
      } while (block.await_next(++turn.count));
      return turn.count;
    }
    Role(block, turn).run();
    return 1;
  }
  static __device__ __forceinline__ void merge(const WideSm90Block<Traits>& block, int place) {
    if constexpr (Traits::kFusedSplits > 0) WideMergeSm90<Traits>(block, place).run();
  }

  static __device__ __forceinline__ void init_own_barriers(SharedMemory& shared) {
    init_barrier(shared.full_p, 4);
    if constexpr (Traits::kAlternates) {
      for (uint64_t& barrier : shared.halves().full_p) init_barrier(barrier, 4);
      init_barrier(shared.halves().full_sums, 4);
    }
    init_barrier(shared.empty_p, 4);
    init_barrier(shared.empty_q, Traits::kAlternates ? 8 : 4);
    for (int i = 0; i < Traits::kItems; ++i) {
      init_barrier(shared.full_normalisers[i], 4);
      init_barrier(shared.full_item[i], 1);
      // All warps but the one that publishes items.
      init_barrier(shared.empty_item[i], Traits::kThreads / kWarpSize - 1);
    }
  }
};

}  // namespace cupyattn
