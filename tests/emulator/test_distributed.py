"""Distributed prefill on the host: every copy, launch and merge of it, rank after rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import replayed_ranks
from helpers.patching import replace_all

from cupyattn import reference
from cupyattn.array import memory
from cupyattn.distributed import ContextParallelPrefill, Group, ZigZag, prefill

from . import gpu

LENGTHS = [150, 0, 71]
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])


def arrays(heads: int, kv_heads: int, dim: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, dim)
    return [rng.standard_normal((int(OFFSETS[-1]), *x)).astype(np.float16) for x in shapes]


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
    found = []
    for begin, end in pairwise(OFFSETS):
        own = (x[begin:end].astype(np.float64) for x in (q, k, v))
        found.append(reference.attention(*own, **options))
    return (np.concatenate(x) for x in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("method", "chunks", "options"),
    [
        ("gather", 1, {"causal": True}),
        ("gather", 2, {"causal": True, "window_left": 40}),
        ("overlap", 1, {"causal": True}),
        ("overlap", 2, {"causal": False}),
        ("ulysses", None, {"causal": True}),
    ],
)
def test_prefill(
    emulated: gpu.EmulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    chunks: int | None,
    options: dict[str, Any],
) -> None:
    log: list[tuple[Any, ...]] = []
    replace_all(
        monkeypatch,
        (memory.constant, lambda a, like: emulated.upload(a)),
        (prefill.SideStream, lambda device: replayed_ranks.RecordedSide(log)),
    )
    share, whole = ZigZag(OFFSETS, 2), arrays(4, 1, 64)

    def work(group: Group) -> Any:
        own = [emulated.upload(x[share.rows(group.rank)]) for x in whole]
        call = ContextParallelPrefill(group, method=method)
        call.plan(OFFSETS, 4, 1, 64, num_chunks=chunks, **options)
        emulated.launches.clear()
        out, lse = call.run(*own, return_lse=True)
        again = call.run(*own)
        assert np.array_equal(out, again)
        return out, lse

    wanted, wanted_lse = expected(*whole, **options)
    for rank, (out, lse) in enumerate(replayed_ranks.simulate(2, work, log)):
        rows = share.rows(rank)
        np.testing.assert_allclose(out.astype(np.float64), wanted[rows], atol=2e-3)
        np.testing.assert_allclose(lse, wanted_lse[rows], atol=2e-3)
    assert emulated.has_launched("store_kv")
    assert emulated.has_launched("merge_states") is (method == "overlap")
    assert emulated.has_launched("copy_rows") is (method == "ulysses")
