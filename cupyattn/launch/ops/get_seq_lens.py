"""Launches the get_seq_lens kernel."""

from __future__ import annotations

from typing import NamedTuple

from ... import jit
from ...core.device import device_props
from ..driver import params
from ..driver.enqueue import Launch, enqueue

_THREADS = 256
CONFIG = jit.Config({"kThreads": _THREADS})


class FindLengths(NamedTuple):
    """The lengths of page tables, of any arrays."""

    function: int
    page_size: int
    device_index: int

    def enqueue(
        self, stream: int, kv_indptr: int, kv_last_page_len: int, seq_lens: int, batch_size: int
    ) -> None:
        """Launch: indptr [B + 1] and last lengths [B] -> lengths [B], contiguous int32 at these
        addresses."""
        arguments = params.this_thread.launch_buffer
        params.GET_SEQ_LENS.pack_into(
            arguments.buffer,
            arguments.offset,
            kv_indptr,
            kv_last_page_len,
            seq_lens,
            batch_size,
            self.page_size,
        )
        launch = Launch(self.function, (-(-batch_size // _THREADS), 1, 1), _THREADS, 0)
        enqueue(launch, arguments, self.device_index, stream)


def prepare(page_size: int, device: int) -> FindLengths:
    """The lengths of tables with pages of so many tokens, on a device."""
    kernel = jit.load("get_seq_lens", CONFIG, device, device_props(device).arch)
    return FindLengths(kernel.function, page_size, device)
