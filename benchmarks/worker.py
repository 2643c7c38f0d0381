"""One process's share of a run: check and time case after case, saving after each.

A failing implementation or case becomes a row with its error. What takes the whole process down (a
lost CUDA context, a crash, a hang) is left to `cli.supervise`, which reads the progress file that
this process keeps and starts another one without the culprit.
"""

from __future__ import annotations

import gc
import json
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyattn.bench.event_clock import BETWEEN

from . import machine, oracle, peers
from .batch.case import BatchCase
from .batch.inputs import make_batch_inputs
from .batch.oracle import expect_batch
from .candidate import Candidate, Unsupported
from .cases import AnyCase
from .inputs import make_inputs
from .lists.case import ListCase
from .lists.inputs import make_list_inputs
from .lists.oracle import expect_lists
from .merge.candidates import expect_merge, make_merge_inputs
from .merge.case import MergeCase
from .results import FILE_NAME, Results, bare_row, timed_row
from .selections import inputs as selections
from .selections.case import SelectionCase
from .timing import Clock, ContextLost, Timing, describe, measure, measure_host

CONTEXT_LOST = 75  # the exit status that asks for a fresh process
PROGRESS_NAME = "progress.json"

# How long a stage may go without progress before the supervisor ends the process, in seconds. The
# first FlashInfer call of a kind compiles for minutes; ours compiles in two seconds.
_STAGE_LIMITS = {"start": 120.0, "build": 240.0, "check": 240.0, "time": 60.0}
_OUR_LIMIT = 60.0
_SAVE_SECONDS = 3.0


