"""Scores of keys on the CPU, for functions that give them as matrices."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import require_contiguous_last, require_dtype
from ..core import dtypes
from ..errors import ArgumentError, UnsupportedError


def require_cpu(v: ArrayView, name: str, instead: str) -> None:
    """UnsupportedError on a GPU."""
    if v.device.kind != "cpu":
        raise UnsupportedError(f"{name}: matrices of scores have no GPU kernel; {instead}")


def ints_of(x: Any, name: str, count: int | None = None) -> np.ndarray:
    """int32 [count] of the CPU. Raises ArgumentError."""
    v = array.view(x, name)
    require_dtype(v, dtypes.int32, name)
    if v.device.kind != "cpu" or len(v.shape) != 1 or count not in (None, v.shape[0]):
        wanted = "one axis" if count is None else f"[{count}]"
        raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted {wanted}, on the CPU")
    return array.as_numpy(v)


def offsets_of(x: Any, name: str, size: int, count: int | None = None) -> list[int]:
    """Offsets from 0 on that rise to `size` at most. Raises ArgumentError."""
    offsets = ints_of(x, name, count)
    if not offsets.size or offsets[0] or (np.diff(offsets) < 0).any() or offsets[-1] > size:
        raise ArgumentError(
            f"{name}: holds {offsets.tolist()[:8]}; wanted offsets from 0 on that rise to at most "
            f"{size}"
        )
    return [int(offset) for offset in offsets]


class KeyRows(NamedTuple):
    """Keys of requests, in pages with heads ahead of slots or in rows.

    lengths  keys of each request; begins: its first row, where there are no pages
    """

    k: ArrayView
    table: np.ndarray | None
    lengths: list[int]
    begins: list[int]
    num_heads: int

    @classmethod
    def of(cls, k: Any, table: Any, lengths: Any, offsets: Any) -> KeyRows:
        """Checked: pages [pages, heads, page_size, columns] with a table and lengths, or rows
        [rows, heads, columns] with offsets."""
        v = array.view(k, "k")
        require_contiguous_last(v, "k")
        axes = 3 if table is None else 4
        if len(v.shape) != axes or 0 in v.shape[1:]:
            wanted = (
                "[rows, heads, head_dim]" if table is None else "pages of [heads, 128, head_dim]"
            )
            raise ArgumentError(f"k: shape is {list(v.shape)}; wanted {wanted}")
        if table is None:
            if offsets is None:
                raise ArgumentError("cu_seqlens_k: got None without page_table; pass one of them")
            begins = offsets_of(offsets, "cu_seqlens_k", v.shape[0])
            steps = [end - begin for begin, end in itertools.pairwise(begins)]
            return cls(v, None, steps, begins, v.shape[1])
        if lengths is None:
            raise ArgumentError("seqused_k: got None beside page_table; pass both")
        pages = array.view(table, "page_table")
        require_dtype(pages, dtypes.int32, "page_table")
        if len(pages.shape) != 2:
            raise ArgumentError(f"page_table: shape is {list(pages.shape)}; wanted [B, most pages]")
        counts = ints_of(lengths, "seqused_k", pages.shape[0])
        room = pages.shape[1] * v.shape[2]
        if counts.size and not 0 <= counts.min() <= counts.max() <= room:
            raise ArgumentError(
                f"seqused_k: holds {counts.tolist()[:8]}; page_table has room for {room} keys"
            )
        return cls(v, array.as_numpy(pages), [int(n) for n in counts], [], v.shape[1])

    @property
    def dtype(self) -> dtypes.DType:
        return self.k.dtype

    @property
    def head_dim(self) -> int:
        return self.k.shape[-1]

    @property
    def num_requests(self) -> int:
        return len(self.lengths)

    def rows(self, request: int) -> np.ndarray:
        """The keys of a request, [keys, heads, columns]."""
        keys, count = array.as_numpy(self.k), self.lengths[request]
        if self.table is None:
            begin = self.begins[request]
            return keys[begin : begin + count]
        size = keys.shape[2]
        own = self.table[request][: -(-count // size)]
        wrong = own[(own < 0) | (own >= keys.shape[0])]
        if wrong.size:
            raise ArgumentError(
                f"page_table: request {request} has page {int(wrong[0])}; k holds {keys.shape[0]} "
                "pages"
            )
        return keys[own].swapaxes(1, 2).reshape(-1, *keys.shape[1::2])[:count]
