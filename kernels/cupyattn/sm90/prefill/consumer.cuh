// A consumer warpgroup of prefill_sm90: 64 rows of Q of one item after another, multiplied by tiles
// of keys and values that other warps bring. It keeps the pipeline; the softmax is in
// sm90/roles/softmax.cuh, the rows and O in sm90/roles/rows.cuh.
//
// A step is a tile, or the end of an item. "<-" names what a phase waits for.
//
// kFirst, an item's first tile, which completes the item before.
//   await_item            <- scheduler: the item is published
//   await_queries         <- scheduler: Q has landed
//   rotate_queries        RoPE: the warpgroup rotates its rows of Q in place
//   halve_queries         bf16 over fp8: the warpgroup turns its rows of Q to f16 in place
//   issue_scores          S = Q K^T of the last tile <- producer: K has landed, <- the turn
//   issue_output          O += P V, the last of the item before <- producer: V has landed
//   pass_turn             the next warpgroup issues its products
//   begin_item
//   await_scores          <- S; releases K, and Q after the item's only tile
//   make                  softmax: maxima and probabilities. Without overlap it is in settle_first.
//   take_output           <- O of the item before; releases V
//   finish_rows           normalisers and LSE of the item before
//   settle_first          P becomes the operand of the next product
//   write                 stores O of the item before; releases that item
// The last O += P V of an item is left to the next item (Pending), so that nothing drains between.
//
// kNext, every other tile of keys, from the last to the first.
//   issue_scores          S = Q K^T <- producer: K has landed, <- the turn
//   issue_output          O += P V of the tile before <- producer: V has landed
//   pass_turn
//   await_scores          <- S; releases K, and Q after the item's last tile
//   make                  softmax. Without overlap it is in settle_next.
//   take_output           <- O; releases V
//   settle_next           P becomes the operand of the next product
//
// kEnd, where no other item runs beside the end of an item: the last O += P V, finish_rows, write.
//
// What several steps do stands once, and what is rare stands last: a launch fetches the first 64 KB
// of its instructions ahead, and waits for each line beyond (docs/prefill_sm90.md, "Instructions").
#pragma once

