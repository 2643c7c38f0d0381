"""The geometry of a batch: what plan() is told besides lengths, checked and derived once."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..array import Device
from ..core import dtypes
from ..core.problem import AttentionProblem
from ..errors import ArgumentError, PlanError, UnsupportedError
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.single import AttentionOptions
from . import parse

_MAX_KNOWN = 4096
_BACKENDS = (
    *("auto", "fa2", "fa3", "cudnn", "cutlass", "cute-dsl", "trtllm-gen", "trtllm-native", "xqa"),
)


class PlanOptions(NamedTuple):
    """What a plan fixes besides lengths, as given: the key of the cache of geometries."""

    kv_layout: str
    device: Device
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int | None
    page_size: int  # 0: ragged keys
    q_data_type: object
    kv_data_type: object
    o_data_type: object
    custom_mask: bool
    causal: bool
    pos_encoding_mode: str
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None
    rope_scale: float | None
    rope_theta: float | None
    # custom_mask is true and the mask is runs of keys (_item_runs.py): always causal.
    key_runs: bool = False


class Variant(NamedTuple):
    """What a run decides about the kernel; see AttentionProblem. A run may bring a mask."""

    aligned: bool
    prescale_logits: bool
    has_mask: bool = False


@dataclass(slots=True)
class Geometry:
    """What is known of every plan with the same options.

    kv_axis  the axis of a cache along which its size may change: pages, or rows of ragged keys
    looks    those of the runs so far, see _batch_repeat.py
    """

    given: PlanOptions
    problem: AttentionProblem
    options: AttentionOptions
    num_qo_heads: int
    num_kv_heads: int
    page_size: int
    kv_axis: int
    launchers: dict[Variant, BatchLauncher] = field(default_factory=dict)
    looks: dict[tuple[object, ...], Any] = field(default_factory=dict)

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def default_variant(self) -> Variant:
        """That of arrays on 16-byte boundaries, without scales by head."""
        return Variant(True, self.options.sm_scale <= 0.0)

    def launcher(self, variant: Variant) -> BatchLauncher:
        found = self.launchers.get(variant)
        if found is None:
            aligned, prescale_logits, has_mask = variant
            options = replace(self.options, causal=False) if has_mask else self.options
            found = self.launchers[variant] = BatchLauncher(
                replace(
                    self.problem,
                    aligned=aligned,
                    prescale_logits=prescale_logits,
                    custom_mask=self.problem.custom_mask or has_mask,
                    mask_form="rows" if has_mask else self.problem.mask_form,
                ),
                options,
                self.num_qo_heads,
                self.num_kv_heads,
                self.page_size,
                self.given.device.index,
            )
        return found


_known: dict[PlanOptions, Geometry] = {}


def find_geometry(given: PlanOptions) -> Geometry:
    """The geometry of these options, checked when they are first seen."""
    try:
        found = _known.get(given)
    except TypeError:
        return _make(given)
    if found is None:
        found = _make(given)
        # A tensor given for a scale may change its value.
        if all(x is None or isinstance(x, (str, int, float, np.generic)) for x in given[-5:]):
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[given] = found
    return found


def _make(given: PlanOptions) -> Geometry:
    parse.kv_layout(given.kv_layout)
    heads = count(given.num_qo_heads, "num_qo_heads")
    kv_heads = count(given.num_kv_heads, "num_kv_heads")
    if heads % kv_heads:
        raise ArgumentError(
            f"num_qo_heads, num_kv_heads: {heads} query heads over {kv_heads} KV heads; wanted a "
            "multiple"
        )
    dim_qk = count(given.head_dim_qk, "head_dim_qk")
    dim_vo = dim_qk if given.head_dim_vo is None else count(given.head_dim_vo, "head_dim_vo")
    dtype_q = dtypes.parse(given.q_data_type, "q_data_type")
    kv = given.kv_data_type
    soft_cap = parse.soft_cap(given.logits_soft_cap)
    sm_scale = parse.finite(given.sm_scale, "sm_scale", 1.0 / math.sqrt(dim_qk))
    is_causal = parse.flag(given.causal, "causal") and not given.custom_mask
    is_causal |= given.key_runs
    options = AttentionOptions(
        causal=is_causal,
        window_left=parse.window_left(given.window_left),
        sm_scale=sm_scale,
        output_scale=1.0,
        logits_soft_cap=soft_cap,
        rope_scale=parse.positive(given.rope_scale, "rope_scale", 1.0),
        rope_theta=parse.positive(given.rope_theta, "rope_theta", 1e4),
    )
    problem = AttentionProblem(
        dtype_q=dtype_q,
        dtype_kv=dtype_q if kv is None else dtypes.parse(kv, "kv_data_type"),
        dtype_o=dtype_q
        if given.o_data_type is None
        else dtypes.parse(given.o_data_type, "o_data_type"),
        head_dim_qk=dim_qk,
        head_dim_vo=dim_vo,
        pos_encoding=parse.pos_encoding_mode(given.pos_encoding_mode),
        soft_cap=soft_cap > 0.0,
        custom_mask=given.custom_mask,
        mask_form="runs" if given.key_runs else "whole",
        paged=given.page_size > 0,
    )
    problem.check_dtypes()
    if given.device.kind == "cuda":
        problem.check_supported()
    axis = 1 if not given.page_size and given.kv_layout == "HND" else 0
    return Geometry(given, problem, options, heads, kv_heads, given.page_size, axis)


def count(value: Any, name: str) -> int:
    """A positive integer."""
    if type(value) is int and value > 0:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ArgumentError(f"{name}: got {value!r}; wanted a positive integer")
    return number


def split_size(fixed_split_size: Any, disable_split_kv: Any, unit: int) -> tuple[int, bool]:
    """(keys of a split or 0, whether keys may be split); a fixed size counts units of keys.

    disable_split_kv wins over a fixed size.
    """
    if fixed_split_size is None and disable_split_kv is False:
        return 0, True
    may_split = not parse.flag(disable_split_kv, "disable_split_kv")
    if fixed_split_size is None or fixed_split_size == -1:
        return 0, may_split
    keys = count(fixed_split_size, "fixed_split_size") * unit
    return (keys, True) if may_split else (0, False)


def backend(value: object, jit_args: object) -> None:
    """Check arguments that choose among FlashInfer's kernels, and nothing here."""
    parse.choice(value, _BACKENDS, "backend")
    if jit_args is not None:
        raise UnsupportedError("jit_args: kernels of the caller's own are not supported; pass None")


def refuse(what: str, **arguments: Any) -> None:
    """UnsupportedError naming the first of `arguments` that is given."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise UnsupportedError(f"{name}: {what}; pass None")


def require_frozen(before: PlanOptions, now: PlanOptions) -> None:
    """PlanError naming what differs between the plans of a wrapper in graph mode."""
    for name, old, new in zip(PlanOptions._fields, before, now, strict=True):
        if old != new:
            raise PlanError(
                f"{name}: the first plan of this wrapper said {old!r} and this one says {new!r}, "
                "but a captured graph keeps it; use a separate wrapper for each"
            )
