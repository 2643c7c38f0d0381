"""Mistakes in what user-written logits read, and in how kernels apply them."""

from __future__ import annotations

from .mutation import Mutation

LOGITS = (
    Mutation("expression-of-another-key", "8 * n + e", "8 * n", "expression"),
    Mutation("array-axes-swapped", "index * array.extent[++axis] + rest",
             "index + rest * array.extent[++axis]", "expression"),
    Mutation("quotient-toward-zero", "- static_cast<int>(a % b < 0)", "", "expression"),
    Mutation("index-past-array", "min_of(index, params.logits_arrays[slot].extent[axis] - 1)",
             "index", "expression mask"),
    Mutation("expression-mask-of-lane-0", "first", "first_key", "expression mask"),
    Mutation("mask-map-of-first-head", "head < num_heads", "head < 1", "expression by head"),
    Mutation("mask-scanned-for-one-head", "head < num_heads", "head < 1",
             "hopper expression by head"),
)  # fmt: skip
