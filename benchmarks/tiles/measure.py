"""Times every candidate of drawn batches on this machine's GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import numpy as np

from ..batch.case import BatchCase
from ..batch.inputs import BatchInputs, make_batch_inputs
from ..batch.wrappers import Calls, bind, empty_output
from ..sweep.plans import compile_instances, plan_of
from ..timing import Clock, describe, measure, random_order
from .rows import Row

_ROUNDS = 3
_MOST_ERROR = 0.02  # between the outputs of two candidates, of their norm: rounding alone is less


def instances(cases: Iterable[BatchCase]) -> list[tuple[str, Any]]:
    """(entry name, Config) of the kernels of all candidates of these cases, once each."""
    from cupyattn.choose import candidates
    from cupyattn.launch.attention import merge_splits

    found: dict[tuple[str, Any], None] = {}
    seen = set()
    for case in cases:
        planned = plan_of(case)
        assert planned is not None
        launcher, schedule = planned
        for candidate in launcher.candidates(schedule.requests):
            rows = tuple(name for name, _ in candidate.parts)
            if (launcher.problem, case.page_size, candidate.name, rows) in seen:
                continue
            seen.add((launcher.problem, case.page_size, candidate.name, rows))
            with candidates.only(candidate.name):
                launcher.schedule(schedule.requests)
        for kernel in launcher.kernels():
            found[kernel.loaded.tiles.name, kernel.loaded.tiles.config] = None
            merges = merge_splits.configs(launcher.problem, kernel.kinds[0])
            found |= dict.fromkeys(("merge_splits", config) for config in merges)
    return list(found)


def compile_ahead(cases: Iterable[BatchCase], jobs: int) -> int:
    """Compile these kernels in so many processes; returns how many they are."""
    found = instances(cases)
    compile_instances(found, jobs)
    return len(found)


def rows_of(cases: Iterable[BatchCase], commit: str, deadline: float, seed: int) -> Iterator[Row]:
    """The rows of these cases, as long as there is time."""
    clock = Clock()
    clock.preheat()
    for case in cases:
        if time.time() > deadline:
            return
        try:
            yield from _rows_of_case(case, commit, deadline, clock, seed)
        except Exception as error:  # another batch may do; a lost context ends the run
            print(f"{case.name}: {describe(error)}", flush=True)
            clock.check_alive()


def _rows_of_case(
    case: BatchCase, commit: str, deadline: float, clock: Clock, seed: int
) -> Iterator[Row]:
    from cupyattn.choose import candidates
    from cupyattn.core.device import device_props

    inputs = make_batch_inputs(case)
    launcher, schedule = _planned(_bind(case, inputs, "tiles"))
    offered = launcher.candidates(schedule.requests)
    calls, outputs = [], []
    for index, candidate in enumerate(offered):
        bound = _bind(case, inputs, f"tiles{index}")
        with candidates.only(candidate.name):
            bound.plan()
        calls.append(bound.run)
        outputs.append(bound.run().float())
    for candidate, output in zip(offered, outputs, strict=True):
        error = float((output - outputs[0]).norm() / outputs[0].norm())
        if not error <= _MOST_ERROR:
            raise AssertionError(f"{case.name}: {candidate.name} differs by {error:.3g}")
    timings = measure(calls, clock, _ROUNDS, deadline, order=random_order(f"{seed} {case.name}"))
    props = device_props(0)
    for candidate, timing in zip(offered, timings, strict=True):
        if timing.error is not None:
            raise RuntimeError(f"{case.name}: {candidate.name}: {timing.error}")
        told = float(candidate.time) if np.isfinite(candidate.time) else None
        is_chosen = candidate.name == schedule.candidate
        of_card = props.name, props.sm_clock, commit
        yield Row(*of_card, case, candidate.name, timing.percentile(50), told, is_chosen)


def _bind(case: BatchCase, inputs: BatchInputs, owner: str) -> Calls:
    out = empty_output(case, inputs)
    return bind(import_module("cupyattn"), owner, case, inputs, lambda x: x, out, {})


def _planned(bound: Calls) -> tuple[Any, Any]:
    """(BatchLauncher, BatchSchedule) of what a plan chooses."""
    bound.plan()
    wrapper = bound.run.func.__self__  # type: ignore[attr-defined]
    (prepared,) = wrapper._current.prepared.values()
    return prepared.launcher, prepared.schedule
