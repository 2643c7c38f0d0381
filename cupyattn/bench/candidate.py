"""What one implementation offers for one case: a call to time, and the rows of its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Unsupported(Exception):
    """The implementation cannot serve this case; the message is the reason that is recorded."""


class Skipped(Exception):
    """The implementation was not called for this case; the message says why."""


@dataclass
class Candidate:
    """One way of calling one implementation.

    `call()` enqueues the whole case (all requests) and returns the library's own result;
    `output(result)` views that as an array [batch, q_len, Hq, head_dim_vo] or, where requests
    differ in length, [1, rows of all requests, Hq, head_dim_vo]. `buffer`, if any, is the array
    that `call` writes into: it is poisoned before the check. `timed`, if any, is what is timed in
    place of `call`, which then serves the check alone.
    """

    peer: str
    variant: str
    call: Callable[[], Any]
    output: Callable[[Any], Any]
    buffer: Any = None
    note: str = ""
    timed: Callable[[], Any] | None = None

    @property
    def label(self) -> str:
        return f"{self.peer}:{self.variant}"
