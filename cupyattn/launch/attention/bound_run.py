"""Launches with everything packed that a plan decides: what is left to a run is addresses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..driver import params
from ..driver.enqueue import Launch, enqueue
from .rotate_keys import Rotation
from .tma_sm90 import Maps
from .widen_rows import Widening

# A launch with its params.PLANNED, packed, and what prefill_sm90 needs.
Step = tuple[Launch, bytes, Maps | None]


def in_order(kernels: Iterable[Step], merges: Iterable[Step]) -> tuple[Step, ...]:
    """Nothing but merges, and what has a launch ahead, needs what another leaves: the rest begins
    beside persistent blocks that it follows."""
    steps: list[Step] = []
    is_beside = False
    for launch, planned, maps in kernels:
        is_dependent = is_beside and launch.prologue is None
        is_dependent |= launch.is_dependent
        if is_dependent != launch.is_dependent:
            launch = launch._replace(is_dependent=is_dependent)
        steps.append((launch, planned, maps))
        is_beside |= maps is not None
    return (*steps, *merges)


class BoundRun(NamedTuple):
    """The launches of a plan.

    rotation  keys are rotated first; prefill_sm90 reads them where it leaves them
    widening  queries, or keys and values too, are widened first, and all launches read those
    behind    what follows params.RUN, but for latent attention
    """

    steps: tuple[Step, ...]
    device_index: int
    rotation: Rotation | None = None
    behind: bytes = b""
    widening: Widening | None = None

    def launch(
        self,
        q: int,
        k: int,
        v: int,
        o: int,
        optional: bytes,
        stream: int,
        latent: bytes = b"",
        lengths: bytes = params.NO_LENGTHS,
    ) -> None:
        """Enqueue one run on arrays at these addresses; `optional` is params.OPTIONAL, packed,
        `latent` params.LATENT for latent attention, and `lengths` what follows where blocks
        find their items."""
        arguments = params.this_thread.launch_buffer
        if self.widening is not None:
            q, k, v = self.widening.launch(q, k, v, self.device_index, stream)
        latent = latent or self.behind
        if latent:
            begin = arguments.offset + params.RUN.size
            arguments.buffer[begin : begin + len(latent)] = latent
        keys = k
        if self.rotation is not None:
            self.rotation.launch(k, self.device_index, stream)
            keys = self.rotation.to.address
        for launch, planned, maps in self.steps:
            params.RUN.pack_into(arguments.buffer, arguments.offset, q, k, v, o, optional, planned)
            if maps is not None:
                maps.pack(arguments, q, keys, v, o)
            if lengths:
                begin = arguments.offset + params.ATTENTION.size
                begin += 0 if maps is None else params.PREFILL_SM90.size
                arguments.buffer[begin : begin + len(lengths)] = lengths
            enqueue(launch, arguments, self.device_index, stream)
