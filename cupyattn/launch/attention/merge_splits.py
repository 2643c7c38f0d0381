"""The merge_splits kernel, launched after a prefill launch that split keys."""

from __future__ import annotations

from functools import lru_cache

from ... import jit
from ...core.device import device_props, overlaps_launches
from ...core.problem import AttentionProblem
from ..driver.enqueue import Launch, load_function

_WARPS = 4


@lru_cache(maxsize=1024)
def config(problem: AttentionProblem, tile_q: int, fused_splits: int = 0) -> jit.Config:
    """The kernel's Config for the partial states of a prefill tile of `tile_q` rows. Tiles of up to
    `fused_splits` splits are left to their last block (TileConfig)."""
    return jit.Config(
        {
            "DTypeO": problem.dtype_o,
            "kHeadDimVO": problem.head_dim_vo,
            "kTileQ": tile_q,
            "kFusedSplits": fused_splits,
            "kWarps": _WARPS,
            "kAligned": problem.aligned,
        }
    )


def parts(head_dim: int) -> int:
    """Into how many warps' work a row is divided: a lane holds four columns of a wide row."""
    return head_dim // 128 if head_dim > 256 else 1


def prepare(
    problem: AttentionProblem,
    tile_q: int,
    num_rows: int,
    num_kv_heads: int,
    device_index: int,
    fused_splits: int = 0,
) -> Launch:
    """The merge of `num_rows` packed rows a KV head; its arguments are those of the prefill."""
    of_tiles = config(problem, tile_q, fused_splits)
    function = load_function("merge_splits", of_tiles, device_index)
    grid = (-(-num_rows * parts(problem.head_dim_vo) // _WARPS), num_kv_heads, 1)
    early = overlaps_launches(device_props(device_index).arch)
    return Launch(function, grid, _WARPS * 32, 0, is_dependent=early)
