"""How the tokens of prompts are spread over ranks, so that causal attention is even work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import parse
from ..engine.requests import read_rows
from ..errors import ArgumentError
from ..typing import Array
from .ranks import check_rank

_MAX_AXES = 64  # of NumPy's arrays


class ZigZag:
    """The tokens of a ragged batch on `size` ranks, zig-zag.

    Each request is cut into 2 * size pieces of as equal lengths as can be, and rank r has pieces r
    and 2 * size - 1 - r of each: the early piece that it has sees as many keys fewer as the late
    one sees more, so causal work is the same on all ranks. A rank's tokens lie request after
    request, in order of position. A request of fewer tokens has empty pieces.

    Parameters
    ----------
    qo_indptr
        int32 or int64 [B + 1] from 0 on: the rows of each whole request.
    size
        The number of ranks.

    Raises
    ------
    CupyAttnError
        ArgumentError for offsets that fall or do not begin at 0, and for a size below 1.

    Notes
    -----
    `cut` and `join` are for any array with one row a token: q, k, v, ids, positions, answers::

        >>> import numpy as np
        >>> from cupyattn.distributed import ZigZag
        >>> share = ZigZag(np.array([0, 8, 12]), size=2)
        >>> share.cut(np.arange(12), rank=0)
        array([ 0,  1,  6,  7,  8, 11])
        >>> share.positions(0), share.indptr(0)
        (array([0, 1, 6, 7, 0, 3]), array([0, 4, 6]))
        >>> share.join([share.cut(np.arange(12), rank) for rank in (0, 1)])
        array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11])
    """

    def __init__(self, qo_indptr: Array, size: int) -> None:
        self.size = parse.require_int(size, "size")
        rows = read_rows(qo_indptr)
        self.qo_indptr = rows.indptr
        self.lengths = rows.lengths
        # Where every piece of a request begins, and behind the last one the request's length.
        self.begins = self.lengths[:, None] * np.arange(2 * self.size + 1) // (2 * self.size)

    @property
    def num_requests(self) -> int:
        return self.lengths.size

    @property
    def num_tokens(self) -> int:
        """The tokens of all ranks."""
        return int(self.qo_indptr[-1])

    def pieces(self, rank: int) -> tuple[int, int]:
        """The numbers of the early and of the late piece of a rank."""
        check_rank(rank, self.size)
        return rank, 2 * self.size - 1 - rank

    def spans(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions at which the rank's two pieces of each request begin and end, each [B, 2]."""
        pieces = np.array(self.pieces(rank))
        return self.begins[:, pieces], self.begins[:, pieces + 1]

    def counts(self, rank: int) -> np.ndarray:
        """int64 [B]: the tokens of each request that the rank has."""
        begin, end = self.spans(rank)
        return (end - begin).sum(axis=1)

    def indptr(self, rank: int) -> np.ndarray:
        """int64 [B + 1]: the rows of each request in the rank's arrays."""
        return np.concatenate([[0], self.counts(rank).cumsum()])

    def positions(self, rank: int) -> np.ndarray:
        """int64 [rows of the rank]: where in its request each of its tokens is, as RoPE counts."""
        begin, end = self.spans(rank)
        return expand(begin.ravel(), (end - begin).ravel())

    def rows(self, rank: int) -> np.ndarray:
        """int64 [rows of the rank]: where in the whole batch each of its tokens is."""
        begin, end = self.spans(rank)
        return expand((begin + self.qo_indptr[:-1, None]).ravel(), (end - begin).ravel())

    def cut(self, x: Any, rank: int, axis: int = 0) -> Any:
        """The rank's tokens of an array of the whole batch: a copy of the same framework."""
        self._require_extent(x, "x", self.num_tokens, axis)
        return _take(x, self.rows(rank), axis)

    def join(self, parts: Sequence[Any], axis: int = 0) -> Any:
        """The array of the whole batch, of the parts of all ranks in order."""
        if len(parts) != self.size:
            raise ArgumentError(
                f"parts: got {len(parts)} of them; wanted {self.size}, one of each rank in order"
            )
        for rank, part in enumerate(parts):
            wanted = int(self.counts(rank).sum())
            self._require_extent(part, f"parts[{rank}]", wanted, axis)
        rows = np.concatenate([self.rows(rank) for rank in range(self.size)])
        return _take(_concatenated(parts, axis), np.argsort(rows, kind="stable"), axis)

    def _require_extent(self, x: Any, name: str, wanted: int, axis: int) -> None:
        axis = parse.require_int(axis, "axis", -_MAX_AXES, _MAX_AXES)
        shape = tuple(getattr(x, "shape", ()))
        if not -len(shape) <= axis < len(shape) or shape[axis] != wanted:
            raise ArgumentError(
                f"{name}: shape is {list(shape)}; wanted {wanted} tokens along axis {axis}, as the "
                "offsets of the whole batch say"
            )


def expand(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """first[i], first[i] + 1, ..., of lengths[i] numbers, one after another for every i."""
    ends = lengths.cumsum()
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(first - (ends - lengths), lengths) + np.arange(total, dtype=np.int64)


def _take(x: Any, rows: np.ndarray, axis: int) -> Any:
    framework = _framework(x)
    if framework == "torch":
        return x.index_select(axis, sys.modules["torch"].from_numpy(rows).to(x.device))
    return x.take(sys.modules["cupy"].asarray(rows) if framework == "cupy" else rows, axis)


def _concatenated(parts: Sequence[Any], axis: int) -> Any:
    framework = _framework(parts[0])
    if framework == "torch":
        return sys.modules["torch"].cat(list(parts), axis)
    module: Any = sys.modules[framework]
    return (module.numpy if framework == "jax" else module).concatenate(parts, axis)


def _framework(x: Any) -> str:
    """Whose array it is, of any dtype: tokens come as ids and numbers of all kinds too."""
    name = type(x).__module__.partition(".")[0]
    return {"torch": "torch", "cupy": "cupy", "numpy": "numpy"}.get(name, "jax")
