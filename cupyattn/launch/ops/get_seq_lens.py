"""Launches the get_seq_lens kernel."""

from __future__ import annotations

from ... import jit
from ...array import ArrayView
from ...core.device import device_props
from ..driver import params
from ..driver.enqueue import Launch, enqueue

_THREADS = 256


def launch(
    kv_indptr: ArrayView,
    kv_last_page_len: ArrayView,
    seq_lens: ArrayView,
    page_size: int,
    stream: int,
) -> None:
    """Enqueue: indptr [B + 1] and last lengths [B] -> lengths [B], contiguous int32."""
    batch_size = seq_lens.shape[0]
    device = kv_indptr.device.index
    kernel = jit.load("get_seq_lens", CONFIG, device, device_props(device).arch)
    arguments = params.this_thread.launch_buffer
    params.GET_SEQ_LENS.pack_into(
        arguments.buffer,
        arguments.offset,
        kv_indptr.ptr,
        kv_last_page_len.ptr,
        seq_lens.ptr,
        batch_size,
        page_size,
    )
    blocks = -(-batch_size // _THREADS)
    enqueue(Launch(kernel.function, (blocks, 1, 1), _THREADS, 0), arguments, device, stream)


CONFIG = jit.Config({"kThreads": _THREADS})
