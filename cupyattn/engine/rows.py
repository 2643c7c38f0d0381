"""The queries and keys of a call, in the terms of calls without a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .views import Names


@dataclass(slots=True)
class Batch:
    """Queries and keys of a batch, in the order of their requests.

    q           [b, s, h, d], or [rows, h, d] with qo_offsets
    k, v        pages with a table [b, n], else rows with kv_offsets
    kv_lens     [b], after what the call appends; None: steps of kv_offsets
    has_kv_steps  kv_lens [b + 1] are offsets, whose steps are the lengths
    are_causal  [b], 0 for requests that see all their keys in a causal call; None: no such
    max_seqlen_q, max_seqlen_k   the most rows and keys of one, as far as the host knows
    qv          like q: queries that are multiplied with values too; None: no such
    sharers     requests, one after another, that are one of the caller's
    is_fp8_q, is_fp8_k   whether those of the caller are fp8, if q, k and v are copies of 16 bits
    """

    names: Names
    q: Any
    k: Any
    v: Any
    kv_lens: Any
    table: Any = None
    qo_lens: Any = None
    qo_offsets: Any = None
    kv_offsets: Any = None
    kv_begin: Any = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    qv: Any = None
    is_fp8_q: bool = False
    is_fp8_k: bool = False
    has_kv_steps: bool = False
    are_causal: Any = None
    sharers: int = 1
    append: Callable[[], None] | None = None
