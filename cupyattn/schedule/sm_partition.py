"""How many blocks a launch of persistent blocks has, if another runs beside it.

A persistent block keeps an SM to the end of its launch. Where all SMs have one, the launch that
follows begins when they are done: first the matrix units work, then the memory. With fewer, the
other launch streams its keys on SMs of its own meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from .balance import BLOCK_OVERHEAD
from .batch import BatchRequests, count_work, make_tiles
from .masking import Masking
from .mixed import Kinds
from .tile_shape import TileShape

# What an SM of an H200 does in a microsecond, measured: products by wgmma, and bytes of keys and
# values that blocks of decode stream, while SMs are few enough not to be limited by memory.
_FLOP, _BYTES = 4.6e6, 75e3
# With so large a share of the SMs all that memory gives is streamed.
_MOST = 0.42
# Of SMs: the choice is coarse, so that plans of like batches share what is made for it.
_STEP = 4


def persistent_grid_size(
    kernels: Sequence[Kinds], group_size: int, masking: Masking, head_dims: int, itemsize: int
) -> int:
    """Blocks of the first kernel that end when the others do on the SMs that they leave.

    head_dims: of q, k and v, o together. itemsize: of k and v.
    """
    (_, shape), *_ = kernels[0]
    first, *others = (
        [(_key_tiles(kind, group_size, masking), kind[1]) for kind in kinds] for kinds in kernels
    )
    flop = sum(n * of.tile_q * of.tile_kv * 2 * head_dims for n, of in first)
    num_bytes = sum(n * of.tile_kv * head_dims * itemsize for kinds in others for n, of in kinds)
    multiplying, streaming = flop / _FLOP, num_bytes / _BYTES
    if not multiplying or not streaming:
        return shape.num_slots
    share = min(streaming / (multiplying + streaming), _MOST)
    return shape.num_slots - int(share * shape.num_slots / _STEP) * _STEP


def _key_tiles(kind: tuple[BatchRequests, TileShape], group_size: int, masking: Masking) -> float:
    """How many each KV head's blocks visit, or might in the time of their starts and ends."""
    requests, shape = kind
    tiles = make_tiles(requests, group_size, shape, masking)
    work = count_work(requests, tiles, group_size, shape, masking)
    return work.total + BLOCK_OVERHEAD * work.num_tiles
