"""A check of work lists: every tile of query rows is there, and its keys are dealt out once."""

from __future__ import annotations

import numpy as np

from ..errors import PlanError
from .batch import WORK_FIELDS, BatchPlan, BatchRequests, listed_parts


def validate_plan(plan: BatchPlan, requests: BatchRequests, group_size: int, tile_q: int) -> None:
    """Raise PlanError unless a plan's items cover the requests' rows and keys exactly once.

    The keys of a tile are covered if its splits are 0, 1, ... num_splits - 1: the kernels deal key
    tiles to splits evenly (schedule.masking.tile_span), unless items say where each begins, which
    is then where the one before ends. Partial states must not overlap. Requests that share rows
    must differ in where their keys begin.
    """
    column = {name: plan.items[:, i].astype(np.int64) for i, name in enumerate(WORK_FIELDS)}
    has_rows = requests.qo_len > 0
    num_tiles = -(-requests.qo_len[has_rows] * group_size // tile_q)
    begins = requests.q_start[has_rows], requests.kv_start[has_rows]
    wanted = {
        (int(q_start), int(kv_start), tile * tile_q)
        for q_start, kv_start, count in zip(*begins, num_tiles, strict=True)
        for tile in range(count)
    }
    result: dict[tuple[int, int, int], list[int]] = {}
    fields = column["q_start"], column["kv_start"], column["first_row"]
    for index, (q_start, kv_start, row) in enumerate(zip(*fields, strict=True)):
        result.setdefault((int(q_start), int(kv_start), int(row)), []).append(index)
    if result.keys() != wanted:
        raise PlanError(f"plan: tiles of rows {sorted(result.keys() ^ wanted)[:4]} are not covered")
    states = np.zeros(plan.num_states, np.int64)
    merged = {int(column["split_tile"][i]): int(i) for i in plan.merges}
    for tile, items in result.items():
        count = len(items)
        splits = sorted(int(column["split"][i]) for i in items)
        if splits != list(range(count)) or set(column["num_splits"][items]) != {count}:
            raise PlanError(f"plan: the keys of tile {tile} are not covered once: splits {splits}")
        if plan.num_blocks:
            in_order = sorted(items, key=lambda i: int(column["split"][i]))
            begin, end, _ = listed_parts(plan.items[in_order])
            if begin[0] or (begin[1:] != end[:-1]).any():
                raise PlanError(f"plan: the keys of tile {tile} are not covered once: {begin, end}")
        leaves_state = int(column["split_tile"][items[0]]) < 0
        if count > 1 or leaves_state:
            first = int(column["first_state"][items[0]])
            states[first : first + count] += 1
            if not leaves_state and merged.get(int(column["split_tile"][items[0]])) not in items:
                raise PlanError(f"plan: no merge of tile {tile}")
    if plan.num_blocks:
        _validate_links(plan)
    if not (states == 1).all():
        raise PlanError("plan: partial states overlap, or some are nobody's")


def _validate_links(plan: BatchPlan) -> None:
    """Raise PlanError unless each item that no block begins with follows one other, and no block
    walks in a circle."""
    _, _, following = listed_parts(plan.items)
    linked = np.sort(following[following > 0])
    if linked.tolist() != list(range(plan.num_blocks, len(plan.items))):
        raise PlanError("plan: items are not linked once")
    (behind,) = following[plan.num_blocks :].nonzero()
    if (following[plan.num_blocks :][behind] <= behind + plan.num_blocks).any():
        raise PlanError("plan: an item is followed by one that is not behind it")
