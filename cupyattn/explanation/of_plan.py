"""Explanations of plans: of a wrapper, or of a schedule that nobody is going to run."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np

from ..choose.candidates import BY_ROW_CLASS, form_of, full_name
from ..choose.card import Card, card_of
from ..core import parse
from ..core.device import NO_GPU, DeviceProps, device_props
from ..core.tracing import untraced
from ..distributed.attention import ContextParallelWrapper
from ..engine.wrapper import BatchWrapper, Plan
from ..errors import ArgumentError, PlanError
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.layout import BatchSchedule
from ..launch.attention.words import batch_words, problem_words
from ..schedule.batch import BatchRequests
from ..wrappers.batch_pod import BatchPODWithPagedKVCacheWrapper
from ..wrappers.pod import PODWithPagedKVCacheWrapper
from ..wrappers.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from .planned import has_levels, planned_launches, row_bytes
from .record import Choice, Explanation, Refusal
from .refused import refusals, refused_clusters
from .timeline import Rates

_SHARED_PREFIX = (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
# Operations of the matrix units of an SM in a clock, for 16-bit numbers.
_PER_CLOCK = {"sm_80": 2048, "sm_90a": 4096, "sm_100a": 8192}
_OTHER_PER_CLOCK = 1024
# Where a driver tells neither: GB/s and MHz, of no card in particular.
_SOME_MEMORY_RATE, _SOME_CLOCK = 1000.0, 1500.0


@untraced
def explain(wrapper: Any) -> Explanation:
    """Why the kernels of a wrapper's plan run.

    Parameters
    ----------
    wrapper
        Any of the batch wrappers (decode, prefill, mixed, latent, cascade, sparse, POD, shared
        prefix) after plan(), or a ContextParallelWrapper of one, for what its rank attends to.

    Returns
    -------
    result
        An Explanation: `print` it for a table of the candidates with their estimated times in
        microseconds, of what was refused and why, and of the launches with their tiles, blocks,
        waves and splits; its fields have the same as values, and `picture()` is an SVG of the SMs
        over time. It is about the variant that the last run needed, such as one of arrays off
        16-byte boundaries, or else the planned one. A wrapper of CPU arrays is explained as if on
        an H100, by which its plans are sized.

    Raises
    ------
    CupyAttnError
        ArgumentError for what is no batch wrapper, PlanError before plan().

    Notes
    -----
    Nothing is launched and nothing changes; it takes milliseconds.

    Semantics: this library's own.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)  # [pages, K and V, page_size, heads, D]
    >>> indptr, indices, last = np.array([0, 2, 3]), np.array([3, 0, 1]), np.array([5, 16])
    >>> wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper()
    >>> wrapper.plan(indptr, indices, last, 8, 2, 64, 16)
    >>> cupyattn.explain(wrapper).launches[0].kernel
    'decode_sm80'
    """
    notes: tuple[str, ...] = ()
    if isinstance(wrapper, PODWithPagedKVCacheWrapper):
        wrapper, notes = wrapper._decodes, ("these are the decodes; run() plans the prompt",)
    elif isinstance(wrapper, _SHARED_PREFIX):
        wrapper = wrapper._unique
        notes = ("these are the requests' own keys; run() plans the shared prefix",)
    elif isinstance(wrapper, ContextParallelWrapper):
        rank, size = wrapper.group.rank, wrapper.group.size
        wrapper, notes = wrapper.wrapper, (f"this is what rank {rank} of {size} attends to",)
    if not isinstance(wrapper, BatchWrapper):
        raise ArgumentError(
            f"wrapper: got {parse.shown(wrapper)}; wanted a batch wrapper of cupyattn, such as "
            "BatchDecodeWithPagedKVCacheWrapper, after plan()"
        )
    with wrapper._turns.planning:
        first, *others = (_of_plan(x, notes) for x in _planned(wrapper))
    return replace(first, parts=tuple(others))


def _planned(wrapper: BatchWrapper) -> list[BatchWrapper]:
    """The wrappers that have a plan of the last plan(): this one, or its parts."""
    result: list[BatchWrapper] = [wrapper]
    if isinstance(wrapper, BatchPODWithPagedKVCacheWrapper):
        parts = {"together": wrapper, **wrapper._apart}
        result = [part for name, part in parts.items() if name in wrapper._ready]
    result = [x for x in result if x._current is not None]
    if not result:
        raise PlanError("explain() was called before plan(); call plan() first")
    return result


def _of_plan(wrapper: BatchWrapper, notes: tuple[str, ...]) -> Explanation:
    plan = wrapper._require_plan()
    variant = next(iter(plan.prepared), plan.geometry.default_variant)
    preferred = wrapper._preferred
    if preferred is not None and preferred[0] is plan.geometry and preferred[1] in plan.prepared:
        variant = preferred[1]
    cached = plan.prepared.get(variant)
    if cached is not None and cached.schedule.words.size:
        launcher, schedule = cached.launcher, cached.schedule
    else:
        # Not made yet, or by the GPU, which splits keys as the host does.
        probe = copy.copy(wrapper)  # whose workspace may grow
        probe._outgrown = []
        launcher, schedule = probe._schedule_variant(plan, variant)
    return explain_schedule(
        launcher, schedule, plan.batch.requests, (*_notes(plan, schedule), *notes), plan.split
    )


def _notes(plan: Plan, schedule: BatchSchedule) -> list[str]:
    """What else decided about a wrapper's plan."""
    result = []
    if plan.geometry.options.device.kind == "cpu":
        checked = f"this is the plan of an {_name(NO_GPU)}, by which it is checked"
        result.append(f"the arrays are on the CPU, where the reference answers; {checked}")
    asked, planned = plan.geometry.spec.dtype_q, plan.geometry.launched_spec.dtype_q
    if asked is not planned:
        result.append(f"there are no kernels for {asked}: this is the plan of {planned}")
    if plan.capacity is not None:
        kept = "keeps the tiles of the first plan, whose longest request chose them"
        result.append(f"a captured graph {kept}; lists have room for any later plan")
    if plan.batch.levels is not None:
        result.append("levels of a cascade: each leaves states, which one launch merges")
    return result


