"""FlashInfer's choices of keys by scores, given as slots of a cache or as rows of all keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import array, reference
from .array import ArrayView
from .array.match import match_array, match_output, require_contiguous
from .core import dtypes, parse
from .core.names import refuse_names
from .core.parse import require_int
from .core.tracing import untraced
from .errors import ArgumentError
from .launch.ops import select_topk
from .typing import Array

__all__ = ["top_k_page_table_transform", "top_k_ragged_transform"]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)

_DTYPES = dtypes.float32, dtypes.float16, dtypes.bfloat16


@untraced
def top_k_page_table_transform(
    input: Array,
    src_page_table: Array,
    lengths: Array,
    k: int,
    row_to_batch: Array | None = None,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: Array | None = None,
    page_table_row_starts: Array | None = None,
    *,
    page_size: int = 1,
    out: Array | None = None,
    out_raw_indices: Array | None = None,
) -> Any:
    """The slots of the k greatest scores of each row.

    Parameters
    ----------
    input
        float32, float16 or bfloat16 [rows, columns]; row i has scores from row_starts[i] (default
        0) on, lengths[i] of them.
    src_page_table
        int32 [B, most pages]: page p of row i's request holds its keys p * page_size and on.
    row_to_batch
        int32 [rows]: row i's row of the table, by default i.
    lengths, row_starts, page_table_row_starts
        int32 [rows]; the last says where in its row of the table a row's pages begin, by default
        row_starts where page_size is 1.
    k
        Entries of a row of the result.
    tie_break
        0 or 1: of equal scores the lower index; 2: the higher one.
    page_size
        A power of two.
    out, out_raw_indices
        int32 [rows, k], arrays to write: the result, and the indices from which it is made.
    deterministic, dsa_graph_safe
        Accepted for compatibility.

    Returns
    -------
    result
        int32 [rows, k]: table[row_to_batch[i], start + j // page_size] * page_size + j % page_size
        for each index j that is chosen, ascending, then -1. A GPU's indices are not looked at
        before the launch: there, scores beyond the input do not count, and what lies beyond the
        table is -1.

    Raises
    ------
    CupyAttnError
        ArgumentError.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, whose order within a row is not ours.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> scores = np.array([[0.1, 0.9, 0.3, 0.8]], np.float32)
    >>> slots = np.array([[70, 71, 72, 73]], np.int32)  # of the request's keys: pages of one
    >>> cupyattn.top_k_page_table_transform(scores, slots, np.array([4], np.int32), k=2)
    array([[71, 73]], dtype=int32)
    """
    table = array.view(src_page_table, "src_page_table")
    match_array(table, "B pages", dtypes.int32, "src_page_table")
    size = require_int(page_size, "page_size", 1, 1 << 30)
    if size & (size - 1):
        raise ArgumentError(f"page_size: got {size}; wanted a power of two")
    if row_starts is not None and page_table_row_starts is None and size > 1:
        raise ArgumentError(
            "page_table_row_starts: got None beside row_starts with pages of several keys; wanted "
            "where each row's pages begin"
        )
    by_row = {
        "lengths": lengths,
        "row_starts": row_starts,
        "row_to_batch": row_to_batch,
        "page_table_row_starts": page_table_row_starts,
    }
    scores = _Scores.of(input, k, tie_break, by_row, src_page_table=table)
    for name, flag in (("deterministic", deterministic), ("dsa_graph_safe", dsa_graph_safe)):
        parse.flag(flag, name)
    pages = _Pages(table, size)
    if scores.v.device.kind == "cpu":
        return _on_cpu(scores, pages, out, out_raw_indices)
    starts = scores.address("page_table_row_starts")
    rows = select_topk.Given(
        owners=scores.address("row_to_batch"),
        page_begins=starts or scores.address("row_starts"),
        table=table.ptr,
        table_stride=table.strides[0],
        num_tables=table.shape[0],
        table_width=table.shape[1],
        page_shift=size.bit_length() - 1,
    )
    return _on_gpu(scores, rows, out, out_raw_indices)


@untraced
def top_k_ragged_transform(
    input: Array,
    offsets: Array,
    lengths: Array,
    k: int,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: Array | None = None,
) -> Any:
    """The rows of all keys that have the k greatest scores of each row.

    Parameters
    ----------
    input
        float32, float16 or bfloat16 [rows, columns]; row i has scores from row_starts[i] (default
        0) on, lengths[i] of them.
    offsets, lengths, row_starts
        int32 [rows]; offsets[i] is added to what is chosen for row i, which counts from
        row_starts[i] on.
    k
        Entries of a row of the result.
    tie_break
        0 or 1: of equal scores the lower index; 2: the higher one.
    deterministic, dsa_graph_safe
        Accepted for compatibility.

    Returns
    -------
    result
        int32 [rows, k], ascending, then -1. A GPU's lengths are not looked at before the launch:
        there, scores beyond the input do not count.

    Raises
    ------
    CupyAttnError
        ArgumentError.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, whose order within a row is not ours.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> scores = np.array([[0.1, 0.9, 0.3, 0.8]], np.float32)
    >>> first, lengths = np.array([100], np.int32), np.array([4], np.int32)
    >>> cupyattn.top_k_ragged_transform(scores, first, lengths, k=2)
    array([[101, 103]], dtype=int32)
    """
    by_row = {"lengths": lengths, "row_starts": row_starts, "offsets": offsets}
    scores = _Scores.of(input, k, tie_break, by_row)
    for name, flag in (("deterministic", deterministic), ("dsa_graph_safe", dsa_graph_safe)):
        parse.flag(flag, name)
    if scores.v.device.kind == "cpu":
        return _on_cpu(scores, None, None, None)
    return _on_gpu(scores, select_topk.Given(offsets=scores.address("offsets")), None, None)


class _Pages(NamedTuple):
    table: ArrayView
    size: int


class _Scores(NamedTuple):
    """Rows of scores, how many of each are chosen, and what is given of each row, by name."""

    v: ArrayView
    k: int
    has_late_ties: bool
    by_row: dict[str, ArrayView]

    @classmethod
    def of(
        cls, x: Any, k: Any, tie_break: Any, by_row: dict[str, Any], **others: ArrayView
    ) -> _Scores:
        """Checked. others: arrays that are where the scores are."""
        v = array.view(x, "input")
        match_array(v, "rows columns", _DTYPES, "input")
        views = {}
        for name, numbers in by_row.items():
            if numbers is not None:
                views[name] = array.view(numbers, name)
                match_array(views[name], "rows", dtypes.int32, name, {"rows": v.shape[0]})
        array.same_device(input=v, **views, **others)
        late = require_int(tie_break, "tie_break", 0, 2) == 2
        return cls(v, require_int(k, "k"), late, views | others)

    def address(self, name: str) -> int:
        """0 for what is not given."""
        return self.by_row[name].ptr if name in self.by_row else 0

    def numbers(self, name: str) -> np.ndarray | None:
        """What a caller on the CPU gave under this name; None if nothing."""
        return array.as_numpy(self.by_row[name]) if name in self.by_row else None


def _on_gpu(scores: _Scores, rows: select_topk.Given, out: Any, columns: Any) -> Any:
    """Launch on the stream of the scores."""
    v, shape = scores.v, (scores.v.shape[0], scores.k)
    target = None if out is None else array.view(out, "out")
    raw = None if columns is None else array.view(columns, "out_raw_indices")
    match_output(target, shape, dtypes.int32, "out", input=v, **scores.by_row)
    match_output(raw, shape, dtypes.int32, "out_raw_indices", input=v, **scores.by_row, out=target)
    for name, x in (("out", target), ("out_raw_indices", raw)):
        if x is not None:
            require_contiguous(x, name)
    built = array.empty(shape, dtypes.int32, v) if out is None else out
    target = array.view(built, "out")
    rows = rows._replace(
        counts=scores.address("lengths"),
        begins=scores.address("row_starts"),
        columns=0 if raw is None else raw.ptr,
        has_late_ties=scores.has_late_ties,
    )
    three = array.as_strided(v, (v.shape[0], 1, v.shape[1]), (v.strides[0], 0, 1))
    used = [target, *scores.by_row.values(), *([] if raw is None else [raw])]
    array.acquire(v, *used)
    lists = select_topk.Lists(target.ptr, (scores.k, 0))
    select_topk.launch_given(
        three, rows, select_topk.Choice(scores.k), lists, array.current_stream(v)
    )
    array.release(v, *used)
    return array.deliver(built, v) if out is None else out


def _on_cpu(scores: _Scores, pages: _Pages | None, out: Any, columns: Any) -> Any:
    """Row by row."""
    rows, num_columns = scores.v.shape
    counts = scores.numbers("lengths")
    begins, owners = scores.numbers("row_starts"), scores.numbers("row_to_batch")
    assert counts is not None
    begins = np.zeros(rows, np.int32) if begins is None else begins
    _require_within(begins, counts, num_columns + 1, "row_starts, lengths")
    offsets = scores.numbers("offsets" if pages is None else "page_table_row_starts")
    if pages is not None:
        owners = np.arange(rows) if owners is None else owners
        offsets = begins if offsets is None else offsets
        _require_within(owners, 0, pages.table.shape[0], "row_to_batch")
    assert offsets is not None
    raw, slots = (np.full((rows, scores.k), -1, np.int32) for _ in range(2))
    for row in range(rows):
        own = array.as_numpy(scores.v)[row, begins[row] : begins[row] + counts[row]]
        chosen = _choose(own.astype(np.float64), scores.k, scores.has_late_ties)
        raw[row, : chosen.size] = chosen
        if pages is None:
            slots[row, : chosen.size] = chosen + offsets[row]
            continue
        assert owners is not None
        entries = offsets[row] + chosen // pages.size
        _require_within(entries, 0, pages.table.shape[1], "src_page_table")
        of_row = array.as_numpy(pages.table)[owners[row]][entries].astype(np.int64)
        slot = of_row * pages.size + chosen % pages.size
        slots[row, : chosen.size] = np.where(of_row < 0, -1, slot)
    if columns is not None:
        _write(raw, columns, "out_raw_indices", scores.v)
    if out is None:
        return array.from_numpy(slots, scores.v)
    _write(slots, out, "out", scores.v)
    return out


def _choose(scores: np.ndarray, k: int, has_late_ties: bool) -> np.ndarray:
    if not has_late_ties:
        return reference.choose_blocks(scores, k)
    return np.sort(scores.size - 1 - reference.choose_blocks(scores[::-1], k))


def _require_within(first: Any, length: Any, end: int, name: str) -> None:
    """ArgumentError unless all of these ranges lie within so many."""
    begins, behind = np.asarray(first, np.int64), np.asarray(first, np.int64) + length
    if begins.size and not (begins.min() >= 0 and np.max(behind) < end and np.min(length) >= 0):
        raise ArgumentError(
            f"{name}: holds {begins.reshape(-1).tolist()[:8]}; wanted entries of the array that it "
            f"points into, which has {end}"
        )


def _write(x: np.ndarray, target: Any, name: str, like: ArrayView) -> None:
    v = array.view(target, name)
    match_output(v, x.shape, dtypes.int32, name, input=like)
    array.as_numpy(v)[...] = x
