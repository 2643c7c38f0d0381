"""Whether a card that was fitted here is better than what plans choose by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...choose.card import Card
from ...core.device import DeviceProps
from .fit import Check, check, fit, split
from .rows import Row

MIN_BATCHES = 40
# Mean regrets this near are one, or if they differ by no more than twice what chance makes of them:
# then the errors of the estimates decide.
_SAME_REGRET = 0.005


class Verdict(NamedTuple):
    """A card that was fitted to some batches, and what it and the one before say of the others.

    num_batches  that were held out
    """

    card: Card
    before: Check
    after: Check
    num_batches: int

    @property
    def is_better(self) -> bool:
        gain = self.before.regret - self.after.regret
        if abs(gain) > max(_SAME_REGRET, 2 * self._chance()):
            return gain > 0
        return self.after.error < self.before.error

    def _chance(self) -> float:
        """What the draw of the batches makes of the gain: its standard error."""
        before, after = self.before.all_regrets(), self.after.all_regrets()
        if not before or len(before) != len(after):  # a choice that was not timed has no regret
            return 0.0
        return float((np.array(before) - np.array(after)).std()) / len(before) ** 0.5

    def lines(self) -> list[str]:
        """For readers."""
        rows = (
            ("estimates are off by, in the median", lambda x: f"{100 * x.error:.1f} %"),
            ("chosen / best, in the mean", lambda x: f"{x.regret:.3f}"),
            ("chosen / best, at the 95th percentile", lambda x: f"{x.high_regret:.3f}"),
        )
        return [
            f"{self.num_batches} batches were held out:{'before':>28}{'after':>10}",
            *(f"  {name:40}{of(self.before):>10}{of(self.after):>10}" for name, of in rows),
        ]


def judge(card: Card, rows: Sequence[Row], props: DeviceProps, source: str) -> Verdict:
    """Fit a card like `card` to rows of a device, whose name and rates it gets."""
    fitted, held_out = split(rows)
    built = fit(card.slower(_slowness(card, fitted, props)), fitted, props.index)
    built = replace(
        built,
        name=props.name,
        match=(props.name,),
        arch=props.arch,
        num_sms=props.num_sms,
        memory_rate=props.memory_rate,
        sm_clock=props.sm_clock,
        source=source,
        scaled_from="",
    )
    before, after = (check(x, held_out, props.index) for x in (card, built))
    return Verdict(built, before, after, len({row.case.name for row in held_out}))


def _slowness(card: Card, rows: Sequence[Row], props: DeviceProps) -> float:
    """How many times as long rows took as the card says, in the median.

    The fit begins with a card that is so much slower. Tiles with too few rows for a fit then keep
    their place beside the others.
    """
    logs = [x for some in check(card, rows, props.index).errors.values() for x in some]
    return float(np.exp(-np.median(logs))) if logs else 1.0