def explain_schedule(
    launcher: BatchLauncher,
    schedule: BatchSchedule,
    requests: BatchRequests,
    notes: tuple[str, ...] = (),
    split: tuple[int, bool] = (0, True),
) -> Explanation:
    """Why the kernels of a schedule run.

    split: (keys of a part or 0, whether keys may be split), as the caller has said.
    """
    props = device_props(launcher.device_index)
    card, problem = card_of(props), launcher.problem
    page_size = launcher.spec.page_size
    rates = rates_of(card, props)
    candidates, more = _candidates(launcher, schedule, requests, split)
    launches, blocks = planned_launches(launcher, schedule, rates)
    offered = {x.tiles for x in launches} if candidates else None
    if offered is not None:
        own = (x.name for x in candidates if form_of(x.name) == launcher.form)
        offered |= {name.removesuffix(f", {launcher.form}") for name in own}
    heads = launcher.num_kv_heads, launcher.group_size
    refused: list[Refusal] = refusals(problem, page_size, props, offered)
    refused += refused_clusters(problem, requests, heads, props, offered) if offered else []
    if any(launcher.widened):
        more.append(_widening_words(launcher, requests))
    if schedule.rotated_bytes:
        more.append(f"keys are rotated ahead, into {schedule.rotated_bytes:,} bytes")
    key_bytes = _key_bytes(launcher, requests)
    key_time = key_bytes / rates.memory if props.memory_rate else None
    taken = next((x.time for x in candidates if x.is_taken), None)
    if taken is not None and key_time is not None and taken < key_time:
        more.append(
            f"{taken:,.1f} us is less than memory takes for the keys: unless L2 has them, the "
            "estimate is too low"
        )
    return Explanation(
        card=card_words(props),
        times=times_words(card, props),
        problem=problem_words(launcher.spec, problem),
        batch=batch_words(requests),
        key_bytes=key_bytes,
        key_time=key_time,
        candidates=tuple(candidates),
        refusals=tuple(refused),
        launches=tuple(launches),
        workspace_bytes=schedule.workspace_bytes,
        word_bytes=schedule.words.nbytes,
        notes=(*notes, *more),
        blocks=tuple(blocks),
        num_sms=props.num_sms,
    )


