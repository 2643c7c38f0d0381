"""The most that any plan for a captured graph may have."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import PlanError
from .batch import BatchPlan, Splitting
from .tile_shape import TileShape


class Limits(NamedTuple):
    """The most that any plan for a captured graph may have."""

    num_items: int
    num_split_tiles: int
    num_states: int


def limits(
    num_requests: int,
    num_rows: int,
    max_qo_len: int,
    num_tokens: int,
    group_size: int,
    num_kv_heads: int,
    shape: TileShape,
    splitting: Splitting,
) -> Limits:
    """Limits of any plan of so many requests, query rows (tokens) and keys.

    The longest query and num_tokens matter only where the size of splits is fixed.
    """
    num_tiles = num_requests + num_rows * group_size // shape.tile_q
    if not splitting.may_split:
        return Limits(num_tiles, 0, 0)
    if splitting.tokens:
        chunk_tokens = max(1, splitting.tokens // shape.tile_kv) * shape.tile_kv
        more = -(-max_qo_len * group_size // shape.tile_q) * (num_tokens // chunk_tokens + 1)
    else:
        more = int(splitting.waves * max(1, shape.num_slots // num_kv_heads))
    return Limits(num_tiles + more, min(num_tiles, more), min(num_tiles, more) + more)


def check_limits(plan: BatchPlan, limits: Limits) -> None:
    """Raise PlanError if a plan is larger than a captured graph has room for."""
    for name, have, room in (
        ("blocks", len(plan.items), limits.num_items),
        ("split tiles", len(plan.merges), limits.num_split_tiles),
        ("partial states", plan.num_states, limits.num_states),
    ):
        if have > room:
            raise PlanError(
                f"plan: {have} {name}, but the captured graph has room for {room}; plan at first "
                "with the largest batch, or capture again"
            )
