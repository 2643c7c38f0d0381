// A consumer warpgroup of prefill_sm90: 64 rows of Q of one item after another, multiplied by tiles
// of keys and values that other warps bring. It keeps the pipeline; the softmax is in
// sm90/roles/softmax.cuh, the rows and O in sm90/roles/rows.cuh.
//
// One item. "<-" names what a phase waits for.
//   await_item            <- scheduler: the item is published
//   await_queries         <- scheduler: Q has landed
//   rotate_queries        RoPE: the warpgroup rotates its rows of Q in place
//   issue_scores          S = Q K^T of the last tile <- producer: K has landed, <- the turn
//   issue_output          O += P V, the last of the item before <- producer: V has landed
//   pass_turn             the next warpgroup issues its products
//   finish_rows           normalisers and LSE of the item before; then begin_item of this one
//   await_scores          <- S; releases K, and Q after the item's only tile
//   first_tile            softmax: maxima and probabilities
//   await_output          <- O of the item before; releases V
//   write                 stores O of the item before; releases that item
//   commit_probabilities  P becomes the operand of the next product
//   process_tile          for every other tile of keys, from the last to the first
// The last O += P V of an item is left to the next item (Pending), so that nothing drains between.
//
// One tile.
//   issue_scores          S = Q K^T <- producer: K has landed, <- the turn
//   issue_output          O += P V of the tile before <- producer: V has landed
//   pass_turn
//   await_scores          <- S; releases K, and Q after the item's last tile
//   next_tile             softmax
//   await_output          <- O; releases V. Without overlap this phase precedes the softmax.
//   commit_probabilities
#pragma once

#include "cupyattn/shared/hidden_values.cuh"
#include "cupyattn/shared/key_rows.cuh"
#include "cupyattn/sm90/roles/softmax.cuh"

namespace cupyattn {

template <typename Traits>
struct PrefillSm90Consumer {
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using Item = typename Traits::Item;
  using Softmax = PrefillSm90Softmax<Traits>;
  using Probabilities = typename Softmax::Probabilities;
  using Rows = PrefillSm90Rows<Traits>;
  using Output = typename Rows::Output;
  static constexpr int kHeadDimQK = Traits::kHeadDimQK, kHeadDimVO = Traits::kHeadDimVO;
  static constexpr int kTileKV = Traits::kTileKV, kWarpgroup = Traits::kWarpgroup;
  static constexpr bool kOverlap = Softmax::kOverlap;
  using Stage = PipelineState<Traits::kStages>;
  using ItemStage = PipelineState<Traits::kItems>;

  // What the present item still lacks: nothing, the store of O, or the last P V and that store.
  enum class Pending { kNone, kStore, kLastPV };

  const PrefillSm90Block<Traits>& block;
  const AttentionParams& params;
  typename Traits::SharedMemory& shared;
  const int group, lane;
  Stage k, v;
  PipelineState<Traits::kSlots> next_q;
  ItemStage item_stage;
  // These and item_stage belong to the present item.
  int q_slot = 0;
  Pending pending = Pending::kNone;
  int last_tile = 0;
  int masked_key = -1;  // the first key of the tile of `p`, or -1 if that tile needed no mask
  bool adds_output;     // whether O holds a part of the item's sum
  float o[1][kHeadDimVO / 8][4];
  uint32_t p[Softmax::kSteps][1][4];
  Softmax softmax;

  __device__ __forceinline__ PrefillSm90Consumer(const PrefillSm90Block<Traits>& block, int group)
      : block(block),
        params(block.params),
        shared(block.shared),
        group(group),
        lane(threadIdx.x % kWarpSize),
        softmax(block, group) {}

  // Serves the only item of a block: nothing of another item runs beside it.
  __device__ __forceinline__ void run_only_item() {
    if (group == Traits::kConsumers - 1) pass_turn();
    ptx::warp_sync();
    const ItemStage stage;
    const Item& item = block.await_item(stage);
    if (!item.exists) return;
    if (item.has_keys() && item.work.tile.num_rows > 64 * group) {
      int tile = ptx::warp_uniform(item.tiles.end) - 1;
      process_first_tile(item, tile, stage);
      while (tile > last_tile) tile = process_tile(item, tile);
      pending = Pending::kLastPV;
    } else {
      if (item.has_keys()) skip_item(item);
      begin_item(item, stage);
      clear_output();
      pending = Pending::kStore;
    }
    complete_item();
  }

