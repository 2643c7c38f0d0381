"""The copy of a plan to the device.

A plan is written into pinned host memory and copied from there while the host goes on. There are
two such blocks, used in turn, and each has an event that says when the last copy out of it is over:
planning again while an earlier plan is still on its way waits for that, and overwrites nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import dtypes
from ..launch.driver.enqueue import cuda
from .workspace import on_device

_HOST_TO_DEVICE = 1
_MIN_WORDS = 4096

# (offset, size) of int32 words in the block, and the address they go to.
Copy = tuple[int, int, int]


class _Block:
    """Pinned host memory and the event after which it may be written again."""

    __slots__ = ("_memory", "address", "event", "is_in_flight", "words")

    def __init__(self, num_words: int) -> None:
        self.words, self._memory = alloc_pinned(num_words)
        self.address = self.words.ctypes.data
        self.event = _make_event()
        self.is_in_flight = False

    def wait(self) -> None:
        if self.is_in_flight:
            self.event.synchronize()
            self.is_in_flight = False


def alloc_pinned(num_words: int) -> tuple[np.ndarray, object]:
    from cupy.cuda import alloc_pinned_memory

    memory = alloc_pinned_memory(4 * num_words)
    return np.frombuffer(memory, np.int32, num_words), memory


def _make_event() -> Any:
    from cupy.cuda import Event

    return Event(disable_timing=True)


class Staging:
    """Two pinned blocks, used in turn, out of which plans are copied to one device."""

    def __init__(self, device_index: int) -> None:
        self._device = device_index
        self._blocks: list[_Block | None] = [None, None]
        self._turn = 0

    def block(self, num_words: int) -> np.ndarray:
        """int32 [>= num_words] of pinned memory that no copy is reading any more."""
        self._turn = 1 - self._turn
        block = self._blocks[self._turn]
        if block is not None:
            block.wait()
        if block is None or block.words.size < num_words:
            size = max(_MIN_WORDS, 1 << (num_words - 1).bit_length())
            with on_device(self._device):
                block = self._blocks[self._turn] = _Block(size)
        return block.words

    @property
    def address(self) -> int:
        """The address of the block that `block` returned last, at which the GPU reads it too."""
        block = self._blocks[self._turn]
        assert block is not None
        return block.address

    def send(self, copies: Sequence[Copy], stream: int) -> None:
        """Enqueue copies out of the block that `block` returned last."""
        block = self._blocks[self._turn]
        assert block is not None
        api = cuda()
        if api.get_device() != self._device:
            with api.Device(self._device):
                self.send(copies, stream)
            return
        runtime, base = api.runtime, block.address
        block.is_in_flight = True
        try:
            for offset, size, target in copies:
                if size:
                    source = base + 4 * offset
                    runtime.memcpyAsync(target, source, 4 * size, _HOST_TO_DEVICE, stream)
        finally:
            runtime.eventRecord(block.event.ptr, stream)

    def __del__(self) -> None:
        # The pool may hand pinned memory out again at once.
        for block in getattr(self, "_blocks", ()):
            if block is not None:
                with contextlib.suppress(Exception):
                    block.wait()


class DeviceBuffer:
    """int32 words on the device of a workspace, in memory of its framework."""

    def __init__(self, like: ArrayView) -> None:
        self._like = like
        self.view: ArrayView | None = None
        # Launches on any stream may still read outgrown memory. Sizes double, so it stays small.
        self._outgrown: list[ArrayView] = []

    @property
    def size(self) -> int:
        return 0 if self.view is None else self.view.shape[0]

    @property
    def address(self) -> int:
        return 0 if self.view is None else self.view.ptr

    def reserve(self, num_words: int, exactly: bool = False) -> int:
        """The address of at least `num_words` words; the memory moves if it has to grow."""
        if num_words > self.size:
            if self.view is not None:
                self._outgrown.append(self.view)
            size = num_words if exactly else max(_MIN_WORDS, 2 * num_words)
            self.view = array.view(array.empty((size,), dtypes.int32, self._like), "int workspace")
        return self.address


@dataclass(slots=True)
class Upload:
    """What a plan brings to the device at once, each part from a 16-byte boundary on.

    own     parts of memory of the wrapper's own, where they lie one behind the other, by name
    others  parts that have addresses of their own
    """

    own: dict[str, np.ndarray] = field(default_factory=dict)
    others: list[tuple[np.ndarray, int]] = field(default_factory=list)

    @property
    def num_own_words(self) -> int:
        return sum(map(_room_of, self.own.values()))

    def send(self, staging: Staging, base: int, stream: int) -> dict[str, int]:
        """Enqueue the copies; base: of the memory of the wrapper's own. The addresses of the parts
        that lie there."""
        parts = list(self.own.values()) + [part for part, _ in self.others]
        total = sum(map(_room_of, parts))
        if not total:
            return dict.fromkeys(self.own, base)
        block, begin, offsets = staging.block(total), 0, []
        for part in parts:
            offsets.append(begin)
            block[begin : begin + part.size] = part
            begin += _room_of(part)
        num_own = self.num_own_words
        copies = [(0, num_own, base)] if num_own else []
        for offset, (part, target) in zip(offsets[len(self.own) :], self.others, strict=True):
            copies.append((offset, part.size, target))
        staging.send(copies, stream)
        return {name: base + 4 * offset for name, offset in zip(self.own, offsets, strict=False)}


def _room_of(part: np.ndarray) -> int:
    return -(-part.size // 4) * 4