#include "cupyattn/shared/byte_fragments.cuh"
#include "cupyattn/shared/hidden_values.cuh"
#include "cupyattn/shared/key_rows.cuh"
#include "cupyattn/sm90/prefill/union_rows.cuh"
#include "cupyattn/sm90/roles/softmax.cuh"
#include "cupyattn/tile/half_rows.cuh"

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
  static constexpr bool kItemsFollow = Traits::kItemsFollow;
  // Whether a tile that needs O corrected leaves the loop of tiles for it. Without overlap the softmax
  // is still to come, and would have to stand twice.
  static constexpr bool kLeavesLoop = kOverlap;
  // Whether the next item is found by the present one, since registers are scarce.
  static constexpr bool kFindsNext = Traits::kPersistent && Traits::kMultipliesBytes;
  using Stage = PipelineState<Traits::kStages>;
  using ValueStage = PipelineState<Traits::kValueStages>;
  using ItemStage = PipelineState<Traits::kItems>;

  // What the present item still lacks: nothing, the store of O, or the last P V and that store.
  enum class Pending { kNone, kStore, kLastPV };

  const PrefillSm90Block<Traits>& block;
  const AttentionParams& params;
  typename Traits::SharedMemory& shared;
  const int group, lane;
  Stage k;
  ValueStage v;
  PipelineState<Traits::kSlots> next_q;
  ItemStage item_stage;
  // These and item_stage belong to the present item.
  Pending pending = Pending::kNone;
  int last_tile = 0;
  int masked_key = -1;  // the first key of the tile of `p`, or -1 if that tile needed no mask
  bool adds_output = false;  // whether O holds a part of the item's sum
  uint32_t powers = 0;  // of the thread's rows of Q (convert_rows_to_half)
  float o[1][kHeadDimVO / 8][4];
  // Where sums have few bits, O is the sum of a few tiles. What has been added up before lies in
  // shared memory; it is to be multiplied by `factors`, as maxima have been raised since.
  static constexpr bool kHasTotal = Traits::kMultipliesBytes;
  int tiles_of_part = 0;  // and kHasSums if there is a total, since registers are scarce
  static constexpr int kHasSums = 1 << 16;
  float factors_of_total[1][2] = {{1.0f, 1.0f}};
  uint32_t p[Softmax::kSteps][1][4];
  static constexpr bool kKeepsQueries = Traits::kKeepsQueries;
  uint32_t q[kKeepsQueries ? ceil_div(kHeadDimQK, 32) : 1][4];
  Softmax softmax;

  __device__ __forceinline__ PrefillSm90Consumer(const PrefillSm90Block<Traits>& block, int group)
      : block(block),
        params(block.params),
        shared(block.shared),
        group(group),
        lane(threadIdx.x % kWarpSize),
        softmax(block, group) {
    if constexpr (kItemsFollow) clear(p);
    clear_total();
    if constexpr (kFindsNext) item_stage = ItemStage{Traits::kItems - 1, 1};
  }

  // Serves the only item of a block: nothing of another item runs beside it.
  __device__ __forceinline__ void run_only_item() {
    if (group == Traits::kConsumers - 1) pass_turn();
    ptx::warp_sync();
    Place at;
    Tile tile;
    block.await_item(at.next);
    if (!item_of(at).exists) return;
    if (item_of(at).has_keys() && item_of(at).work.tile.num_rows > 64 * group) {
      multiply_first(at, tile);
      settle_first(at, tile);
      while (at.tile > last_tile) {
        multiply_next(at, tile);
        correct_output(tile, Step::kNext);
        settle_next(at, tile);
      }
      multiply_last(tile);
      correct_output(tile, Step::kEnd);
      release_values();
    } else {
      pass_over(at);
    }
    complete_output();
    softmax.rows.write(softmax.rows.finish_rows(softmax.online, 0, 0), o);
  }

  __device__ __forceinline__ void run() {
    if constexpr (!Traits::kPersistent) return run_only_item();
    if (group == Traits::kConsumers - 1) pass_turn();  // the first turn is the first warpgroup's
    ptx::warp_sync();
    Place at;
    for (;;) {
      Tile tile;
      // The loop that most of a launch is. A rare event leaves it.
      bool is_interrupted = false;
      while (at.tile > last_tile) {
        multiply_next(at, tile);
        if constexpr (kLeavesLoop) {
          is_interrupted = unlikely(tile.nonfinite_keys != 0 || tile.probabilities.raised);
          if (is_interrupted) break;
        } else {
          correct_output(tile, Step::kNext);
        }
        settle_next(at, tile);
      }
      Step step = Step::kNext;
      if (!is_interrupted) {
        if constexpr (kFindsNext) {
          at.next = item_stage;
          at.next.advance();
        }
        at.item = &block.await_item(at.next);
        const bool has_keys = item_of(at).exists && item_of(at).has_keys();
        const bool has_rows = item_of(at).work.tile.num_rows > 64 * group;
        const bool follows = kItemsFollow && has_keys && has_rows;
        if (pending == Pending::kStore || (pending == Pending::kLastPV && !follows)) {
          step = Step::kEnd;
        } else if (!item_of(at).exists) {
          if constexpr (Traits::kHasWarpBoxes) softmax.rows.await_box();
          return;
        } else if (!has_keys || !has_rows) {
          pass_over(at);
          continue;
        } else {
          step = Step::kFirst;
        }
      }
      if (step == Step::kFirst) {
        multiply_first(at, tile);
      } else if (step == Step::kEnd) {
        multiply_last(tile);
      }
      correct_output(tile, step);
      if (step == Step::kNext) {
        settle_next(at, tile);
        continue;
      }
      if (tile.has_values) release_values();
      const bool completes = step == Step::kEnd || tile.has_values;
      const bool is_behind = step == Step::kFirst;  // whether a first tile follows the item
      Output output;
      if (completes) {
        const int place = before<Traits::kItems>(item_stage.stage, is_behind);
        if constexpr (Traits::kOfUnions) tile.is_mended = finds_nonfinite(tile.sums);
        output = softmax.rows.finish_rows(tile.sums, place, 0);
      }
      if (step == Step::kFirst) settle_first(at, tile);
      if (completes) {
        output.place = before<Traits::kItems>(item_stage.stage, is_behind);
        // mutate: output-in-the-slot-of-the-next-item
        output.slot = before<Traits::kSlots>(q_slot(), is_behind);
        complete_output();
        write(output, tile.is_mended);
        clear_total();
      }
      if (step == Step::kEnd) pending = Pending::kNone;
    }
  }

  // --- One step ---

  // kNext: another tile of the item. kFirst: an item's first tile, which also completes the item
  // before. kEnd: no tile; an item is completed when no other runs beside it.
  enum class Step { kNext, kFirst, kEnd };

  // Where a warpgroup stands.
  struct Place {
    const Item* item = nullptr;
    ItemStage next;
    int tile = 0;  // the last one that has been multiplied
  };
  __device__ __forceinline__ const Item& item_of(const Place& at) const {
    return Traits::kPersistent ? *at.item : shared.items[0];
  }
  // The item of a tile that is not its first.
  __device__ __forceinline__ const Item& present_item(const Place& at) const {
    return Traits::kMultipliesBytes ? shared.items[softmax.place] : item_of(at);
  }
  // What the parts of a step leave to each other.
  struct Tile {
    float s[1][kTileKV / 8][4];
    Probabilities probabilities;
    typename Traits::SeenTile key_tile;
    bool is_fast;
    uint32_t nonfinite_keys;
    // These belong to the item that the step completes.
    bool has_values;
    typename Softmax::Online sums;
    bool is_mended = false;  // whether some of its rows are not finite, where a union may be why
  };

  // An item that has no keys, or no rows for this warpgroup, leaves zeros.
  __device__ __forceinline__ void pass_over(Place& at) {
    if (item_of(at).has_keys()) skip_item(item_of(at));  // mutate: idle-warpgroup-skips-turns
    begin_item(item_of(at), at.next);
    softmax.begin_rows(item_of(at));
    at.tile = last_tile;
    clear_output();
    pending = Pending::kStore;
    at.next.advance();
  }

  // Behind the last product of an item beside which no other runs.
  __device__ __forceinline__ void multiply_last(Tile& tile) {
    tile.has_values = pending == Pending::kLastPV;
    tile.nonfinite_keys = 0;
    tile.sums = softmax.online;
    if (!tile.has_values) return;
    issue_output();
    tile.nonfinite_keys = any_nonfinite_key();
    take_output();
    // O takes the place of Q, which no warp of the warpgroup reads any more.
    if (Traits::kStagesOutput) ptx::named_barrier_sync(Traits::kDone + group, kWarpgroup);
  }

  // What O rarely needs behind a product: values that are not finite, and larger maxima.
  __device__ __forceinline__ void correct_output(Tile& tile, Step step) {
    if (tile.nonfinite_keys != 0) {
      const int place = before<Traits::kItems>(item_stage.stage, step == Step::kFirst);
      add_nonfinite_keys(shared.items[place]);  // mutate: nonfinite-keys-not-added
      ptx::warp_sync();
    }
    if (kOverlap && step == Step::kNext && unlikely(tile.probabilities.raised)) {
      rescale_output(tile.probabilities.factors);
    }
  }

  // Whether rows of the warp must be made again, of an item that has a union; their maxima are kept.
  __device__ __forceinline__ bool finds_nonfinite(const typename Softmax::Online& sums) const {
    // mutate: union-values-not-mended
    if (!unlikely(ptx::warp_any(!UnionRows<Traits>::is_finite(o)))) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane % 4 == 0) shared.unions.row_max[softmax.rows.own_row(h)] = sums.row_max[0][h];
    }
    ptx::warp_sync();
    return true;
  }

  __device__ __forceinline__ void settle_first(Place& at, Tile& tile) {
    if constexpr (!kOverlap) {
      softmax.begin_rows(item_of(at));
      softmax.make(tile.probabilities, tile.s, item_of(at), tile.key_tile, v, true);
    }
    pending = Pending::kLastPV;
    adds_output = false;  // mutate: first-values-added
    if (!kItemsFollow || !tile.has_values) tiles_of_part = 0;  // else when the total is complete
    at.next.advance();
    commit_probabilities(tile.probabilities);
    at.tile = tile.key_tile.tile;
  }

  __device__ __forceinline__ void settle_next(Place& at, Tile& tile) {
    release_values();
    if constexpr (Traits::kOfUnions) {
#pragma unroll 1
      for (int passed = at.tile - 1; passed > tile.key_tile.tile; --passed) {
        await_phase(shared.full_v[v.stage], v.parity);
        release_values();  // mutate: skipped-values-kept
      }
    }
    if constexpr (Traits::kSkipsTiles && !kOverlap) {
      if (skip_tiles(at, tile, !is_light(at, tile))) return;
    } else if constexpr (Traits::kSkipsTiles) {
      if (softmax.is_skipped) {
        if (skip_tiles(at, tile, false)) return;
        softmax.make(tile.probabilities, tile.s, present_item(at), tile.key_tile, v, false);
        if (unlikely(tile.probabilities.raised)) rescale_output(tile.probabilities.factors);
      }
    }
    if constexpr (!kOverlap) {
      if (!tile.is_fast || !softmax.fast_tile(tile.probabilities, tile.s)) {
        softmax.make(tile.probabilities, tile.s, present_item(at), tile.key_tile, v, false);
        if (unlikely(tile.probabilities.raised)) {
          rescale_output(tile.probabilities.factors);  // mutate: output-not-rescaled-at-cut
        }
      }
    }
    commit_probabilities(tile.probabilities);
    at.tile = tile.key_tile.tile;
  }

  // Passes over tiles that weigh next to nothing, from the present one on. Returns whether no tile of
  // the item is left; O is then complete. No product is under way.
  __device__ __forceinline__ bool skip_tiles(Place& at, Tile& tile, bool matters) {
    while (!matters) {
      at.tile = ptx::warp_uniform(tile.key_tile.tile);
      await_phase(shared.full_v[v.stage], v.parity);
      ptx::warp_sync();  // mutate: skipped-values-released-early
      release_values();
      if (at.tile == last_tile) {
        pending = Pending::kStore;
        return true;
      }
      issue_scores(tile.s);
      pass_turn();
      tile.key_tile = key_tile_after(at.tile);
      await_scores<0>(tile.s, tile.key_tile.tile == last_tile);
      matters = !is_light(at, tile);
    }
    return false;
  }
  // Whether a tile, if it is weighed, weighs next to nothing in every row of the warpgroup, all of whose
  // warps issue a product, or none.
  __device__ __forceinline__ bool is_light(const Place& at, const Tile& tile) {
    if (tile.key_tile.needs_mask || !softmax.is_weighed(tile.key_tile.tile)) return false;
    const bool matters = any_warp(ptx::warp_any(softmax.matters(tile.s, present_item(at))));
    softmax.has_weighed(matters);
    return !matters;
  }
  // Whether a warp of the warpgroup says so. It is asked once between two turns, for which all wait. A
  // barrier that votes would make registers spill.
  __device__ __forceinline__ bool any_warp(bool says) {
    Vector16& votes = shared.row_bits.of[group];
    if (lane == 0) votes.word[softmax.rows.warp] = says;
    ptx::named_barrier_sync(Traits::kQueriesDone + group, kWarpgroup);
    const Vector16 all = votes;
    return (all.word[0] | all.word[1] | all.word[2] | all.word[3]) != 0;  // mutate: warps-skip-alone
  }

  // Multiplies an item's first tile, and takes its maxima and probabilities if softmax runs beside
  // products. A product is issued and waited for under one condition, since ptxas serialises others:
  // so in the first item of a block, which has no product of values before it, keys stand for them,
  // and O starts anew behind it.
  __device__ __forceinline__ void multiply_first(Place& at, Tile& tile) {
    const Item& item = item_of(at);
    tile.has_values = pending == Pending::kLastPV;
    tile.nonfinite_keys = 0;
    await_queries();
    if constexpr (Traits::kRope) rotate_queries(item);
    if constexpr (Traits::kHalvesQueries) halve_queries();
    if constexpr (Traits::LogitsVariant::kScalesQueries) scale_queries();
    if constexpr (kKeepsQueries) take_queries();
    if constexpr (Traits::LogitsVariant::kFoldsScales) turn_negative_rows(at.next.stage);
    issue_scores(tile.s);
    if constexpr (kItemsFollow) issue_output(tile.has_values);
    pass_turn();
    begin_item(item, at.next);
    tile.key_tile = key_tile_after(ptx::warp_uniform(item.tiles.end));
    await_scores<kItemsFollow ? 1 : 0>(tile.s, tile.key_tile.tile == last_tile);
    tile.sums = softmax.online;
    if constexpr (kOverlap) {
      const ValueStage values = tile.has_values ? after(v) : v;
      softmax.begin_rows(item);
      softmax.make(tile.probabilities, tile.s, item, tile.key_tile, values, true);
    }
    if constexpr (kItemsFollow) {
      if (tile.has_values) tile.nonfinite_keys = any_nonfinite_key();
      take_output();
    }
  }

  // Multiplies any other tile, and the values of the tile before.
  __device__ __forceinline__ void multiply_next(Place& at, Tile& tile) {
    const int before_tile = at.tile - pass_unnamed_tiles(at);
    issue_scores(tile.s);
    // Beside the product of keys.
    if (kHasTotal && (tiles_of_part & (kHasSums - 1)) >= Traits::kFlushTiles) flush();  // mutate: sums-not-flushed
    issue_output();
    pass_turn();
    tile.key_tile = key_tile_after(before_tile);
    tile.is_fast = softmax.takes_fast_path(tile.key_tile, masked_key >= 0);
    await_scores<1>(tile.s, tile.key_tile.tile == last_tile);
    // Warps differ in which way they take, and all of a warpgroup must wait for O at one place.
    if constexpr (kOverlap && Traits::kSkipsTiles) {
      softmax.is_skipped = is_light(at, tile);
      tile.probabilities.raised = false;
      if (!softmax.is_skipped) {
        softmax.make(tile.probabilities, tile.s, present_item(at), tile.key_tile, after(v), false);
      }
    } else if constexpr (kOverlap) {
      const bool is_made = tile.is_fast && softmax.fast_tile(tile.probabilities, tile.s);
      if (!is_made) {
        softmax.make(tile.probabilities, tile.s, present_item(at), tile.key_tile, after(v), false,
                     masked_key >= 0);
      }
    }
    tile.nonfinite_keys = tile.is_fast ? 0 : any_nonfinite_key();
    take_output();  // mutate: fast-warps-do-not-wait
  }

  // Of a union: passes over tiles of which none of the warpgroup's tokens names a block; returns how
  // many. The values of the tile before are still to be multiplied, and those of each tile lie
  // behind them: with more tiles than stages the ring would wait for ever. The last tile releases Q.
  __device__ __forceinline__ int pass_unnamed_tiles(const Place& at) {
    int count = 0;
    if constexpr (Traits::kOfUnions) {
#pragma unroll 1
      for (; count < Traits::kStages && at.tile - 1 - count > last_tile; ++count) {
        await_phase(shared.full_k[k.stage], k.parity);
        // mutate: named-tiles-skipped
        if ((tokens_of(shared.unions.of[k.stage]) & own_tokens()) != 0) break;
        ptx::warp_sync();
        release_keys(false);
      }
    }
    return count;
  }
  // A bit for each token whose list names a block of a tile.
  template <typename TileOfUnion>
  __device__ __forceinline__ uint32_t tokens_of(const TileOfUnion& tile) const {
    if constexpr (Traits::kSmallUnions) {
      return ptx::warp_ballot(tile.units[lane] != 0);
    } else {
      return tile.tokens[0] | tile.tokens[1];
    }
  }
  // A bit for each token that has rows in the warpgroup. A union has no bits of tokens past the last.
  __device__ __forceinline__ uint32_t own_tokens() const {
    const int first = 64 * group;
    return low_bits(PackGqaRow::of(params, first + 63).token + 1) &
           ~low_bits(PackGqaRow::of(params, first).token);
  }

  // Passes over an item that has no rows for this warpgroup: the others wait for its turns, and for
  // the stages that it releases.
  __device__ __forceinline__ void skip_item(const Item& item) {
    await_queries();
    if constexpr (kKeepsQueries) release(shared.empty_q[q_slot()]);
    const int last = item.tiles.begin;
#pragma unroll 1
    for (int tile = item.tiles.end; tile > last;) {
      await_phase(shared.full_k[k.stage], k.parity);
      tile = Traits::kMasked ? key_tile_after(tile).tile : tile - 1;
      await_turn();
      ptx::warp_sync();
      pass_turn();
      ptx::warp_sync();
      release_keys(tile == last);
      await_phase(shared.full_v[v.stage], v.parity);
      // The others may have left out this tile, and the next values come at once.
      if constexpr (Traits::kSkipsTiles) ptx::warp_sync();
      release_values();
    }
  }

  // --- Phases ---

  __device__ __forceinline__ void begin_item(const Item& item, const ItemStage& stage) {
    item_stage = stage;
    last_tile = ptx::warp_uniform(item.tiles.begin);
    softmax.begin_limits(item, stage.stage);
  }

  __device__ __forceinline__ void await_queries() {
    await_phase(shared.full_q[next_q.stage], next_q.parity);
    next_q.advance();
  }
  // The slot of the rows of Q that are multiplied.
  __device__ __forceinline__ int q_slot() const {
    return (next_q.stage == 0 ? Traits::kSlots : next_q.stage) - 1;
  }

  // Keys arrive rotated; each warpgroup rotates its rows of Q where they have landed.
  __device__ __forceinline__ void rotate_queries(const Item& item) const {
    const TileWork& work = item.work.tile;
    rotate_rows<QTile, kHeadDimQK, 64, kWarpgroup>(
        // mutate: rotates-rows-of-first-group
        shared.q[q_slot()], 64 * group, shared.rope, threadIdx.x % kWarpgroup, [&](int r) {
          const int row = work.first_row + min_of(r, work.num_rows - 1);
          return item.work.request.position(params, PackGqaRow::of(params, row).token);
        });
    publish_queries();
  }
  __device__ __forceinline__ void scale_queries() const {
    scale_rows<QTile, kWarpgroup>(shared.q[q_slot()], 64 * group, shared.logits.query_scale,
                                  threadIdx.x % kWarpgroup);
    publish_queries();
  }
  __device__ __forceinline__ void take_queries() {
    load_fragments_of_bytes<QTile>(q, ptx::shared_address(shared.q[q_slot()]),
                                   softmax.rows.warp_row(), lane);
    ptx::warp_sync();
    release(shared.empty_q[q_slot()]);
  }
  // Rows of Q of negative scales change their sign. Fragments have a thread's two rows by turns.
  __device__ __forceinline__ void turn_negative_rows(int place) {
    if constexpr (kKeepsQueries) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto& row = softmax.rows.rows_of(place)[8 * h + (lane >> 2)];
        // mutate: sign-of-a-scale-lost
        const uint32_t signs = Traits::LogitsVariant::is_negative(row) ? 0x80808080u : 0;
#pragma unroll
        for (int i = 0; i < ceil_div(kHeadDimQK, 32); ++i) {
          q[i][h] ^= signs;
          q[i][2 + h] ^= signs;
        }
      }
    } else {
      turn_landed_rows(place);
      publish_queries();
    }
  }
  // The same where they have landed. A lane has half of a row.
  __device__ __forceinline__ void turn_landed_rows(int place) const {
    const int row = softmax.rows.warp_row() + lane / 2;
    if (!Traits::LogitsVariant::is_negative(softmax.rows.rows_of(place)[lane / 2])) return;
#pragma unroll 1
    for (int chunk = lane & 1; chunk < QTile::kChunks; chunk += 2) {
      uint32_t* const words = reinterpret_cast<uint32_t*>(shared.q[q_slot()] + QTile::offset(row, chunk));
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] ^= 0x80808080u;
    }
  }
  __device__ __forceinline__ void halve_queries() {
    // mutate: queries-not-converted
    powers = convert_rows_to_half<QTile>(shared.q[q_slot()], softmax.rows.warp_row(), lane);
    publish_queries();
  }
  // Makes the rows of Q that all threads of the warpgroup have written visible to its products.
  __device__ __forceinline__ void publish_queries() const {
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(Traits::kQueriesDone + group, kWarpgroup);
  }

  // S = Q K^T of the tile whose keys land next.
  __device__ __forceinline__ void issue_scores(float (&s)[1][kTileKV / 8][4]) {
    const uint32_t rows = ptx::shared_address(shared.q[q_slot()]) + 64 * group * QTile::kRowBytes;
    const uint32_t keys = ptx::shared_address(shared.k[k.stage]);
    await_phase(shared.full_k[k.stage], k.parity);
    if (Traits::kMultipliesGathered) ptx::fence_proxy_async();
    // The descriptor is made before the turn, for which other warpgroups wait.
    const uint64_t operand = ptx::opaque_copy(operand_at<KTile>(keys));
    await_turn();
    ptx::wgmma_fence();
    if constexpr (kKeepsQueries) {
      issue_qk_of_fragments<KTile>(s, q, operand);
    } else {
      issue_qk<QTile, KTile, kHeadDimQK>(s, operand_at<QTile>(rows), operand);
    }
    ptx::wgmma_commit();
  }

  // O += P V of the tile of `p`; without values, of the keys that have landed.
  __device__ __forceinline__ void issue_output(bool has_values = true) {
    const uint32_t values = ptx::shared_address(has_values ? shared.v[v.stage] : shared.k[k.stage]);
    if (has_values) await_phase(shared.full_v[v.stage], v.parity);  // mutate: values-not-awaited
    if (Traits::kMultipliesGathered) ptx::fence_proxy_async();
    ptx::wgmma_fence();
    if constexpr (Traits::kMultipliesBytes) {
      issue_pv_of_bytes<VTile, kHeadDimVO>(o, p, operand_at<VTile>(values), (tiles_of_part & (kHasSums - 1)) > 0);
    } else {
      issue_pv<VTile, kHeadDimVO>(o, p, operand_at<VTile>(values), adds_output);
    }
    ptx::wgmma_commit();
    adds_output = true;
  }

  // Warpgroups take turns at issuing products: while one is at its softmax, another multiplies. A
  // turn also says that all warps of the warpgroup are done with what they read before: O may then
  // take the place of Q.
  // Products of 8 bits are over before a turn comes round: without turns they take less time.
  static constexpr bool kTakesTurns = !Traits::kMultipliesBytes;
  // Of unions, warpgroups multiply different tiles.
  enum : bool { kAlternates = Traits::kConsumers > 1 && kTakesTurns && !Traits::kOfUnions };
  __device__ __forceinline__ void await_turn() const {
    if constexpr (!kTakesTurns) return;
    constexpr int kOthers = kAlternates ? kWarpgroup : 0;
    ptx::named_barrier_sync(Traits::kSchedulerBarrier + group, kWarpgroup + kOthers);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (!kAlternates) return;
    const int next = group + 1 == Traits::kConsumers ? 0 : group + 1;
    ptx::named_barrier_arrive(Traits::kSchedulerBarrier + next, 2 * kWarpgroup);
  }

  // kPending: groups of products that were issued after S.
  template <int kPending>
  __device__ __forceinline__ void await_scores(float (&s)[1][kTileKV / 8][4], bool is_last) {
    ptx::wgmma_wait<kPending>();
    take_results(s);
    release_keys(is_last);
    if constexpr (Traits::kHalvesQueries) {
      if (unlikely(ptx::warp_any(powers != 0))) undo_powers(s, powers);
    }
  }

  // The marks of the product's tile, of all keys together.
  __device__ __forceinline__ uint32_t any_nonfinite_key() const {
    uint32_t any = 0;
    if (masked_key >= 0) {
      const auto nonfinite_keys = shared.nonfinite_keys[v.stage];
#pragma unroll
      for (int word = 0; word < ceil_div(kTileKV, 32); ++word) any |= nonfinite_keys.word[word];
    }
    return any;
  }
  __device__ __forceinline__ void take_output() {
    ptx::wgmma_wait<0>();
    take_results(o);
    if constexpr (kHasTotal) ++tiles_of_part;
  }

  // Adds what O has to the total; the next product begins it anew.
  __device__ __forceinline__ void flush() {
    if constexpr (kHasTotal) {
      if (tiles_of_part >= kHasSums) add_total();
      if constexpr (Traits::kHasWarpBoxes) softmax.rows.await_box();
#pragma unroll
      for (int n = 0; n < kHeadDimVO / 8; ++n) {
        Vector16 sums;
#pragma unroll
        for (int e = 0; e < 4; ++e) sums.word[e] = __float_as_uint(o[0][n][e]);
        shared.totals[warp_of_all()][n][lane] = sums;
      }
      clear_total();
      tiles_of_part = kHasSums;
    }
  }
  // The warp among those of all consumers.
  __device__ __forceinline__ int warp_of_all() const { return 4 * group + softmax.rows.warp; }
  __device__ __forceinline__ void add_total() {
#pragma unroll
    for (int n = 0; n < kHeadDimVO / 8; ++n) {
      // Loads of all columns at once would take as many registers again.
      if (n % 4 == 0) ptx::end_basic_block(static_cast<uint32_t>(lane));
      const Vector16 sums = shared.totals[warp_of_all()][n][lane];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        o[0][n][e] = fmaf(__uint_as_float(sums.word[e]), factors_of_total[0][e / 2], o[0][n][e]);
      }
    }
  }
  __device__ __forceinline__ void rescale_output(const float (&factors)[1][2]) {
    multiply_rows(o, factors);
    if constexpr (kHasTotal) {
#pragma unroll
      // mutate: total-not-rescaled
      for (int h = 0; h < 2; ++h) factors_of_total[0][h] *= factors[0][h];
    }
  }
  // O of an item whose last product is over.
  __device__ __forceinline__ void complete_output() {
    if constexpr (kHasTotal) {
      if (tiles_of_part >= kHasSums) add_total();
      order_columns(o);
    }
  }
  __device__ __forceinline__ void write(const Output& output,
                                        [[maybe_unused]] bool is_mended = false) {
    if constexpr (Traits::kOfUnions) {
      softmax.rows.store(output, o);
      if (unlikely(is_mended)) {
        ptx::warp_sync();
        UnionRows<Traits>{block, softmax.rows}.write_again(output);
        // O has been written, and registers are short: the next product finds zeros.
        clear_output();
      }
      return softmax.rows.release(output);
    }
    if constexpr (Traits::kHasWarpBoxes) {
      if (softmax.rows.fills_box(block.all_params, output)) {
        return softmax.rows.write_box(block.all_params, output, o, warp_of_all());
      }
    }
    softmax.rows.write(output, o);
  }
  __device__ __forceinline__ void clear_total() {
    tiles_of_part = 0;
    factors_of_total[0][0] = factors_of_total[0][1] = 1.0f;
  }
  __device__ __forceinline__ void add_nonfinite_keys(const Item& item) {
    for (int word = 0; word < ceil_div(kTileKV, 32); ++word) {
      for (uint32_t bits = shared.nonfinite_keys[v.stage].word[word]; bits != 0; bits &= bits - 1) {
        const int key = 32 * word + __ffs(static_cast<int>(bits)) - 1;
        const auto* values = values_of<typename Traits::DTypeKV>(params, item.work.tile.kv_head);
        const auto* row = values + value_row<Traits::kPaged, Traits::kOwnValuePages>(
                                       params, item.work.request, masked_key + key);
        if constexpr (Traits::kMultipliesBytes) {
          add_nonfinite_key_of_bytes(o, p, key, row, lane);
        } else {
          add_nonfinite_key<typename Traits::DTypeP>(o, p, key, row, lane);
        }
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

  // What the first product of a block takes for probabilities; O starts anew behind it.
  static __device__ __forceinline__ void clear(uint32_t (&p)[Softmax::kSteps][1][4]) {
#pragma unroll
    for (int i = 0; i < Softmax::kSteps; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) p[i][0][e] = 0;
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

  static __device__ __forceinline__ ValueStage after(ValueStage stage) {
    stage.advance();
    return stage;
  }

  // The place of a ring before this one, if it is wanted.
  template <int kPlaces>
  static __device__ __forceinline__ int before(int place, bool is_wanted) {
    if constexpr (!Traits::kPersistent) return place;
    // Computed here and not earlier, because registers are scarce.
    place = static_cast<int>(ptx::opaque_copy(static_cast<uint32_t>(place)));
    return is_wanted ? (place == 0 ? kPlaces : place) - 1 : place;
  }

  // The tile that K holds at the present stage, which follows `tile`.
  __device__ __forceinline__ typename Traits::SeenTile key_tile_after(int tile) const {
    if constexpr (Traits::kOfUnions) {
      UnionKeyTile found{{tile - 1, 0}, {}};
      const int window = Traits::kUnionCuts ? block.all_params.unions().window : 0;
      softmax.find_seen(found, shared.unions.of[k.stage], window);
      return found;
    } else if constexpr (Traits::kMasked) {
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
    if constexpr (!kKeepsQueries) release(shared.empty_q[q_slot()], is_last);
    k.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(shared.empty_v[v.stage]);
    v.advance();
  }
};

}  // namespace cupyattn
