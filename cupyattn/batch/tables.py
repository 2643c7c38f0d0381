"""Tables of plan() that are on the GPU: a launch checks them there and brings them to the host.

The host looks at the other arguments meanwhile. Tables that are on the host, or that are wrong, are
read by requests.py, whose errors say what is wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import dtypes
from ..inputs.geometry import Geometry
from ..launch.attention import read_tables
from ..launch.attention.layout import BatchSchedule
from ..launch.attention.read_tables import DeviceTables, Landing, Planner
from ..schedule.batch import BatchRequests
from .requests import Batch, uniform_rows

_IS_WIDE = {dtypes.int32: False, dtypes.int64: True}
_NO_TABLE = 0, False, 0


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


class TableReading:
    """A context in which tables come to the host.

    schedule  once they are there: the one that the GPU has made, by the planner, if any
    last      lengths of last pages that it has not read
    """

    __slots__ = ("_landing", "_stream", "_tables", "last", "planner", "schedule")

    def __init__(
        self, landing: Landing, stream: int, tables: DeviceTables, planner: Planner | None
    ) -> None:
        self._landing: Landing | None = landing
        self._stream, self._tables, self.planner = stream, tables, planner
        self.schedule: BatchSchedule | None = None
        self.last: ArrayView | None = None

    def __enter__(self) -> TableReading:
        return self

    def __exit__(self, *_: object) -> None:
        if self._landing is not None:  # the GPU still writes there
            self._landing.take(self._stream)

    def wait(self) -> Batch | None:
        """The batch without its page table; None if something is wrong with the tables."""
        _, kind, count, q_len, page_size = self._tables
        assert self._landing is not None
        numbers, self._landing = self._landing.take(self._stream), None
        _, is_bad, least_rows, most_rows, *planned = numbers[: read_tables.HEAD].tolist()
        if is_bad:
            return None
        if self.planner is not None:
            self.schedule = self.planner.schedule(*planned)
        at_keys = read_tables.HEAD + count + 1
        at_lengths, at_rows = at_keys + count, at_keys + 2 * count
        kv_indptr, keys = numbers[read_tables.HEAD : at_keys], numbers[at_keys:at_lengths]
        if q_len:
            (qo_indptr, qo_len, uniform), num_rows = uniform_rows(count, q_len), count * q_len
        else:
            qo_indptr = numbers[at_rows : at_rows + count + 1]
            qo_len, num_rows = numbers[at_rows + count + 1 :], int(qo_indptr[-1])
            uniform = least_rows if 0 < least_rows == most_rows else -1
        requests = BatchRequests(qo_len, keys, qo_indptr[:-1], kv_indptr[:-1], None, uniform)
        num_keys = 0 if page_size else int(kv_indptr[-1])
        lengths = numbers[at_lengths:at_rows] if kind == read_tables.LAST_PAGE else None
        return Batch(requests, num_rows, num_keys, qo_indptr, kv_indptr, lengths, self.last)


class NoReading:
    """Of tables that the host reads."""

    planner = schedule = None

    def __enter__(self) -> NoReading:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> None:
        return None


NO_READING = NoReading()


def find(given: Tables, workspace: ArrayView) -> tuple[DeviceTables, ArrayView | None] | None:
    """The tables, if one launch on the GPU of the workspace can read them all: contiguous, and of
    its framework, torch or CuPy. And lengths of last pages that it need not read."""
    if type(given.kv_indptr) is np.ndarray or workspace.device.kind != "cuda":
        return None
    if workspace.framework not in ("torch", "cupy"):
        return None
    rows, names, last = given.rows, given.names, None
    q_len = rows if isinstance(rows, int) else 0
    kv_indptr = _table(given.kv_indptr, names[0], workspace)
    if kv_indptr is None:
        return None
    count = kv_indptr[2] - 1
    if not 0 < count <= read_tables.MOST_REQUESTS:
        return None
    qo_indptr = lengths = _NO_TABLE
    if not q_len:
        found = _table(rows, "qo_indptr", workspace)
        if found is None or found[2] != count + 1:
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
            if found is None or found[2] != count:
                return None
            lengths = found
            kind = read_tables.KEYS if given.has_keys else read_tables.LAST_PAGE
    tables = (*qo_indptr[:2], *kv_indptr[:2], *lengths[:2])
    return DeviceTables(tables, kind, count, q_len, given.page_size), last


def _table(x: Any, name: str, workspace: ArrayView) -> tuple[int, bool, int] | None:
    """The address of a table that the launch can read, whether it is wide, and its length."""
    if type(x) is np.ndarray:
        return None
    v = array.view(x, name)
    is_wide = _IS_WIDE.get(v.dtype)
    if is_wide is None or v.device != workspace.device or v.framework != workspace.framework:
        return None
    if len(v.shape) != 1 or (v.strides[0] != 1 and v.shape[0] > 1):
        return None
    return v.ptr, is_wide, v.shape[0]


def begin(
    wrapper: Any, tables: DeviceTables, geometry: Geometry | None, stream: int
) -> TableReading:
    """Enqueue the launch, for a wrapper of batch/wrapper.py, which also makes the work list of a
    plan that may split as it likes, if its geometry is given and the kernel can."""
    planner, words = None, 0
    if geometry is not None and tables.q_len:
        (variant,) = wrapper._variants(geometry)
        if not variant.has_mask:
            launcher = geometry.launcher(variant)
            planner = read_tables.planner(launcher, tables.num_requests, tables.q_len)
            if planner is not None:
                words = wrapper._next_words.reserve(planner.num_words)
    device = wrapper._workspace.device.index
    landing = read_tables.launch(tables, planner, words, device, stream)
    return TableReading(landing, stream, tables, planner)
