"""Launches the get_batch_indices_positions kernel."""

from __future__ import annotations

from typing import NamedTuple

from ... import jit
from ...core.device import device_props
from ...core.key_share import KeyShare
from ..driver import params
from ..driver.enqueue import Launch, enqueue

_THREADS = 256
CONFIG = jit.Config({"kThreads": _THREADS})


class FindPositions(NamedTuple):
    """The search for the requests and positions of new tokens, of any arrays."""

    function: int
    share: bytes
    device_index: int

    def enqueue(
        self,
        stream: int,
        append_indptr: int,
        seq_lens: int,
        batch_indices: int,
        positions: int,
        nnz: int,
        batch_size: int,
    ) -> None:
        """Launch: indptr [B + 1] and lengths [B] -> requests and positions [nnz], contiguous int32
        at these addresses."""
        arguments = params.this_thread.launch_buffer
        params.GET_BATCH_INDICES_POSITIONS.pack_into(
            arguments.buffer,
            arguments.offset,
            append_indptr,
            seq_lens,
            batch_indices,
            positions,
            nnz,
            batch_size,
            self.share,
        )
        launch = Launch(self.function, (-(-nnz // _THREADS), 1, 1), _THREADS, 0)
        enqueue(launch, arguments, self.device_index, stream)


def prepare(share: KeyShare, device: int) -> FindPositions:
    """The search on a device, for positions in a rank's keys."""
    arch = device_props(device).arch
    kernel = jit.load("get_batch_indices_positions", CONFIG, device, arch)
    return FindPositions(kernel.function, params.share_numbers(share), device)
