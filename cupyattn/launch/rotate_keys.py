"""Launches the rotate_keys kernel."""

from __future__ import annotations

from functools import lru_cache

from .. import jit
from ..array import ArrayView, empty, view
from ..device import device_props
from ..dtypes import DType
from . import params
from .enqueue import enqueue

_THREADS = 256


@lru_cache(maxsize=256)
def config(dtype: DType, head_dim: int) -> jit.Config:
    """The kernel's Config for keys of a 16-bit dtype."""
    return jit.Config({"DType": dtype, "kHeadDim": head_dim, "kThreads": _THREADS})


def launch(
    k: ArrayView,
    k_strides: tuple[int, int],
    kv_len: int,
    num_kv_heads: int,
    head_dim: int,
    rope_table: bytes,
    like: ArrayView,
    stream: int,
) -> ArrayView:
    """Enqueue the rotation of keys [kv_len, num_kv_heads, head_dim]; returns them, contiguous.

    `k_strides` are k's (token, head) strides in elements. The scratch is allocated as like's.
    """
    device = like.device.index
    rotated = view(empty((kv_len, num_kv_heads, head_dim), k.dtype, like), "scratch")
    kernel = jit.load("rotate_keys", config(k.dtype, head_dim), device, device_props(device).arch)
    arguments = params.launch_buffer
    params.ROTATE_KEYS.pack_into(
        arguments.buffer, arguments.offset, k.ptr, rotated.ptr, *k_strides, kv_len, num_kv_heads
    )
    start = arguments.offset + params.ROTATE_KEYS.size
    arguments.buffer[start : start + len(rope_table)] = rope_table
    blocks = -(-kv_len * num_kv_heads * (head_dim // 16) // _THREADS)
    enqueue(kernel.function, (blocks, 1, 1), _THREADS, 0, arguments, device, stream)
    return rotated
