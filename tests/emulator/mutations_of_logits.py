"""Mistakes in what user-written logits read, and in how kernels apply them."""

from __future__ import annotations

from .mutation import Mutation

LOGITS = (
    Mutation("expression-of-another-key", "8 * n + e", "8 * n", "expression"),
    Mutation("array-axes-swapped", "index * array.extent[++axis] + rest",
             "index + rest * array.extent[++axis]", "expression"),
    Mutation("tokens-counted-by-request", "request.q_start + token", "token", "expression tokens"),
    Mutation("near-tokens-counted-by-request", "at.q_token", "row.token", "near biases, batch"),
    Mutation("near-pair-shares-bias", "8 * n + e", "8 * n", "near biases"),
    Mutation("near-distance-past-the-last",
             "static_cast<uint32_t>(distance - step) < static_cast<uint32_t>(extent[2])",
             "distance >= step", "near biases"),
    Mutation("last-near-tile-has-no-bias", "distance - kLastStep < distances",
             "distance + kLastStep < distances", "near biases"),
    Mutation("quotient-toward-zero", "- static_cast<int>(a % b < 0)", "", "expression"),
    Mutation("index-past-array", "min_of(index, params.logits_arrays[slot].extent[axis] - 1)",
             "index", "expression mask"),
    Mutation("expression-mask-of-lane-0", "first", "first_key", "expression mask"),
    Mutation("tile-seen-by-first-head", "head < heads", "head < 1", "expression by head"),
    Mutation("mixed-expression-tile-is-whole", "if (!sight.all)", "if (false)",
             "hopper expression by head"),
    Mutation("pair-shares-expression", "8 * n + 1", "8 * n", "hopper linear expression"),
    Mutation("far-logits-in-one-sum", "(x + c) * kLog2e", "fmaf(x, kLog2e, c * kLog2e)",
             "far biases"),
    Mutation("far-maximum-becomes-infinite", "fminf(fmaxf(max, -kMost), kMost)", "max",
             "far biases"),
    Mutation("far-maximum-takes-the-fast-path", "fabsf(shift) > kFarthestFast", "false",
             "hopper far biases"),
)  # fmt: skip
