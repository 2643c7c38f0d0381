"""Launches the get_batch_indices_positions kernel."""

from __future__ import annotations

from ... import jit
from ...array import ArrayView
from ...core.device import device_props
from ..driver import params
from ..driver.enqueue import Launch, enqueue

_THREADS = 256


def launch(
    append_indptr: ArrayView,
    seq_lens: ArrayView,
    batch_indices: ArrayView,
    positions: ArrayView,
    stream: int,
) -> None:
    """Enqueue: indptr [B + 1] and lengths [B] -> requests and positions [nnz], contiguous int32."""
    nnz = batch_indices.shape[0]
    device = append_indptr.device.index
    arch = device_props(device).arch
    kernel = jit.load("get_batch_indices_positions", CONFIG, device, arch)
    arguments = params.this_thread.launch_buffer
    params.GET_BATCH_INDICES_POSITIONS.pack_into(
        arguments.buffer,
        arguments.offset,
        append_indptr.ptr,
        seq_lens.ptr,
        batch_indices.ptr,
        positions.ptr,
        nnz,
        seq_lens.shape[0],
    )
    blocks = -(-nnz // _THREADS)
    enqueue(Launch(kernel.function, (blocks, 1, 1), _THREADS, 0), arguments, device, stream)


CONFIG = jit.Config({"kThreads": _THREADS})
