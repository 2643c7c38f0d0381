// A warpgroup of prefill_sm90 that multiplies: 64 rows of Q of one item after another, by tiles of
// keys and values that other warps bring. See prefill_sm90.cuh.
#pragma once

#include "cupyattn/attention/hidden_values.cuh"
#include "cupyattn/attention/key_rows.cuh"
#include "cupyattn/attention/mask_sm90.cuh"
#include "cupyattn/attention/maxima_softmax.cuh"
#include "cupyattn/attention/ring.cuh"
#include "cupyattn/attention/rope.cuh"
#include "cupyattn/attention/rows_sm90.cuh"
#include "cupyattn/attention/softmax.cuh"
#include "cupyattn/attention/work.cuh"
#include "cupyattn/common/types.cuh"
#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/mbarrier.cuh"
#include "cupyattn/ptx/tensor_copy.cuh"
#include "cupyattn/ptx/warp.cuh"
#include "cupyattn/tile/warpgroup_tile.cuh"

namespace cupyattn {

template <typename Kernel>
struct PrefillSm90Consumer {
  using Config = typename Kernel::ConfigType;
  using DTypeQ = typename Kernel::DTypeQ;
  using DTypeKV = typename Kernel::DTypeKV;
  using QTile = typename Kernel::QTile;
  using KTile = typename Kernel::KTile;
  using VTile = typename Kernel::VTile;
  using LogitsVariant = typename Kernel::LogitsVariant;
  using Item = typename Kernel::Item;
  using SharedMemory = typename Kernel::SharedMemory;
  static constexpr int kHeadDimQK = Kernel::kHeadDimQK;
  static constexpr int kHeadDimVO = Kernel::kHeadDimVO;
  static constexpr int kConsumers = Kernel::kConsumers;
  static constexpr int kTileKV = Kernel::kTileKV;
  static constexpr int kTilesS = kTileKV / 8;
  static constexpr int kStages = Kernel::kStages;
  static constexpr int kSlots = Kernel::kSlots;
  static constexpr int kItems = Kernel::kItems;
  static constexpr bool kPaged = Kernel::kPaged;
  static constexpr bool kOverlaps = Config::kOverlaps;
  static constexpr int kSteps = kTileKV / 16;  // of 16 keys
  // Rows take every maximum, or that of their first tile and others where they must; then, while O
  // is complete, that of every tile that causality cuts.
  static constexpr bool kTakesMaxima = Config::kTakesMaxima;
  using Softmax = typename conditional<kTakesMaxima, MaximaSoftmax,
                                       OnlineSoftmax<1, LogitsVariant::kSlackBits>>::type;
  // Whose probabilities are made beside the products of the last values.
  static constexpr int kEarlySteps = kTakesMaxima ? Config::kEarlySteps : (kOverlaps ? kSteps : 0);
  static constexpr int kWarpgroup = Kernel::kWarpgroup;
  // Whether tiles of which a guess holds have a path of their own. (Three coefficients beside the
  // probabilities of two tiles leave no registers for one.)
  static constexpr bool kTakesGuesses =
      LogitsVariant::kGuessesAll && (Kernel::kScalesQueries || !kOverlaps);
  // After the last tile nothing is guessed any more. (To ask takes a register.)
  static constexpr bool kSkipsLast = Kernel::kScalesQueries;
  static constexpr bool kTakesCutMaxima =
      !kTakesMaxima && !kOverlaps && !Kernel::kScalesQueries && !Kernel::kMasked;
  // Q that comes late is scaled beside the last values of the item before.
  static constexpr bool kValuesFirst = kSlots == 1 && Kernel::kScalesQueries;

  // Of a tile; and what O is to be multiplied by before, if it is.
  struct Probabilities {
    uint32_t p[kSteps][1][4];
    float factors[1][2];
    bool raised;
    int hidden_key;
  };
  using Rows = PrefillSm90Rows<Kernel, Softmax>;
  using Output = typename Rows::Output;

