"""A work list that is made on the device once, for calls without a plan that say they are alike."""

from __future__ import annotations

from ..core import recording
from ..launch.driver import scratch
from ..launch.driver.enqueue import cuda
from .arrays import Arrays
from .prepared import Launches, Prepared

_KV_LENS = Arrays._fields.index("kv_lens")


class KeptList:
    """The list of the last call that was launched with it, and what it was made for: launches,
    where lengths are, and a stream, on which calls follow one another.

    Graphs and records keep no list: each of their calls plans, whatever was made before.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: tuple[tuple[object, ...], int, object] | None = None

    def launch(
        self,
        prepared: Launches,
        addresses: list[int],
        stream: int,
        allocate: scratch.Allocate,
    ) -> None:
        """Enqueue a call, and the planner ahead of it unless the list is there."""
        is_apart = recording.current is not None or cuda().is_capturing(stream)
        if is_apart or type(prepared) is not Prepared or not prepared.has_planner:
            prepared.launch(addresses, stream, allocate)
            return
        asked = prepared, addresses[_KV_LENS], scratch.identity(stream)
        kept = self._kept
        if kept is not None and kept[0] == asked:
            prepared.launch(addresses, stream, allocate, kept[1], is_planned=True)
            return
        self._kept = None
        address, owner = allocate(prepared.partials)
        prepared.launch(addresses, stream, allocate, address)
        self._kept = asked, address, owner
