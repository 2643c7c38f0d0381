"""Times every candidate of drawn batches on a GPU."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ... import jit
from ...choose import candidates
from ...core import dtypes
from ...core.device import NO_GPU, device_props
from ...launch.attention import merge_splits
from ...launch.attention.batch import BatchLauncher
from ..inputs import NAN_BITS, Arrays, as_bits, to_host
from ..timing import ContextLost, Stopwatch, describe, measure, random_order
from .case import TileCase
from .plans import mask_bytes, page_counts, plan_of, planned, wrapper_of
from .rows import Row

Instance = tuple[str, jit.Config]

_ROUNDS = 5
_MAX_ERROR = 0.02  # between the outputs of two candidates, of their norm: rounding alone is less
_COMPARED_ROWS = 256


def instances(
    cases: Iterable[TileCase], device_index: int = NO_GPU.index
) -> dict[str, frozenset[Instance]]:
    """(entry name, Config) of the kernels of all candidates of each case, and of all other cases of
    its problem. Nothing is compiled for an imagined device."""
    launchers: dict[Any, BatchLauncher] = {}
    groups: dict[Any, dict[Instance, None]] = defaultdict(dict)
    group_of, seen = {}, set()
    for case in cases:
        built = plan_of(case)
        assert built is not None
        drawn, problem = built.launcher, built.launcher.problem
        launcher = launchers.setdefault(
            (drawn.spec, problem), BatchLauncher(drawn.spec, problem, device_index)
        )
        group_of[case.name] = group = problem, case.page_size
        for candidate in launcher.candidates(built.requests):
            rows = tuple(name for name, _ in candidate.parts)
            if (group, candidate.name, rows) in seen:
                continue
            seen.add((group, candidate.name, rows))
            with candidates.only(candidate.name):
                launcher.schedule(built.requests)
            groups[group] |= dict.fromkeys(_kernels_of(launcher))
    return {name: frozenset(groups[group]) for name, group in group_of.items()}


def _kernels_of(launcher: BatchLauncher) -> Iterator[Instance]:
    for kernel in launcher.kernels():
        yield kernel.loaded.tiles.name, kernel.loaded.tiles.config
        for config in merge_splits.configs(launcher.problem, kernel.kinds[0]):
            yield "merge_splits", config


def rows_of(
    cases: Iterable[TileCase],
    arrays: Arrays,
    clock: Stopwatch,
    commit: str,
    deadline: float,
    now: Callable[[], float] = time.time,
) -> Iterator[list[Row]]:
    """The rows of each of these cases, as long as there is time; none of a case that cannot be
    measured. Raises ContextLost if the device is lost."""
    for case in cases:
        if now() > deadline:
            return
        try:
            yield _rows_of_case(case, arrays, clock, commit, deadline, now)
        except ContextLost:
            raise
        except Exception as error:  # another batch may do; a lost context ends the run
            print(f"\n{case.name}: {describe(error)}", flush=True)
            clock.check_alive()
            yield []


@dataclass(frozen=True)
class _Inputs:
    """q [rows, Hq, Dqk], k and v as the wrapper takes them, what it writes, and what it plans by.

    mask  packed bits, of which each is set as often as not: no tile is empty or full
    """

    q: Any
    keys: tuple[Any, ...]
    out: Any
    indices: Any = None
    mask: Any = None

    def wrapper(self, case: TileCase, device: str) -> Any:
        return wrapper_of(case, device, self.indices, self.mask)


def _make_inputs(case: TileCase, arrays: Arrays) -> _Inputs:
    rows, kv_dtype = case.q_offsets[-1], dtypes.parse(case.kv_dtype)
    q = arrays.normal(rows, case.num_qo_heads, case.head_dim_qk)
    out = arrays.empty((rows, case.num_qo_heads, case.head_dim_vo), dtypes.bfloat16)
    dims, indices = (case.head_dim_qk, case.head_dim_vo), None
    key_shape: tuple[int, ...] = (case.kv_offsets[-1],)
    if case.api == "paged":
        order = arrays.random.permutation(int(page_counts(case).sum()))
        indices, key_shape = arrays.int32(order), (order.size, case.page_size)
    k, v = (arrays.normal(*key_shape, case.num_kv_heads, dim, dtype=kv_dtype) for dim in dims)
    mask = arrays.uint8(arrays.random.bytes(mask_bytes(case))) if case.has_mask else None
    return _Inputs(q, ((k, v),) if case.api == "paged" else (k, v), out, indices, mask)


def _rows_of_case(
    case: TileCase,
    arrays: Arrays,
    clock: Stopwatch,
    commit: str,
    deadline: float,
    now: Callable[[], float],
) -> list[Row]:
    inputs, device = _make_inputs(case, arrays), str(arrays.device)
    built = planned(inputs.wrapper(case, device))
    assert built is not None
    offered = built.launcher.candidates(built.requests)
    calls, outputs = [], []
    for candidate in offered:
        # The first run plans again, in memory of its arrays' framework (BatchWrapper._follow).
        with candidates.only(candidate.name):
            wrapper = inputs.wrapper(case, device)
            calls.append(functools.partial(wrapper.run, inputs.q, *inputs.keys, out=inputs.out))
            outputs.append(_answer(calls[-1], inputs, clock))
        planned_now = planned(wrapper)
        if planned_now is None or planned_now.schedule.candidate != candidate.name:
            raise AssertionError(f"{candidate.name}: another candidate was launched in its place")
    for candidate, output in zip(offered, outputs, strict=True):
        error = float(np.linalg.norm(output - outputs[0]) / np.linalg.norm(outputs[0]))
        if not error <= _MAX_ERROR:
            raise AssertionError(f"{candidate.name} differs by {error:.3g} from {offered[0].name}")
    timings = measure(calls, clock, _ROUNDS, deadline, now, random_order(case.name))
    props = device_props(arrays.device.index)
    rows = []
    for candidate, timing in zip(offered, timings, strict=True):
        if timing.error is not None:
            raise RuntimeError(f"{candidate.name}: {timing.error}")
        told = float(candidate.time) if np.isfinite(candidate.time) else None
        is_chosen = candidate.name == built.schedule.candidate
        row = Row(
            card=props.name,
            clock=props.sm_clock,
            commit=commit,
            case=case,
            candidate=candidate.name,
            us=timing.percentile(50),
            told=told,
            is_chosen=is_chosen,
            between="code",
        )
        rows.append(row)
    return rows


def _answer(call: Callable[[], Any], inputs: _Inputs, clock: Stopwatch) -> np.ndarray:
    """Some rows of what a call writes, where NaN was before."""
    bits = as_bits(inputs.out)
    bits[...] = NAN_BITS
    call()
    clock.wait()
    step = -(-bits.shape[0] // _COMPARED_ROWS)
    return to_host(bits[::step]).view(ml_dtypes.bfloat16).astype(np.float32)
