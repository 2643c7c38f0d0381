"""Tile configurations of wide_decode_sm90: few rows of latent attention on Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ... import jit
from ...core.dtypes import DType
from ...core.problem import KEY_SCALES, AttentionProblem
from . import wide_sm90
from .common import PATTERN_BYTES, panels, share_constants
from .config import Field, Target, TileConfig, refusal_by_room, struct_of
from .row_classes import DECODE, VERIFY
from .wide_sm90 import FUSED_SPLITS, ITEM_BYTES, LATENT

_ROWS = {DECODE: 16, VERIFY: 32}


def refusal(problem: AttentionProblem, row_class: str, target: Target) -> str | None:
    """Why it does not serve requests of a row class; None if it does."""
    if not problem.latent or row_class not in _ROWS:
        return "it serves up to 32 rows of latent attention"
    if problem.key_scales == "pages" or (problem.key_scales == "rows" and row_class == VERIFY):
        # One consumer that converts 64 keys for 32 rows takes longer than products of 64 rows.
        return "tiles of 64 rows serve such scales of keys sooner"
    result = wide_sm90.refusal_of_problem(problem, target)
    return result or refusal_by_room(tiles(problem, row_class, target), target)


def tiles(problem: AttentionProblem, row_class: str, target: Target) -> TileConfig:
    """The tiles for requests of a row class."""
    return config(
        problem.dtype_q,
        problem.dtype_o,
        _ROWS[row_class],
        dtype_kv=problem.dtype_kv,
        key_scales=problem.key_scales,
        sparse=problem.sparse,
        tma=wide_sm90.has_latent_boxes(problem, target.page_size),
        more=share_constants(problem),
    )


def config(
    dtype: DType,
    dtype_o: DType,
    tile_q: int,
    *,
    dtype_kv: DType | None = None,
    key_scales: str = "",
    sparse: bool = False,
    tma: bool = False,
    more: Mapping[str, jit.Constant] = MappingProxyType({}),
) -> TileConfig:
    """The instance for up to `tile_q` packed rows, 16 or 32.

    dtype_kv: e4m3, or as `dtype`, that of queries.
    key_scales: of e4m3 keys (core.problem.KEY_SCALES). more: constants of options.
    """
    dtype_kv = dtype_kv or dtype
    head_dim_qk, head_dim_vo = LATENT
    tile_kv, num_pieces = 64, 2
    stages, keys, consumers = 2, panels(tile_kv, head_dim_qk, 2), 1
    if dtype_kv.is_fp8:
        # One that converts keys would wait for its own results for longer than memory takes. Of 32
        # rows there are not the registers for two.
        consumers = 2 if tile_q == 16 else 1
        row_bytes = head_dim_qk
        if key_scales == "rows":
            row_bytes = head_dim_vo + 16 + 2 * (head_dim_qk - head_dim_vo)
        stages = 4 if key_scales == "rows" else 5
        keys = Field(stages * tile_kv * row_bytes, PATTERN_BYTES)
    shared = struct_of(
        panels(tile_q, head_dim_qk, 1),
        keys,
        panels(tile_q, tile_kv, consumers),
        Field(4 * 4 * tile_q * consumers, 16),  # of_warps
        Field(4 * tile_q * consumers),  # factors
        Field(4 * (tile_q if dtype_kv.is_fp8 else 1)),  # row_scales
        Field(8 * consumers),  # nonfinite keys
        Field(4),  # is_last
        Field(4 * tile_kv * (stages if key_scales == "tokens" else 1)),
        Field(stages * tile_kv if sparse else 1),
        Field(ITEM_BYTES, 8),
        Field(8 * (1 + 2 * num_pieces * stages), 8),
    ).size
    constants: dict[str, jit.Constant] = {
        "DTypeQ": dtype,
        "DTypeKV": dtype_kv,
        "DTypeO": dtype_o,
        "kHeadDimQK": head_dim_qk,
        "kHeadDimVO": head_dim_vo,
        "kHeadDimRope": head_dim_qk - head_dim_vo,
        "kKeyScales": KEY_SCALES.index(key_scales),
        "kLatent": True,
        "kSparse": sparse,
        "kTma": tma,
        "kPaged": True,
        "kConsumers": consumers,
        "kFusedSplits": FUSED_SPLITS[tile_q],
        "kTileQ": tile_q,
        "kTileKV": tile_kv,
        "kStages": stages,
        "kSharedBytes": shared,
    }
    name, threads = "wide_decode_sm90", 128 * (1 + consumers)
    return TileConfig(name, jit.Config({**constants, **more}), tile_q, tile_kv, threads, shared)
