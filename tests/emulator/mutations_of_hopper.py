"""Mistakes in prefill_sm90: phases, operands, and what its warps tell each other."""

from __future__ import annotations

from .mutation import BAD, Mutation

KERNEL = "cupyattn/attention/prefill_sm90.cuh"
PRODUCER = "cupyattn/attention/producer_sm90.cuh"
CONVERTER = "cupyattn/attention/converter_sm90.cuh"
CONSUMER = "cupyattn/attention/consumer_sm90.cuh"
ROWS = "cupyattn/attention/rows_sm90.cuh"
SOFTMAX = "cupyattn/attention/softmax.cuh"
MAXIMA = "cupyattn/attention/maxima_softmax.cuh"
GATHERER = "cupyattn/attention/gatherer_sm90.cuh"
VARIANTS = "cupyattn/attention/variants.cuh"
SOFT_CAP = "cupyattn/attention/soft_cap.cuh"
MASK = "cupyattn/attention/mask_sm90.cuh"
MASK_MAP = "cupyattn/attention/mask_map.cuh"
STATE = "cupyattn/attention/state.cuh"
TILE = "cupyattn/tile/warpgroup_tile.cuh"

HOPPER = (
    Mutation(
        "values are not waited for",
        CONSUMER,
        "    Kernel::wait(shared.full_v[v.stage], v.parity);\n    const uint32_t address",
        "    const uint32_t address",
        "hopper causal",
    ),
    Mutation(
        "the place of keys is not waited for",
        PRODUCER,
        "      Kernel::wait(place.empty, place.parity ^ 1);\n      ptx::warp_sync();\n",
        "      ptx::warp_sync();\n",
        "hopper causal",
    ),
    Mutation(
        "the counter of items does not return to zero",
        KERNEL,
        "ptx::atomic_inc_wrap(params.counters, num_items - 1)",
        "ptx::atomic_inc_wrap(params.counters, num_items)",
        "hopper causal",
    ),
    Mutation(
        "rows of Q of a later tile",
        PRODUCER,
        "PackedRow::of(params, work.first_row + r)",
        "PackedRow::of(params, r)",
        "hopper odd groups",
    ),
    Mutation(
        "a row too many of a partial tile",
        PRODUCER,
        "ptx::cp_async_16(tile + QTile::offset(r, chunk), source, r < work.num_rows);",
        "ptx::cp_async_16(tile + QTile::offset(r, chunk), source, r <= work.num_rows);",
        "hopper odd groups",
    ),
    Mutation(
        "groups of rows of pages without their panels",
        TILE,
        "kByPatterns ? kPanels * kPatternBytes : kPatternBytes",
        "kByPatterns ? kPatternBytes : kPatternBytes",
        "hopper wide pages",
    ),
    Mutation(
        "the maximum never moves",
        SOFTMAX,
        "return tile_sum > kMostOfTile || row_max[m][h] == -ptx::infinity();",
        "return row_max[m][h] == -ptx::infinity();",
        "hopper steep alibi",
    ),
    Mutation(
        "O keeps the scale of a maximum that has moved",
        SOFTMAX,
        "o[m][n][e] *= factors[m][e / 2];",
        "o[m][n][e] *= 1.0f;",
        "hopper steep",
    ),
    Mutation(
        "O keeps the scale of a maximum that a tile has passed",
        CONSUMER,
        "      if constexpr (!kIsFirst) multiply_rows(o, to.factors);\n",
        "",
        "hopper maxima",
    ),
    Mutation(
        "a sum keeps the scale of a maximum that a tile has passed",
        MAXIMA,
        "fmaf(row_sum[0][h], factors[0][h], sums[h]);",
        "row_sum[0][h] + sums[h];",
        "hopper maxima",
    ),
    Mutation(
        "a maximum is passed by a third",
        MAXIMA,
        "-quad_max(largest[h]) * scale",
        "0.3f - quad_max(largest[h]) * scale",
        "hopper largest probability",
    ),
    Mutation(
        "the larger of two negative floats is the larger integer",
        MAXIMA,
        "if (rarely(looks_again)) {",
        "if (false) {",
        "hopper largest probability",
    ),
    Mutation(
        "a maximum that moves is taken to be above zero",
        MAXIMA,
        "row_shift[0][0] > 0.0f || row_shift[0][1] > 0.0f",
        "false",
        "hopper largest probability",
    ),
    Mutation(
        "the items that come after all sections are the first ones",
        KERNEL,
        "int first_place = sectioned,",
        "int first_place = 0,",
        "hopper sections",
    ),
    Mutation(
        "hidden keys that are not finite are nobody's",
        CONSUMER,
        "      add_bad_keys(shared.items[its_place]);\n",
        "",
        "hopper bad values",
    ),
    Mutation(
        "an item's first values are added to the output of the item before",
        CONSUMER,
        "    adds_output = false;",
        "",
        "hopper wide pages",
    ),
    Mutation(
        "rows of Q come into a place that O has not left",
        KERNEL,
        "            if (lane == 0) ptx::bulk_wait_read();",
        "",
        "hopper wide pages",
    ),
    Mutation(
        "O leaves from another item's place",
        KERNEL,
        "stored = stored + 1 == kSlots ? 0 : stored + 1;",
        "",
        "hopper wide pages",
    ),
    Mutation(
        "halves of a quad exchanged the wrong way",
        STATE,
        "whole.word[i] = is_upper ? got : kept;",
        "whole.word[i] = is_upper ? kept : got;",
        "hopper odd groups",
    ),
    Mutation(
        "what is not finite stays",
        BAD,
        "chunk.word[w] = values.word[w] & ~holes.word[w];",
        "chunk.word[w] = values.word[w];",
        "hopper bad values",
    ),
    Mutation(
        "bad keys are not added",
        BAD,
        "if (key < num_keys) ptx::atomic_or_shared",
        "if (key < 0) ptx::atomic_or_shared",
        "hopper bad values",
    ),
    Mutation(
        "rows are gathered from the start of their page",
        GATHERER,
        "page * units.page + slot * units.row",
        "page * units.page",
        "hopper small pages",
    ),
    Mutation(
        "values of the tile of keys, which is one ahead",
        GATHERER,
        "select(tile.tile == present_tile, present, behind)",
        "present",
        "hopper small pages",
    ),
    Mutation(
        "a warpgroup without rows takes no turns",
        CONSUMER,
        "if (has_keys) pass_by(*item);",
        "",
        "hopper wide pages",
    ),
    Mutation(
        "a box of O of which some rows are another's",
        KERNEL,
        "? num_rows / 64 * 64 : 0;",
        "? ceil_div(num_rows, 64) * 64 : 0;",
        "hopper steep",
    ),
    Mutation(
        "a pair of keys has one bias",
        VARIANTS,
        "fmaf(slope[h], 8 * n + 1, first)",
        "fmaf(slope[h], 8 * n, first)",
        "hopper alibi",
    ),
    Mutation(
        "keys are converted before their place is free",
        CONVERTER,
        "    Kernel::wait(shared.empty_k[k.stage], k.parity ^ 1);\n",
        "",
        "hopper fp8",
    ),
    Mutation(
        "tiles that a mask hides in part are not waited for",
        ROWS,
        "Kernel::wait(shared.row_bits.full[values.stage], values.parity);",
        "",
        "hopper mask",
    ),
    Mutation(
        "bits of rows come before their place is free",
        PRODUCER,
        "Kernel::wait(shared.empty_v[v.stage], v.parity ^ 1);\n              shared.row_bits",
        "shared.row_bits",
        "hopper mask",
    ),
    Mutation(
        "hidden tiles are skipped one too far",
        MASK,
        "tile -= __clz(static_cast<int>(rest));",
        "tile -= __clz(static_cast<int>(rest)) + 1;",
        "hopper mask",
    ),
    Mutation(
        "tiles that hide some keys count as full on Hopper",
        MASK_MAP,
        "is_mixed |= (all[w] & exists) != exists;",
        "",
        "hopper mask",
    ),
    Mutation(
        "a mask is looked through for the tokens of one warp",
        MASK_MAP,
        "token += kWarps) {",
        "token += 1000) {",
        "hopper mask",
    ),
    Mutation(
        "those that multiply are not told which tile it is",
        PRODUCER,
        "if (place.name != nullptr) *place.name = tile;\n"
        "        ptx::mbarrier_arrive_expect_tx(lands, Tile::kBytes);\n#pragma",
        "ptx::mbarrier_arrive_expect_tx(lands, Tile::kBytes);\n#pragma",
        "hopper mask",
    ),
    Mutation(
        "rotated pages are looked up in the table",
        PRODUCER,
        "if (kInOrder && page >= 0) page = request.kv_start + at.page;",
        "",
        "hopper rope",
    ),
    Mutation(
        "each warpgroup rotates the rows of the first",
        CONSUMER,
        "shared.q[slot], 64 * group, shared.rope,",
        "shared.q[slot], 0, shared.rope,",
        "hopper rope",
    ),
    Mutation(
        "every tile of rows rotates the same share of the keys",
        "entry/rotate_keys.cu",
        "share = item.first_row / params.tile_rows;",
        "share = 0;",
        "hopper rope",
    ),
    Mutation(
        "a thread's second key of a pair is hidden late",
        MASK,
        "2 * (offset >> 3) + min_of(offset & 7, 2)",
        "2 * (offset >> 3) + 2 * min_of(offset & 7, 1)",
        "hopper causal",
    ),
    Mutation(
        "O keeps its scale where a cut tile raises maxima",
        CONSUMER,
        "no_sums, form, scale);\n          multiply_rows(o, to.factors);",
        "no_sums, form, scale);",
        "hopper alibi causal",
    ),
    Mutation(
        "tiles start so early before a window that the last ends too soon",
        "cupyattn/attention/mask.cuh",
        "      origin -= ahead;",
        "      origin -= ahead + keys_per_tile;",
        "hopper window",
    ),
    Mutation(
        "sums do not tell of logits past the range",
        SOFTMAX,
        "fails |= tile_sum[h] > guess.most_of_tile() || !has_max;",
        "fails |= !has_max;",
        "hopper capped",
    ),
    Mutation(
        "sums may be as large as if all maxima were zero",
        SOFT_CAP,
        "fminf(reach - top, kSlackBits)",
        "fminf(reach, kSlackBits)",
        "hopper capped",
    ),
    Mutation(
        "rows of which sums cannot tell are in reach",
        SOFT_CAP,
        "row_max[h] <= reach.top;",
        "true;",
        "hopper capped",
    ),
    Mutation(
        "rows that have nothing yet are in reach",
        SOFT_CAP,
        "row_sum[h] * ptx::ex2_approx(row_max[h] + reach.evidence)",
        "keys",
        "hopper capped",
    ),
    Mutation(
        "queries stay as they are",
        TILE,
        "ptx::multiply_add_pair<typename Tile::T>(chunk.word[w], factors, kMinusZeros);",
        "chunk.word[w];",
        "hopper capped",
    ),
    Mutation(
        "the cubic past its range",
        SOFT_CAP,
        "kMostError = 1.25e-4f",
        "kMostError = 2e-3f",
        "hopper capped",
    ),
    Mutation(
        "the polynomial of degree 5 past its range",
        SOFT_CAP,
        "fminf(0.52f, exp2f(log2f(1250.0f * error) / 7.0f))",
        "0.9f",
        "hopper capped",
    ),
    Mutation(
        "the cubic falls where products are large",
        SOFT_CAP,
        "ptx::square_saturated(x)",
        "x * x",
        "hopper capped key",
    ),
    Mutation(
        "large logits are said to be small",
        SOFT_CAP,
        "? -1.0f : constants.limit;",
        "? -1.0f : 8.0f * constants.limit;",
        "hopper capped",
    ),
)
