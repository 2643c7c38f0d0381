"""Tile configurations of the kernels of wide heads: head dims beyond 256, and latent attention."""

from __future__ import annotations

from ... import jit
from ...core.problem import AttentionProblem
from .common import LOGIT_BYTES, NONFINITE_BYTES, ROW_BYTES, common_constants, tile_field
from .config import Field, Target, TileConfig, struct_of
from .row_classes import MAX_ROWS, SMALL

_STAGES = 2
# By the most packed rows: (m-tiles of 16 rows, warps, keys of a tile), the best first. Warps of 64
# rows hold 128 registers of O. A second block an SM needs half the shared memory, and where there
# is little of it, fewer warps with more columns each serve fewer keys.
_SHAPES = {
    16: ((1, 8, 64), (1, 4, 32), (1, 4, 16), (1, 2, 16)),
    32: ((2, 8, 64), (2, 8, 32), (2, 4, 16), (1, 4, 32), (1, 4, 16), (1, 2, 16)),
    64: ((4, 8, 32), (4, 8, 16), (2, 4, 16), (1, 4, 32), (1, 4, 16), (1, 2, 16)),
}


def refusal(problem: AttentionProblem, row_class: str, target: Target) -> str | None:
    """Why it does not serve requests of a row class; None if it does."""
    if not problem.is_wide:
        return "heads of up to 256 columns have kernels of their own"
    if problem.key_scales:
        return (
            "k: keys that have scales of their own are read on sm_90 only, from 16-byte boundaries "
            "and under one positive scale of the logits; pass a cache with one scale, or CPU arrays"
        )
    return None


def tiles(problem: AttentionProblem, row_class: str, target: Target) -> TileConfig:
    """The tiles for requests of a row class."""
    for mma_q, warps, tile_kv in _SHAPES[MAX_ROWS.get(row_class, MAX_ROWS[SMALL])]:
        result = wide_tiles(problem, mma_q, warps, tile_kv)
        if result is not None and result.shared_bytes <= target.max_shared_bytes:
            return result
    raise AssertionError(f"no tile of wide heads fits {target.max_shared_bytes} bytes")


def wide_tiles(
    problem: AttentionProblem, mma_q: int, warps: int, tile_kv: int
) -> TileConfig | None:
    """An instance of 16 * mma_q rows; None if its warps cannot share out columns and keys."""
    tile_q, is_rotated = 16 * mma_q, problem.pos_encoding == "ROPE_LLAMA"
    itemsize = problem.dtype_kv.itemsize
    key_warps = warps // min(mma_q, warps)
    if problem.head_dim_vo % (warps * 16 * (2 if itemsize == 1 else 1)):
        return None
    if tile_kv % (8 * key_warps) or (tile_kv // 8 // key_warps) not in (1, 2, 4, 8):
        return None
    values = tile_field(tile_kv, problem.head_dim_vo, itemsize, _STAGES)
    if problem.latent:
        values = Field(128, tile_field(tile_kv, problem.head_dim_qk, itemsize).align)
    shared = struct_of(
        Field(ROW_BYTES * tile_q, 16),
        Field(LOGIT_BYTES, 16),
        Field(8 * tile_q, 8),
        Field(8 * (tile_q if problem.latent else 1), 8),
        Field(2 * 8 * tile_kv, 8),
        Field((2 * key_warps + 1) * 4 * tile_q),
        Field(NONFINITE_BYTES),
        Field((_STAGES + 1) * (tile_kv if problem.sparse else 4), 1),
        Field(4),
        Field(2 * problem.head_dim_qk if is_rotated else 4),
        tile_field(tile_q, problem.head_dim_qk, 2),
        tile_field(tile_kv, problem.head_dim_qk, itemsize, _STAGES),
        values,
        tile_field(tile_q, tile_kv, 2),
    ).size
    config = common_constants(problem, is_rotated) | {
        "kLatent": problem.latent,
        "kSparse": problem.sparse,
        "kHeadDimRope": problem.head_dim_qk - problem.head_dim_vo if problem.latent else 0,
        "kFusedMerge": tile_q == 16,
        "kMmaQ": mma_q,
        "kWarps": warps,
        "kTileKV": tile_kv,
        "kStages": _STAGES,
        "kMinBlocks": 1,
        "kSharedBytes": shared,
    }
    return TileConfig("wide_sm80", jit.Config(config), tile_q, tile_kv, warps * 32, shared)
