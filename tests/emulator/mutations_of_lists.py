"""Mistakes where tokens have lists of their keys."""

from __future__ import annotations

from .mutation import Mutation

LISTS = (
    Mutation(
        "entries-beyond-the-request",
        "static_cast<uint32_t>(num_blocks)",
        "0x80000000u",
        "lists of blocks",
    ),
    Mutation("last-block-not-cut", "key < listed_end", "key >= 0", "lists of blocks"),
    Mutation(
        "window-keys-twice", "max_of(end - lists.window, 0), end", "end, end", "lists, window"
    ),
    Mutation("drafts-see-the-future", "at.rest - 1", "0", "lists of blocks"),
    Mutation(
        "padded-tokens-attend",
        "max_of(lists.qo_offsets[(first + 1) * offset_step] - token, 0)",
        "1",
        "lists of nobody",
    ),
    Mutation("listed-offsets-read-early", "ptx::warp_sync();", "", "lists of blocks"),
    Mutation(
        "absent-listed-keys-attend",
        "s[m][n][e] = Form::hidden()",
        "s[m][n][e] += 0.0f",
        "lists of blocks",
    ),
    Mutation(
        "listed-scales-of-tokens", "= at.request;", "= work.request.q_start;", "lists, scales"
    ),
    Mutation(
        "union-pairs-of-others",
        "min_of(totals[0], ahead + a_tile)",
        "min_of(totals[0], ahead)",
        "unions, skipped tiles",
    ),
    Mutation(
        "last-page-not-widened",
        "page * params.page_size >= kv_len",
        "(page + 1) * params.page_size > kv_len",
        "unions, 8 bits",
    ),
    Mutation(
        "widened-scales-of-the-first-head",
        " + head * params.scale_step[array]",
        "",
        "unions, scales of heads",
    ),
    Mutation("union-windows-twice", "max_of(seen - params.window, 0)", "seen", "unions, window"),
    Mutation("union-rows-past-the-last", "params.num_rows", "(1 << 30)", "unions of rows"),
    Mutation(
        "union-windows-as-lists",
        "SeenOfHalf{max_of(~begin, listed_end), seen}",
        "SeenOfHalf{~begin, seen}",
        "unions, window",
    ),
    Mutation("unions-of-blocks-beyond", "num_blocks", "0xffffffffu", "unions"),
    Mutation("union-duplicates-once", " + rank.times", "", "unions, repeated"),
    Mutation("union-tokens-shifted", "1u << (entry", "2u << (entry", "unions"),
    Mutation(
        "union-values-not-mended",
        "!unlikely(ptx::warp_any(!UnionRows<Traits>::is_finite(o)))",
        "true",
        "unions, bad values",
    ),
    Mutation("skipped-values-kept", "release_values();", "", "unions, skipped tiles"),
    Mutation("named-tiles-skipped", "own_tokens()) != 0", "own_tokens()) == 0", "unions"),
    Mutation("values-of-others-reach-rows", "if (!sees) continue;", "", "unions, bad values"),
    Mutation(
        "union-blocks-not-cut",
        "seen - tile.first_key[half]",
        "static_cast<int>(kUnionKeys)",
        "unions",
    ),
    Mutation(
        "union-rows-see-nothing",
        "(to.seen[0] | to.seen[1]) != 0",
        "to.seen[0] != 0",
        "unions, bad values",
    ),
    Mutation("unions-of-the-first-head", "groups > 1 ? kv_head : 0", "0", "unions"),
    Mutation("listed-keys-awaited-too-late", "kStages - 2", "kStages - 1", "lists of wide heads"),
    Mutation("listed-values-awaited-too-late", "kStages - 2", "kStages - 1", "lists of wide heads"),
    Mutation("values-overwrite-listed-keys", "ptx::warp_sync();", "", "lists of wide heads"),
    Mutation("small-unions-of-another-unit", ">> unit)", ">> 0)", "unions of small blocks"),
    Mutation(
        "small-unions-not-cut", "(position[h] >> 5) - first", "2", "unions of small blocks, cut"
    ),
    Mutation("marked-tokens-shifted", "1u << (entry", "2u << (entry", "unions of small blocks"),
    Mutation("lists-alone-left-out", "= are_alone", "= 0", "unions, some alone"),
    Mutation(
        "alone-as-the-first-head",
        "lists.alone_groups > 1 ? kv_head : 0",
        "0",
        "unions, some alone",
    ),
)
