"""A run of a planned batch that has passed its checks, over any layout of keys."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import are_rows_aligned, match_output, require_contiguous_last
from ..core import dtypes
from . import output_gate
from .arrays import RunArrays
from .block_scales import NO_BLOCKS, CheckedBlocks
from .cpu import Request
from .geometry import Variant
from .kv_cache import KeyStrides
from .latent_rows import Second
from .workspace import require_apart, same_device
from .wrapper import Plan


@dataclass(slots=True)
class CheckedRun:
    """A run whose arrays fit the plan.

    views        of the arrays, by role: pages or rows of keys and values apart, v None where keys
                 are the values too. Outputs come last: given and checked, or made
    inputs       what is read, by what messages call it
    factors      scales of the logits, of the output, and of the LSE, which is in base 2
    num_keys     pages, or rows of k and v
    is_one_tensor  k of the run holds the values too, behind the keys
    head_scales  arrays of scales, scale_q, scale_k and scale_v by name: of heads, or of requests
                 and heads
    logits       what the expressions of the plan read
    second       of latent rows, what a launch is told of their second parts
    blocks       scales of blocks of tokens
    skip_softmax  see AttentionSpec
    on_cpu       (rows of q, requests) for the reference
    """

    views: RunArrays
    inputs: dict[str, ArrayView | None]
    factors: tuple[float, float, float]
    num_keys: int
    key_strides: KeyStrides
    on_cpu: Callable[[], tuple[np.ndarray, Iterator[Request]]]
    prescale_logits: bool
    is_one_tensor: bool = False
    key_scales: str = ""
    head_scales: dict[str, ArrayView] = field(default_factory=dict)
    logits: tuple[ArrayView, ...] = ()
    second: Second | None = None
    blocks: CheckedBlocks = NO_BLOCKS
    skip_softmax: float = 0.0

    @property
    def variant(self) -> Variant:
        """The variant of the kernel that serves the run; an output that is made is aligned."""
        views = self.views
        return Variant(
            self._is_aligned and output_gate.is_aligned(views.output_gate),
            self.prescale_logits or self._scales_blocks,
            views.mask is not None,
            self.key_scales,
            output_gate.kind_of(views.output_gate),
            self._scales_requests or self._scales_blocks,
            self._scales_blocks,
            self.skip_softmax if views.q.device.kind != "cpu" else 0.0,
        )

    @property
    def _scales_blocks(self) -> bool:
        """Whether a kernel reads scales of blocks of tokens; the CPU plans without them."""
        return bool(self.blocks.views) and self.views.q.device.kind != "cpu"

    @property
    def _scales_requests(self) -> bool:
        """Whether each request has scales of its own; those of latent keys are of tokens."""
        return not self.key_scales and any(len(v.shape) == 2 for v in self.head_scales.values())

    @property
    def _is_aligned(self) -> bool:
        """Whether all rows start on 16-byte boundaries."""
        views, keys = self.views, (self.views.k, self.views.v or self.views.k)
        rows = [x for x in (views.q, views.out, views.q_rope, views.k_rope) if x is not None]
        strides = [(x.strides[:2], x.dtype) for x in rows]
        strides.append((self.key_strides, keys[0].dtype))
        pointers = functools.reduce(operator.or_, (x.ptr for x in (*rows, *keys)))
        return are_rows_aligned(pointers, strides)


class Layout(NamedTuple):
    """What runs over a layout of keys, heads of their own or latent rows, do each in their way.

    check   of a plan, arrays, options, and what the plan's expressions read: the run, whose outputs
            are still to be checked
    remedy  of an output of another dtype
    """

    check: Callable[[Plan, RunArrays, Any, tuple[ArrayView, ...]], CheckedRun]
    remedy: str


def view_optional(x: Any, name: str) -> ArrayView | None:
    return None if x is None else array.view(x, name)


def check_outputs(
    run: CheckedRun, plan: Plan, workspace: ArrayView, arrays: RunArrays, remedy: str
) -> None:
    """Put views of the outputs that are given among those of the run.

    Raises ArgumentError where they do not fit, and for an array on another device than the
    workspace, or in its memory.
    """
    out, lse = view_optional(arrays.out, "out"), view_optional(arrays.lse, "lse")
    inputs, spec = run.inputs, plan.geometry.spec
    same_device(workspace, **inputs, out=out, lse=lse)
    require_apart(workspace, **inputs, out=out, lse=lse)
    shape = plan.batch.num_rows, spec.num_qo_heads, spec.head_dim_vo
    others = {**inputs, "mask": run.views.mask or plan.mask.view}
    if out is not None:
        require_contiguous_last(out, "out")
    match_output(out, shape, spec.dtype_o, "out", remedy, **others, lse=lse)
    match_output(lse, shape[:-1], dtypes.float32, "lse", **others)
    run.views = run.views._replace(out=out, lse=lse)
