"""One run of `cupyattn bench`: each case is built, called, checked, and then timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import peers
from .candidate import Candidate, Skipped, Unsupported
from .cases import Case
from .check import TOLERANCE, expect, relative_error
from .inputs import NAN_BITS, Arrays, Inputs, as_bits, make_inputs
from .timing import ContextLost, Stopwatch, Timing, describe, measure, random_order
from .trial import Outcomes
from .wrappers import ours

OURS = "cupyattn"
ROUNDS = 10

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What a run is made of. `deadline` is compared with `now()`; no case begins after it.

    tried  peer -> what `trial` found out about it, for peers that compile
    """

    cases: Sequence[Case]
    peer_names: Sequence[str]
    seed: int
    deadline: float
    rounds: int = ROUNDS
    now: Callable[[], float] = time.time
    tried: Mapping[str, Outcomes] = field(default_factory=dict)


def rows(settings: Settings, arrays: Arrays, clock: Stopwatch) -> Iterator[list[Row]]:
    """The rows of each case, ours first. Ends early at the deadline.

    A row has case, kind, name, variant, status ("timed", "wrong", "failed", "unsupported",
    "skipped") and a note; if it was timed also us, p10, p90, rate, unit and error, and a peer's
    correct output has speedup, its time over ours. Raises ContextLost if the device is lost.
    """
    for number, case in enumerate(settings.cases):
        if number and settings.now() > settings.deadline:
            return
        yield _case(case, settings, arrays, clock)


def _case(case: Case, settings: Settings, arrays: Arrays, clock: Stopwatch) -> list[Row]:
    try:
        inputs = make_inputs(case, arrays)
    except Exception as error:  # too little memory, say
        clock.check_alive()
        return [_bare(case, OURS, "failed", describe(error))]
    offered, result = _offers(case, settings, inputs, clock)
    expected = expect(case, inputs, arrays.random)
    checked = []
    for candidate in offered:
        try:
            checked.append((candidate, _error(candidate, expected, clock)))
        except ContextLost:
            raise
        except Skipped as reason:
            result.append(_bare(case, candidate.peer, "skipped", str(reason), candidate.variant))
        except Exception as error:
            clock.check_alive()
            result.append(_bare(case, candidate.peer, "failed", describe(error), candidate.variant))
    calls = [candidate.call for candidate, _ in checked]
    order = random_order(f"{settings.seed} {case.name}")
    timings = measure(calls, clock, settings.rounds, settings.deadline, settings.now, order)
    for (candidate, relative), timing in zip(checked, timings, strict=True):
        result.append(_timed(case, candidate, relative, timing))
    return _compared(result)


def _offers(
    case: Case, settings: Settings, inputs: Inputs, clock: Stopwatch
) -> tuple[list[Candidate], list[Row]]:
    """What can be called, and the rows of what cannot."""
    offered: list[Candidate] = []
    result: list[Row] = []
    for name in (OURS, *settings.peer_names):
        try:
            if name == OURS:
                offered.append(ours(case, inputs))
            else:
                tried = settings.tried.get(name)
                told = None if tried is None else tried.get(case.kind, {})
                offered += peers.candidates(name, case, inputs, told)
        except Unsupported as reason:
            result.append(_bare(case, peers.TITLES.get(name, name), "unsupported", str(reason)))
        except Exception as error:
            clock.check_alive()
            result.append(_bare(case, peers.TITLES.get(name, name), "failed", describe(error)))
    return offered, result


def _error(candidate: Candidate, expected: Any, clock: Stopwatch) -> float:
    """The relative error of one call, whose output held NaN before."""
    if candidate.buffer is not None:
        as_bits(candidate.buffer)[...] = NAN_BITS
    result = candidate.call()
    clock.wait()
    return relative_error(expected, candidate.output(result))


def _bare(case: Case, name: str, status: str, note: str, variant: str = "") -> Row:
    row = {"case": case.name, "kind": case.kind, "name": name, "variant": variant}
    return row | {"status": status, "note": note}


def _timed(case: Case, candidate: Candidate, error: float, timing: Timing) -> Row:
    if timing.error is not None:
        return _bare(case, candidate.peer, "failed", timing.error, candidate.variant)
    us = timing.percentile(50)
    rate, unit = case.rate(us)
    status = "timed" if error <= TOLERANCE else "wrong"  # NaN is wrong
    return _bare(case, candidate.peer, status, candidate.note, candidate.variant) | {
        "us": us,
        "p10": timing.percentile(10),
        "p90": timing.percentile(90),
        "samples": len(timing.samples),
        "rate": rate,
        "unit": unit,
        "error": error if error == error else "NaN",  # JSON has no NaN
    }


def _compared(result: list[Row]) -> list[Row]:
    """Ours first, then the peers, the fastest first; each right peer with its time over ours."""
    result.sort(key=lambda row: (row["name"] != OURS, row.get("us", float("inf"))))
    mine = result[0]
    for row in result[1:]:
        if mine["status"] == row["status"] == "timed":
            row["speedup"] = row["us"] / mine["us"]
    return result
