"""Requests of equal lengths are planned once: later plans are what a planner of its own makes."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from golden.cards import plugged_in

from cupyattn.core import dtypes
from cupyattn.core.spec import AttentionSpec
from cupyattn.launch.attention.batch import BatchLauncher
from cupyattn.launch.attention.equal_requests import EqualRequests
from cupyattn.launch.attention.layout import BatchSchedule, Capacity
from cupyattn.schedule.batch import BatchRequests, Splitting

_HALF = dtypes.bfloat16
_PLAIN = AttentionSpec(8, 2, 128, 128, _HALF, _HALF, _HALF, page_size=16, causal=True)
SPECS = {
    "causal": _PLAIN,
    "full": replace(_PLAIN, causal=False),
    "window": replace(_PLAIN, window_left=100),
    "ragged": replace(_PLAIN, page_size=0),
    "odd groups": replace(_PLAIN, num_qo_heads=14),
    "wide": replace(_PLAIN, head_dim_qk=512, head_dim_vo=512),
    "rope": replace(_PLAIN, pos_encoding="ROPE_LLAMA"),
    "latent": AttentionSpec(
        16, 1, 576, 512, _HALF, _HALF, _HALF, page_size=64, causal=True, latent=True
    ),
    "latent of many heads": AttentionSpec(
        128, 1, 576, 512, _HALF, _HALF, _HALF, page_size=64, causal=True, latent=True
    ),
}


def _requests(rng: np.random.Generator, count: int, qo_len: int, kv_len: int) -> BatchRequests:
    """Requests whose keys begin anywhere."""
    return BatchRequests(
        np.full(count, qo_len),
        np.full(count, kv_len),
        np.arange(count) * qo_len,
        rng.permutation(count * 5)[:count] * 1000,
        uniform=qo_len,
    )


def _compare(got: BatchSchedule, wanted: BatchSchedule, what: object) -> None:
    np.testing.assert_array_equal(got.words, wanted.words, str(what))
    assert got.workspace_bytes == wanted.workspace_bytes, what
    assert (got.positions, got.uniform) == (wanted.positions, wanted.uniform), what
    assert (got.rotated, got.rotated_bytes) == (wanted.rotated, wanted.rotated_bytes), what
    ends = [(x.items, x.merges, x.counters, x.launches) for x in got.parts]
    assert ends == [(x.items, x.merges, x.counters, x.launches) for x in wanted.parts], what
    if any(part.tiles is not None for part in got.parts):
        assert got.longest == wanted.longest, what


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("qo_len", [1, 2, 5, 70, 300])
def test_plans_are_a_planners_own(name: str, qo_len: int) -> None:
    rng = np.random.default_rng(qo_len)
    spec = SPECS[name]
    splittings = Splitting(), Splitting(tokens=256), Splitting(may_split=False)
    with plugged_in("h100"):
        remembers = BatchLauncher(spec, spec.problem(), 0)
        for count in (1, 2, 7, 40):
            for kv_len in (qo_len, 300, 301, 303, 300, 320, 4096, 4097, 4100):
                requests = _requests(rng, count, qo_len, max(qo_len, kv_len))
                for splitting in splittings:
                    got = remembers.schedule(
                        requests, split_tokens=splitting.tokens, may_split=splitting.may_split
                    )
                    fresh = BatchLauncher(spec, spec.problem(), 0)
                    wanted = fresh._schedule(requests, splitting, None)
                    _compare(got, wanted, (count, kv_len, splitting))


def _capacities(count: int, qo_len: int) -> list[Capacity]:
    """The first plan of a graph was like this one, or had more of everything."""
    return [
        Capacity(count, count * qo_len, qo_len, 1 << 23),
        Capacity(count, count * 300, 300, 1 << 24),
        Capacity(2 * count, 3 * count * qo_len, 2 * qo_len, 1 << 24),
    ]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("qo_len", [1, 5, 70])
def test_plans_of_graphs_are_a_planners_own(name: str, qo_len: int) -> None:
    rng = np.random.default_rng(qo_len)
    spec, splittings = SPECS[name], (Splitting(), Splitting(may_split=False))
    with plugged_in("h100"):
        remembers = BatchLauncher(spec, spec.problem(), 0)
        for count in (1, 7, 40):
            for kv_len in (300, 301, 300, 320, 4097):
                requests = _requests(rng, count, qo_len, kv_len)
                for capacity in _capacities(count, qo_len):
                    for splitting in splittings:
                        got = remembers.schedule(
                            requests, may_split=splitting.may_split, capacity=capacity
                        )
                        fresh = BatchLauncher(spec, spec.problem(), 0)
                        wanted = fresh._schedule(requests, splitting, capacity)
                        _compare(got, wanted, (count, kv_len, splitting, capacity))


@pytest.mark.parametrize("capacity", [None, Capacity(8, 8, 1, 40000)])
@pytest.mark.parametrize("name", ["causal", "latent", "latent of many heads"])
def test_they_are_planned_once(name: str, capacity: Capacity | None) -> None:
    rng = np.random.default_rng(0)
    spec = SPECS[name]
    with plugged_in("h100"):
        launcher = BatchLauncher(spec, spec.problem(), 0)
        with (
            mock.patch.object(
                EqualRequests, "schedule", autospec=True, side_effect=EqualRequests.schedule
            ) as reused,
            mock.patch.object(launcher, "_schedule", side_effect=launcher._schedule) as planned,
        ):
            for kv_len in (4090, 4091, 4096):
                launcher.schedule(_requests(rng, 8, 1, kv_len), capacity=capacity)
    assert reused.call_count == 3 - planned.call_count
    assert planned.call_count == (3 if name == "latent of many heads" else 1)


@pytest.mark.parametrize("kv_len", [100, 4096, 70000])
def test_one_tile_of_rows_needs_no_list(kv_len: int) -> None:
    """Blocks would wait for the list before they look up a page."""

    def schedule(count: int, qo_len: int, kv_start: int, name: str = "causal") -> BatchSchedule:
        one = np.ones(count, np.int64)
        starts = kv_start + 5000 * np.arange(count)
        requests = BatchRequests(
            qo_len * one, kv_len * one, qo_len * np.arange(count), starts, uniform=qo_len
        )
        return BatchLauncher(SPECS[name], SPECS[name].problem(), 0).schedule(requests)

    with plugged_in("h100"):
        for name in ("causal", "ragged", "odd groups"):
            listed = schedule(1, 1, 7, name)
            free = schedule(1, 1, 0, name)
            ((before, _),), ((launch, _),) = listed.parts[0].launches, free.parts[0].launches
            assert listed.uniform is None and free.uniform is not None
            num_parts = before.grid[1]
            assert free.uniform[:] == (1, kv_len, 1, num_parts)
            assert launch == before._replace(grid=(before.grid[0], 1, num_parts))
            assert free.workspace_bytes == listed.workspace_bytes
        assert schedule(2, 1, 0).uniform is None
        # Heads of more than 256 columns keep their list.
        assert schedule(1, 1, 0, "wide").uniform is None
    with plugged_in("rtx3090"):
        assert schedule(1, 75, 0).uniform is None  # 300 rows are three tiles
        assert schedule(1, 16, 0).uniform is not None
