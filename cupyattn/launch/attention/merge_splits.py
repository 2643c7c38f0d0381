"""The merge_splits kernel, launched after a prefill launch that split keys."""

from __future__ import annotations

from functools import lru_cache

from ... import jit
from ...core.device import device_props, overlaps_launches
from ...core.problem import AttentionProblem
from ..driver.enqueue import Launch, load_function
from ..tiles.config import TileConfig

_WARPS = 4


@lru_cache(maxsize=1024)
def config(problem: AttentionProblem, tiles: TileConfig) -> jit.Config:
    """The kernel's Config for the partial states of these tiles of prefill."""
    return jit.Config(
        {
            "DTypeO": problem.dtype_o,
            "kHeadDimVO": problem.head_dim_vo,
            "kTileQ": tiles.tile_q,
            "kWholeTokens": tiles.is_sm90,
            "kWarps": _WARPS,
            "kAligned": problem.aligned,
        }
    )


def parts(head_dim: int) -> int:
    """Into how many warps' work a row is divided: a lane holds four columns of a wide row."""
    return head_dim // 128 if head_dim > 256 else 1


def prepare(
    problem: AttentionProblem,
    tiles: TileConfig,
    num_rows: int,
    num_kv_heads: int,
    device_index: int,
) -> Launch:
    """The merge of so many rows, in whole tiles, a KV head; its arguments are those of prefill."""
    function = load_function("merge_splits", config(problem, tiles), device_index)
    grid = (-(-num_rows * parts(problem.head_dim_vo) // _WARPS), num_kv_heads, 1)
    early = overlaps_launches(device_props(device_index).arch)
    return Launch(function, grid, _WARPS * 32, 0, is_dependent=early)
