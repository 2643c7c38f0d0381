"""Mistakes in cascades and mixed batches: whose state a row's is, and which kind a block is of."""

from __future__ import annotations

from .mutation import MASK, WORK, Mutation

_LEVELS = "cupyattn/attention/levels.cuh"

LEVELS = (
    Mutation(
        "rows of a group stay in the tile of its first",
        _LEVELS,
        "if (row >= tile.tile_rows) {",
        "if (row > tile.tile_rows) {",
        "cascade",
    ),
    Mutation(
        "states of one head in another's place, level by level",
        _LEVELS,
        "kv_head * tile.num_splits)",
        "kv_head)",
        "split cascade",
    ),
    Mutation(
        "each level's states are counted from the first",
        _LEVELS,
        "begin += count;",
        "begin = count;",
        "cascade of three levels",
    ),
    Mutation(
        "rows that q no longer has are written",
        _LEVELS,
        "== LevelRow::kNoToken) return;",
        "== LevelRow::kNoToken - 1) return;",
        "cascade in a graph",
    ),
    Mutation(
        "heads that do not exist are merged",
        "entry/merge_levels.cu",
        "if (head >= num_heads) return;",
        "",
        "cascade",
    ),
    Mutation(
        "the kind of a block by its tokens",
        "entry/mixed_sm80.cu",
        "if (qo_len * params.group_size <= Decode::kTileQ) {",
        "if (qo_len <= Decode::kTileQ) {",
        "cascade",
    ),
    Mutation(
        "a tile of a level writes the answer itself",
        WORK,
        "return num_splits > 1 || split_tile < 0;",
        "return num_splits > 1;",
        "cascade of few rows",
    ),
    Mutation(
        "places of keys count from every level's first",
        WORK,
        "params.positions[q_start + token] - key_offset;",
        "params.positions[q_start + token];",
        "cascade of few rows",
    ),
    Mutation(
        "rows that share keys are in order",
        MASK,
        "if (params.positions == nullptr) {",
        "if (true) {",
        "cascade of few rows",
    ),
)
