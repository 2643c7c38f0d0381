"""Launches the rotate_keys kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ... import jit
from ...core.device import device_props
from ...core.dtypes import DType
from ..driver import params
from ..driver.enqueue import Launch, enqueue
from ..driver.scratch import Allocate

_THREADS = 256
_BLOCKS_AN_SM = 16
_MAX_DEPTH = 1024
# A thread computes sines and cosines of a key once for so many heads.
_HEADS = 4
# The fields of pages of the struct, where keys have none.
NO_PAGES = 0, 0, 0


class Keys(NamedTuple):
    """What a launcher knows of its keys. page_size: tokens of a page, or 0 for ragged rows."""

    dtype: DType
    num_kv_heads: int
    head_dim: int
    page_size: int
    rope_table: bytes
    device_index: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the rotated keys of a token, which are contiguous."""
        return self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, int, int]:
        """(token, head, page) strides of the rotated keys in elements."""
        row = self.num_kv_heads * self.head_dim
        return row, self.head_dim, row * self.page_size


class Where(NamedTuple):
    """Memory for rotated keys: its address, and the rows or pages that there are."""

    address: int
    size: int


class Rotation(NamedTuple):
    """A launch with everything packed but the address of the keys."""

    step: Launch
    packed: bytes
    to: Where

    def launch(self, k: int, device_index: int, stream: int) -> None:
        """Enqueue the rotation of keys at address `k`."""
        arguments = params.this_thread.launch_buffer
        params.ROTATE_KEYS.pack_into(arguments.buffer, arguments.offset, k, self.packed)
        enqueue(self.step, arguments, device_index, stream)


@lru_cache(maxsize=256)
def config(dtype: DType, head_dim: int, paged: bool) -> jit.Config:
    """The kernel's Config for keys of a 16-bit dtype."""
    return jit.Config(
        {
            "DType": dtype,
            "kHeadDim": head_dim,
            "kThreads": _THREADS,
            "kHeads": _HEADS,
            "kPaged": paged,
        }
    )


def launch(
    keys: Keys,
    k: int,
    k_strides: tuple[int, int],
    kv_len: int,
    stream: int,
    allocate: Allocate,
) -> tuple[int, object]:
    """Enqueue the rotation of keys [kv_len, num_kv_heads, head_dim] at address `k`.

    `k_strides` are k's (token, head) strides in elements. Returns the address of the rotated keys,
    which are contiguous, and their owner.
    """
    rotated, owner = allocate(kv_len * keys.row_bytes)
    packed = params.ROTATION.pack(
        0,
        0,
        rotated,
        *k_strides,
        0,
        kv_len,
        keys.num_kv_heads,
        1,
        1,
        *NO_PAGES,
        0,
        keys.rope_table,
    )
    num_blocks = -(-kv_len * (keys.head_dim // 16) // _THREADS)
    rotation = Rotation(step(keys, num_blocks), packed, Where(rotated, kv_len))
    rotation.launch(k, keys.device_index, stream)
    return rotated, owner


def step(keys: Keys, num_shares: int) -> Launch:
    """A launch of blocks for so many shares of the keys, and for each few heads."""
    props = device_props(keys.device_index)
    kernel_config = config(keys.dtype, keys.head_dim, keys.page_size > 0)
    kernel = jit.load("rotate_keys", kernel_config, keys.device_index, props.arch)
    heads = -(-keys.num_kv_heads // _HEADS)
    # Few requests of few rows have many keys.
    depth = min(_MAX_DEPTH, -(-_BLOCKS_AN_SM * props.num_sms // max(1, num_shares * heads)))
    return Launch(kernel.function, (num_shares, heads, depth), _THREADS, 0)
