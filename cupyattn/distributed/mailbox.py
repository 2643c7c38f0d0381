"""Memory by which kernels of several ranks exchange, on one host."""

from __future__ import annotations

import numpy as np

from ..array.views import cupy_stream
from ..engine.staging import alloc_pinned
from ..launch.driver.enqueue import cuda
from ..launch.ops import exchange_states
from ..launch.ops.exchange_states import Windows
from .group import Group
from .transport import Window

_HOST_TO_DEVICE = 1
_NANOSECONDS = 1e9


class Mailbox:
    """A window that a kernel of every rank writes, what the kernel keeps, and how it tells.

    what  that peers send, for the message of one that is late
    """

    def __init__(
        self,
        group: Group,
        window: Window,
        num_groups: int,
        device: int,
        timeout: float,
        what: str = "attention states",
    ) -> None:
        self._window, self._what = window, what
        self._timeout = timeout
        self._status, self._memory = alloc_pinned(1)
        self._status[0] = 0
        with cuda().Device(device):
            self._control = cuda().alloc(len(exchange_states.CONTROL) * 4)
            # What had this memory before may still be running.
            cuda().runtime.streamSynchronize(cupy_stream(device))
        control = np.array(exchange_states.CONTROL, np.uint32)
        cuda().runtime.memcpy(
            self._control.ptr, control.ctypes.data, control.nbytes, _HOST_TO_DEVICE
        )
        self.windows = Windows(
            rank=group.rank,
            addresses=tuple(int(x) for x in window.peers),
            num_groups=num_groups,
            control=self._control.ptr,
            status=self._status.ctypes.data,
            limit_ns=round(timeout * _NANOSECONDS),
        )
        self._group = group
        group.add_check(self.late)

    def late(self) -> str | None:
        """The sentence of a peer that did not come in time, as Group.add_check wants it."""
        source = int(self._status[0])
        if not source:
            return None
        return f"rank {source - 1} did not deliver its {self._what} within {self._timeout:g} s"

    def close(self) -> None:
        """Give the window back. A peer that has been late stays the group's failure."""
        self._window.close()
        if self.late() is None:
            self._group.drop_check(self.late)
