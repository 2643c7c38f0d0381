"""Mistakes in products of 8 bits of prefill_sm90: transposed values, headroom, sums of 14 bits."""

from __future__ import annotations

from .mutation import Mutation

EIGHT_BITS = (
    Mutation("sums-not-flushed", "kHasTotal &&", "false &&", "hopper 8-bit sums"),
    Mutation("total-not-rescaled", "*= factors[0][h]", "*= 1.0f", "hopper 8-bit rising"),
    Mutation("turned-before-landed", "v.parity)", "v.parity ^ 1)", "hopper 8-bit prompt"),
    Mutation(
        "turned-before-read",
        "ptx::named_barrier_sync(Traits::kNonFiniteBarrier, kThreads);",
        "",
        "hopper 8-bit prompt",
    ),
    Mutation("turned-keys-swapped", "0x7531", "0x5731", "hopper 8-bit prompt"),
    Mutation("turned-columns-in-order", "2 * index - 7", "2 * index", "hopper 8-bit prompt"),
    Mutation("columns-of-o-in-the-order-of-rows", "second", "0.0f", "hopper 8-bit prompt"),
    Mutation("8-bit-values-not-swept", "tile.needs_mask", "false", "hopper 8-bit hidden values"),
    Mutation(
        "8-bit-value-of-another-key", "(key & 7) >> 1", "key & 3", "hopper 8-bit hidden values"
    ),
    Mutation(
        "small-probabilities-flushed",
        "headroom(sum * ptx::rcp_approx(largest))",
        "0.0f",
        "hopper 8-bit peak",
    ),
    Mutation(
        "rows-beside-raised",
        "quad_any(largest[h] > kLargest)",
        "true",
        "hopper 8-bit rows alone",
    ),
    Mutation("sum-of-bytes-not-rescaled", "*= factor", "*= 1.0f", "hopper 8-bit rising"),
    Mutation("far-logits-not-made-again", "(is_far)", "(false)", "hopper 8-bit far"),
    Mutation(
        "rows-behind-cuts-without-maximum",
        "needs_mask || after_masked",
        "false",
        "hopper 8-bit new rows",
    ),
    Mutation(
        "8-bit-queries-by-16-bits",
        "16 / static_cast<int>",
        "8 * static_cast<int>",
        "hopper 8-bit broken tokens",
    ),
    Mutation("scale-of-zero-hides-nothing", "? kLeast :", "? 0.0f :", "hopper 8-bit signed scales"),
    Mutation("sign-of-a-scale-lost", "? 0x80808080u : 0", "? 0u : 0", "hopper 8-bit signed scales"),
    Mutation("far-logits-without-sign", "sum = -sum", "sum = +sum", "hopper 8-bit signed scales"),
    Mutation("box-of-missing-rows", "<= work.num_rows", "<= 128", "hopper 8-bit boxes"),
    Mutation(
        "warp-boxes-of-rows-at-tokens",
        "all_params.output_box_step == Traits::kBoxOfWarp",
        "all_params.output_box_step != Traits::kBoxOfWarp",
        "hopper 8-bit boxes",
    ),
    Mutation(
        "widened-row-of-another-half",
        "offset(row, chunk)",
        "offset(row, chunk ^ 1)",
        "widened on arrival",
    ),
    Mutation("widened-into-another-vector", "(index) * kCount", "(index ^ 1) * kCount", "widened"),
    Mutation(
        "block-scales-of-first-request", "request.mask_start", "0", "hopper block scales of rows"
    ),
    Mutation("block-scale-of-the-page", "place.slot >> shift", "0", "hopper block scales of pages"),
    Mutation("int8-sign-lost", "0xe480e480u", "0xe400e400u", "widened int8"),
)