class Progress:
    """The file that says what this process is doing, for whoever survives it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PROGRESS_NAME

    def note(self, stage: str, case: str = "", label: str = "") -> None:
        """`stage` starts now; `label` is "peer" or "peer:variant"."""
        limit = _STAGE_LIMITS[stage]
        if label.partition(":")[0] in peers.OURS:
            limit = min(limit, _OUR_LIMIT)
        entry = {"stage": stage, "case": case, "label": label, "until": time.time() + limit}
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(entry))
        part.replace(self._path)


@dataclass
class _Checked:
    candidate: Candidate
    verdict: oracle.Verdict
    repeatable: bool


def run(args: Namespace) -> int:
    """Work through the chosen cases until they or the seconds are over. Returns the exit status."""
    progress = Progress(args.out)
    progress.note("start")
    results = Results(args.out / FILE_NAME, _SAVE_SECONDS)
    clock = Clock()
    if "header" not in results.data:
        results.data["header"] = machine.header(args.commit) | {"between": BETWEEN}
        results.data["ceilings"] = clock.ceilings()
        results.save()
    try:
        for case in args.cases:
            if not results.finished(case):
                _one_case(case, args, results, clock, progress)
                results.save_soon()
    except ContextLost as error:
        print(f"context lost: {error}", flush=True)
        results.save()
        return CONTEXT_LOST
    results.data["header"]["gpu_at_end"] = machine.gpu_state()
    results.save()
    return 0


def _one_case(
    case: AnyCase, args: Namespace, results: Results, clock: Clock, progress: Progress
) -> None:
    reason = results.why_lost(case, "*")
    if time.time() > args.deadline:
        reason = "the budget of seconds was spent"
    if reason:
        results.add_case(case, [bare_row(case, "*", "", "skipped", reason)])
        return
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    try:
        facts = _check_and_time(case, args, results, clock, progress, rows)
    except ContextLost:
        raise
    except Exception as error:
        rows.append(bare_row(case, "*", "", "failed", describe(error)))
        clock.check_alive()
    seconds = time.perf_counter() - start
    results.add_case(case, rows, seconds=seconds, **facts)
    _release()
    print(_line(case, results), flush=True)


def _check_and_time(
    case: AnyCase,
    args: Namespace,
    results: Results,
    clock: Clock,
    progress: Progress,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    """Append the rows of one case to `rows`; returns what the GPU was like right after timing."""
    progress.note("time", case.name, "*")
    inputs, expected = problem(case)
    clock.wait()
    offered = _offers(case, args, inputs, results, clock, progress, rows)
    checked = []
    for candidate in offered:
        progress.note("check", case.name, candidate.label)
        try:
            checked.append(_check(candidate, expected, clock, _tolerance(case)))
        except ContextLost:
            raise
        except Exception as error:
            rows.append(_failed(case, candidate, describe(error)))
            clock.check_alive()

    progress.note("time", case.name, "*")
    clock.preheat(args.preheat)
    calls = [item.candidate.timed or item.candidate.call for item in checked]
    if case.is_host:
        timings = measure_host(calls, clock.wait, clock.check_alive, args.rounds)
    else:
        timings = measure(calls, clock, args.rounds, args.deadline, order=args.order(case.name))
    state = machine.gpu_state()
    ceilings = results.data["ceilings"]
    for item, timing in zip(checked, timings, strict=True):
        rows.append(_row(case, item, timing, ceilings))
    return {"gpu": state}


def _tolerance(case: AnyCase) -> float:
    if isinstance(case, SelectionCase):
        return selections.TOLERANCE
    is_8bit = isinstance(case, BatchCase) and case.is_8bit
    return oracle.TOLERANCE_8BIT if is_8bit else oracle.TOLERANCE


def problem(case: AnyCase) -> tuple[Any, list[oracle.Expected]]:
    """Inputs of a case, and the answers of sampled rows."""
    if isinstance(case, ListCase):
        listed = make_list_inputs(case)
        return listed, expect_lists(case, listed)
    if isinstance(case, SelectionCase):
        selected = selections.make_selection_inputs(case)
        return selected, selections.expect_selection(case, selected)
    if isinstance(case, BatchCase):
        batch = make_batch_inputs(case)
        return batch, expect_batch(case, batch)
    if isinstance(case, MergeCase):
        states = make_merge_inputs(case)
        return states, expect_merge(case, states)
    inputs = make_inputs(case)
    return inputs, oracle.expect(case, inputs)


def _offers(
    case: AnyCase,
    args: Namespace,
    inputs: Any,
    results: Results,
    clock: Clock,
    progress: Progress,
    rows: list[dict[str, Any]],
) -> list[Candidate]:
    offered: list[Candidate] = []
    for name in args.peers:
        if name not in peers.offering(case):
            continue
        if reason := results.why_lost(case, name):
            rows.append(bare_row(case, name, "", "failed", reason))
            continue
        progress.note("build", case.name, name)
        try:
            result = peers.candidates(name, case, inputs, args.build)
            clock.wait()
        except Unsupported as error:
            rows.append(bare_row(case, name, "", "unsupported", str(error)))
            continue
        except ContextLost:
            raise
        except Exception as error:
            rows.append(bare_row(case, name, "", "failed", describe(error)))
            clock.check_alive()
            continue
        for candidate in result:
            if reason := results.why_lost(case, candidate.label):
                rows.append(_failed(case, candidate, reason))
            else:
                offered.append(candidate)
    return offered


def _check(
    candidate: Candidate, expected: list[oracle.Expected], clock: Clock, tolerance: float
) -> _Checked:
    import torch

    if candidate.buffer is not None:
        candidate.buffer.fill_(float("nan"))
    first = candidate.output(candidate.call()).clone()
    clock.wait()
    again = candidate.output(candidate.call())
    clock.wait()
    verdict = oracle.judge(expected, first, tolerance)
    return _Checked(candidate, verdict, bool(torch.equal(first, again)))


def _row(
    case: AnyCase, item: _Checked, timing: Timing, ceilings: dict[str, float]
) -> dict[str, Any]:
    candidate = item.candidate
    if timing.error is not None or not timing.samples:
        return _failed(case, candidate, timing.error or "no sample before the deadline")
    row = timed_row(
        case, candidate.peer, candidate.variant, timing, item.verdict, item.repeatable, ceilings
    )
    return row | ({"note": candidate.note} if candidate.note else {})


def _failed(case: AnyCase, candidate: Candidate, reason: str) -> dict[str, Any]:
    return bare_row(case, candidate.peer, candidate.variant, "failed", reason)


def _line(case: AnyCase, results: Results) -> str:
    parts = []
    for row in results.rows:
        if row["case"] == case.name and row["status"] != "unsupported":
            said = f"{row['us']:.1f}" if "us" in row else row["status"]
            mark = " WRONG" if row["status"] == "wrong" else ""
            parts.append(f"{row['peer']}:{row['variant']} {said}{mark}")
    return f"{case.name}: " + ", ".join(parts)


def _release() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()
