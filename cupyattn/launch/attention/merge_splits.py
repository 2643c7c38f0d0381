"""The merge_splits kernel, launched after a prefill launch that split keys."""

from __future__ import annotations

from functools import lru_cache

from ... import jit
from ...core.device import device_props, overlaps_launches
from ...core.problem import AttentionProblem
from ..driver.enqueue import Launch, load_function
from ..tiles.common import gate_constants
from ..tiles.config import TileConfig

_WARPS = 4
# Up to so many rows of all KV heads each have a block.
_FEW_ROWS = 1024
# Blocks for each SM that merge wide rows, as many as run at a time: of many rows, and of so few
# that fewer blocks, which have more states under way, reach them all at once.
_WIDE_BLOCKS, _WIDE_BLOCKS_OF_FEW = 8, 3


@lru_cache(maxsize=1024)
def config(problem: AttentionProblem, tiles: TileConfig, shares_rows: bool = False) -> jit.Config:
    """The kernel's Config for the partial states of these tiles of prefill.

    shares_rows: there are few rows. The warps of a block merge one, each some of its states; of
    wide rows each has more states under way.
    """
    # Blocks that find their items list them, so the list is no older than their states.
    waits = {"kFindsItems": True} if tiles.finds_items else {}
    # Each token with a list of keys is a request of its own.
    of_tokens = {"kSparse": True} if problem.sparse and not problem.is_wide else {}
    return jit.Config(
        {
            "DTypeO": problem.dtype_o,
            "kHeadDimVO": problem.head_dim_vo,
            "kTileQ": tiles.tile_q,
            "kWholeTokens": tiles.is_sm90,
            "kFusedSplits": tiles.fused_splits,
            "kWarps": _WARPS,
            "kAligned": problem.aligned,
            **gate_constants(problem),
            "kSharesRows": shares_rows,
            **waits,
            **of_tokens,
        }
    )


def configs(problem: AttentionProblem, tiles: TileConfig) -> list[jit.Config]:
    """The Configs for any number of rows."""
    return [config(problem, tiles, shares_rows) for shares_rows in (False, True)]


def is_wide(problem: AttentionProblem) -> bool:
    """Whether a row is divided among warps by its columns."""
    return parts(problem.head_dim_vo) > 1


def parts(head_dim: int) -> int:
    """Into how many warps' work a row is divided: a lane holds four columns of a wide row."""
    return head_dim // 128 if head_dim > 256 else 1


def prepare(
    problem: AttentionProblem,
    tiles: TileConfig,
    num_rows: int,
    num_kv_heads: int,
    device_index: int,
    keeps_order: bool = False,
) -> Launch:
    """The merge of so many rows, in whole tiles, a KV head; its arguments are those of prefill.

    keeps_order: the number of rows does not decide how one is merged.
    """
    props = device_props(device_index)
    if is_wide(problem):
        blocks = -(-num_rows * parts(problem.head_dim_vo) // _WARPS)
        shares_rows = blocks * num_kv_heads <= _WIDE_BLOCKS_OF_FEW * props.num_sms
        blocks = min(blocks, _WIDE_BLOCKS * props.num_sms)
    else:
        shares_rows = num_rows * num_kv_heads <= _FEW_ROWS and not keeps_order
        blocks = num_rows if shares_rows else -(-num_rows // _WARPS)
    function = load_function("merge_splits", config(problem, tiles, shares_rows), device_index)
    grid = (blocks, num_kv_heads, 1)
    early = overlaps_launches(props.arch)
    return Launch(function, grid, _WARPS * 32, 0, is_dependent=early)
