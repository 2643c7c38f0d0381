"""Heads of each rank become those of all ranks: queries before attention, outputs behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import dtypes
from ..core.cupy_module import as_stream
from ..errors import ArgumentError
from ..launch.driver.enqueue import cuda
from ..launch.ops import exchange_states, gather_heads
from ..launch.ops.gather_heads import Gather
from .exchange import StateExchange
from .mailbox import Mailbox

_WORD = 16


class HeadGather:
    """Arrays [..., heads of a rank, columns] become [..., heads of all ranks, columns].

    Where `exchange`, whose rows, heads and device these are, goes by windows, this does too: each
    rank writes its heads into the memory of all peers, by one kernel for each array. Elsewhere the
    arrays of a call go through one all_gather, side by side.
    """

    def __init__(self, exchange: StateExchange) -> None:
        self._exchange, self._group = exchange, exchange.group
        self.by_windows = exchange.by_windows
        # By the vectors of a row; None where there is no window for those.
        self._memories: dict[int, Mailbox | None] = {}
        self._launches: dict[tuple[Any, ...], Gather] = {}

    def __call__(self, views: Sequence[ArrayView]) -> list[Any]:
        """The gathered arrays of `views`, which are of one dtype, and one shape but for columns."""
        first = views[0]
        if any(v.dtype is not first.dtype or v.shape[:-1] != first.shape[:-1] for v in views):
            parts = ", ".join(f"{v.dtype} {list(v.shape)}" for v in views)
            raise ArgumentError(
                f"q: parts are {parts}; wanted one dtype, and one shape but for columns"
            )
        memories = [self._memory(v) for v in views]
        if None in memories:
            return self._by_all_gather(views)
        return [
            self._by_windows(v, memory)
            for v, memory in zip(views, memories, strict=True)
            if memory is not None
        ]

    def close(self) -> None:
        """Give the memory back that peers write. All ranks close."""
        for memory in self._memories.values():
            if memory is not None:
                memory.close()
        self._memories.clear()
        self._launches.clear()

    # --- windows ---

    def _memory(self, v: ArrayView) -> Mailbox | None:
        """Where ranks send rows like these; made by all of them at the first."""
        num_bytes = v.shape[-1] * v.dtype.itemsize
        vectors = num_bytes // _WORD
        if not self.by_windows or num_bytes % _WORD or vectors > gather_heads.MAX_VECTORS:
            return None
        if vectors not in self._memories:
            if cuda().is_capturing(array.current_stream(v)):
                return None
            self._memories[vectors] = self._make_memory(vectors, v.device.index)
        return self._memories[vectors]

    def _make_memory(self, vectors: int, device: int) -> Mailbox | None:
        exchange, group = self._exchange, self._group
        groups = exchange_states.groups_of(exchange.max_rows * exchange.own_heads)
        window = group.window(gather_heads.window_bytes(group.size, groups, vectors))
        if window is None:
            return None
        gather_heads.load(vectors, group.size, device)  # before anybody waits for this rank
        memory = Mailbox(group, window, groups, device, exchange.timeout, "heads")
        group.share_bytes(b"")
        return memory

    def _by_windows(self, v: ArrayView, memory: Mailbox) -> Any:
        *lead, heads, columns = v.shape
        if v.ptr % _WORD or any(stride * v.dtype.itemsize % _WORD for stride in v.strides[:-1]):
            v = array.view(array.row_major(v.owner, "q"), "q")
        rows = int(np.prod(lead, dtype=np.int64))
        flat = _flat(v, rows)
        made = array.empty((*lead, self._group.size * heads, columns), v.dtype, v)
        out = _flat(array.view(made, "q"), rows)
        key = flat.shape, flat.strides, v.dtype
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = gather_heads.prepare(flat, out, memory.windows)
        array.acquire(v, v)
        launch.enqueue(array.current_stream(v), (flat.ptr, out.ptr))
        array.release(v, v)
        return array.deliver(made, v)

    # --- all_gather ---

    def _by_all_gather(self, views: Sequence[ArrayView]) -> list[Any]:
        group, first = self._group, views[0]
        *lead, heads, _ = first.shape
        columns = [v.shape[-1] for v in views]
        made = array.empty((*lead, group.size * heads, sum(columns)), first.dtype, first)
        rows = int(np.prod(lead, dtype=np.int64))
        bits = np.dtype(f"u{first.dtype.itemsize}")
        ends = np.cumsum(columns).tolist()
        if not group.on_gpu:
            parts = [array.as_numpy(v).view(bits) for v in views]
            target = array.as_numpy(array.view(made, "q")).view(bits)
            sent, got = np.empty((rows, heads, ends[-1]), bits), np.empty(target.size, bits)
            self._gather(parts, sent, got, target, None)
        else:
            stream = array.current_stream(first)
            with cuda().Device(first.device.index), as_stream(stream):
                parts = [array.as_cupy(v, bits) for v in views]
                given = rows * heads * ends[-1] * bits.itemsize
                buffers = [
                    array.empty((count,), dtypes.uint8, first)
                    for count in (given, given * group.size)
                ]
                sent, got = (array.as_cupy(array.view(x, "memory")).view(bits) for x in buffers)
                target = array.as_cupy(array.view(made, "q"), bits)
                self._gather(parts, sent.reshape(rows, heads, ends[-1]), got, target, stream)
        begins = [0, *ends[:-1]]
        return [made[..., begin:end] for begin, end in zip(begins, ends, strict=True)]

    def _gather(
        self, parts: Sequence[Any], sent: Any, got: Any, target: Any, stream: int | None
    ) -> None:
        """parts, sent [rows, heads, columns], got, target: arrays of NumPy or CuPy."""
        rows, heads, columns = sent.shape
        if len(parts) == 1 and parts[0].flags.c_contiguous:
            sent = parts[0]
        else:
            begin = 0
            for part in parts:
                end = begin + part.shape[-1]
                sent[..., begin:end] = part.reshape(rows, heads, -1)
                begin = end
        size = self._group.size
        self._group.all_gather(got, sent, stream)
        by_rank = got.reshape(size, rows, heads, columns)
        target.reshape(rows, size, heads, columns)[...] = by_rank.transpose(1, 0, 2, 3)


def _flat(v: ArrayView, rows: int) -> ArrayView:
    """[rows, heads, columns] of an array whose leading dimensions are one behind the other."""
    *lead, heads, columns = v.shape
    strides = v.strides
    expected = strides[-3] if lead else heads * columns
    step = expected
    for extent, stride in zip(reversed(lead), reversed(strides[:-2]), strict=True):
        if extent > 1 and stride != expected:
            v = array.view(array.row_major(v.owner, "q"), "q")
            return array.as_strided(v, (rows, heads, columns), (heads * columns, columns, 1))
        expected *= extent
    return array.as_strided(v, (rows, heads, columns), (step, strides[-2], strides[-1]))
