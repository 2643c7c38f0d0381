"""The exchange of states in a group of several hosts: inside each host first, then between hosts.

Inside a host each rank gets what its host's ranks have for it and for the ranks of its place on the
other hosts, merged. Between hosts, ranks of one place exchange what is left: of the bytes of an
exchange in one level, one part in as many as a host has ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import array
from ..array import ArrayView
from ..array.views import view
from . import exchanged_rows
from .group import Group

if TYPE_CHECKING:
    from .exchange import StateExchange


class Layout(NamedTuple):
    """Where ranks are: on each host as many, host by host, or in turns."""

    num_hosts: int
    is_by_host: bool


def layout_of(hosts: Sequence[int]) -> Layout | None:
    """None where one level is all there is: one host, hosts of one rank, or ranks of no order."""
    names = list(dict.fromkeys(hosts))
    found = [names.index(host) for host in hosts]
    num_hosts = len(names)
    per_host, rest = divmod(len(hosts), num_hosts)
    if rest or num_hosts == 1 or per_host == 1:
        return None
    if found == [rank // per_host for rank in range(len(hosts))]:
        return Layout(num_hosts, is_by_host=True)
    if found == [rank % num_hosts for rank in range(len(hosts))]:
        return Layout(num_hosts, is_by_host=False)
    return None


class TwoLevels:
    """The exchanges of both levels. Merges are in the order of a host's ranks, then of hosts.

    make   StateExchange(group, max_rows, num_heads, head_dim, out_dtype=, uses_windows=), all else
           as the exchange of the whole group has it
    """

    def __init__(
        self,
        group: Group,
        layout: Layout,
        make: Callable[..., StateExchange],
        max_rows: int,
        num_heads: int,
        head_dim: int,
        *,
        dtype: Any,
        out_dtype: Any,
        uses_windows: bool | None,
    ) -> None:
        groups = group.two_levels()
        # Host by host, the heads of a host's ranks are a row of their own: ranks of a place are
        # neighbours in it, as they are in the whole row where hosts take turns.
        self._parts = layout.num_hosts if layout.is_by_host else 1
        self.inside = make(
            groups[0],
            max_rows * self._parts,
            num_heads // self._parts,
            head_dim,
            out_dtype=dtype,
            uses_windows=uses_windows,
        )
        heads = layout.num_hosts * (num_heads // group.size)
        self.between = make(
            groups[1], max_rows, heads, head_dim, out_dtype=out_dtype, uses_windows=False
        )
        self.can_capture: bool = self.inside.can_capture and self.between.can_capture

    def run(self, o: ArrayView, lse: ArrayView, out: Any, lse_out: Any) -> None:
        """o [rows, num_heads, head_dim], lse [rows, num_heads]; writes out and lse_out."""
        rows, num_heads, head_dim = o.shape
        parts = self._parts
        if parts > 1 and rows > 1 and not (_is_row_by_row(o) and _is_row_by_row(lse)):
            o, lse = _packed(o, lse)
        shape = rows * parts, num_heads // parts
        states, their_lse = (x.owner if parts == 1 else _folded(x, shape) for x in (o, lse))
        merged, merged_lse = self.inside.run(states, their_lse, return_lse=True)
        num_heads = self.between.num_heads
        self.between.run(
            merged.reshape(rows, num_heads, head_dim),
            merged_lse.reshape(rows, num_heads),
            out,
            lse_out,
        )

    def close(self) -> None:
        self.inside.close()
        self.between.close()


def _is_row_by_row(x: ArrayView) -> bool:
    return bool(x.strides[0] == x.shape[1] * x.strides[1])


def _folded(x: ArrayView, shape: tuple[int, int]) -> Any:
    """Rows of so many heads, one for each host."""
    strides = shape[1] * x.strides[1], *x.strides[1:]
    return array.restride(x.owner, "o", (*shape, *x.shape[2:]), strides)


def _packed(*arrays: ArrayView) -> list[ArrayView]:
    """Contiguous copies, on the current stream."""
    like = arrays[0]
    copies = [view(array.empty(x.shape, x.dtype, like), "a copy") for x in arrays]
    array.acquire(like, *arrays)
    pairs = [(_with_columns(x), _with_columns(to)) for x, to in zip(arrays, copies, strict=True)]
    for pair in pairs:
        stream = None if like.device.kind == "cpu" else array.current_stream(like)
        exchanged_rows.copy([pair], stream)
    array.release(like, *arrays)
    return copies


def _with_columns(x: ArrayView) -> ArrayView:
    """An LSE's heads are rows of one column."""
    return x if len(x.shape) == 3 else array.as_strided(x, (*x.shape, 1), (*x.strides, 1))
