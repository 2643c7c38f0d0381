"""A call of flash_attn's functions on its way to the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core import parse
from ..core.key_share import KeyShare
from ..core.parse import require_int
from ..core.records import maker
from ..engine.arrays import Arrays
from ..engine.check_planless import Options, options_of
from ..engine.planless_cache import Append, Asked
from ..engine.views import Names
from ..errors import ArgumentError

# Beyond so many rows of a request one kernel serves any number.
MANY_ROWS = 65


class FlashOptions(NamedTuple):
    """The options of a call, as given where they can be hashed.

    max_q_len   an upper bound of a request's rows where they differ, as far as it matters
    max_kv_len  one of its keys, rounded up; None where the page table says it
    """

    names: Names
    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    num_splits: Any
    attention_chunk: Any = 0
    return_lse: Any = False
    max_q_len: int | None = None
    max_kv_len: int | None = None
    rotary_interleaved: Any = True
    has_kv_steps: bool = False
    has_table_offsets: bool = False
    sharers: int = 1
    key_share: KeyShare | None = None

    def resolve(self, arrays: Arrays) -> Options:
        """Checked. Kernels split keys as finely as suits the longest request that is likely."""
        shape: tuple[int, ...] = tuple(arrays.q.shape)
        q_len = shape[1] if len(shape) == 4 and arrays.qo_offsets is None else 0
        left, right = parse_window(self.window_size)
        max_kv_len = self.max_kv_len
        if require_int(self.num_splits, "num_splits", 0) == 1:
            max_kv_len = 1
        cap = parse.finite(self.softcap, "softcap", 0.0)
        if cap < 0.0:
            raise ArgumentError(f"softcap: got {self.softcap!r}; wanted 0 (off) or a positive cap")
        return options_of(
            self,
            q_axes=(len(shape),),
            q_len=q_len,
            max_q_len=q_len or self.max_q_len,
            max_kv_len=max_kv_len,
            sm_scale=_scale(self.softmax_scale, 1.0 / math.sqrt(max(1, shape[-1]))),
            window_left=left,
            window_right=right,
            causal=parse.flag(self.causal, "causal"),
            pads_lse=self.return_lse and q_len > 0,
            logits_soft_cap=cap,
            scales_by_head=True,
            attention_chunk=require_int(self.attention_chunk, "attention_chunk", 0),
            cumulative_kv_lens=self.has_kv_steps,
        )


make_options = maker(FlashOptions)


@dataclass(slots=True)
class Batch:
    """A call on its way to the kernels, whose steps replace its arrays by others.

    asked       the call as its caller made it
    arrays      q [b, s, h, d], or [rows, h, d] with qo_offsets; k and v pages with a table [b, n],
                else rows with kv_offsets; kv_lens [b], after what the call appends, None: steps of
                kv_offsets; scales and sinks as given
    max_q_len, max_kv_len   upper bounds of a request's rows and keys, as far as the host knows
    qv, are_causal   see MoreArrays
    is_fp8_q, is_fp8_k   whether those of the caller are fp8, if q, k and v are copies of 16 bits
    """

    asked: Asked
    arrays: Arrays
    options: FlashOptions
    max_q_len: int | None = None
    max_kv_len: int | None = None
    is_fp8_q: bool = False
    is_fp8_k: bool = False
    append: Append | None = None
    qv: Any = None
    are_causal: Any = None

    def __post_init__(self) -> None:
        """Check what is asked before the checks: whether there are chunks."""
        chunk = require_int(self.options.attention_chunk, "attention_chunk", 0)
        self.options = self.options._replace(attention_chunk=chunk)

    @property
    def names(self) -> Names:
        return self.options.names

    def take(self, **arrays: Any) -> None:
        """Go on with these arrays in these roles."""
        self.arrays = self.arrays._replace(**arrays)

    def share(self, **arrays: Any) -> None:
        """The same, of arrays as `Asked.shared`."""
        self.take(**arrays)
        self.asked.shared.update(arrays)


def _scale(softmax_scale: Any, default: float) -> float:
    scale = parse.finite(softmax_scale, "softmax_scale", default)
    if scale == 0.0:
        raise ArgumentError(
            f"softmax_scale: got {softmax_scale!r}, with which all keys weigh the same; wanted "
            "another number, or None for 1 / sqrt(head_dim). (FlashAttention-2 has dropout_p in "
            "its place: so have the functions of cupyattn.flash_attn)"
        )
    return scale


def parse_window(window_size: Any) -> tuple[int, int]:
    """(left, right) of (left, right) as given, where None and -1 stand for no limit."""
    if window_size is None:
        return -1, -1
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ArgumentError(f"window_size: got {parse.shown(window_size)}; wanted (left, right)")
    left, right = (
        -1 if side is None else parse.window(side, "window_size") for side in window_size
    )
    return left, right
