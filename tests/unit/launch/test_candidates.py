"""Every way to serve a batch, and that a measurement can ask for each."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupyattn.choose import candidates
from cupyattn.launch.attention.batch import BatchLauncher
from cupyattn.schedule.batch import BatchRequests

from .test_mixed_launches import planned

Lengths = list[tuple[int, int]]
PROMPTS = [
    "persistent",
    "q64_persistent",
    "q128_oneshot",
    "q64_oneshot",
    "lean_persistent",
    "lean32",
]


def requests_of(lengths: Lengths) -> BatchRequests:
    rows, keys = np.array(lengths, np.int64).T
    return BatchRequests(rows, keys, np.cumsum(rows) - rows, np.cumsum(keys) - keys)


def launcher_of(heads: tuple[int, int] = (32, 8), page_size: int = 16) -> BatchLauncher:
    """One of its own: others remember their kernels."""
    launcher, _ = planned([(1, 100)], heads, page_size)
    return BatchLauncher(launcher.spec, launcher.problem, launcher.device_index)


def names(lengths: Lengths, heads: tuple[int, int] = (32, 8)) -> list[str]:
    return [x.name for x in launcher_of(heads).candidates(requests_of(lengths))]


def test_what_serves_prompts_decodes_and_both() -> None:
    assert names([(700, 900)]) == PROMPTS
    assert names([(1, 900)] * 2) == [
        "decode",
        "decode one_an_sm",
        "decode cluster8",
        "decode cluster4",
    ]
    assert names([(1, 900)] * 64) == ["decode"]
    assert names([(1, 900)] * 64, (64, 4)) == ["decode merge_launch"]
    assert names([(16, 900)] * 2) == [*PROMPTS, "by row class"]
    assert "small" in names([(8, 900)] * 40)
    both = names([(700, 900), (1, 900)])
    # Only tiles for long launches, and blocks of one item, have launches behind them.
    behind = [f"{x} + others" for x in ("persistent", "q128_oneshot", "q64_oneshot")]
    assert sorted(both) == sorted([*PROMPTS, *behind])


@pytest.mark.parametrize(
    "lengths", [[(700, 900)], [(1, 900)] * 3, [(8, 900)] * 40, [(700, 900), (1, 900)]]
)
def test_a_plan_takes_the_candidate_that_is_asked_for(lengths: Lengths) -> None:
    launcher, requests = launcher_of(), requests_of(lengths)
    plans = {}
    for candidate in launcher.candidates(requests):
        with candidates.only(candidate.name):
            schedule = launcher.schedule(requests)
        assert schedule.candidate == candidate.name
        launches = [part.launches[0][0] for part in schedule.parts]
        assert len(launches) == len(candidate.parts)
        plans[candidate.name] = [(x.threads, x.shared_bytes, x.cluster, x.grid) for x in launches]
    assert len({str(x) for x in plans.values()}) > len(plans) // 2
    assert not candidates.forced()
    # Without such a one, plans choose.
    chosen = launcher.schedule(requests).candidate
    with candidates.only("none of these"):
        assert launcher.schedule(requests).candidate == chosen != "none of these"


def test_candidates_of_timed_kernels_say_when_they_are_done() -> None:
    for candidate in launcher_of().candidates(requests_of([(700, 900), (1, 900)])):
        assert (candidate.time < math.inf) == (candidate.name != "by row class")
