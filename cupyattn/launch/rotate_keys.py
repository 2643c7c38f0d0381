"""Launches the rotate_keys kernel."""

from __future__ import annotations

from functools import lru_cache

from .. import jit
from ..device import device_props
from ..dtypes import DType
from . import params
from .enqueue import Launch, enqueue
from .scratch import Allocate

_THREADS = 256


@lru_cache(maxsize=256)
def config(dtype: DType, head_dim: int) -> jit.Config:
    """The kernel's Config for keys of a 16-bit dtype."""
    return jit.Config({"DType": dtype, "kHeadDim": head_dim, "kThreads": _THREADS})


def launch(
    k: int,
    k_strides: tuple[int, int],
    dtype: DType,
    kv_len: int,
    num_kv_heads: int,
    head_dim: int,
    rope_table: bytes,
    device_index: int,
    stream: int,
    allocate: Allocate,
) -> tuple[int, object]:
    """Enqueue the rotation of keys [kv_len, num_kv_heads, head_dim] at address `k`.

    `k_strides` are k's (token, head) strides in elements. Returns the address of the rotated keys,
    which are contiguous, and their owner.
    """
    rotated, owner = allocate(kv_len * num_kv_heads * head_dim * dtype.itemsize)
    arch = device_props(device_index).arch
    kernel = jit.load("rotate_keys", config(dtype, head_dim), device_index, arch)
    arguments = params.this_thread.launch_buffer
    params.ROTATE_KEYS.pack_into(
        arguments.buffer, arguments.offset, k, rotated, *k_strides, kv_len, num_kv_heads, rope_table
    )
    blocks = -(-kv_len * num_kv_heads * (head_dim // 16) // _THREADS)
    grid = (blocks, 1, 1)
    enqueue(Launch(kernel.function, grid, _THREADS, 0), arguments, device_index, stream)
    return rotated, owner