  const Kernel& kernel;
  const AttentionParams& params;
  SharedMemory& shared;
  const int group, lane;
  const Rows rows;  // of this warp
  RingPlace<kStages> k, v;
  RingPlace<kSlots> queries;  // of the next item
  RingPlace<kItems> place;    // of the present item, as is `slot`
  int slot = 0;
  // What is still to be done for the present item: its last values to be multiplied, and, or
  // only, O to be written.
  enum Rest { kNothing, kOutput, kValues } rest = kNothing;
  // Of the item: the tile that is its last, and where its tiles of keys begin and hide none.
  int last_tile, origin, full_begin, full_end;
  int position[2];      // of the thread's rows, where `shared.rows` does not tell
  int hidden_key = -1;  // the first key of the tile that `p` is of, if it hides some
  typename LogitsVariant::Kept kept;
  // Of guesses of all tiles, whatever their logits.
  enum Reach { kNone, kFar, kNear } reach;
  int holds_until;    // the last tile of which that is known
  bool near_is_over;  // it has failed in this item
  int last_far;       // the last tile that may be guessed by kFar, which is none once it has failed
  bool adds_output;   // to O, which holds products of the item
  float o[1][kHeadDimVO / 8][4];
  uint32_t p[kSteps][1][4];
  Softmax softmax;

  __device__ __forceinline__ PrefillSm90Consumer(const Kernel& kernel, int group)
      : kernel(kernel),
        params(kernel.params),
        shared(kernel.shared),
        group(group),
        lane(threadIdx.x % kWarpSize),
        rows(kernel, group),
        kept(LogitsVariant::keep(kernel.shared.logits)) {}

  __device__ __forceinline__ void run() {
    // The first turn is the first group's.
    if (group == kConsumers - 1) pass_turn();
    ptx::warp_sync();
    RingPlace<kItems> next;
    const Item* item = nullptr;
    int tile = 0;
    last_tile = 0;
    for (;;) {
      while (tile > last_tile) tile = visit(*item, tile);
      item = &kernel.await_item(next);
      const bool has_keys = item->exists && item->has_keys();
      const bool has_rows = item->work.tile.num_rows > 64 * group;
      if (!has_keys || !has_rows || rest == kOutput) complete();
      if (!item->exists) return;
      if (has_keys && has_rows) {
        tile = ptx::warp_uniform(item->tiles.end) - 1;
        visit_first(*item, tile, next);
        rest = kValues;
      } else {
        if (has_keys) pass_by(*item);
        start(*item, next);
        tile = last_tile;
        clear_output();
        rest = kOutput;
      }
      next.advance();
    }
  }

  static __device__ __forceinline__ RingPlace<kStages> after(RingPlace<kStages> place) {
    place.advance();
    return place;
  }

  // Groups take turns at issuing products, so that they are not at their softmax together.
  __device__ __forceinline__ void await_turn() const {
    if constexpr (Config::kTakesTurns)
      ptx::named_barrier_sync(Kernel::kTurn + group, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (Config::kTakesTurns) {
      const int next = group + 1 == kConsumers ? 0 : group + 1;
      ptx::named_barrier_arrive(Kernel::kTurn + next, 2 * kWarpgroup);
    }
  }

  // Does what is left of the present item.
  __device__ __forceinline__ void complete() {
    if (rest == kNothing) return;
    if (rest == kValues) {
      multiply_values();
      await_output(place.stage);
      // Nobody of the warpgroup reads Q any more, and O may take its place.
      if constexpr (Kernel::kStagesOutput) {
        ptx::named_barrier_sync(Kernel::kDone + group, kWarpgroup);
      }
    }
    rows.write(rows.conclude(softmax, place.stage, slot), o);
    rest = kNothing;
  }

  // The keys of an item that has no rows for this group: others wait for it to take its turns, and
  // to leave what it does not need.
  __device__ __forceinline__ void pass_by(const Item& item) {
    Kernel::wait(shared.full_q[queries.stage], queries.parity);
    slot = queries.stage;
    queries.advance();
    const int last = item.tiles.begin;
    for (int tile = item.tiles.end; tile > last;) {
      Kernel::wait(shared.full_k[k.stage], k.parity);
      tile = present_tile(tile).tile;
      await_turn();
      ptx::warp_sync();
      pass_turn();
      ptx::warp_sync();
      release_keys(tile == last);
      Kernel::wait(shared.full_v[v.stage], v.parity);
      release_values();
    }
  }

  // Turns to an item: describes this warp's rows; those past the last repeat it.
  __device__ __forceinline__ void start(const Item& item, const RingPlace<kItems>& next) {
    place = next;
    near_is_over = false;
    last_far = 0;
    last_tile = ptx::warp_uniform(item.tiles.begin);
    origin = ptx::warp_uniform(item.tiles.origin);
    full_begin = ptx::warp_uniform(item.range.full_begin);
    full_end = ptx::warp_uniform(item.range.full_end);
    float first_max = -ptx::infinity();
    if constexpr (Kernel::kScalesQueries) {
      // Rows of few keys take their own maximum: its probability is 1, without a rounding.
      if (item.tiles.end - last_tile > 1) first_max = LogitsVariant::first_max(shared.logits);
    }
    softmax = Softmax(first_max);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      position[h] = item.work.request.position(params, rows.token_of(item, rows.own_row(h)).token);
    }
    if constexpr (LogitsVariant::kReadsRows) describe_rows(item);
  }