  __device__ __forceinline__ void run() {
    if constexpr (!Traits::kPersistent) return run_only_item();
    if (group == Traits::kConsumers - 1) pass_turn();  // the first turn is the first warpgroup's
    ptx::warp_sync();
    ItemStage next;
    const Item* item = nullptr;
    int tile = 0;
    for (;;) {
      while (tile > last_tile) tile = process_tile(*item, tile);
      item = &block.await_item(next);
      const bool has_keys = item->exists && item->has_keys();
      const bool has_rows = item->work.tile.num_rows > 64 * group;
      if (!has_keys || !has_rows || pending == Pending::kStore) complete_item();
      if (!item->exists) return;
      if (has_keys && has_rows) {
        tile = ptx::warp_uniform(item->tiles.end) - 1;
        process_first_tile(*item, tile, next);
        pending = Pending::kLastPV;
      } else {
        if (has_keys) skip_item(*item);  // mutate: idle-warpgroup-skips-turns
        begin_item(*item, next);
        tile = last_tile;
        clear_output();
        pending = Pending::kStore;
      }
      next.advance();
    }
  }

  // --- One item, one tile ---

  __device__ __forceinline__ void process_first_tile(const Item& item, int tile,
                                                     const ItemStage& next) {
    float s[1][kTileKV / 8][4];
    Probabilities probabilities;
    KeyTile key_tile;
    const int last_slot = q_slot;
    await_queries();
    if constexpr (Traits::kRope) rotate_queries(item);
    if constexpr (Traits::LogitsVariant::kScalesQueries) scale_queries();
    issue_scores(s);
    // A product is issued and waited for under one condition: ptxas serialises others.
    if (Traits::kPersistent && pending == Pending::kLastPV) {
      issue_output();
      pass_turn();
      const Output output = softmax.rows.finish_rows(softmax.online, item_stage.stage, last_slot);
      begin_item(item, next);
      key_tile = key_tile_after(tile + 1);
      await_scores<1>(s, tile == last_tile);
      if (kOverlap) softmax.first_tile(probabilities, s, item, key_tile, after(v));
      await_output(output.place);
      softmax.rows.write(output, o);
    } else {
      pass_turn();
      begin_item(item, next);
      key_tile = key_tile_after(tile + 1);
      await_scores<0>(s, tile == last_tile);
      if (kOverlap) softmax.first_tile(probabilities, s, item, key_tile, v);
    }
    if (!kOverlap) softmax.first_tile(probabilities, s, item, key_tile, v);
    adds_output = false;  // mutate: first-values-added
    commit_probabilities(probabilities);
  }

  // Processes the tile that comes after `tile`. Returns its number.
  __device__ __forceinline__ int process_tile(const Item& item, int tile) {
    float s[1][kTileKV / 8][4];
    Probabilities probabilities;
    issue_scores(s);
    issue_output();
    pass_turn();
    const KeyTile key_tile = key_tile_after(tile);
    const bool is_fast = softmax.takes_fast_path(key_tile, masked_key >= 0);
    await_scores<1>(s, key_tile.tile == last_tile);
    const Stage values = after(v);
    // Warps differ in which way they take, and all of a warpgroup must wait for O at one place: ahead
    // of both ways without overlap, and behind them with it.
    if constexpr (kOverlap) {
      const bool is_made = is_fast && softmax.fast_tile(probabilities, s);
      if (!is_made) softmax.next_tile(probabilities, s, o, item, key_tile, values);
      const uint32_t nonfinite_keys = is_fast ? 0 : any_nonfinite_key();
      take_output();
      complete_output(item_stage.stage, nonfinite_keys);
      if (unlikely(probabilities.raised)) multiply_rows(o, probabilities.factors);
    } else {
      const uint32_t nonfinite_keys = is_fast ? 0 : any_nonfinite_key();
      take_output();  // mutate: fast-warps-do-not-wait
      if (is_fast) {
        release_values();
        if (softmax.fast_tile(probabilities, s)) {
          commit_probabilities(probabilities);
          return key_tile.tile;
        }
      } else {
        complete_output(item_stage.stage, nonfinite_keys);
      }
      softmax.next_tile(probabilities, s, o, item, key_tile, values);
    }
    commit_probabilities(probabilities);
    return key_tile.tile;
  }

