"""Launches the gather_heads kernel: heads of each rank become those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ... import jit
from ...array import ArrayView
from ...core.device import device_props
from ..driver import params
from ..driver.enqueue import Launch, enqueue
from .exchange_states import (
    Windows,
    batch_of,
    groups_per_block,
    launch_of,
    threads_of,
)

_SENT_WORDS, _WORD = 4, 16
MAX_VECTORS = 256


class Gather(NamedTuple):
    """A gather of arrays of one look, wherever they are: what `params.GATHER_LOOK` packs."""

    launch: Launch
    look: bytes
    device_index: int

    def enqueue(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on x and out at these addresses."""
        arguments = params.this_thread.launch_buffer
        params.GATHER_HEADS.pack_into(arguments.buffer, arguments.offset, *addresses, self.look)
        enqueue(self.launch, arguments, self.device_index, stream)


def window_bytes(num_ranks: int, num_groups: int, vectors: int) -> int:
    """The size of a window: for even and odd gathers, what each rank writes."""
    return 2 * num_ranks * num_groups * _SENT_WORDS * vectors * _WORD


@lru_cache(maxsize=64)
def config(vectors: int, num_ranks: int) -> jit.Config:
    """The kernel's Config, for rows of so many vectors of 16 bytes."""
    return jit.Config(
        {
            "kVectors": vectors,
            "kGroups": groups_per_block(vectors),
            "kBatch": batch_of(num_ranks),
            "kThreads": threads_of(vectors),
        }
    )


def load(vectors: int, num_ranks: int, device: int) -> int:
    """The kernel, compiled."""
    chosen = config(vectors, num_ranks)
    function: int = jit.load("gather_heads", chosen, device, device_props(device).arch).function
    return function


def prepare(x: ArrayView, out: ArrayView, windows: Windows) -> Gather:
    """The gather of x [rows, heads, D] into out [rows, ranks * heads, D].

    Rows of both are whole vectors on 16-byte boundaries; none of rows, heads and D is 0.
    """
    rows, own_heads, columns = x.shape
    itemsize, device = x.dtype.itemsize, x.device.index
    vectors = columns * itemsize // _WORD
    look = params.GATHER_LOOK.pack(
        *(stride * itemsize // _WORD for v in (x, out) for stride in v.strides[:2]),
        rows * own_heads,
        own_heads,
        *params.divisor(own_heads),
        windows.pack(windows.num_groups * _SENT_WORDS * vectors),
    )
    function = load(vectors, len(windows.addresses), device)
    return Gather(launch_of(function, rows * own_heads, vectors, device), look, device)
