"""Tables of plan() that are on the GPU: a launch checks them there and brings them to the host, which
looks at the other arguments meanwhile. Tables that are on the host, or that are wrong, are read by
requests.py, whose errors say what is wrong."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import dtypes
from ..launch.attention import read_tables
from ..launch.attention.layout import BatchSchedule
from ..launch.attention.read_tables import NO_TABLE, Planner, Reading, Table
from ..schedule.batch import BatchRequests
from .requests import Batch, uniform_rows

_IS_WIDE = {dtypes.int32: False, dtypes.int64: True}


class Tables(NamedTuple):
    """Arguments of plan(), and what they are called.

    rows       qo_indptr, or the query rows that every request has
    lengths    last_page_len, or keys of each request if `has_keys`; None for ragged keys
    page_size  0 for ragged keys
    """

    rows: Any
    kv_indptr: Any
    lengths: Any
    page_size: int
    names: tuple[str, str, str]
    has_keys: bool = False


class _OnGpu(NamedTuple):
    """Tables that one launch can read. last: lengths that it need not read."""

    tables: tuple[Table, Table, Table]
    kind: int
    num_requests: int
    q_len: int
    page_size: int
    last: ArrayView | None


class TableReading:
    """A context in which tables come to the host. `schedule` is the one that the GPU has made, if
    any, once they are read."""

    __slots__ = ("_planner", "_reading", "_tables", "schedule")

    def __init__(self, reading: Reading, tables: _OnGpu, planner: Planner | None) -> None:
        self._reading, self._tables, self._planner = reading, tables, planner
        self.schedule: BatchSchedule | None = None

    def __enter__(self) -> TableReading:
        return self

    def __exit__(self, *error: object) -> None:
        self._reading.__exit__(*error)

    def wait(self) -> Batch | None:
        """The batch without its page table; None if something is wrong with the tables."""
        tables, count = self._tables, self._tables.num_requests
        numbers = self._reading.wait()
        _, is_bad, least_rows, most_rows, *planned = numbers[: read_tables.HEAD].tolist()
        if is_bad:
            return None
        if self._planner is not None:
            self.schedule = read_tables.planned_schedule(self._planner, *planned)
        begin = read_tables.HEAD
        kv_indptr, begin = numbers[begin : begin + count + 1], begin + count + 1
        keys, begin = numbers[begin : begin + count], begin + count
        lengths, begin = numbers[begin : begin + count], begin + count
        if tables.q_len:
            rows = uniform_rows(count, tables.q_len)
            qo_indptr, qo_len, uniform = rows
        else:
            qo_indptr, qo_len = numbers[begin : begin + count + 1], numbers[begin + count + 1 :]
            uniform = least_rows if 0 < least_rows == most_rows else -1
        requests = BatchRequests(qo_len, keys, qo_indptr[:-1], kv_indptr[:-1], None, uniform)
        num_rows = int(qo_indptr[-1])
        num_keys = 0 if tables.page_size else int(kv_indptr[-1])
        batch = Batch(requests, num_rows, num_keys, qo_indptr, kv_indptr)
        if tables.kind == read_tables.LAST_PAGE:
            batch.last_page_len = lengths
        batch.last_page_len_device = tables.last
        return batch


class _NoReading:
    """Of tables that the host reads."""

    schedule = None

    def __enter__(self) -> _NoReading:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> None:
        return None


NO_READING = _NoReading()


def find(given: Tables, workspace: ArrayView) -> _OnGpu | None:
    """The tables, if one launch on the GPU of the workspace can read them all: contiguous, and of
    its framework."""
    rows, names, last = given.rows, given.names, None
    q_len = rows if isinstance(rows, int) else 0
    kv_indptr = _table(given.kv_indptr, names[0], workspace)
    if kv_indptr is None:
        return None
    count = kv_indptr[1] - 1
    if not 0 < count <= read_tables.MOST_REQUESTS:
        return None
    qo_indptr = lengths = (NO_TABLE, 0)
    if not q_len:
        found = _table(rows, "qo_indptr", workspace)
        if found is None or found[1] != count + 1:
            return None
        qo_indptr = found
    kind = read_tables.NO_LENGTHS
    if given.lengths is not None:
        if given.page_size == 1 and not given.has_keys:
            # Pages of one token are full.
            last = array.view(given.lengths, names[2])
            if last.device.kind == "cpu" or tuple(last.shape) != (count,):
                return None
        else:
            found = _table(given.lengths, names[2], workspace)
            if found is None or found[1] != count:
                return None
            lengths = found
            kind = read_tables.KEYS if given.has_keys else read_tables.LAST_PAGE
    addresses = qo_indptr[0], kv_indptr[0], lengths[0]
    return _OnGpu(addresses, kind, count, q_len, given.page_size, last)


def _table(x: Any, name: str, workspace: ArrayView) -> tuple[Table, int] | None:
    """A table that the launch can read, and its length."""
    if type(x) is np.ndarray:
        return None
    v = array.view(x, name)
    is_wide = _IS_WIDE.get(v.dtype)
    if is_wide is None or v.device != workspace.device or v.framework != workspace.framework:
        return None
    if len(v.shape) != 1 or (v.strides[0] != 1 and v.shape[0] > 1):
        return None
    return Table(v.ptr, is_wide), v.shape[0]


def begin(tables: _OnGpu, planner: Planner | None, words: int, device: int, stream: int) -> TableReading:
    """Enqueue the launch. words: where the planner's list goes."""
    reading = read_tables.launch(
        tables.tables, tables.kind, tables.num_requests, tables.q_len, tables.page_size or 1,
        planner, words, device, stream,
    )  # fmt: skip
    return TableReading(reading, tables, planner)
