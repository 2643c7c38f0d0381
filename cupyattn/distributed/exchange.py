"""The exchange of attention states: all heads over a rank's keys become its heads over all keys."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import (
    Dims,
    match,
    match_array,
    match_output,
    require_contiguous_last,
    require_dtype,
)
from ..core import dtypes, parse
from ..core.cupy_module import as_stream
from ..core.dtypes import DType
from ..core.observed import Observed
from ..core.records import maker
from ..engine import merge_states
from ..engine.call_cache import Argument, CallCache
from ..errors import ArgumentError, DeviceError, DistributedError, UnsupportedError
from ..launch.driver.enqueue import cuda
from ..launch.ops import exchange_states
from ..launch.ops.exchange_states import Exchange
from . import two_levels
from .group import Group, checked_group
from .mailbox import Mailbox
from .two_levels import TwoLevels

_FLOATS = (dtypes.float32, dtypes.float16, dtypes.bfloat16)
_ALIGNMENT = 16


class _Arrays(NamedTuple):
    """The arrays of a call, in the order that the kernel has their addresses."""

    o: Any
    lse: Any
    out: Any = None
    lse_out: Any = None


class _Options(NamedTuple):
    """Which exchange it is, and what else calls differ by."""

    serial: int
    return_lse: Any


_make_arrays, _make_options = maker(_Arrays), maker(_Options)
_OUT, _LSE_OUT = (_Arrays._fields.index(name) for name in ("out", "lse_out"))


@dataclass(frozen=True, slots=True)
class _Checked:
    """What calls of one signature share: the launch, and shapes of outputs."""

    exchange: Exchange
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]


_CALLS: CallCache[_Checked] = CallCache(
    *(Argument(name, is_output=name in ("out", "lse_out")) for name in _Arrays._fields)
)
_serials = itertools.count()


class StateExchange(Observed):
    """Hands each rank the states of its heads, and merges them in the order of ranks.

    Every rank of `group` attends with all `num_heads` heads to the keys that it has. `run` makes of
    these states those over all keys, of the rank's own heads: rank r has heads r * own to (r + 1) *
    own - 1, where own = num_heads / group.size.

    Where peers can write each other's memory, which is on one host, the exchange is one kernel:
    blocks write their states to the owners, wait for those of the peers, and merge. Elsewhere
    states are packed, go through the group's all_to_all, and merge. Of several hosts, the ranks of
    each exchange so among themselves first, and then those of one place on all hosts; merges are in
    the order of a host's ranks, then of hosts. That is where hosts have equal numbers of ranks,
    numbered host by host or in turns; other groups exchange in one level. CUDA graphs hold all of
    it, where `can_capture` is true. Exchanges of one `StateExchange` are made in the same order on
    all ranks, and on one stream, or on streams that wait for each other.

    A peer that does not come within `timeout` seconds is late: its rows are NaN, later exchanges do
    not wait for it, and the next call (or `group.check()`) raises DeviceError. Kernels that are
    compiled during a run make a rank late too: where a number of rows is new, ranks wait for each
    other on the host first.

    Parameters
    ----------
    group
        The ranks; each of them makes a StateExchange of the same arguments.
    max_rows
        The most rows (query tokens) of a call.
    num_heads
        Query heads of all ranks.
    head_dim
        Columns of a state, those of v.
    dtype
        The dtype in which states travel: "float32", or "bfloat16" or "float16" for half the bytes
        and a larger error.
    out_dtype
        The dtype of the answers.
    lse_base_on_e
        Whether LSEs are natural logarithms; base 2 otherwise.
    timeout
        Seconds for which a peer is waited for on the GPU.
    uses_windows
        False: by the group's all_to_all, in one level; True: raise UnsupportedError where the
        memory of a host's peers cannot be written; None: as the group allows.

    Raises
    ------
    ArgumentError
        Heads that the ranks do not divide, and other arguments of no meaning.
    DistributedError
        A rank that gave other arguments.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn.distributed import StateExchange, simulate
    >>> o, lse = np.ones((3, 8, 64), np.float32), np.zeros((3, 8), np.float32)  # of a rank's keys
    >>> def work(group):
    ...     exchange = StateExchange(group, 3, 8, 64, out_dtype="float16")
    ...     return exchange.run(o, lse).shape  # of 4 of the 8 heads
    >>> simulate(2, work)
    [(3, 4, 64), (3, 4, 64)]
    """

    def __init__(
        self,
        group: Group,
        max_rows: int,
        num_heads: int,
        head_dim: int,
        *,
        dtype: Any = "float32",
        out_dtype: Any = "bfloat16",
        lse_base_on_e: bool = False,
        timeout: float = 1.0,
        uses_windows: bool | None = None,
    ) -> None:
        self.group = checked_group(group)
        if uses_windows is not None:
            uses_windows = parse.flag(uses_windows, "uses_windows")
        self.max_rows = parse.require_int(max_rows, "max_rows")
        self.num_heads = parse.require_int(num_heads, "num_heads")
        self.own_heads = group.check_heads(self.num_heads, "num_heads")
        self.head_dim = parse.require_int(head_dim, "head_dim")
        self.dtype, self.out_dtype = (
            _float_dtype(x, name) for x, name in ((dtype, "dtype"), (out_dtype, "out_dtype"))
        )
        self.lse_base_on_e = parse.flag(lse_base_on_e, "lse_base_on_e")
        self.timeout = parse.positive(timeout, "timeout", 1.0)
        self._serial = next(_serials)
        self._known_rows: set[int] = set()
        self._is_closed = False
        self._device = cuda().get_device() if group.on_gpu else 0
        group.handshake(
            {
                "max_rows": self.max_rows,
                "num_heads": self.num_heads,
                "head_dim": self.head_dim,
                "dtype of states": self.dtype,
                "dtype of answers": self.out_dtype,
                "lse_base_on_e": self.lse_base_on_e,
                "uses_windows": uses_windows,
            }
        )
        self._windows: Mailbox | None = None
        self.by_windows = False
        self._levels = None if uses_windows is False else self._make_levels(uses_windows)
        if self._levels is not None:
            self.can_capture: bool = self._levels.can_capture
            return
        if uses_windows is not False:
            self._windows = self._make_windows(uses_windows is True)
        self.by_windows = self._windows is not None
        self.can_capture = self.by_windows or group.can_capture

    def run(
        self,
        o: Any,
        lse: Any,
        out: Any = None,
        lse_out: Any = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """The states of this rank's heads over the keys of all ranks.

        Parameters
        ----------
        o
            [rows, num_heads, head_dim] of `dtype`, over this rank's keys.
        lse
            [rows, num_heads] of float32; -inf where a row has no key here.
        out
            [rows, own heads, head_dim] of `out_dtype` to write, or None.
        lse_out
            [rows, own heads] of float32 to write, or None.
        return_lse
            Return (out, lse_out) instead of out.

        Notes
        -----
        It is launched on the current stream of the arrays' framework; the host waits for nothing.
        """
        if self._is_closed:
            raise DistributedError("this exchange is closed; make a new one")
        self.group.check()
        arrays = _make_arrays(o, lse, out, lse_out)
        options = _make_options(self._serial, return_lse)
        answer = self._run_cached(arrays, options)
        if answer is not None:
            return answer

        # --- 1. Validate ---
        returns_lse = parse.flag(return_lse, "return_lse")
        views = _Arrays._make(
            None if x is None else array.view(x, name)
            for x, name in zip(arrays, _Arrays._fields, strict=True)
        )
        for x, name in ((o, "o"), (lse, "lse")):
            if x is None:
                raise ArgumentError(f"{name}: got None; wanted the states of this rank's keys")
        rows = self._check(views)
        shape = rows, self.own_heads, self.head_dim
        made = self._outputs(views, shape, returns_lse)

        # --- 2. Exchange ---
        if rows:
            self.meet(rows, views.o)
            self._known_rows.add(rows)
            if self._levels is not None:
                self._run_levels(self._levels, views, made)
            elif self._windows is not None:
                self._run_by_windows(views, made, arrays, options)
            else:
                self._run_packed(views, made)
        out, lse_out = (
            x if given is not None or x is None else array.deliver(x, views.o)
            for x, given in zip(made, (views.out, views.lse_out), strict=True)
        )
        return (out, lse_out) if returns_lse else out

    def words(self) -> str:
        """What is exchanged, by what, in a line."""
        if self._is_closed:
            way = "closed"
        elif self._levels is not None:
            way = "in two levels, of a host and between hosts"
        else:
            way = "by windows" if self.by_windows else "by all_to_all"
        states = f"{self.max_rows} rows of {self.num_heads} heads of {self.head_dim} columns"
        return f"{self.group.describe()}; up to {states}, {self.dtype}, {way}"

    def __repr__(self) -> str:
        return f"<StateExchange: {self.words()}>"

    def close(self) -> None:
        """Give the memory back that peers write. All ranks close, once none exchanges any more."""
        self._is_closed = True
        for memory in (self._levels, self._windows):
            if memory is not None:
                memory.close()

    # --- several hosts ---

    def _make_levels(self, uses_windows: bool | None) -> TwoLevels | None:
        layout = two_levels.layout_of(self.group.hosts)
        if layout is None:
            return None
        make = functools.partial(
            StateExchange,
            dtype=self.dtype,
            lse_base_on_e=self.lse_base_on_e,
            timeout=self.timeout,
        )
        return TwoLevels(
            self.group,
            layout,
            make,
            self.max_rows,
            self.num_heads,
            self.head_dim,
            dtype=self.dtype,
            out_dtype=self.out_dtype,
            uses_windows=uses_windows,
        )

    def _run_levels(self, levels: TwoLevels, views: _Arrays, made: tuple[Any, Any]) -> None:
        try:
            out, lse_out = made
            levels.run(views.o, views.lse, out, lse_out)
        except DeviceError as error:
            # Ranks of other hosts and places wait in other groups.
            self.group.fail(self.group.failure() or str(error))
            raise

    # --- windows ---

    def _make_windows(self, is_required: bool) -> Mailbox | None:
        """What peers write, where they can; on the GPU only."""
        group, max_states = self.group, self.max_rows * self.own_heads
        vectors = exchange_states.vectors_of(self.head_dim, self.dtype)
        fits = vectors > 0 and self.head_dim <= exchange_states.MAX_HEAD_DIM
        fits = fits and group.size <= exchange_states.MAX_RANKS
        fits = fits and max_states <= exchange_states.MAX_STATES
        window = None
        groups = exchange_states.groups_of(max_states)
        if group.on_gpu and fits and exchange_states.has_whole_words():
            size = exchange_states.window_bytes(group.size, groups, self.head_dim, self.dtype)
            window = group.window(size)
        if window is None:
            if is_required:
                raise UnsupportedError(
                    f"uses_windows: {group.describe()} has no memory that peers can write for "
                    f"states of {self.head_dim} columns of {self.dtype}; leave uses_windows out"
                )
            return None
        exchange_states.load(
            self.dtype, self.out_dtype, self.head_dim, group.size, self._device
        )  # before anybody waits for this rank on the GPU
        memory = Mailbox(group, window, groups, self._device, self.timeout)
        group.share_bytes(b"")
        return memory

    def _run_cached(self, arrays: _Arrays, options: _Options) -> Any:
        """The answer of a call that is in the cache, else None."""
        answer = _CALLS.lookup(arrays, options)
        if answer is None:
            return None
        found, addresses = answer
        call = found.call
        if call.outputs and call.overlaps(addresses, found.sizes):
            return None
        checked, out, lse = call.checked, arrays.out, arrays.lse_out
        if out is None:
            out = call.make_out(checked.out_shape)
            addresses[_OUT] = call.address(out)
        if lse is None and options.return_lse:
            lse = call.make_lse(checked.lse_shape)
            addresses[_LSE_OUT] = call.address(lse)
        checked.exchange.enqueue(call.current_stream(), addresses)
        return (out, lse) if options.return_lse else out

    def _run_by_windows(
        self,
        views: _Arrays,
        made: tuple[Any, Any],
        arrays: _Arrays,
        options: _Options,
    ) -> None:
        assert self._windows is not None
        out, lse_out = (None if x is None else array.view(x, "out") for x in made)
        assert out is not None
        count = exchange_states.count_of(self.dtype)
        _require_aligned(views.o, "o", _ALIGNMENT)
        _require_aligned(out, "out", min(count * out.dtype.itemsize, _ALIGNMENT))
        exchange = exchange_states.prepare(
            views.o,
            views.lse,
            out,
            lse_out,
            self._windows.windows,
            base_on_e=self.lse_base_on_e,
        )
        used = [x for x in (views.o, views.lse, out, lse_out) if x is not None]
        array.acquire(views.o, *used)
        addresses = [x.ptr for x in used] + [0] * (len(_Arrays._fields) - len(used))
        exchange.enqueue(array.current_stream(views.o), addresses)
        array.release(views.o, *used)
        checked = _Checked(exchange, out.shape, out.shape[:2])
        _CALLS.insert(arrays, options, checked, views.o, out.dtype, out.shape, out.shape[:2])

    # --- collectives ---

    def _run_packed(self, views: _Arrays, made: tuple[Any, Any]) -> None:
        """By all_to_all: a rank's part is its states, row by row, and then their LSE."""
        if not self.group.on_gpu:
            o, lse = array.as_numpy(views.o), array.as_numpy(views.lse)
            self._pack_and_merge(o, lse, views.o, made, None)
            return
        stream = array.current_stream(views.o)
        array.acquire(views.o, views.o, views.lse)
        with cuda().Device(self._device), as_stream(stream):
            o, lse = (array.as_cupy(x) for x in (views.o, views.lse))
            self._pack_and_merge(o, lse, views.o, made, stream)
        array.release(views.o, views.o, views.lse)

    def _pack_and_merge(
        self, o: Any, lse: Any, like: ArrayView, made: tuple[Any, Any], stream: int | None
    ) -> None:
        """o, lse: arrays of NumPy or CuPy."""
        size, rows, heads, columns = self.group.size, o.shape[0], self.own_heads, self.head_dim
        itemsize = self.dtype.itemsize
        # LSE come first, and both on boundaries that the merge kernel likes.
        lse_bytes = _round_up(rows * heads * 4)
        part = lse_bytes + _round_up(rows * heads * columns * itemsize)

        def split(x: Any, dtype: Any) -> tuple[Any, Any]:
            """The states of all parts [rank, row, head, column], and their LSE."""
            of_lse = x.view(np.float32).reshape(size, -1)[:, : rows * heads]
            states = x.view(dtype).reshape(size, -1)[:, lse_bytes // itemsize :]
            states = states[:, : rows * heads * columns]
            return states.reshape(size, rows, heads, columns), of_lse.reshape(size, rows, heads)

        sent, got = self._bytes(size * part, like), self._bytes(size * part, like)
        bits = f"u{itemsize}"  # what is copied only
        to_states, to_lse = split(sent, bits)
        to_states[...] = o.view(bits).reshape(rows, size, heads, columns).transpose(1, 0, 2, 3)
        to_lse[...] = lse.reshape(rows, size, heads).transpose(1, 0, 2)
        self.group.all_to_all(got, sent, stream)
        v, s = (x.swapaxes(0, 1) for x in split(got, self.dtype.numpy))
        arrays = merge_states.Arrays(v, s_a=s, out=made[0], lse=made[1])
        merge_states.run(merge_states.STATES, arrays, self.lse_base_on_e)

    def _bytes(self, count: int, like: ArrayView) -> Any:
        """So many bytes, which on a GPU the caller's framework allocates."""
        if not self.group.on_gpu:
            return np.empty(count, np.uint8)
        return array.as_cupy(array.view(array.empty((count,), dtypes.uint8, like), "a buffer"))

    # --- checks ---

    def _check(self, views: _Arrays) -> int:
        """The number of rows."""
        dims = Dims(H=self.num_heads, D=self.head_dim)
        match_array(views.o, "rows H D", (self.dtype,), "o", dims)
        require_contiguous_last(views.o, "o")
        match(views.lse, "rows H", dims, "lse")
        require_dtype(views.lse, dtypes.float32, "lse")
        device = array.same_device(**{k: v for k, v in views._asdict().items() if v is not None})
        is_here = device.kind == "cuda" and device.index == self._device
        if not (is_here if self.group.on_gpu else device.kind == "cpu"):
            wanted = f"cuda:{self._device}" if self.group.on_gpu else "the CPU"
            raise ArgumentError(f"o: is on {device}; wanted {wanted}, as the group is")
        rows: int = dims["rows"]
        if rows > self.max_rows:
            raise ArgumentError(
                f"o: has {rows} rows; this exchange was made for max_rows={self.max_rows}; make "
                "one for more, or exchange parts of the rows"
            )
        return rows

    def _outputs(
        self, views: _Arrays, shape: tuple[int, int, int], returns_lse: bool
    ) -> tuple[Any, Any]:
        """The arrays to write: the caller's, or new ones; None for an LSE that nobody wants."""
        others = {"o": views.o, "lse": views.lse}
        out, lse_out = views.out, views.lse_out
        match_output(lse_out, shape[:2], dtypes.float32, "lse_out", **others)
        match_output(out, shape, (self.out_dtype,), "out", **others, lse_out=lse_out)
        if out is not None:
            require_contiguous_last(out, "out")
        like = views.o
        made = array.empty(shape, self.out_dtype, like) if out is None else out.owner
        if lse_out is not None:
            return made, lse_out.owner
        needs_lse = returns_lse or self._windows is None
        return made, array.empty(shape[:2], dtypes.float32, like) if needs_lse else None

    def meet(self, rows: int, like: ArrayView) -> None:
        """Wait for the peers on the host where a number of rows is new: they may be compiling.

        It raises DistributedError where they have other numbers of rows. `run` does this too, so
        that a number is new until then."""
        if rows in self._known_rows:
            return
        if self.group.on_gpu and cuda().is_capturing(array.current_stream(like)):
            return
        self.group.handshake({"rows of o": rows})


def _float_dtype(value: Any, name: str) -> DType:
    dtype = dtypes.parse(value)
    if dtype not in _FLOATS:
        raise ArgumentError(f"{name}: got {dtype}; wanted float32, float16 or bfloat16")
    return dtype


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _require_aligned(v: ArrayView, name: str, num_bytes: int) -> None:
    offsets = v.ptr
    for extent, stride in zip(v.shape[:-1], v.strides[:-1], strict=True):
        offsets |= stride * v.dtype.itemsize if extent > 1 else 0
    if offsets % num_bytes:
        raise ArgumentError(
            f"{name}: rows begin off {num_bytes}-byte boundaries (strides {list(v.strides)}); pass "
            "a contiguous array, or make the exchange with uses_windows=False"
        )