def _widening_words(launcher: BatchLauncher, requests: BatchRequests) -> str:
    """What a launch ahead does, and what that takes."""
    spec, problem = launcher.spec, launcher.problem
    arrays = f"queries of {spec.dtype_q}"
    if launcher.widens_keys:
        queries = "queries, " if launcher.widens_queries else ""
        arrays = f"{queries}keys and values of {spec.dtype_k}"
    time = launcher.ahead_time(requests)
    return (
        f"{arrays} are widened ahead in some {time:,.1f} us: these are kernels of {problem.dtype_q}"
    )


def _candidates(
    launcher: BatchLauncher,
    schedule: BatchSchedule,
    requests: BatchRequests,
    split: tuple[int, bool],
) -> tuple[list[Choice], list[str]]:
    """The candidates that a plan chose among, the soonest first, and what else there is to say."""
    if split != (0, True):
        return [], ["the caller says how keys are split, so rows alone choose the kernels"]
    if has_levels(schedule) or not schedule.parts:
        return [], []
    taken, notes = schedule.candidate, []
    if any(not isinstance(part.row_class, str) for part in schedule.parts):
        taken = full_name(BY_ROW_CLASS, launcher.form)
        notes = ["one launch has blocks for many rows and for few"]
    result = [
        Choice(x.name, x.time if x.time < math.inf else None, x.name == taken)
        for x in launcher.candidates(requests)
    ]
    result.sort(key=lambda x: math.inf if x.time is None else x.time)
    times = {x.name: x.time for x in result if x.time is not None}
    soonest = min(times, key=times.__getitem__, default=taken)
    if taken in times and times[taken] > times[soonest]:
        share = 1 - times[soonest] / times[taken]
        notes.append(
            f"{soonest} is estimated {share:.1%} sooner than what is taken, which others "
            "replace only where more is to be gained"
        )
    return result, notes


def _key_bytes(launcher: BatchLauncher, requests: BatchRequests) -> int:
    """The bytes of the keys and values that rows see, once for each request."""
    keys, masking = requests.kv_len * (requests.qo_len > 0), launcher.masking
    if masking.window_left >= 0:
        keys = np.minimum(keys, masking.keys_among(requests.qo_len + masking.window_left))
    return int(keys.sum()) * row_bytes(launcher) * launcher.num_kv_heads


def rates_of(card: Card, props: DeviceProps) -> Rates:
    memory = props.memory_rate or card.memory_rate or _SOME_MEMORY_RATE
    clock = props.sm_clock or card.sm_clock or _SOME_CLOCK
    # GB/s are kilobytes in a microsecond, and MHz are clocks in one.
    return Rates(1e3 * memory, clock * _PER_CLOCK.get(props.arch, _OTHER_PER_CLOCK))


def _name(props: DeviceProps) -> str:
    return "H100" if props is NO_GPU else props.name


def card_words(props: DeviceProps) -> str:
    result = [f"{_name(props)}: {props.arch}", f"{props.num_sms} SMs"]
    result += [f"{props.memory_rate:,.0f} GB/s"] if props.memory_rate else []
    result += [f"{props.sm_clock:,.0f} MHz"] if props.sm_clock else []
    return ", ".join(result)


def times_words(card: Card, props: DeviceProps) -> str:
    """Where a card's times come from."""
    if not card.scaled_from:
        source = f"measured: {card.source}" if card.source else "which nobody has measured yet"
        return f"of {card.name}, {source}"
    if props is NO_GPU:
        return f"of {card.scaled_from}"
    return f"of {card.scaled_from}, scaled by memory's rate and clock; this card is not measured"
