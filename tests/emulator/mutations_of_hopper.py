"""Mistakes in prefill_sm90: phases, operands, and what its warps tell each other."""

from __future__ import annotations

from .mutation import Mutation

# Mutations that name a file have no marker yet.
KERNEL = "cupyattn/attention/prefill_sm90.cuh"
PRODUCER = "cupyattn/attention/producer_sm90.cuh"
CONVERTER = "cupyattn/attention/converter_sm90.cuh"
CONSUMER = "cupyattn/attention/consumer_sm90.cuh"
ROWS = "cupyattn/attention/rows_sm90.cuh"
SOFTMAX = "cupyattn/attention/softmax.cuh"
MAXIMA = "cupyattn/attention/maxima_softmax.cuh"
GATHERER = "cupyattn/attention/gatherer_sm90.cuh"
SOFT_CAP = "cupyattn/attention/soft_cap.cuh"
MASK = "cupyattn/attention/mask_sm90.cuh"

HOPPER = (
    Mutation(
        "row-groups-without-panels", "kPanels * kPatternBytes", "kPatternBytes", "hopper wide pages"
    ),
    Mutation("quad-halves-swapped", "got : kept", "kept : got", "hopper odd groups"),
    Mutation("hopper-bad-values-stay", "& ~holes.word[w]", "", "hopper bad values"),
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
        "queries-not-scaled",
        "ptx::multiply_add_pair<typename Tile::T>(chunk.word[w], factors, kMinusZeros)",
        "chunk.word[w]",
        "hopper capped",
    ),
    Mutation(
        "spare-items-worked-on",
        "if (item.work.tile.num_rows <= 0) return item;",
        "",
        "hopper device plans",
    ),
    Mutation(
        "values are not waited for",
        "    Kernel::wait(shared.full_v[v.stage], v.parity);\n    const uint32_t address",
        "    const uint32_t address",
        "hopper causal",
        CONSUMER,
    ),
    Mutation(
        "the place of keys is not waited for",
        "      Kernel::wait(place.empty, place.parity ^ 1);\n      ptx::warp_sync();\n",
        "      ptx::warp_sync();\n",
        "hopper causal",
        PRODUCER,
    ),
    Mutation(
        "the counter of items does not return to zero",
        "ptx::atomic_inc_wrap(params.counters, num_items - 1)",
        "ptx::atomic_inc_wrap(params.counters, num_items)",
        "hopper causal",
        KERNEL,
    ),
    Mutation(
        "rows of Q of a later tile",
        "PackGqaRow::of(params, work.first_row + r)",
        "PackGqaRow::of(params, r)",
        "hopper odd groups",
        PRODUCER,
    ),
    Mutation(
        "a row too many of a partial tile",
        "ptx::cp_async_16(tile + QTile::offset(r, chunk), source, r < work.num_rows);",
        "ptx::cp_async_16(tile + QTile::offset(r, chunk), source, r <= work.num_rows);",
        "hopper odd groups",
        PRODUCER,
    ),
    Mutation(
        "the maximum never moves",
        "return tile_sum > kMostOfTile || row_max[m][h] == -ptx::infinity();",
        "return row_max[m][h] == -ptx::infinity();",
        "hopper steep alibi",
        SOFTMAX,
    ),
    Mutation(
        "O keeps the scale of a maximum that has moved",
        "o[m][n][e] *= factors[m][e / 2];",
        "o[m][n][e] *= 1.0f;",
        "hopper steep",
        SOFTMAX,
    ),
    Mutation(
        "O keeps the scale of a maximum that a tile has passed",
        "      if constexpr (!kIsFirst) multiply_rows(o, to.factors);\n",
        "",
        "hopper maxima",
        CONSUMER,
    ),
    Mutation(
        "a sum keeps the scale of a maximum that a tile has passed",
        "fmaf(row_sum[0][h], factors[0][h], sums[h]);",
        "row_sum[0][h] + sums[h];",
        "hopper maxima",
        MAXIMA,
    ),
    Mutation(
        "a maximum is passed by a third",
        "-quad_max(largest[h]) * scale",
        "0.3f - quad_max(largest[h]) * scale",
        "hopper largest probability",
        MAXIMA,
    ),
    Mutation(
        "the larger of two negative floats is the larger integer",
        "if (unlikely(looks_again)) {",
        "if (false) {",
        "hopper largest probability",
        MAXIMA,
    ),
    Mutation(
        "a maximum that moves is taken to be above zero",
        "row_shift[0][0] > 0.0f || row_shift[0][1] > 0.0f",
        "false",
        "hopper largest probability",
        MAXIMA,
    ),
    Mutation(
        "the items that come after all sections are the first ones",
        "int first_place = sectioned,",
        "int first_place = 0,",
        "hopper sections",
        KERNEL,
    ),
    Mutation(
        "hidden keys that are not finite are nobody's",
        "      add_bad_keys(shared.items[its_place]);\n",
        "",
        "hopper bad values",
        CONSUMER,
    ),
    Mutation(
        "an item's first values are added to the output of the item before",
        "    adds_output = false;",
        "",
        "hopper wide pages",
        CONSUMER,
    ),
    Mutation(
        "rows of Q come into a place that O has not left",
        "            if (lane == 0) ptx::bulk_wait_read();",
        "",
        "hopper wide pages",
        KERNEL,
    ),
    Mutation(
        "O leaves from another item's place",
        "stored = stored + 1 == kSlots ? 0 : stored + 1;",
        "",
        "hopper wide pages",
        KERNEL,
    ),
    Mutation(
        "rows are gathered from the start of their page",
        "page * units.page + slot * units.row",
        "page * units.page",
        "hopper small pages",
        GATHERER,
    ),
    Mutation(
        "values of the tile of keys, which is one ahead",
        "select(tile.tile == present_tile, present, behind)",
        "present",
        "hopper small pages",
        GATHERER,
    ),
    Mutation(
        "a warpgroup without rows takes no turns",
        "if (has_keys) pass_by(*item);",
        "",
        "hopper wide pages",
        CONSUMER,
    ),
    Mutation(
        "a box of O of which some rows are another's",
        "? num_rows / 64 * 64 : 0;",
        "? ceil_div(num_rows, 64) * 64 : 0;",
        "hopper steep",
        KERNEL,
    ),
    Mutation(
        "keys are converted before their place is free",
        "    Kernel::wait(shared.empty_k[k.stage], k.parity ^ 1);\n",
        "",
        "hopper fp8",
        CONVERTER,
    ),
    Mutation(
        "tiles that a mask hides in part are not waited for",
        "Kernel::wait(shared.row_bits.full[values.stage], values.parity);",
        "",
        "hopper mask",
        ROWS,
    ),
    Mutation(
        "bits of rows come before their place is free",
        "Kernel::wait(shared.empty_v[v.stage], v.parity ^ 1);\n              shared.row_bits",
        "shared.row_bits",
        "hopper mask",
        PRODUCER,
    ),
    Mutation(
        "hidden tiles are skipped one too far",
        "tile -= __clz(static_cast<int>(rest));",
        "tile -= __clz(static_cast<int>(rest)) + 1;",
        "hopper mask",
        MASK,
    ),
    Mutation(
        "those that multiply are not told which tile it is",
        "if (place.name != nullptr) *place.name = tile;\n"
        "        ptx::mbarrier_arrive_expect_tx(lands, Tile::kBytes);\n#pragma",
        "ptx::mbarrier_arrive_expect_tx(lands, Tile::kBytes);\n#pragma",
        "hopper mask",
        PRODUCER,
    ),
    Mutation(
        "rotated pages are looked up in the table",
        "if (kInOrder && page >= 0) page = request.kv_start + at.page;",
        "",
        "hopper rope",
        PRODUCER,
    ),
    Mutation(
        "each warpgroup rotates the rows of the first",
        "shared.q[slot], 64 * group, shared.rope,",
        "shared.q[slot], 0, shared.rope,",
        "hopper rope",
        CONSUMER,
    ),
    Mutation(
        "a thread's second key of a pair is hidden late",
        "2 * (offset >> 3) + min_of(offset & 7, 2)",
        "2 * (offset >> 3) + 2 * min_of(offset & 7, 1)",
        "hopper causal",
        MASK,
    ),
    Mutation(
        "O keeps its scale where a cut tile raises maxima",
        "no_sums, form, scale);\n          multiply_rows(o, to.factors);",
        "no_sums, form, scale);",
        "hopper alibi causal",
        CONSUMER,
    ),
    Mutation(
        "sums do not tell of logits past the range",
        "fails |= tile_sum[h] > guess.most_of_tile() || !has_max;",
        "fails |= !has_max;",
        "hopper capped",
        SOFTMAX,
    ),
    Mutation(
        "sums may be as large as if all maxima were zero",
        "fminf(reach - top, kSlackBits)",
        "fminf(reach, kSlackBits)",
        "hopper capped",
        SOFT_CAP,
    ),
    Mutation(
        "rows of which sums cannot tell are in reach",
        "row_max[h] <= reach.top;",
        "true;",
        "hopper capped",
        SOFT_CAP,
    ),
    Mutation(
        "rows that have nothing yet are in reach",
        "row_sum[h] * ptx::ex2_approx(row_max[h] + reach.evidence)",
        "keys",
        "hopper capped",
        SOFT_CAP,
    ),
    Mutation(
        "the cubic past its range",
        "kMostError = 1.25e-4f",
        "kMostError = 2e-3f",
        "hopper capped",
        SOFT_CAP,
    ),
    Mutation(
        "the polynomial of degree 5 past its range",
        "fminf(0.52f, exp2f(log2f(1250.0f * error) / 7.0f))",
        "0.9f",
        "hopper capped",
        SOFT_CAP,
    ),
    Mutation(
        "the cubic falls where products are large",
        "ptx::square_saturated(x)",
        "x * x",
        "hopper capped key",
        SOFT_CAP,
    ),
    Mutation(
        "large logits are said to be small",
        "? -1.0f : constants.limit;",
        "? -1.0f : 8.0f * constants.limit;",
        "hopper capped",
        SOFT_CAP,
    ),
)
