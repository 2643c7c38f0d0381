"""Fits the data of a card to measured rows, and checks a card against them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...choose import card as cards
from ...choose.candidates import BY_ROW_CLASS
from ...choose.card import Card
from ...choose.fit import Sample, fit_card
from ...core.device import NO_GPU
from ...launch.attention.batch import BatchLauncher
from ...launch.attention.layout import BatchSchedule
from ...schedule.batch import BatchRequests
from .case import TileCase
from .plans import plan_of
from .rows import Row

# One batch in so many is held out: the fit does not see its times.
_HELD_OUT = 4


class Check(NamedTuple):
    """What a card says of rows.

    errors  of the estimates, logarithms, by the kind of batch and candidate
    regrets of what plans take: its time over that of the best candidate, by the kind of batch
    """

    errors: dict[tuple[str, str], list[float]]
    regrets: dict[str, list[float]]

    @property
    def error(self) -> float:
        """The median error of all estimates, a share."""
        logs = [x for some in self.errors.values() for x in some]
        return float(np.median(np.abs(logs))) if logs else 0.0

    @property
    def regret(self) -> float:
        """The mean regret of all batches; 1 is the least."""
        result = self.all_regrets()
        return float(np.mean(result)) if result else 1.0

    @property
    def high_regret(self) -> float:
        """The 95th percentile of the regrets."""
        result = self.all_regrets()
        return float(np.percentile(result, 95)) if result else 1.0

    def all_regrets(self) -> list[float]:
        """The regrets of all batches, in the same order for every card."""
        return [x for some in self.regrets.values() for x in some]


def split(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """The rows that a card is fitted to, and those of batches that are held out."""
    parts: tuple[list[Row], list[Row]] = [], []
    for row in rows:
        parts[row.case.number % _HELD_OUT == 0].append(row)
    return parts


def fit(card: Card, rows: Sequence[Row], device_index: int = NO_GPU.index) -> Card:
    """A card like `card` whose times are nearest to the rows of a device."""
    with cards.using(card):
        return fit_card(card, [_sample(case, us, device_index) for case, us in _by_case(rows)])


def check(card: Card, rows: Sequence[Row], device_index: int = NO_GPU.index) -> Check:
    """How far off the card's estimates are, and what its choices cost."""
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    regrets: dict[str, list[float]] = defaultdict(list)
    with cards.using(card):
        for case, us in _by_case(rows):
            launcher, schedule, requests = _planned(case, device_index)
            kind = f"{case.kind} {case.api}"
            for candidate in launcher.candidates(requests):
                if candidate.name in us and math.isfinite(candidate.time):
                    label = "+ others" if "+" in candidate.name else candidate.name
                    errors[kind, label].append(math.log(candidate.time / us[candidate.name]))
            chosen = schedule.candidate or BY_ROW_CLASS
            if chosen in us:
                regrets[kind].append(us[chosen] / min(us.values()))
    return Check(dict(errors), dict(regrets))


def table(result: Check) -> str:
    """The errors and regrets as text."""
    lines = [f"{'batches':18}{'':22}{'rows':>6}{'told/taken':>12}{'error':>8}"]
    for (kind, name), logs in sorted(result.errors.items()):
        bias, error = math.exp(np.median(logs)), float(np.median(np.abs(logs)))
        lines.append(f"{kind:18}{name:22}{len(logs):6}{bias:12.3f}{100 * error:7.1f}%")
    count = sum(map(len, result.errors.values()))
    lines.append(f"{'all':40}{count:6}{'':12}{100 * result.error:7.1f}%")
    lines.append(f"{'batches':40}{'number':>6}{'regret':>12}{'95th':>8}{'worst':>8}")
    regrets = {**dict(sorted(result.regrets.items()))}
    regrets["all"] = [x for some in result.regrets.values() for x in some]
    for kind, some in regrets.items():
        high = float(np.percentile(some, 95))
        lines.append(f"{kind:40}{len(some):6}{np.mean(some):12.3f}{high:8.3f}{max(some):8.3f}")
    return "\n".join(lines)


def _by_case(rows: Iterable[Row]) -> list[tuple[TileCase, dict[str, float]]]:
    result: dict[str, tuple[TileCase, dict[str, float]]] = {}
    for row in rows:
        result.setdefault(row.case.name, (row.case, {}))[1][row.candidate] = row.us
    return list(result.values())


def _sample(case: TileCase, us: dict[str, float], device_index: int) -> Sample:
    launcher, _, requests = _planned(case, device_index)
    batch = launcher.batch_of(requests)
    return Sample(launcher.problem, case.page_size, launcher.offer, batch, us)


_launchers: dict[tuple[object, ...], BatchLauncher] = {}


def _planned(
    case: TileCase, device_index: int
) -> tuple[BatchLauncher, BatchSchedule, BatchRequests]:
    """A launcher by the card that is used, a case's requests, and the schedule made of them."""
    result = plan_of(case)
    assert result is not None
    launcher = result.launcher
    key = id(cards.card_of(NO_GPU)), launcher.spec, launcher.problem, device_index
    own = _launchers.get(key)
    if own is None:
        own = _launchers[key] = BatchLauncher(launcher.spec, launcher.problem, device_index)
    return own, own.schedule(result.requests), result.requests
