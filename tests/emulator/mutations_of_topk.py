"""Mistakes in the choice of blocks by their scores."""

from __future__ import annotations

from .mutation import Mutation

TOPK = (
    Mutation("selection-sees-the-future", "tokens.is_causal", "false", "topk of clusters"),
    Mutation("zeros-have-signs", " + 0.0f", "", "topk of clusters"),
    Mutation("last-block-not-forced", "|| block >= last_begin", "", "topk of clusters"),
    Mutation("ties-to-all", "&& is_chosen(threshold, at.equal)", "", "topk of clusters"),
    Mutation(
        "ties-beyond-the-list",
        "before(equal) < topk - __popc(above)",
        "true",
        "topk of warps",
    ),
)
