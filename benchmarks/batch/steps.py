"""Lengths that an engine's steps plan for: no two steps in a row have the same.

A plan() that is called again and again with one table is faster than any engine sees it, because
what its lengths decide may be remembered. Here requests of one row grow by a key a step, and now
and then one is done and another takes its place; prompts are drawn anew for every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Steps that are drawn before they come again: more than are timed between two looks at one.
NUM_STEPS = 1223
# Rows that one request of decode at most has: those of a draft are decoded too.
_MOST_ROWS_OF_DECODE = 8
# The share of steps in which a request is done.
_DONE = 0.25


@dataclass(frozen=True)
class Step:
    """What one step plans: int32 arrays. `table` has the ids of pages of all steps, each of which
    uses the first; None where keys are ragged."""

    qo_indptr: Any
    kv_indptr: Any
    last_page_len: Any
    kv_lens: Any
    table: Any = None


def draw_steps(
    requests: Sequence[tuple[int, int, int]], page_size: int, count: int, seed: int
) -> list[Step]:
    """So many steps of requests, given as groups of (how many, query rows, keys).

    The numbers of a group are the means of what is drawn, between a quarter and seven quarters of
    them. page_size 0: keys are ragged, and those of a request as many as its rows.
    """
    random = np.random.default_rng(seed)
    groups = [_decodes if rows <= _MOST_ROWS_OF_DECODE else _prompts for _, rows, _ in requests]
    drawn = [draw(random, *x) for draw, x in zip(groups, requests, strict=True)]
    lengths = [
        tuple(np.concatenate(x) for x in zip(*(next(of) for of in drawn), strict=True))
        for _ in range(count)
    ]
    if not page_size:
        return [_step(rows, rows, 1, None) for rows, _ in lengths]
    maximum = max(int(np.sum(-(-keys // page_size))) for _, keys in lengths)
    table = random.permutation(maximum).astype(np.int32)
    return [_step(rows, keys, page_size, table) for rows, keys in lengths]


def _around(random: np.random.Generator, mean: int, count: int) -> Any:
    return random.integers(max(1, mean // 4), max(2, mean * 7 // 4), count)


def _decodes(
    random: np.random.Generator, count: int, rows: int, keys: int
) -> Iterator[tuple[Any, Any]]:
    """Rows and keys of requests that grow by their rows."""
    lengths = _around(random, keys, count)
    while True:
        yield np.full(count, rows), np.maximum(lengths, rows)
        lengths = lengths + rows
        if random.random() < _DONE:
            lengths[random.integers(count)] = _around(random, keys, 1)[0]


def _prompts(
    random: np.random.Generator, count: int, rows: int, keys: int
) -> Iterator[tuple[Any, Any]]:
    """Rows and keys of prompts, of which earlier steps have written what is no row of this one."""
    while True:
        new = _around(random, rows, count)
        yield new, new + _around(random, keys - rows, count) * (keys > rows)


def _step(rows: Any, keys: Any, page_size: int, table: Any) -> Step:
    counts = -(-keys // page_size)
    indptr = _offsets(counts)
    last = (keys - (counts - 1) * page_size).astype(np.int32)
    return Step(_offsets(rows), indptr, last, keys.astype(np.int32), table)


def _offsets(counts: Any) -> Any:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
