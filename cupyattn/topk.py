"""FlashInfer's choice of keys by scores, given as slots of a cache: on the CPU alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import array, reference
from .array import ArrayView
from .array.match import match_array, match_output
from .core import dtypes, parse
from .core.names import refuse_names
from .core.parse import require_int
from .core.tracing import untraced
from .engine.scores import ints_of, require_cpu
from .errors import ArgumentError
from .typing import Array

__all__ = ["top_k_page_table_transform"]

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

    input   float32, float16 or bfloat16 [rows, columns]; row i has scores from row_starts[i]
            (default 0) on, lengths[i] of them.
    src_page_table  int32 [B, most pages]: page p of row i's request holds its keys p * page_size
            and on. row_to_batch int32 [rows] is its row of the table, by default i.
    lengths, row_starts, page_table_row_starts  int32 [rows]; the last says where in its row of the
            table a row's pages begin, by default row_starts where page_size is 1.
    k       entries of a row of the result.
    tie_break  0 or 1: of equal scores the lower index; 2: the higher one.
    page_size  a power of two.
    out, out_raw_indices  int32 [rows, k], arrays to write: the result, and the indices from which
            it is made. deterministic and dsa_graph_safe are accepted for compatibility.

    Returns int32 [rows, k]: table[row_to_batch[i], start + j // page_size] * page_size + j %
    page_size for each index j that is chosen, ascending, then -1. Raises ArgumentError, and
    UnsupportedError on a GPU. Semantics: FlashInfer's function of the same name, whose order within
    a row is not ours.
    """
    v, table = array.view(input, "input"), array.view(src_page_table, "src_page_table")
    match_array(v, "rows columns", _DTYPES, "input")
    require_cpu(v, "input", "use sparse.select, or pass CPU arrays")
    match_array(table, "B pages", dtypes.int32, "src_page_table")
    rows, columns = v.shape
    size = require_int(page_size, "page_size", 1, 1 << 30)
    if size & (size - 1):
        raise ArgumentError(f"page_size: got {size}; wanted a power of two")
    for name, flag in (("deterministic", deterministic), ("dsa_graph_safe", dsa_graph_safe)):
        parse.flag(flag, name)
    ties = require_int(tie_break, "tie_break", 0, 2)
    counts = ints_of(lengths, "lengths", rows)
    begins = np.zeros(rows, np.int32)
    if row_starts is not None:
        begins = ints_of(row_starts, "row_starts", rows)
    owners = (
        np.arange(rows) if row_to_batch is None else ints_of(row_to_batch, "row_to_batch", rows)
    )
    pages_from = begins
    if page_table_row_starts is not None:
        pages_from = ints_of(page_table_row_starts, "page_table_row_starts", rows)
    elif row_starts is not None and size > 1:
        raise ArgumentError(
            "page_table_row_starts: got None beside row_starts with pages of several keys; wanted "
            "where each row's pages begin"
        )
    _require_within(owners, 0, table.shape[0], "row_to_batch")
    _require_within(begins, counts, columns + 1, "row_starts, lengths")
    entries = require_int(k, "k")
    raw, slots = (np.full((rows, entries), -1, np.int32) for _ in range(2))
    for row in range(rows):
        own = array.as_numpy(v)[row, begins[row] : begins[row] + counts[row]].astype(np.float64)
        chosen = _choose(own, entries, ties)
        indices = pages_from[row] + chosen // size
        _require_within(indices, 0, table.shape[1], "src_page_table")
        raw[row, : chosen.size] = chosen
        pages = array.as_numpy(table)[owners[row]][indices]
        slots[row, : chosen.size] = pages * size + chosen % size
    if out_raw_indices is not None:
        _write(raw, out_raw_indices, "out_raw_indices", v)
    if out is None:
        return array.from_numpy(slots, v)
    _write(slots, out, "out", v)
    return out


def _choose(scores: np.ndarray, k: int, tie_break: int) -> np.ndarray:
    if tie_break < 2:
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