  // Completes the present item when no other item runs beside it.
  __device__ __forceinline__ void complete_item() {
    if (pending == Pending::kNone) return;
    if (pending == Pending::kLastPV) {
      issue_output();
      await_output(item_stage.stage);
      // O takes the place of Q, which no warp of the warpgroup reads any more.
      if (Traits::kStagesOutput) ptx::named_barrier_sync(Traits::kDone + group, kWarpgroup);
    }
    softmax.rows.write(softmax.rows.finish_rows(softmax.online, item_stage.stage, q_slot), o);
    pending = Pending::kNone;
  }

  // Passes over an item that has no rows for this warpgroup: the others wait for its turns, and for
  // the stages that it releases.
  __device__ __forceinline__ void skip_item(const Item& item) {
    await_queries();
    const int last = item.tiles.begin;
    for (int tile = item.tiles.end; tile > last;) {
      await_phase(shared.full_k[k.stage], k.parity);
      tile = key_tile_after(tile).tile;
      await_turn();
      ptx::warp_sync();
      pass_turn();
      ptx::warp_sync();
      release_keys(tile == last);
      await_phase(shared.full_v[v.stage], v.parity);
      release_values();
    }
  }

  // --- Phases ---

  __device__ __forceinline__ void begin_item(const Item& item, const ItemStage& stage) {
    item_stage = stage;
    last_tile = ptx::warp_uniform(item.tiles.begin);
    softmax.begin_item(item);
  }

  __device__ __forceinline__ void await_queries() {
    await_phase(shared.full_q[next_q.stage], next_q.parity);
    q_slot = next_q.stage;
    next_q.advance();
  }

  // Keys arrive rotated; each warpgroup rotates its rows of Q where they have landed.
  __device__ __forceinline__ void rotate_queries(const Item& item) const {
    const TileWork& work = item.work.tile;
    rotate_rows<QTile, kHeadDimQK, 64, kWarpgroup>(
        // mutate: rotates-rows-of-first-group
        shared.q[q_slot], 64 * group, shared.rope, threadIdx.x % kWarpgroup, [&](int r) {
          const int row = work.first_row + min_of(r, work.num_rows - 1);
          return item.work.request.position(params, PackGqaRow::of(params, row).token);
        });
    publish_queries();
  }
  __device__ __forceinline__ void scale_queries() const {
    scale_rows<QTile, kWarpgroup>(shared.q[q_slot], 64 * group, shared.logits.query_scale,
                                  threadIdx.x % kWarpgroup);
    publish_queries();
  }
  // Makes the rows of Q that all threads of the warpgroup have written visible to its products.
  __device__ __forceinline__ void publish_queries() const {
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(Traits::kQueriesDone + group, kWarpgroup);
  }

  // S = Q K^T of the tile whose keys land next.
  __device__ __forceinline__ void issue_scores(float (&s)[1][kTileKV / 8][4]) {
    const uint32_t rows = ptx::shared_address(shared.q[q_slot]) + 64 * group * QTile::kRowBytes;
    const uint32_t keys = ptx::shared_address(shared.k[k.stage]);
    await_phase(shared.full_k[k.stage], k.parity);
    if (Traits::kMultipliesGathered) ptx::fence_proxy_async();
    // The descriptor is made before the turn, for which other warpgroups wait.
    const uint64_t operand = ptx::opaque_copy(operand_at<KTile>(keys));
    await_turn();
    ptx::wgmma_fence();
    issue_qk<QTile, KTile, kHeadDimQK>(s, operand_at<QTile>(rows), operand);
    ptx::wgmma_commit();
  }

  // O += P V of the tile of `p`.
  __device__ __forceinline__ void issue_output() {
    await_phase(shared.full_v[v.stage], v.parity);  // mutate: values-not-awaited
    const uint32_t values = ptx::shared_address(shared.v[v.stage]);
    if (Traits::kMultipliesGathered) ptx::fence_proxy_async();
    ptx::wgmma_fence();
    issue_pv<VTile, kHeadDimVO>(o, p, operand_at<VTile>(values), adds_output);
    ptx::wgmma_commit();
    adds_output = true;
  }

