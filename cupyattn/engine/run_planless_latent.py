"""Latent attention without a plan: what calls over rows in two parts launch.

As run_planless.py: a block on the device reads the lengths and writes the work list before the
kernels, so that nothing waits, and a graph can capture a call.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import fields, replace
from typing import Any

from .. import array
from ..array import ArrayView
from ..array.match import are_rows_aligned
from ..core import parse
from ..launch.attention import pad_lse, plan_batch
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.layout import BatchSchedule
from ..launch.driver.enqueue import cuda
from . import latent_rows as latent
from . import run_planless
from .arrays import ROLES, Arrays
from .check_planless import Call, Options
from .geometry import Variant
from .index_arrays import progression
from .kv_cache import pack_strides
from .latent_rows import Dims
from .planless_cache import Asked, Repeat
from .prepared import InParts, Prepared, plan_of, prepare_within
from .run_planless import Layout
from .run_planless import run_cached as run_cached
from .views import LATENT_NAMES

_KV_LENS = Arrays._fields.index("kv_lens")


def decode(arrays: Arrays, *, sm_scale: Any, output_scale: Any = None, return_lse: Any) -> Any:
    """One row of 512 latent and 64 rope columns for each request."""
    options = Options(
        LATENT_NAMES.but(q="q", q_rope="q[1]", block_tables="page_table", sm_scale="sm_scale"),
        dims=Dims(512, 64),
        sm_scale=parse.finite(sm_scale, "sm_scale", 1.0),
        output_scale=parse.finite(output_scale, "bmm2_scale", 1.0),
        causal=False,
        return_lse=parse.flag(return_lse, "return_lse"),
    )
    return run(arrays, options)


def run(arrays: Arrays, options: Options, known_as: Asked | None = None) -> Any:
    """The answer of a call: out, or (out, lse) if `return_lse`.

    known_as: the call as its caller made it, which was looked up, by which it is to be found from
    now on if kernels read those arrays
    """
    return run_planless.run(arrays, options, asked=known_as, layout=LATENT_ROWS)


def _prepare(call: Call, have: int | None) -> Prepared:
    """What a call launches. have: bytes of its workspace, which a plan of fewer parts may need."""
    return prepare_within(functools.partial(_prepare_within, call), have)


def _prepare_within(call: Call, max_bytes: int) -> tuple[Prepared, int]:
    """The launches of a plan that takes up to max_bytes, if there is one, and what the workspace
    holds besides."""
    options, queries, pages, vout = call.options, call.queries, call.pages, call.out
    assert vout is not None and queries is not None and pages is not None
    vlse, vq, scales = call.lse, call.q, call.scales
    rows = [x for x in (queries.latent, queries.rope, vout) if x is not None]
    keys = [x for x in (pages.latent, pages.rope) if x is not None]
    pointers = functools.reduce(operator.or_, (x.ptr for x in (*rows, *keys)))
    steps = [(x.strides[:2], x.dtype) for x in (*rows, *keys)]
    is_aligned = are_rows_aligned(pointers, [*steps, (call.gaps[:2], vq.dtype)])
    prescale_logits = scales.views[0] is not None or scales.logits <= 0.0
    variant = Variant(is_aligned, prescale_logits, key_scales=options.key_scales)
    launcher = call.geometry.launcher(variant)
    plan, schedule, partials = None, _schedule_lists(call, launcher, max_bytes), 0
    if schedule is None:
        if call.indices.kv_lens is None:
            count, entries = _table_of(call).shape
            lens = array.view(progression(count, entries, 0, vq), options.names.kv_lens)
            call.indices = call.indices._replace(kv_lens=lens)
        if _has_parts(call, launcher):
            return _in_parts(call, launcher, max_bytes), 0
        lengths = call.lengths._replace(list_gap=call.gaps[2])
        plan = plan_of(launcher, lengths, max_bytes)
        schedule, partials = plan.schedule, plan.partials
    size = of_plan = partials + schedule.workspace_bytes
    padding, lse_rows = None, 0
    lens_stride = 0
    kv_lens = call.indices.kv_lens
    if plan is None and kv_lens is not None:
        lens_stride = kv_lens.strides[0] * kv_lens.dtype.itemsize // 4
    lists = latent.Lists(call.lengths.kv_step, call.gaps, call.options.request_tokens, lens_stride)
    lse_strides = (0, 0) if vlse is None else tuple(vlse.strides[-2:])
    lse_scale = math.log(2.0) if options.natural_lse else 1.0
    if vlse is not None and len(vlse.shape) == 3:
        lse_scale = 1.0  # the launch that pads takes base 2
        padding = pad_lse.prepare(vlse.shape, vlse.strides, launcher.device_index)
        lse_rows, lse_strides = size, (vq.shape[1], 1)
        size += 4 * vq.shape[0] * vq.shape[1]
    prepared = Prepared(
        launcher,
        plan,
        schedule,
        partials,
        padding,
        lse_rows,
        num_bytes=size,
        strides=pack_strides(vq, call.keys.strides, vout, lse_strides),
        num_keys=call.keys.size,
        sm_scale=scales.logits,
        output_scale=scales.output,
        has_scales=any(scales.views),
        lse_shape=call.lse_shape,
        lse_scale=lse_scale,
        lse_form=options.lse_form,
        second=latent.second_parts(queries, pages, options.rope_scale, lists),
    )
    return prepared, size - of_plan


def _has_parts(call: Call, launcher: BatchLauncher) -> bool:
    """Whether there are more requests than a block plans, which can be taken apart."""
    are_apart = call.options.request_tokens > 1 or any(call.gaps) or call.form.has_kv_offsets
    most = plan_batch.max_requests(launcher.device_index)
    return call.lengths.num_requests > most and not are_apart


def _in_parts(call: Call, launcher: BatchLauncher, max_bytes: int) -> Prepared:
    """What a call of more requests than a block plans launches: one part after the other."""
    count, tokens = call.lengths.num_requests, 0
    if call.indices.qo_offsets is None:
        tokens = call.lengths.qo_len
    size = -(-count // -(-count // plan_batch.max_requests(launcher.device_index)))
    parts, vlse = [], call.lse
    for begin in range(0, count, size):
        number = min(size, count - begin)
        if call.lse is not None and len(call.lse.shape) == 3:  # by request
            shape = number, *call.lse.shape[1:]
            vlse = array.as_strided(call.lse, shape, call.lse.strides)
        lengths = call.lengths._replace(num_requests=number)
        if tokens:
            lengths = lengths._replace(num_rows=number * tokens)
        part, _ = _prepare_within(replace(call, lengths=lengths, lse=vlse), max_bytes)
        parts.append((tuple(begin * step for step in _steps(call, tokens)), part))
    _, first = parts[0]
    known = {f.name: getattr(first, f.name) for f in fields(first) if f.name != "bound"}
    known["num_bytes"] = max(part.num_bytes for _, part in parts)
    return InParts(**known, parts=tuple(parts))


def _steps(call: Call, tokens: int) -> tuple[int, ...]:
    """Bytes from a request of so many rows to the next one, in the order of ROLES; 0 for what all
    share."""

    def step(v: ArrayView | None, count: int = 1) -> int:
        return 0 if v is None else count * v.strides[0] * v.dtype.itemsize

    rows = {
        "q": call.q,
        "q_rope": None if call.queries is None else call.queries.rope,
        "out": call.out,
        "lse": call.lse,
        "max_logits": call.max_logits,
    }
    at = {name: step(v, tokens) for name, v in rows.items()}
    if call.lse is not None and len(call.lse.shape) == 3:
        at["lse"] = step(call.lse)
    at["block_tables"], indices = step(call.block_tables), call.indices
    at["kv_lens"], at["qo_offsets"] = step(indices.kv_lens), step(indices.qo_offsets)
    assert at.keys() <= set(ROLES)
    return tuple(at.get(name, 0) for name in ROLES)


def _schedule_lists(call: Call, launcher: BatchLauncher, max_bytes: int) -> BatchSchedule | None:
    """The launches of lists that are all as long as the table, but for what tokens do not see yet;
    None for other calls."""
    knows_length = call.indices.kv_lens is None or call.options.counts_later
    if not call.options.is_list or not knows_length or any(call.scales.views):
        return None
    count, entries = _table_of(call).shape
    return launcher.schedule_lists(count, entries, max_bytes)


def _table_of(call: Call) -> ArrayView:
    assert call.block_tables is not None
    return call.block_tables


def _repeat_of(call: Call, arrays: Arrays, prepared: Prepared) -> Repeat | None:
    """How such a call is launched again; None if what was made for it has no address to keep."""
    table = array.view(arrays.block_tables, call.names.block_tables)
    if _table_of(call).ptr != table.ptr:
        return None
    kv_lens = call.indices.kv_lens
    if arrays.kv_lens is not None or kv_lens is None:
        return Repeat(prepared)
    if cuda().is_capturing(array.current_stream(call.q)):
        return None  # only the graph writes those lengths
    shared = ((_KV_LENS, kv_lens.ptr, kv_lens.owner),)
    return Repeat(replace(prepared, shared=shared))


LATENT_ROWS = Layout(_prepare, _repeat_of)
