// The producer warpgroup of wide_sm90 where the copy engine brings the keys: pages whose size has a
// factor 8. What it writes takes a quarter of the time at shared memory that 16-byte copies take,
// which products need. One warp copies keys; all gather rows of Q.
#pragma once

#include "cupyattn/ptx/tensor_copy.cuh"
#include "cupyattn/sm90/wide/producer.cuh"

namespace cupyattn {

template <typename Traits>
struct WideSm90TmaProducer {
  using KTile = typename Traits::KTile;
  using Item = typename Traits::Item;
  using Block = WideSm90Block<Traits>;

  // Where the keys of one box lie. A lane knows that of one box of a tile.
  struct Box {
    int page, slot;  // -1 is no page
  };

  const Block& block;
  const WideSm90Params& all_params;
  const AttentionParams& params;
  typename Traits::SharedMemory& shared;
  const int lane;
  const uint64_t policy;

  __device__ __forceinline__ explicit WideSm90TmaProducer(const Block& block)
      : block(block),
        all_params(block.all_params),
        params(block.params),
        shared(block.shared),
        lane(threadIdx.x % kWarpSize),
        policy(ptx::evict_first_policy()) {}

  __device__ __forceinline__ void run() const {
    const bool copies_keys = ptx::warp_uniform(threadIdx.x / kWarpSize) == 0;
    typename Block::Stage stage;
    uint32_t q_parity = 1;
    if constexpr (Traits::kLinked) {
      int count = 0;
      do {
        const Item& item = shared.items[Block::place_of(count)];
        run_item(item, copies_keys, stage, q_parity);
        if (copies_keys) {
          block.publish_next(item, count, lane);
        } else {
          block.release_item(count, lane);
        }
      } while (block.await_next(++count));
    } else {
      run_item(shared.items[0], copies_keys, stage, q_parity);
    }
  }

  __device__ __forceinline__ void run_item(const Item& item, bool copies_keys,
                                           typename Block::Stage& stage,
                                           uint32_t& q_parity) const {
    if (ptx::warp_uniform(item.has_keys() ? 1 : 0) == 0) return;
    copy_item(item, copies_keys, stage, q_parity);
    q_parity ^= 1;
  }

  __device__ __forceinline__ void copy_item(const Item& item, bool copies_keys,
                                            typename Block::Stage& stage,
                                            uint32_t q_parity) const {
    Box next{};
    const int begin = ptx::warp_uniform(item.tiles.begin);
    int tile = ptx::warp_uniform(item.tiles.end) - 1;
    // The first keys are under way before rows of Q are looked for.
    if (copies_keys) {
      const Box first = box_of(item, tile);
      next = box_of(item, tile - 1);
      copy_tile(stage, first);
    }
    // mutate: wide-queries-overwritten
    if constexpr (Traits::kLinked) await_phase(shared.empty_q, q_parity);
    WideSm90Producer<Traits>(block).copy_queries(item);
    if (!copies_keys) return;
    while (--tile >= begin) {
      const Box present = next;
      // Looked up a tile ahead, because the page table is far away.
      next = box_of(item, tile - 1);
      copy_tile(stage, present);
    }
  }

  __device__ __forceinline__ Box box_of(const Item& item, int tile) const {
    const int row = lane * all_params.box_rows, key = item.first_key(tile) + row;
    if (tile < item.tiles.begin || row >= Traits::kTileKV || key >= item.range.end) {
      return Box{-1, 0};
    }
    const PageSlot at = PageSlot::of(params, key);
    // mutate: wide-page-of-the-first-box
    return Box{params.kv_indices[item.work.request.kv_start + at.page], at.slot};
  }

  __device__ __forceinline__ void copy_tile(typename Block::Stage& stage, const Box& box) const {
    copy_piece<Traits::kOfFollower>(stage, box);
    copy_piece<Traits::kOfLeader>(stage, box);
    stage.advance();
  }

  // Copies a piece once its place is free, a box of each panel a lane. Boxes of no page become
  // zeros. Rows past the last key are read, and hidden.
  template <int kPiece>
  __device__ __forceinline__ void copy_piece(const typename Block::Stage& stage,
                                             const Box& own) const {
    constexpr bool kHasRope = kPiece == Traits::kOfFollower;  // the last panel
    constexpr int kHalf = Traits::kBoxPanels / 2;
    constexpr int kFirst = kHasRope ? kHalf : 0, kCount = kHasRope ? kHalf + 1 : kHalf;
    const uint32_t lands = landing_of(stage.stage, kPiece);
    const uint32_t tile = ptx::shared_address(shared.k[stage.stage]);
    // mutate: wide-tma-piece-not-awaited
    await_phase(shared.empty[stage.stage][kPiece], stage.parity ^ 1);
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(lands, Traits::template kBoxBytes<kPiece>);
    ptx::warp_sync();
    for (int first = 0; first < kCount << all_params.box_shift; first += kWarpSize) {
      const int index = first + lane, panel = kFirst + (index >> all_params.box_shift);
      const int box = index & ((1 << all_params.box_shift) - 1);
      const int page = ptx::shuffle(own.page, box), slot = ptx::shuffle(own.slot, box);
      if (panel >= kFirst + kCount) continue;
      const int row = box * all_params.box_rows;  // mutate: wide-boxes-in-one-place
      const bool is_latent = panel < Traits::kBoxPanels;
      const int row_bytes = is_latent ? KTile::kRowBytes : Traits::kRopeRowBytes;
      const uint32_t to = tile + panel * Traits::kBoxPanelBytes + row * row_bytes;
      // For the map of latent columns, fp8 elements are pairs of 16 bits.
      const int column = 64 * (is_latent ? panel : panel - Traits::kBoxPanels);
      const TensorMap& map = is_latent ? all_params.k : all_params.k_rope;
      // Most keys are read once, and leave L2 first.
      ptx::tensor_copy_4d(to, map, column, slot, page, 0, lands, policy);
    }
    ptx::warp_sync();
  }
  // The barrier that counts the bytes of a piece.
  __device__ __forceinline__ uint32_t landing_of(int stage, int piece) const {
    if constexpr (Traits::kLands) {
      return ptx::shared_address(&shared.landed[stage][piece]);
    } else {
      return ptx::shared_address(&shared.full[stage][piece]);
    }
  }
};

}  // namespace cupyattn