  // Warpgroups take turns at issuing products: while one is at its softmax, another multiplies. A
  // turn also says that all warps of the warpgroup are done with what they read before: O may then
  // take the place of Q.
  __device__ __forceinline__ void await_turn() const {
    constexpr int kOthers = Traits::kConsumers == 1 ? 0 : kWarpgroup;
    ptx::named_barrier_sync(Traits::kSchedulerBarrier + group, kWarpgroup + kOthers);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (Traits::kConsumers == 1) return;
    const int next = group + 1 == Traits::kConsumers ? 0 : group + 1;
    ptx::named_barrier_arrive(Traits::kSchedulerBarrier + next, 2 * kWarpgroup);
  }

  // kPending: groups of products that were issued after S.
  template <int kPending>
  __device__ __forceinline__ void await_scores(float (&s)[1][kTileKV / 8][4], bool is_last) {
    ptx::wgmma_wait<kPending>();
    take_results(s);
    release_keys(is_last);
  }

  // Waits for O. Other warps have set non-finite values of a masked tile to zero; rows that see
  // such a key get its values here. The marks are read while the product runs.
  __device__ __forceinline__ void await_output(int stage) {
    const uint32_t nonfinite_keys = any_nonfinite_key();
    take_output();
    complete_output(stage, nonfinite_keys);
  }
  // The marks of the product's tile, of all keys together.
  __device__ __forceinline__ uint32_t any_nonfinite_key() const {
    uint32_t any = 0;
    if (masked_key >= 0) {
      const Vector16 nonfinite_keys = shared.nonfinite_keys[v.stage];
#pragma unroll
      for (int word = 0; word < ceil_div(kTileKV, 32); ++word) any |= nonfinite_keys.word[word];
    }
    return any;
  }
  __device__ __forceinline__ void take_output() {
    ptx::wgmma_wait<0>();
    take_results(o);
  }
  __device__ __forceinline__ void complete_output(int stage, uint32_t any_nonfinite_key) {
    if (any_nonfinite_key != 0) {
      add_nonfinite_keys(shared.items[stage]);  // mutate: nonfinite-keys-not-added
      ptx::warp_sync();
    }
    release_values();
  }
  __device__ __forceinline__ void add_nonfinite_keys(const Item& item) {
    for (int word = 0; word < ceil_div(kTileKV, 32); ++word) {
      for (uint32_t bits = shared.nonfinite_keys[v.stage].word[word]; bits != 0; bits &= bits - 1) {
        const int key = 32 * word + __ffs(static_cast<int>(bits)) - 1;
        const auto* values = values_of<typename Traits::DTypeKV>(params, item.work.tile.kv_head);
        add_nonfinite_key<typename Traits::DTypeP>(
            o, p, key,
            values + value_row<Traits::kPaged, Traits::kOwnValuePages>(params, item.work.request,
                                                                      masked_key + key),
            lane);
      }
    }
  }

  // Copies probabilities to `p`, which the product before has read until now.
  __device__ __forceinline__ void commit_probabilities(const Probabilities& from) {
    masked_key = from.masked_key;
#pragma unroll
    for (int i = 0; i < Softmax::kSteps; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[i][0][e] = kOverlap ? ptx::opaque_copy(from.p[i][0][e]) : from.p[i][0][e];
      }
    }
  }

  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int n = 0; n < kHeadDimVO / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][n][e] = 0.0f;
    }
  }

  // --- Stages ---

  static __device__ __forceinline__ Stage after(Stage stage) {
    stage.advance();
    return stage;
  }

  // The tile that K holds at the present stage, which follows `tile`.
  __device__ __forceinline__ KeyTile key_tile_after(int tile) const {
    if constexpr (Traits::kMasked) {
      const KeyTile& present = shared.row_bits.tiles[k.stage];
      return KeyTile{ptx::warp_uniform(present.tile), ptx::warp_uniform(present.needs_mask)};
    } else {
      return KeyTile{tile - 1, softmax.needs_mask(tile - 1)};
    }
  }

  // Arrives once for the warp.
  __device__ __forceinline__ void release(uint64_t& barrier, bool is_released = true) {
    ptx::mbarrier_arrive_if(is_released && lane == 0, ptx::shared_address(&barrier));
  }
  __device__ __forceinline__ void release_keys(bool is_last) {
    release(shared.empty_k[k.stage]);
    release(shared.empty_q[q_slot], is_last);
    k.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(shared.empty_v[v.stage]);
    v.advance();
  }
};

}  // namespace cupyattn
