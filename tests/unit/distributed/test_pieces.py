"""Zig-zag shares of ragged batches: cut and joined, even, and in order of position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn import ArgumentError
from cupyattn.distributed import ZigZag

LENGTHS = [[], [0], [1], [64], [37, 0, 5, 1, 1000, 3], [7] * 5]


def offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_token_is_on_one_rank(lengths: list[int], size: int) -> None:
    share = ZigZag(offsets(lengths), size)
    rows = [share.rows(rank) for rank in range(size)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(sum(lengths)))
    for rank, own in enumerate(rows):
        assert (np.diff(own) > 0).all()
        indptr = share.indptr(rank)
        assert indptr[-1] == own.size and (np.diff(indptr) == share.counts(rank)).all()
        request = np.repeat(np.arange(len(lengths)), share.counts(rank))
        assert (share.positions(rank) == own - share.qo_indptr[request]).all()


def test_causal_work_is_even() -> None:
    share = ZigZag(offsets([4096, 80]), 4)
    work = [int((share.positions(rank) + 1).sum()) for rank in range(4)]
    assert max(work) < 1.002 * min(work)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_cut_and_join(framework: str) -> None:
    module: Any = np if framework == "numpy" else pytest.importorskip(framework)
    xp = module.numpy if framework == "jax" else module
    share = ZigZag(offsets([5, 0, 11]), 3)
    whole = np.arange(2 * 16 * 3).reshape(2, 16, 3)
    x = xp.asarray(whole)
    parts = [share.cut(x, rank, axis=1) for rank in range(3)]
    for rank, part in enumerate(parts):
        assert type(part) is type(x)
        assert (np.asarray(part) == whole[:, share.rows(rank)]).all()
    assert (np.asarray(share.join(parts, axis=1)) == whole).all()
    assert (np.asarray(share.join(parts, axis=-2)) == whole).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ZigZag(np.array([1, 2]), 2), "qo_indptr: the first offset is 1"),
        (lambda: ZigZag(np.array([0, 3, 2]), 2), "qo_indptr: falls from 3 to 2"),
        (lambda: ZigZag(np.array([0, 4]), 0), "size: got 0"),
        (lambda: ZigZag(np.array([0.0, 4.0]), 2), "qo_indptr: got float64"),
        (lambda: ZigZag(np.array([0, 4]), 2).rows(2), "rank: got 2 of 2 ranks"),
        (lambda: ZigZag(np.array([0, 4]), 2).cut(np.zeros(5), 0), "x: shape is .5.; wanted 4"),
        (lambda: ZigZag(np.array([0, 4]), 2).cut(np.zeros(4), 0, 1), "x: shape is .4.; wanted 4"),
        (lambda: ZigZag(np.array([0, 4]), 2).join([np.zeros(2)]), "parts: got 1 of them"),
        (
            lambda: ZigZag(np.array([0, 4]), 2).join([np.zeros(2), np.zeros(3)]),
            r"parts\[1\]: shape is \[3\]; wanted 2",
        ),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
