"""Mistakes where blocks of index rows get their scores."""

from __future__ import annotations

from .mutation import Mutation

SELECT = (
    Mutation("relu-of-scores-lost", "ptx::max_nan(x, 0.0f)", "x", "scores of sums"),
    Mutation("scores-of-other-candidates", "candidate_row(index)", "index", "scores of candidates"),
    Mutation("scores-of-hidden-rows", ">= end", "> end", "scores of blocks"),
    Mutation("warps-not-joined", "first + w", "first", "scores by warps"),
    Mutation("exponentials-not-rescaled", "largest - from", "0.0f", "scores of softmax"),
    Mutation(
        "shares-of-unequal-totals", "shared.logs[head]", "shared.logs[0]", "scores of softmax"
    ),
    Mutation("shares-of-other-candidates", "own[i / size]", "own[0]", "candidates of groups"),
)
