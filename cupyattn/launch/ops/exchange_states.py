"""Launches the exchange_states kernel: states go to the ranks that own their heads, and merge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ... import jit
from ...array import ArrayView
from ...core import dtypes
from ...core.device import device_props, overlaps_launches
from ...core.dtypes import DType
from ...errors import CompileError
from ..driver import params
from ..driver.enqueue import Launch, enqueue

MAX_RANKS = params.MAX_RANKS
MAX_HEAD_DIM = 1024
# States of an owner are counted in 32 bits, and multiplied by two.
MAX_STATES = 2**30
# kernels/cupyattn/params/exchange_states.cuh: ExchangeControl, as it is at first.
CONTROL = (1, 0, 0, 0)

_SENT_STATES, _SENT_WORDS, _WORD = 3, 4, 16
_THREADS = 128
_MAX_BATCH = 4
# All blocks should run at once, beside those of other work.
_BLOCKS_PER_SM = 2


class Windows(NamedTuple):
    """The memory of a group's exchanges, as one rank sees it.

    addresses    of the window of each rank
    num_groups   how many times three vectors' rows a rank sends to each peer at most
    control      address of this rank's ExchangeControl on its GPU
    status       address of an int32 on the host: 0, or 1 + a rank that was late
    limit_ns     how long a peer is waited for
    """

    rank: int
    addresses: tuple[int, ...]
    num_groups: int
    control: int
    status: int
    limit_ns: int

    def pack(self, source_words: int) -> bytes:
        """PeerWindows, where each rank writes so many words."""
        return params.PEER_WINDOWS.pack(
            self.control,
            self.status,
            self.limit_ns,
            source_words,
            self.rank,
            len(self.addresses),
            *self.addresses,
            *[0] * (MAX_RANKS - len(self.addresses)),
        )


class Exchange(NamedTuple):
    """An exchange of arrays of one look, wherever they are: what `params.EXCHANGE_LOOK` packs."""

    launch: Launch
    look: bytes
    device_index: int

    def enqueue(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on arrays at these addresses: o, lse, out, and lse of out or 0."""
        arguments = params.this_thread.launch_buffer
        params.EXCHANGE_STATES.pack_into(arguments.buffer, arguments.offset, *addresses, self.look)
        enqueue(self.launch, arguments, self.device_index, stream)


def has_whole_words() -> bool:
    """Whether this NVRTC knows stores of 16 bytes as a whole: from CUDA 12.3 on."""
    try:
        major, minor = map(int, jit.nvrtc_version().split("."))
    except CompileError:  # kernels are compiled elsewhere
        return True
    return (major, minor) >= (12, 3)


def vectors_of(head_dim: int, dtype: DType) -> int:
    """The vectors of 16 bytes of a state; 0 where rows are not whole vectors."""
    num_bytes = head_dim * dtype.itemsize
    return 0 if num_bytes % _WORD else num_bytes // _WORD


def groups_of(num_states: int) -> int:
    """How many times three states are sent for so many of an owner."""
    return -(-num_states // _SENT_STATES)


def window_bytes(num_ranks: int, num_groups: int, head_dim: int, dtype: DType) -> int:
    """The size of a window: for even and odd exchanges, what each rank writes."""
    return 2 * num_ranks * _source_words(num_groups, vectors_of(head_dim, dtype)) * _WORD


def _source_words(num_groups: int, vectors: int) -> int:
    # Words of states, then of LSE, which end on a line of 128 bytes.
    return -(-(num_groups * (_SENT_WORDS * vectors + 1)) // 8) * 8


@lru_cache(maxsize=256)
def config(dtype: DType, dtype_o: DType, head_dim: int, num_ranks: int) -> jit.Config:
    """The kernel's Config."""
    vectors = vectors_of(head_dim, dtype)
    groups = groups_per_block(vectors)
    return jit.Config(
        {
            "DType": dtype,
            "DTypeO": dtype_o,
            "kHeadDim": head_dim,
            "kGroups": groups,
            "kBatch": batch_of(num_ranks),
            "kThreads": threads_of(vectors),
        }
    )


def batch_of(num_ranks: int) -> int:
    """The peers whose words a thread loads together."""
    return max(1, min(num_ranks - 1, _MAX_BATCH))


def groups_per_block(vectors: int) -> int:
    """How many times three states a block has."""
    return max(1, _THREADS // vectors)


def threads_of(vectors: int) -> int:
    """The threads of a block, whole warps."""
    return -(-groups_per_block(vectors) * vectors // 32) * 32


def count_of(dtype: DType) -> int:
    """The columns that a thread has, which it writes in one or two instructions."""
    return _WORD // dtype.itemsize


def load(dtype: DType, dtype_o: DType, head_dim: int, num_ranks: int, device: int) -> None:
    """Compile the kernel, so that the first exchange is not late."""
    chosen = config(dtype, dtype_o, head_dim, num_ranks)
    jit.load("exchange_states", chosen, device, device_props(device).arch)


def configs(dtype_o: DType, head_dim: int) -> Iterator[jit.Config]:
    """The Configs of two, four and more ranks that exchange states in float32."""
    for num_ranks in (2, 4, 8):
        yield config(dtypes.float32, dtype_o, head_dim, num_ranks)


def prepare(
    o: ArrayView,
    lse: ArrayView,
    out: ArrayView,
    out_lse: ArrayView | None,
    windows: Windows,
    *,
    base_on_e: bool,
) -> Exchange:
    """The exchange of o [rows, H, D] and lse [rows, H] for out [rows, H / ranks, D].

    Rows of o are whole vectors on 16-byte boundaries; none of rows, H and D is 0.
    """
    rows, own_heads, head_dim = out.shape
    device = out.device.index
    arch = device_props(device).arch
    num_ranks = len(windows.addresses)
    chosen = config(o.dtype, out.dtype, head_dim, num_ranks)
    vectors = vectors_of(head_dim, o.dtype)
    look = params.EXCHANGE_LOOK.pack(
        windows.num_groups * _SENT_WORDS * vectors,
        *o.strides[:2],
        *lse.strides,
        *out.strides[:2],
        *((0, 0) if out_lse is None else out_lse.strides),
        rows * own_heads,
        own_heads,
        *params.divisor(own_heads),
        *((math.log2(math.e), math.log(2.0)) if base_on_e else (1.0, 1.0)),
        windows.pack(_source_words(windows.num_groups, vectors)),
    )
    kernel = jit.load("exchange_states", chosen, device, arch)
    return Exchange(launch_of(kernel.function, rows * own_heads, vectors, device), look, device)


def launch_of(function: int, num_states: int, vectors: int, device: int) -> Launch:
    """The launch of a kernel whose threads have a vector of three states."""
    props = device_props(device)
    blocks = -(-groups_of(num_states) // groups_per_block(vectors))
    blocks = min(blocks, _BLOCKS_PER_SM * props.num_sms)
    is_dependent = overlaps_launches(props.arch)
    return Launch(function, (blocks, 1, 1), threads_of(vectors), 0, is_dependent=is_dependent)
