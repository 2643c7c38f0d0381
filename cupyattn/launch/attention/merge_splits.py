"""The merge_splits kernel, launched after a prefill launch that split keys."""

from __future__ import annotations

from functools import lru_cache

from ... import jit
from ...core.device import device_props, overlaps_launches
from ...core.problem import AttentionProblem
from ..driver.enqueue import Launch, load_function

_WARPS = 4


# Up to so many rows of all KV heads each have a block.
_FEW_ROWS = 1024


@lru_cache(maxsize=1024)
def config(
    problem: AttentionProblem, tile_q: int, shares_rows: bool = False, fused_splits: int = 0
) -> jit.Config:
    """The kernel's Config for the partial states of a tile of `tile_q` rows.

    shares_rows: the warps of a block merge one row, each some of its states.
    fused_splits: tiles of up to so many splits are left to their last block (TileConfig).
    """
    return jit.Config(
        {
            "DTypeO": problem.dtype_o,
            "kHeadDimVO": problem.head_dim_vo,
            "kTileQ": tile_q,
            "kFusedSplits": fused_splits,
            "kWarps": _WARPS,
            "kAligned": problem.aligned,
            "kSharesRows": shares_rows,
        }
    )


def configs(problem: AttentionProblem, tile_q: int, fused_splits: int = 0) -> list[jit.Config]:
    """The Configs for any number of rows."""
    all_few = (False, True)[: 1 if is_wide(problem) else 2]
    return [config(problem, tile_q, few, fused_splits) for few in all_few]


def is_wide(problem: AttentionProblem) -> bool:
    """Whether a row is divided among warps by its columns."""
    return parts(problem.head_dim_vo) > 1


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
    """The merge of `num_rows` packed rows a KV head; its arguments are the launch's ahead."""
    shares_rows = num_rows * num_kv_heads <= _FEW_ROWS and not is_wide(problem)
    of_tiles = config(problem, tile_q, shares_rows, fused_splits)
    function = load_function("merge_splits", of_tiles, device_index)
    rows_a_block = 1 if shares_rows else _WARPS
    grid = (-(-num_rows * parts(problem.head_dim_vo) // rows_a_block), num_kv_heads, 1)
    early = overlaps_launches(device_props(device_index).arch)
    return Launch(function, grid, _WARPS * 32, 0, is_dependent=early)
