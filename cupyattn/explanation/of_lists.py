"""Explanations of attention by lists and of selections, which no plan precedes: what calls of some
shape launch, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..choose.card import card_of
from ..core.device import device_props
from ..core.selection import SelectProblem
from ..core.spec import AttentionSpec
from ..launch.attention.key_list_arrays import Lists
from ..launch.attention.key_lists import ListLauncher
from ..launch.attention.log_choices import selection_words
from ..launch.attention.words import batch_words, problem_words
from ..launch.driver import params
from ..launch.driver.enqueue import Launch
from ..launch.ops.select import SelectLauncher, SelectShape, refusal
from ..schedule.batch import BatchRequests
from .of_plan import card_words, rates_of, times_words
from .record import Choice, Explanation, PlannedLaunch, Refusal

_SELECTING = "select_scores", "select_topk"
_UNIONS = "unions of neighbours' lists"


class ListCalls(NamedTuple):
    """Calls of `sparse.attend` on contiguous pages, or on rows of one request.

    entries, granularity, window  of a list, and keys that come besides
    has_own_lists  whether each key head has lists of its own; else all share one
    """

    entries: int
    granularity: int
    window: int = 0
    has_own_lists: bool = True


def explain_lists(
    spec: AttentionSpec, calls: ListCalls, requests: BatchRequests, device_index: int
) -> Explanation:
    """Why the kernels of such calls run: requests are those of the batch."""
    launcher = ListLauncher(spec, device_index)
    lists, strides = _lists_of(spec, calls, requests), _strides_of(spec)
    num_tokens = int(requests.qo_len.sum())
    groups = spec.num_kv_heads if calls.has_own_lists else 1
    unions = launcher.unions
    plan = None if unions is None else unions.plan(lists, groups, strides, num_tokens)
    refused = [] if plan else [Refusal(_UNIONS, launcher.why_apart(lists, num_tokens))]
    candidates = [
        Choice(offer.name, offer.time, plan is None and offer.is_taken)
        for offer in launcher.offers(num_tokens, lists.num_keys)
    ]
    if plan is not None:
        candidates.append(Choice(_UNIONS, None, True))
    candidates.sort(key=lambda x: math.inf if x.time is None else x.time)
    launches = (
        _alone(launcher, lists, num_tokens)
        if plan is None
        else [
            _small("union_lists", _UNIONS, plan.union),
            replace(
                _small("prefill_sm90", _UNIONS, plan.attention),
                is_persistent=True,
                tile_rows=(2 * 64,),
                tile_keys=(2 * 64,),
            ),
        ]
    )
    problem = launcher.problem
    row_bytes = (problem.head_dim_qk + problem.head_dim_vo) * problem.dtype_kv.itemsize
    num_keys = min(num_tokens * lists.num_keys, int(requests.kv_len.sum()))
    about = f"lists of {calls.entries:,} blocks of {calls.granularity} keys"
    about += f" and the last {calls.window:,} keys" * (calls.window > 0)
    return _explanation(
        device_index,
        f"{problem_words(spec, spec.problem())}; {about}",
        batch_words(requests),
        num_keys * row_bytes * spec.num_kv_heads,
        candidates,
        refused,
        launches,
        ["two launches: unions are made ahead"] if plan else [],
    )


def explain_selection(
    problem: SelectProblem, requests: BatchRequests, page_size: int, device_index: int
) -> Explanation:
    """Why the kernels of selections of contiguous index rows run."""
    num_tokens = int(requests.qo_len.sum())
    row_bytes = problem.head_dim * problem.dtype_k.itemsize
    rows = -(-requests.kv_len // problem.ratio)
    reason = refusal(problem)
    launches: list[PlannedLaunch] = []
    words: list[str] = []
    if reason is None:
        shape = _select_shape(problem, requests, page_size)
        prepared = SelectLauncher(problem, device_index).prepare(shape, num_tokens)
        for text, known in prepared.launches():
            words.append(text)
            names = _SELECTING[-len(known) :]
            launches += [
                _small(name, problem.score, x) for name, x in zip(names, known, strict=True)
            ]
    return _explanation(
        device_index,
        selection_words(problem),
        batch_words(requests),
        int(rows.sum()) * row_bytes,
        [],
        [] if reason is None else [Refusal("select_scores", reason)],
        launches,
        words,
    )


def _explanation(
    device_index: int,
    problem: str,
    batch: str,
    key_bytes: int,
    candidates: Sequence[Choice],
    refused: Sequence[Refusal],
    launches: Sequence[PlannedLaunch],
    notes: Sequence[str],
) -> Explanation:
    props = device_props(device_index)
    card = card_of(props)
    rates = rates_of(card, props)
    return Explanation(
        card=card_words(props),
        times=times_words(card, props),
        problem=problem,
        batch=batch,
        key_bytes=key_bytes,
        key_time=key_bytes / rates.memory if props.memory_rate else None,
        candidates=tuple(candidates),
        refusals=tuple(refused),
        launches=tuple(launches),
        workspace_bytes=0,
        word_bytes=0,
        notes=tuple(notes),
        num_sms=props.num_sms,
    )


def _lists_of(spec: AttentionSpec, calls: ListCalls, requests: BatchRequests) -> Lists:
    """What launches are told of such calls."""
    count, longest = requests.qo_len.size, int(requests.kv_len.max(initial=1))
    groups = spec.num_kv_heads if calls.has_own_lists else 1
    pages = -(-longest // spec.page_size)
    return Lists(
        length=calls.entries,
        granularity=calls.granularity,
        stride_n=groups * calls.entries,
        stride_group=calls.entries if groups > 1 else 0,
        num_requests=count,
        max_kv_len=pages * spec.page_size,
        window=calls.window,
        request_tokens=max(requests.uniform, 0),
        kv_step=pages,
        is_causal=spec.causal,
        num_pages=int((-(-requests.kv_len // spec.page_size)).sum()),
    )


def _strides_of(spec: AttentionSpec) -> bytes:
    """params.STRIDES of contiguous arrays, of pages with heads behind slots."""
    qk, vo, heads = spec.head_dim_qk, spec.head_dim_vo, spec.num_kv_heads
    rows = heads * qk, qk, heads * vo, vo
    pages = spec.page_size * heads * qk, spec.page_size * heads * vo
    q, o = (spec.num_qo_heads * dim for dim in (qk, vo))
    return params.STRIDES.pack(q, qk, *rows, o, vo, spec.num_qo_heads, 1, *pages)


def _alone(launcher: ListLauncher, lists: Lists, num_tokens: int) -> list[PlannedLaunch]:
    """What reads each list by itself."""
    plan = launcher.plan(num_tokens, lists.num_keys)
    kernel, merge = launcher.kernel(num_tokens, lists.num_keys), plan.merge
    tiles, loaded, problem = kernel.kinds[0], kernel.loaded, launcher.problem
    row_bytes = (problem.head_dim_qk + problem.head_dim_vo) * problem.dtype_kv.itemsize
    num_tiles = -(-lists.num_keys // tiles.tile_kv)
    result = []
    for launch, _ in plan.parts:
        parts = launch.grid[2] * launch.cluster
        each = -(-num_tiles // parts)
        planned = _small(tiles.name, "decode", launch)
        states = math.prod(launch.grid) if launch.grid[2] > 1 else 0
        slots = loaded.num_slots
        if launch.cluster > 1:
            slots = loaded.max_clusters(launch.cluster) * launch.cluster
        num_lists = math.prod(launch.grid[:2]) // launch.cluster
        result.append(
            replace(
                planned,
                tile_rows=(tiles.tile_q,),
                tile_keys=(tiles.tile_kv,),
                blocks_at_a_time=slots,
                waves=planned.blocks / slots,
                read_bytes=num_lists * lists.num_keys * row_bytes,
                splits=(launch.grid[2], launch.grid[2]),
                key_tiles=(each, each),
                states=states,
                state_bytes=4 * states * tiles.tile_q * (problem.head_dim_vo + 1),
                merge=_merge_words(launch, merge),
            )
        )
    return result


def _merge_words(launch: Launch, merge: Launch | None) -> str:
    if merge is not None:
        return f"a launch of {math.prod(merge.grid):,} blocks"
    return "the last block of a tile" if launch.grid[2] > 1 else ""


def _small(kernel: str, tiles: str, launch: Launch) -> PlannedLaunch:
    """A launch of which nothing but its shape is known."""
    blocks = math.prod(launch.grid)
    return PlannedLaunch(
        kernel=kernel,
        tiles=tiles,
        tile_rows=(),
        tile_keys=(),
        grid=launch.grid,
        blocks=blocks,
        cluster=launch.cluster,
        is_persistent=False,
        blocks_at_a_time=blocks,
        waves=1.0,
        items=launch.num_items or blocks,
        splits=(1, 1),
        key_tiles=(0, 0),
        read_bytes=0,
        states=0,
        state_bytes=0,
        merge="",
        is_beside=launch.is_dependent,
    )


def _select_shape(problem: SelectProblem, requests: BatchRequests, page_size: int) -> SelectShape:
    heads, dim, groups = problem.num_heads, problem.head_dim, problem.num_groups
    pages = -(-int(requests.kv_len.max(initial=1)) // (page_size * problem.ratio))
    entries = problem.list_len
    return SelectShape(
        num_requests=requests.qo_len.size,
        request_tokens=max(requests.uniform, 0),
        page_size=page_size,
        max_kv_len=pages * page_size * problem.ratio,
        q_strides=(heads * dim, dim),
        k_strides=(page_size * dim, dim),
        scale_stride=0,
        table_stride=pages,
        weight_stride=heads,
        out_strides=(groups * entries, entries),
        values_strides=(0, 0),
        is_causal=True,
        kv_lens_are_steps=False,
        sm_scale=1.0,
    )
