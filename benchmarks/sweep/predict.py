"""What the plan of a drawn case told that it would take, by the card that plans choose by.

Plans are made on the host, as for an H100, or within `as_on` for another card.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

from cupyattn.choose import card as cards
from cupyattn.engine import geometry

from ..batch.case import BatchCase
from .plans import plan_of


class Prediction(NamedTuple):
    """The candidate that serves a case, and its time in µs; None where nothing is known of it."""

    candidate: str
    us: float | None


@contextlib.contextmanager
def as_on(device: str) -> Iterator[None]:
    """Predict meanwhile as on the GPU of this name, if there is a card of it."""
    result = [card for card in cards.shipped() if device in card.match]
    if not result:
        yield
        return
    with cards.using(result[0]):
        geometry.forget()
        yield
    geometry.forget()


def predict(case: BatchCase) -> Prediction | None:
    """None where a wrapper of several kinds of requests has a plan that is not the paged one's."""
    planned = plan_of(case)
    if planned is None:
        return None
    name = planned.schedule.candidate
    offered = planned.launcher.candidates(planned.requests)
    times = [candidate.time for candidate in offered if candidate.name == name]
    return Prediction(name, times[0] if times and math.isfinite(times[0]) else None)
