"""The batch wrappers as FlashInfer names them, called alike for ours and for the peer."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..candidate import Candidate
from .case import BatchCase
from .inputs import BatchInputs
from .steps import NUM_STEPS, Step, draw_steps

_CLASSES = {
    "decode": "BatchDecodeWithPagedKVCacheWrapper",
    "paged": "BatchPrefillWithPagedKVCacheWrapper",
    "ragged": "BatchPrefillWithRaggedKVCacheWrapper",
    "verify": "BatchDecodeWithPagedKVCacheWrapper",
}
_WORKSPACE_BYTES = 384 << 20

Wrap = Callable[[Any], Any]  # a torch tensor as an array of the caller's framework


@dataclass
class Calls:
    """A wrapper's two steps, bound to a case. `next_plan` plans for other lengths at each call."""

    plan: Callable[[], Any]
    run: Callable[[], Any]
    next_plan: Callable[[], Any] | None = None

    def candidate(
        self, peer: str, variant: str, case: BatchCase, output: Wrap, buffer: Any = None
    ) -> Candidate:
        """What is timed: plan() where the case says so, for lengths that change from call to call,
        else run() after a plan() made here."""
        if case.timed == "plan":
            checked = Candidate(peer, variant, self.plan, lambda _: output(self.run()), buffer)
            checked.timed = self.next_plan
            return checked
        self.plan()
        return Candidate(peer, variant, self.run, output, buffer)


def bind(
    library: Any,
    owner: str,
    case: BatchCase,
    inputs: BatchInputs,
    wrap: Wrap,
    out: Any,
    mask: dict[str, Any],
    **constructor: Any,
) -> Calls:
    """`library`'s wrapper for a case; `mask` goes to plan(), `constructor` to the class."""
    space = wrap(workspace(owner, str(inputs.q.device)))
    wrapper = getattr(library, _CLASSES[case.api])(space, kv_layout="NHD", **constructor)
    options = {**_options(case), **mask, "q_data_type": case.dtype, "kv_data_type": case.kv_dtype}
    scales: tuple[Any, ...] = ()
    if case.is_8bit:
        options["o_data_type"] = "bfloat16"
        scales = tuple(wrap(x) for x in unit_scales(case, inputs))
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim_qk)
    tables = plan_tables(case, inputs, wrap)
    if case.is_paged:
        heads = (*heads, case.page_size)
    else:
        options["head_dim_vo"] = case.head_dim_vo

    def make_plan(*tables: Any) -> Any:
        return wrapper.plan(*tables, *heads, **options)

    q, k, v = wrap(inputs.q), wrap(inputs.k), wrap(inputs.v)
    keys = ((k, v),) if case.is_paged else (k, v)
    named = {} if out is None else {"out": wrap(out)}
    if case.api == "verify" and inputs.tree is not None:
        named["mask"] = wrap(inputs.tree)
    if inputs.sinks is not None:
        named["sinks"] = wrap(inputs.sinks)
    steps = next_plan(make_plan, case, inputs, wrap) if case.timed == "plan" else None
    plan = functools.partial(make_plan, *tables)
    return Calls(plan, functools.partial(wrapper.run, q, *keys, *scales, **named), steps)


def empty_output(case: BatchCase, inputs: BatchInputs) -> Any:
    """A tensor for `out=`, or None where the case wants none given."""
    shape = (case.q_offsets[-1], case.num_qo_heads, case.head_dim_vo)
    if not case.out:
        return None
    return inputs.q.new_empty(shape, dtype=output_dtype(case, inputs))


def output_dtype(case: BatchCase, inputs: BatchInputs) -> Any:
    """torch's dtype of what answers are asked for in."""
    import torch

    return torch.bfloat16 if case.is_8bit else inputs.q.dtype


def unit_scales(case: BatchCase, inputs: BatchInputs) -> list[Any]:
    """Scales of 1 for each head of q, k and v, which FlashInfer takes and we are given as well."""
    heads = (case.num_qo_heads, case.num_kv_heads, case.num_kv_heads)
    return [inputs.q.new_ones(count, dtype=_float32()) for count in heads]


def as_array(table: Any, case: BatchCase, inputs: BatchInputs, wrap: Wrap) -> Any:
    """An int32 NumPy table in the form that the case gives to plan()."""
    import torch

    if case.arrays == "numpy":
        return table
    host = torch.from_numpy(table)
    return host if case.arrays == "torch_cpu" else wrap(host.to(inputs.q.device))


def _float32() -> Any:
    import torch

    return torch.float32


@functools.cache
def workspace(owner: str, device: str) -> Any:
    """One workspace an owner: nobody finds what another left in it. Zeros, as XQA asks."""
    import torch

    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def plan_tables(case: BatchCase, inputs: BatchInputs, wrap: Wrap) -> list[Any]:
    """The tables that plan() takes first, in its order and in the form that the case gives."""
    if inputs.tables is None:
        given = [inputs.qo_indptr, inputs.kv_indptr]
    else:
        tables = inputs.tables
        given = [tables.indptr, tables.indices, tables.last_page_len]
        if case.api not in ("decode", "verify"):
            given.insert(0, inputs.qo_indptr)
    return [as_array(table, case, inputs, wrap) for table in given]


def next_plan(
    make_plan: Callable[..., Any], case: BatchCase, inputs: BatchInputs, wrap: Wrap
) -> Callable[[], Any]:
    """A call that plans for other lengths each time, the same ones in the same order for all."""
    seed = zlib.crc32(case.name.encode())
    drawn = draw_steps(case.requests, case.page_size, NUM_STEPS, seed)
    ids = drawn[0].table
    table = None if ids is None else as_array(ids, case, inputs, wrap)
    steps = [_tables_of(step, table, case, inputs, wrap) for step in drawn]
    turns = itertools.cycle(steps)

    def plan_next() -> Any:
        return make_plan(*next(turns))

    return plan_next


def _tables_of(
    step: Step, table: Any, case: BatchCase, inputs: BatchInputs, wrap: Wrap
) -> list[Any]:
    """The tables of a step, in the order of `plan_tables`."""
    given = [step.kv_indptr] if case.api == "decode" else [step.qo_indptr, step.kv_indptr]
    arrays = [as_array(x, case, inputs, wrap) for x in given]
    if table is None:
        return arrays
    lengths = step.kv_lens if case.api == "mla" else step.last_page_len
    ids = table[: int(step.kv_indptr[-1])]
    return [*arrays, ids, as_array(lengths, case, inputs, wrap)]


def _options(case: BatchCase) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if case.api == "verify":
        options["q_len_per_req"] = case.q_lens[0]
    elif case.api != "decode":
        options["causal"] = case.causal
    if case.pos_encoding_mode != "NONE":
        options["pos_encoding_mode"] = case.pos_encoding_mode
    if case.logits_soft_cap:
        options["logits_soft_cap"] = case.logits_soft_cap
    if case.window_left >= 0:
        options["window_left"] = case.window_left
    return options
