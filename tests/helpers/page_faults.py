"""Appends of every kind, and index arrays that no caller should pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import poison
from .page_cases import DTYPES, Append, AppendCase

STRAY = AppendCase(lengths=((5, 20), (0, 7), (9, 0), (2, 25)), page_size=3)
# The second runs on from STRAY's first request to the pages of its third, which appends nothing.
_BAD_POSITIONS = (-1, 36, -(2**31), 2**31 - 1)


def spoil(append: Append, **where: Any) -> int:
    """Put bad values in the index arrays, and drop the slots of their rows; returns how many."""
    given = append.arguments
    names = ("batch_indices", "positions", "kv_indices")
    batch, positions, indices = (
        poison._download(given[name], np.dtype(np.int32)).copy() for name in names
    )
    num_requests, num_pages = len(append.case.lengths), append.caches[0].array.shape[0]
    before = len(append.slots)
    rows = [row for row, _, _ in append.slots]
    gone = set()
    for row, bad in zip(rows[0::9], (num_requests, num_requests + 7, 2**31 - 1), strict=False):
        batch[row] = bad
        gone.add(row)
    for row, bad in zip(rows[1::9], _BAD_POSITIONS, strict=False):
        positions[row] = bad
        gone.add(row)
    bad_pages = {}
    for row, bad in zip(rows[2::9], (-1, num_pages, 2**31 - 1), strict=False):
        page = next(p for r, p, _ in append.slots if r == row)
        bad_pages[page] = bad
        indices[np.flatnonzero(indices == page)[0]] = bad
    append.slots = [s for s in append.slots if s[0] not in gone and s[1] not in bad_pages]
    changed = zip(names, (batch, positions, indices), strict=True)
    given |= {name: poison.embed(x, **where).array for name, x in changed}
    return before - len(append.slots)


def random_case(seed: int) -> AppendCase:
    rng = np.random.default_rng(seed)

    def pick(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    dtype, cache_dtype = pick(*DTYPES)
    form = pick("array", "pair", "pair", "no page axis")
    dims = pick((128, 128), (64, 64), (1, 1), (7, 7), (100, 100), (256, 256), (520, 520))
    requests = int(rng.integers(0, 9))
    return AppendCase(
        dtype=dtype,
        cache_dtype=cache_dtype,
        num_kv_heads=pick(1, 2, 5, 8, 33, 130),
        head_dims=dims if form == "array" else pick(dims, (192, 128), (64, 9), (8, 16)),
        page_size=1 if form == "no page axis" else pick(1, 2, 5, 16, 33),
        kv_layout=pick("NHD", "HND"),
        form=form,
        strides=pick("packed", "packed", "gaps", "unaligned"),
        scales=pick((None, None), (0.01, 3.3)) if dtype != cache_dtype else (None, None),
        lengths=tuple((int(rng.integers(0, 40)), pick(0, 1, 1, 6, 30)) for _ in range(requests)),
        seed=seed,
    )
