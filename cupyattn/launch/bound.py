"""Launches with everything packed that a plan decides: what is left to a run is addresses."""

from __future__ import annotations

from typing import NamedTuple

from . import params
from .enqueue import Launch, enqueue
from .maps_sm90 import Maps


class BoundRun(NamedTuple):
    """The launches of a plan, each with its params.PLANNED, packed, and what prefill_sm90 needs."""

    steps: tuple[tuple[Launch, bytes, Maps | None], ...]
    device_index: int

    def launch(self, q: int, k: int, v: int, o: int, optional: bytes, stream: int) -> None:
        """Enqueue one run on arrays at these addresses; `optional` is params.OPTIONAL, packed."""
        arguments = params.this_thread.launch_buffer
        for launch, planned, maps in self.steps:
            params.RUN.pack_into(arguments.buffer, arguments.offset, q, k, v, o, optional, planned)
            if maps is not None:
                maps.pack(arguments, q, k, v)
            enqueue(launch, arguments, self.device_index, stream)
