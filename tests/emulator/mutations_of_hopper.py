"""Mistakes in prefill_sm90: phases, operands, and what its warps tell each other."""

from __future__ import annotations

from .mutation import Mutation

HOPPER = (
    Mutation(
        "states-are-gated",
        "if (item.work.tile.leaves_state()) return;",
        "",
        "hopper gates of splits",
    ),
    Mutation(
        "row-groups-without-panels", "kPanels * kPatternBytes", "kPatternBytes", "hopper wide pages"
    ),
    Mutation(
        "padding-of-a-page-seen",
        "item.range.begin",
        "0",
        "hopper padded prefill",
    ),
    Mutation(
        "last-columns-lost",
        "ceil_div(kHeadDim, Mma::kStep)",
        "kHeadDim / Mma::kStep",
        "hopper odd dims",
    ),
    Mutation(
        "q-chunk-past-the-row",
        "chunk < QTile::kChunks",
        "chunk <= QTile::kChunks",
        "hopper odd dims",
    ),
    Mutation("tail-by-whole-boxes", "Tile::kHasTail &&", "false &&", "hopper odd dims"),
    Mutation("output-past-the-head-dim", "exists && is_tile", "exists", "hopper odd dims"),
    Mutation(
        "fp8-chunk-past-the-row",
        "Tile::kBytesOfLastChunk",
        "16",
        "hopper odd dims of fp8 in pages",
    ),
    Mutation(
        "fast-warps-do-not-wait",
        "take_output();",
        "if (!tile.is_fast) take_output();",
        "hopper parted warps",
    ),
    Mutation("quad-halves-swapped", "got : kept", "kept : got", "hopper odd groups"),
    Mutation("hopper-bad-values-stay", "& ~holes.word[w]", "", "hopper bad values"),
    Mutation(
        "last-small-box-left-out", "row < num_keys", "row + 16 < num_keys", "hopper small boxes"
    ),
    Mutation("lean-slot-not-refilled", "item, copier.copied", "item, 0", "hopper lean"),
    Mutation("lean-values-not-checked", "has_nonfinite_values(num_keys)", "false", "hopper lean"),
    Mutation(
        "lean-queries-not-awaited",
        "await_phase(shared.full_q[q.stage], q.parity);",
        "",
        "hopper lean",
    ),
    Mutation(
        "lean-queries-overwrite-output", "ptx::bulk_wait_read();", "", "hopper lean, persistent"
    ),
    Mutation(
        "lean-missing-rows-stay",
        "softmax.rows.own_row(h) < num_rows",
        "h < 2",
        "hopper lean, capped",
    ),
    Mutation("lean-item-released-early", "kPersistent ? 5 : 4", "4", "hopper lean, persistent"),
    Mutation("bad-keys-not-marked", "key < num_keys", "key < 0", "hopper bad values"),
    Mutation("pair-shares-alibi-bias", "8 * n + 1", "8 * n", "hopper alibi"),
    Mutation(
        "hopper-mixed-tile-counts-as-full",
        "is_mixed |= (all[w] & exists) != exists;",
        "",
        "hopper mask",
    ),
    Mutation("mask-scanned-by-one-warp", "kWarps", "1000", "hopper mask"),
    Mutation(
        "every-tile-rotates-first-share", "item.first_row / params.tile_rows", "0", "hopper rope"
    ),
    Mutation("window-tiles-start-too-early", "ahead", "ahead + keys_per_tile", "hopper window"),
    Mutation(
        "spare-items-worked-on",
        "if (item.work.tile.num_rows <= 0) return item;",
        "",
        "hopper device plans",
    ),
    Mutation(
        "values-not-awaited", "await_phase(shared.full_v[v.stage], v.parity);", "", "hopper causal"
    ),
    Mutation(
        "k-stage-not-awaited", "await_phase(place.empty, place.parity ^ 1);", "", "hopper causal"
    ),
    Mutation("item-counter-not-reset", "num_items - 1", "num_items", "hopper swizzle"),
    Mutation("end-not-announced", "item.nears_end(tile, next)", "tile == next", "hopper swizzle"),
    Mutation("q-rows-of-first-tile", "work.first_row + r", "r", "hopper broken tokens"),
    Mutation("q-row-past-tile", "r < work.num_rows", "r <= work.num_rows", "hopper broken tokens"),
    Mutation("maximum-never-moves", "tile_sum > most ||", "", "hopper steep alibi"),
    Mutation("hopper-output-not-rescaled", "factors[m][e / 2]", "1.0f", "hopper steep"),
    Mutation(
        "dominating-probability-rounded",
        "fminf(fmaf(2.0f, row_sum[m][h], room), kMostOfTile)",
        "kMostOfTile",
        "hopper dominating probability",
    ),
    Mutation("tail-items-from-first", "num_swizzled", "0", "hopper swizzle"),
    Mutation(
        "nonfinite-keys-not-added",
        "add_nonfinite_keys(shared.items[place]);",
        "",
        "hopper bad values",
    ),
    Mutation("first-values-added", "adds_output = false;", "", "hopper wide pages"),
    Mutation(
        "output-not-rescaled-at-cut",
        "rescale_output(tile.probabilities.factors);",
        "",
        "hopper alibi causal",
    ),
    Mutation(
        "output-in-the-slot-of-the-next-item",
        "before<Traits::kSlots>(q_slot(), is_behind)",
        "q_slot()",
        "hopper swizzle",
    ),
    Mutation(
        "q-overwrites-output", "if (lane == 0) ptx::bulk_wait_read();", "", "hopper wide pages"
    ),
    Mutation(
        "output-of-another-slot",
        "stored = stored + 1 == kSlots ? 0 : stored + 1;",
        "",
        "hopper wide pages",
    ),
    Mutation("rows-from-page-start", "+ slot * units.row", "", "hopper small pages"),
    Mutation(
        "values-of-next-tile",
        "select(tile.tile == present_tile, present, behind)",
        "present",
        "hopper small pages",
    ),
    Mutation(
        "idle-warpgroup-skips-turns",
        "if (item_of(at).has_keys()) skip_item(item_of(at));",
        "",
        "hopper wide pages",
    ),
    Mutation(
        "tiles-of-broken-tokens",
        "whole_token_rows(params, Traits::kTileQ)",
        "Traits::kTileQ",
        "hopper whole tokens",
    ),
    Mutation(
        "boxes-of-rows-at-tokens",
        "boxes.step == boxes.rows",
        "false",
        "hopper rows of one head",
    ),
    Mutation(
        "output-box-of-partial-rows",
        "num_rows & ~63",
        "(num_rows + 63) & ~63",
        "hopper partial rows",
    ),
    Mutation(
        "hopper-row-power-not-undone", "-static_cast<int8_t>", "0 & ", "hopper rows of any size"
    ),
    Mutation("power-of-another-row", "row / 4", "row % 4", "hopper rows of any size"),
    Mutation("queries-not-converted", "warp_row()", "warp_row() / 2", "hopper fp8 of bfloat16"),
    Mutation(
        "converted-before-empty",
        "await_phase(shared.empty_k[k.stage], k.parity ^ 1);",
        "",
        "hopper fp8",
    ),
    Mutation(
        "mask-bits-not-awaited",
        "await_phase(shared.row_bits.full[v.stage], v.parity);",
        "",
        "hopper mask",
    ),
    Mutation(
        "mask-bits-before-empty",
        "await_phase(shared.empty_v[v.stage], v.parity ^ 1);",
        "",
        "hopper mask",
    ),
    Mutation(
        "hidden-tiles-skip-too-far",
        "__clz(static_cast<int>(rest))",
        "__clz(static_cast<int>(rest)) + 1",
        "hopper mask",
    ),
    Mutation("tile-not-named", "if (place.name != nullptr) *place.name = tile;", "", "hopper mask"),
    Mutation(
        "rotated-pages-by-table",
        "if (kInOrder && page >= 0) page = request.kv_start + at.page;",
        "",
        "hopper rope",
    ),
    Mutation("rotates-rows-of-first-group", "64 * group", "0", "hopper rope"),
    Mutation(
        "second-key-hidden-late",
        "min_of(offset & 7, 2)",
        "2 * min_of(offset & 7, 1)",
        "hopper causal",
    ),
    Mutation("sums-never-fail", "fails |= tile_sum[h] > path.most_of_tile();", "", "hopper capped"),
    Mutation("sum-range-ignores-maximum", "exp2f(bits)", "exp2f(end)", "hopper capped"),
    Mutation("high-rows-are-valid", "row_max[h] <= constants.top", "true", "hopper capped"),
    Mutation(
        "empty-rows-are-valid",
        "row_sum[h] * ptx::ex2_approx(row_max[h] + constants.evidence)",
        "keys",
        "hopper capped",
    ),
    Mutation("cubic-range-too-wide", "1.25e-4f", "2e-3f", "hopper capped"),
    Mutation("cubic-not-saturated", "ptx::square_saturated(x)", "x * x", "hopper capped key"),
    Mutation(
        "queries-not-scaled",
        "ptx::multiply_add_pair<typename Tile::T>(chunk.word[w], factors, kMinusZeros)",
        "chunk.word[w]",
        "hopper capped",
    ),
    Mutation(
        "large-logits-said-small", "constants.limit", "8.0f * constants.limit", "hopper capped"
    ),
    # Items that blocks find, of prefill_sm90 and decode.
    Mutation(
        "found-key-offsets-as-lengths", "lengths.kv_lens_are_steps", "false", "hopper found items"
    ),
    Mutation("found-level-too-high", "+= step", "+= step + (step == 1)", "hopper found items"),
    Mutation("found-places-of-all-requests", "-= begin", "-= 0", "hopper found by offsets"),
    Mutation(
        "found-request-of-another-rank",
        "seconds & (bit - 1)",
        "seconds & bit",
        "hopper found items",
    ),
    Mutation("found-requests-twice", "index + i", "index", "hopper found two a lane"),
    Mutation(
        "found-tiles-past-the-last",
        "static_cast<uint32_t>(from_end) >= num_tiles",
        "false",
        "hopper found absurd offsets",
    ),
    Mutation("found-split-of-another-request", "end <= place", "end < place", "hopper found parts"),
    Mutation(
        "found-splits-of-the-next-request", "end -= num_second", "", "hopper found two a lane"
    ),
    Mutation(
        "found-splits-are-the-first",
        "tiles_left * num_splits - from_end",
        "0",
        "hopper found parts",
    ),
    Mutation("found-parts-outgrow-their-wave", "<= slots", "<= 2 * slots", "hopper found parts"),
    Mutation("found-tiles-are-merged-whole", "> 1", "> 0", "hopper found parts"),
    Mutation("rows-of-nobody-keep-tiles", "row + 8 * h < num_rows", "true", "hopper skipped tiles"),
    Mutation(
        "tiles-left-out-too-early",
        "row_max[h] + margin * units",
        "row_max[h]",
        "hopper skipped tiles",
    ),
    # Once for the present tile and once for the next one.
    Mutation(
        "skipped-values-released-early",
        "ptx::warp_sync();",
        "release_values();",
        "hopper skipped tiles",
    ),
    Mutation("warps-skip-alone", "all.word[2] | all.word[3]", "0", "hopper skipping warps"),
    Mutation(
        "tiles-weighed-too-seldom",
        "max_of(heavy - kFirstHeavy, 0)",
        "heavy",
        "hopper skipped tiles",
    ),
    Mutation(
        "found-scales-of-first-request",
        "ptx::shuffle(found.index, source)",
        "0",
        "hopper found 8-bit",
    ),
)
