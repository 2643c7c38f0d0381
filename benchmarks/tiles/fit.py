"""Fits the data of a card to measured rows, and checks a card against them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cupyattn.choose import card as cards
from cupyattn.choose.card import Card
from cupyattn.choose.fit import Sample, fit_card
from cupyattn.core.device import NO_GPU
from cupyattn.launch.attention.batch import BatchLauncher

from ..batch.case import BatchCase
from ..sweep.plans import plan_of
from .rows import Row

# Of all batches, one in so many is held out: its times are no part of the fit.
_HELD_OUT = 4


class Check(NamedTuple):
    """What a card says of rows.

    errors  of the estimates, logarithms, by the kind of batch and candidate
    regrets of what plans take: its time over that of the best candidate, by the kind of batch
    """

    errors: dict[tuple[str, str], list[float]]
    regrets: dict[str, list[float]]


def split(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """The rows that a card is fitted to, and those of batches that are held out."""
    parts: tuple[list[Row], list[Row]] = [], []
    for row in rows:
        number = int(row.case.name.split("_")[1])
        parts[number % _HELD_OUT == 0].append(row)
    return parts


def fit(card: Card, rows: Sequence[Row]) -> Card:
    """A card like `card` whose times are nearest to the rows."""
    with cards.using(card):
        return fit_card(card, [_sample(case, us) for case, us in _by_case(rows)])


def check(card: Card, rows: Sequence[Row]) -> Check:
    """How far off the card's estimates are, and what its choices cost."""
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    regrets: dict[str, list[float]] = defaultdict(list)
    with cards.using(card):
        for case, us in _by_case(rows):
            launcher, schedule = _planned(case)
            kind = f"{case.name.split('_')[2]} {case.api}"
            for candidate in launcher.candidates(schedule.requests):
                if candidate.name in us and math.isfinite(candidate.time):
                    label = "+ others" if "+" in candidate.name else candidate.name
                    errors[kind, label].append(math.log(candidate.time / us[candidate.name]))
            chosen = schedule.candidate or "by rows"
            if chosen in us:
                regrets[kind].append(us[chosen] / min(us.values()))
    return Check(dict(errors), dict(regrets))


def table(found: Check) -> str:
    """The errors and regrets as text."""
    lines = [f"{'batches':18}{'':22}{'rows':>6}{'told/taken':>12}{'error':>8}"]
    for (kind, name), logs in sorted(found.errors.items()):
        bias, error = math.exp(np.median(logs)), float(np.median(np.abs(logs)))
        lines.append(f"{kind:18}{name:22}{len(logs):6}{bias:12.3f}{100 * error:7.1f}%")
    logs = [x for some in found.errors.values() for x in some]
    lines.append(f"{'all':40}{len(logs):6}{'':12}{100 * float(np.median(np.abs(logs))):7.1f}%")
    lines.append(f"{'batches':40}{'number':>6}{'regret':>12}{'95th':>8}{'worst':>8}")
    regrets = {**dict(sorted(found.regrets.items()))}
    regrets["all"] = [x for some in found.regrets.values() for x in some]
    for kind, some in regrets.items():
        high = float(np.percentile(some, 95))
        lines.append(f"{kind:40}{len(some):6}{np.mean(some):12.3f}{high:8.3f}{max(some):8.3f}")
    return "\n".join(lines)


def _by_case(rows: Iterable[Row]) -> list[tuple[BatchCase, dict[str, float]]]:
    found: dict[str, tuple[BatchCase, dict[str, float]]] = {}
    for row in rows:
        found.setdefault(row.case.name, (row.case, {}))[1][row.candidate] = row.us
    return list(found.values())


def _sample(case: BatchCase, us: dict[str, float]) -> Sample:
    launcher, schedule = _planned(case)
    batch = launcher.batch_of(schedule.requests)
    return Sample(launcher.problem, case.page_size, launcher.offer, batch, us)


_launchers: dict[tuple[object, ...], BatchLauncher] = {}


def _planned(case: BatchCase) -> tuple[BatchLauncher, object]:
    """A launcher by the card that is used, and the schedule that it makes of a case's requests."""
    found = plan_of(case)
    assert found is not None
    launcher, schedule = found
    key = id(cards.card_of(NO_GPU)), launcher.spec, launcher.problem
    own = _launchers.get(key)
    if own is None:
        own = BatchLauncher(launcher.spec, launcher.problem, launcher.device_index)
        _launchers[key] = own
    return own, own.schedule(schedule.requests)