  __device__ __forceinline__ void describe_rows(const Item& item) {
    const int r = rows.warp_row() + (lane & 15);
    const PackGqaRow row = rows.token_of(item, r);
    const int kv_head = item.work.tile.kv_head;
    ptx::warp_sync();
    if (lane < 16) {
      shared.rows[r] =
          LogitsVariant::make_row(params, row.token, item.work.request.position(params, row.token),
                                  kv_head * params.group_size + row.group_head, kv_head);
    }
    ptx::warp_sync();
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int n = 0; n < kHeadDimVO / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][n][e] = 0.0f;
    }
  }

  // Issues O += P V of the last tile, once its values have landed.
  __device__ __forceinline__ void multiply_values() {
    Kernel::wait(shared.full_v[v.stage], v.parity);
    const uint32_t address = ptx::shared_address(shared.v[v.stage]);
    if constexpr (Kernel::kIsGathered) ptx::fence_proxy_async();
    ptx::wgmma_fence();
    issue_pv<DTypeQ, VTile, kHeadDimVO>(o, p, operand_at<VTile>(address), adds_output);
    ptx::wgmma_commit();
    adds_output = true;
  }

  // Values that are not finite were taken out of a tile that hides keys: rows that see them get
  // them here. its_place: of the item.
  __device__ __forceinline__ void await_output(int its_place) {
    uint32_t any_bad_key = 0;  // asked for while the products are still being made
    if (hidden_key >= 0) {
      const Vector16 bad_keys = shared.bad_keys[v.stage];
#pragma unroll
      for (int word = 0; word < ceil_div(kTileKV, 32); ++word) any_bad_key |= bad_keys.word[word];
    }
    ptx::wgmma_wait<0>();
    take_results(o);
    if (any_bad_key != 0) {
      add_bad_keys(shared.items[its_place]);
      ptx::warp_sync();
    }
    release_values();
  }

  // After the last keys of an item Q is free too.
  __device__ __forceinline__ void release_keys(bool is_last) {
    arrive_once(shared.empty_k[k.stage]);
    arrive_once(shared.empty_q[slot], is_last);
    k.advance();
  }
  __device__ __forceinline__ void release_values() {
    arrive_once(shared.empty_v[v.stage]);
    v.advance();
  }
  // For the warp.
  __device__ __forceinline__ void arrive_once(uint64_t& barrier, bool arrives = true) {
    ptx::mbarrier_arrive_if(arrives && lane == 0, ptx::shared_address(&barrier));
  }

  // Issues S = Q K^T of a tile that has landed.
  __device__ __forceinline__ void multiply_keys(float (&s)[1][kTilesS][4], bool awaits = true) {
    const uint32_t rows = ptx::shared_address(shared.q[slot]) + 64 * group * QTile::kRowBytes;
    const uint32_t keys = ptx::shared_address(shared.k[k.stage]);
    Kernel::wait(shared.full_k[k.stage], k.parity);
    if constexpr (Kernel::kIsGathered) ptx::fence_proxy_async();
    // Made here, and not in the turn, for which others wait.
    const uint64_t operand = ptx::opaque_copy(operand_at<KTile>(keys));
    if (awaits) await_turn();
    ptx::wgmma_fence();
    issue_qk<DTypeQ, QTile, KTile, kHeadDimQK>(s, operand_at<QTile>(rows), operand);
    ptx::wgmma_commit();
  }

  // The tile whose keys have landed last, if it comes after `tile` of an item.
  __device__ __forceinline__ KeyTile present_tile(int tile) const {
    if constexpr (Kernel::kMasked) {
      const KeyTile& present = shared.row_bits.tiles[k.stage];
      return KeyTile{ptx::warp_uniform(present.tile), ptx::warp_uniform(present.hides)};
    } else {
      const int first_key = origin + (tile - 1) * kTileKV;
      return KeyTile{tile - 1, first_key < full_begin || first_key + kTileKV > full_end};
    }
  }

  // Keys come rotated; each warpgroup rotates its rows of Q where they have landed.
  __device__ __forceinline__ void rotate_queries(const Item& item) const {
    const TileWork& work = item.work.tile;
    rotate_rows<QTile, kHeadDimQK, 64, kWarpgroup>(
        shared.q[slot], 64 * group, shared.rope, threadIdx.x % kWarpgroup, [&](int r) {
          const int row = work.first_row + min_of(r, work.num_rows - 1);
          return item.work.request.position(params, PackGqaRow::of(params, row).token);
        });
    end_queries();
  }
  __device__ __forceinline__ void scale_queries() const {
    scale_rows<QTile, kWarpgroup>(shared.q[slot], 64 * group, shared.logits.query_scale,
                                  threadIdx.x % kWarpgroup);
    end_queries();
  }
  // The warpgroup's rows are written anew.
  __device__ __forceinline__ void end_queries() const {
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(Kernel::kQueriesDone + group, kWarpgroup);
  }

  // The first tile of an item: its logits beside the last values of the item before, of which
  // everything but O is settled meanwhile.
  __device__ __forceinline__ void visit_first(const Item& item, int tile,
                                              const RingPlace<kItems>& next) {
    float s[1][kTilesS][4];
    Probabilities probabilities;
    KeyTile present;
    // Logits that come behind the last values have nothing left to be beside.
    constexpr bool kIsBeside = kOverlaps && !kValuesFirst;
    Kernel::wait(shared.full_q[queries.stage], queries.parity);
    const int last_slot = slot;
    slot = queries.stage;
    queries.advance();
    if constexpr (Kernel::kRope) rotate_queries(item);
    if constexpr (!kValuesFirst) {
      if constexpr (Kernel::kScalesQueries) scale_queries();
      multiply_keys(s);
    }
    if (rest == kValues) {
      if constexpr (kValuesFirst) await_turn();
      multiply_values();
      if constexpr (kValuesFirst) {
        scale_queries();
        multiply_keys(s, false);
      }
      pass_turn();
      const Output output = rows.conclude(softmax, place.stage, last_slot);
      start(item, next);
      present = present_tile(tile + 1);
      ptx::wgmma_wait<kValuesFirst ? 0 : 1>();
      take_results(s);
      release_keys(tile == last_tile);
      if constexpr (kIsBeside) exponentiate<true>(probabilities, s, item, present, after(v));
      await_output(output.place);
      rows.write(output, o);
    } else {
      if constexpr (kValuesFirst) {
        scale_queries();
        multiply_keys(s);
      }
      pass_turn();
      start(item, next);
      present = present_tile(tile + 1);
      ptx::wgmma_wait<0>();
      take_results(s);
      release_keys(tile == last_tile);
      if constexpr (kIsBeside) exponentiate<true>(probabilities, s, item, present, v);
    }
    if constexpr (!kIsBeside) exponentiate<true>(probabilities, s, item, present, v);
    adds_output = false;
    take(probabilities);
  }

  // The tile that comes after `tile`, which it returns: its logits beside the values of the one
  // before, then its probabilities, if registers allow while the values are still being multiplied.
  __device__ __forceinline__ int visit(const Item& item, int tile) {
    float s[1][kTilesS][4];
    Probabilities probabilities;
    multiply_keys(s);
    multiply_values();
    pass_turn();
    const KeyTile present = present_tile(tile);
    const bool is_near = may_be_guessed(present, kNear);
    const bool is_far = Kernel::kScalesQueries && may_be_guessed(present, kFar);
    ptx::wgmma_wait<1>();
    take_results(s);
    release_keys(present.tile == last_tile);
    const RingPlace<kStages> values = after(v);
    bool has_failed = false;
    if constexpr (kTakesGuesses) {
      if (is_near) {
        if constexpr (!kOverlaps) end_output();
        if (holds(LogitsVariant::near_guess(kept), probabilities, s)) {
          finish_ordinary(probabilities);
          return present.tile;
        }
        has_failed = !Kernel::kScalesQueries;
        near_is_over = true;
      } else if (is_far) {
        if constexpr (!kOverlaps) end_output();
        if (holds(LogitsVariant::far_guess(kept, shared.logits), probabilities, s)) {
          finish_ordinary(probabilities);
          return present.tile;
        }
        last_far = 1 << 30;
        has_failed = true;
      } else if constexpr (!kOverlaps) {
        await_output(place.stage);
      }
    } else if constexpr (!kOverlaps) {
      await_output(place.stage);
    }
    exponentiate<false>(probabilities, s, item, present, values, has_failed);
    if constexpr (kOverlaps && !kTakesMaxima) {
      await_output(place.stage);
      if (unlikely(probabilities.raised)) multiply_rows(o, probabilities.factors);
    }
    take<kEarlySteps>(probabilities);
    return present.tile;
  }
  // Whether a tile takes a guess, and neither it nor the one before hides keys: one condition,
  // settled beside products. Behind them each would be waited for.
  __device__ __forceinline__ bool may_be_guessed(const KeyTile& present, Reach wanted) const {
    if constexpr (!kTakesGuesses) return false;
    const bool may = present.hides == 0 && hidden_key < 0 && reach == wanted;
    return ptx::opaque_copy(static_cast<uint32_t>(may && present.tile >= holds_until)) != 0;
  }
  __device__ __forceinline__ void finish_ordinary(Probabilities& probabilities) {
    if constexpr (kOverlaps) end_output();
    probabilities.hidden_key = -1;
    take(probabilities);
  }
  __device__ __forceinline__ void end_output() {
    ptx::wgmma_wait<0>();
    take_results(o);
    release_values();
  }

  // Turns products of a tile, whose values are at `values`, into probabilities, and raises the
  // maximum where they ask for it. (Where all are taken, O is complete afterwards.)
  template <bool kIsFirst>
  __device__ __forceinline__ void exponentiate(Probabilities& to, float (&s)[1][kTilesS][4],
                                               const Item& item, const KeyTile& present,
                                               const RingPlace<kStages>& values,
                                               bool has_failed = false) {
    const int first_key = origin + present.tile * kTileKV;
    const bool hides = present.hides != 0;
    to.hidden_key = hides ? first_key : -1;
    if constexpr (LogitsVariant::kGuessesAll) {
      exponentiate_capped<kIsFirst>(to, s, item, present, values, has_failed);
      if (!kSkipsLast || present.tile > last_tile) settle_reach(item, present.tile);
    } else {
      if constexpr (LogitsVariant::kGuesses && !kIsFirst) {
        if (!hides) {
          const auto guess =
              LogitsVariant::guess(shared.rows + rows.warp_row(), params, first_key, lane);
          if (holds(guess, to, s)) return;
        }
      }
      const auto form = LogitsVariant::apply(s, softmax.maxima(), shared.rows + rows.warp_row(),
                                             shared.logits, params, first_key, lane, hides);
      finish_tile<kIsFirst>(to, s, form, item, present, values);
    }
  }

  // A tile under a cap, of which a guess has failed or not been made.
  template <bool kIsFirst>
  __device__ __forceinline__ void exponentiate_capped(Probabilities& to, float (&s)[1][kTilesS][4],
                                                      const Item& item, const KeyTile& present,
                                                      const RingPlace<kStages>& values,
                                                      bool has_failed) {
    const bool is_trusted = !kIsFirst && reach != kNone && present.tile >= holds_until;
    bool is_small = is_trusted && !has_failed;
    if (!is_trusted) is_small = LogitsVariant::are_small(s, softmax.row_max, shared.logits);
    // A vote, so that the compiler knows that the warp stays together.
    if (ptx::warp_any(is_small)) {
      if (present.hides != 0) {
        rows.template hide_keys<PolynomialForm>(s, item, origin + present.tile * kTileKV, values,
                                                position);
      }
      if (holds(LogitsVariant::far_guess(kept, shared.logits), to, s)) return;
    }
    const auto form = LogitsVariant::settle(s, shared.logits);
    finish_tile<kIsFirst>(to, s, form, item, present, values);
  }
  template <bool kIsFirst, typename Form>
  __device__ __forceinline__ void finish_tile(Probabilities& to, float (&s)[1][kTilesS][4],
                                              const Form& form, const Item& item,
                                              const KeyTile& present,
                                              const RingPlace<kStages>& values) {
    const float scale = LogitsVariant::softmax_scale(params);
    if (unlikely(present.hides != 0)) {
      const int first_key = origin + present.tile * kTileKV;
      rows.template hide_keys<Form>(s, item, first_key, values, position);
      // Where causality cuts a second tile, rows may have seen no key before, or a few.
      if constexpr (kTakesCutMaxima && !kIsFirst) {
        if (first_key + kTileKV > full_end) {
          const float no_sums[1][2] = {};
          softmax.template raise_where_asked<true>(s, to.factors, no_sums, form, scale);
          multiply_rows(o, to.factors);
        }
      }
    }
    if constexpr (kTakesMaxima) {
      exponentiate_under_maxima<kIsFirst>(to, s, form.scale);
    } else {
      // Rows that begin with a maximum take another only where they must.
      constexpr bool kTakesMax = kIsFirst && !Kernel::kScalesQueries;
      to.raised = softmax.template exponentiate_or_raise<DTypeQ, kTakesMax>(to.p, s, to.factors,
                                                                            form, scale);
      if constexpr (!kOverlaps && !kIsFirst) {
        if (unlikely(to.raised)) multiply_rows(o, to.factors);
      }
    }
  }
  // O is multiplied beside the special functions of the later steps. Of an item's first tile there
  // is none yet, and all steps are early.
  template <bool kIsFirst>
  __device__ __forceinline__ void exponentiate_under_maxima(Probabilities& to,
                                                            const float (&s)[1][kTilesS][4],
                                                            float scale) {
    constexpr int kEarly = kIsFirst ? kSteps : kEarlySteps;
    float sums[2];
    const bool moves = softmax.raise(s, scale, to.factors);
    softmax.template exponentiate<DTypeQ, 0, kEarly>(to.p, s, scale, sums);
    if constexpr (!kIsFirst) await_output(place.stage);
    if (moves) {
      if constexpr (!kIsFirst) multiply_rows(o, to.factors);
      softmax.look_at_signs();
    }
    softmax.template exponentiate<DTypeQ, kEarly, kSteps>(to.p, s, scale, sums);
    softmax.add(to.factors, sums);
  }

  // How far guesses hold after a tile, and down to which.
  __device__ __forceinline__ void settle_reach(const Item& item, int tile) {
    const int end = ptx::warp_uniform(item.tiles.end);
    const float sums[] = {quad_sum(softmax.row_sum[0][0]), quad_sum(softmax.row_sum[0][1])};
    const auto last_in = [&](const CapReach& limit) {
      const int keys = LogitsVariant::keys_in_reach(softmax.row_max[0], sums, limit);
      return end - ptx::warp_min(keys) / kTileKV;
    };
    holds_until = last_in(LogitsVariant::reach(shared.logits));
    reach = holds_until < tile ? kNear : kNone;
    if constexpr (Kernel::kScalesQueries) {
      const int far_until = max_of(last_in(LogitsVariant::far_reach(shared.logits)), last_far);
      if (near_is_over || reach == kNone) {
        reach = far_until < tile ? kFar : kNone;
        // Sums grow: soon the cubic may do.
        holds_until = near_is_over ? far_until : max_of(far_until, tile - 1);
      }
    }
  }

  // All probabilities of a tile, if a guess holds.
  template <typename Guess>
  __device__ __forceinline__ bool holds(const Guess& guess, Probabilities& to,
                                        const float (&s)[1][kTilesS][4]) {
    to.raised = false;
    return softmax.template exponentiate_guessed<DTypeQ>(to.p, s, guess,
                                                         LogitsVariant::softmax_scale(params));
  }

  // Products read `p` until they are over: beside them, the next ones are written elsewhere.
  template <int kEarly = kOverlaps ? kSteps : 0>  // of an item's first tile all, if any
  __device__ __forceinline__ void take(const Probabilities& from) {
    hidden_key = from.hidden_key;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[i][0][e] = i < kEarly ? ptx::opaque_copy(from.p[i][0][e]) : from.p[i][0][e];
      }
    }
  }

  __device__ __forceinline__ void add_bad_keys(const Item& item) {
    for (int word = 0; word < ceil_div(kTileKV, 32); ++word) {
      for (uint32_t bits = shared.bad_keys[v.stage].word[word]; bits != 0; bits &= bits - 1) {
        const int key = 32 * word + __ffs(static_cast<int>(bits)) - 1;
        const DTypeKV* values = static_cast<const DTypeKV*>(params.v) +
                                item.work.tile.kv_head * params.v_stride_h +
                                value_row<kPaged>(params, item.work.request, hidden_key + key);
        add_nonfinite_key<DTypeKV, DTypeQ>(o, p, key, values, lane);
      }
    }
  }
};

}  // namespace cupyattn
