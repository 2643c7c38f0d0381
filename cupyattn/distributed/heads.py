"""Which heads a rank has where heads are spread over ranks, as tensor parallelism does."""

from __future__ import annotations

from dataclasses import dataclass

from ..core import parse
from ..engine.spec import require_group
from ..errors import ArgumentError

_NAMES = "num_qo_heads, num_kv_heads"


@dataclass(frozen=True, slots=True)
class HeadRange:
    """The heads of one rank: those from a first one on.

    Parameters
    ----------
    first_qo_head, num_qo_heads
        The first of the heads of q and of the output, and how many there are.
    first_kv_head, num_kv_heads
        The same of the heads of keys and values.
    num_replicas
        How many ranks have the same KV heads; 1: each has its own.
    """

    first_qo_head: int
    num_qo_heads: int
    first_kv_head: int
    num_kv_heads: int
    num_replicas: int

    @property
    def qo_heads(self) -> slice:
        """For the axis of heads of q: `q[:, heads.qo_heads]`."""
        return slice(self.first_qo_head, self.first_qo_head + self.num_qo_heads)

    @property
    def kv_heads(self) -> slice:
        """For the axis of heads of k and v."""
        return slice(self.first_kv_head, self.first_kv_head + self.num_kv_heads)


def head_range(num_qo_heads: int, num_kv_heads: int, size: int, rank: int) -> HeadRange:
    """The heads of `rank` where the heads of a model are spread over `size` ranks.

    Heads of q are divided equally, in order. So are KV heads where there are as many as ranks, or a
    multiple; where there are fewer, each KV head is on size / num_kv_heads ranks, beside the heads
    of q that read it::

        >>> from cupyattn.distributed import head_range
        >>> head_range(32, 8, size=4, rank=1)
        HeadRange(first_qo_head=8, num_qo_heads=8, first_kv_head=2, num_kv_heads=2, num_replicas=1)
        >>> head_range(32, 8, size=16, rank=3).kv_heads
        slice(1, 2, None)

    Raises
    ------
    CupyAttnError
        ArgumentError where num_kv_heads does not divide num_qo_heads, size does not divide
        num_qo_heads, neither of size and num_kv_heads is a multiple of the other, or rank is none
        of the group's.
    """
    num_qo_heads = parse.require_int(num_qo_heads, "num_qo_heads")
    num_kv_heads = parse.require_int(num_kv_heads, "num_kv_heads")
    size = parse.require_int(size, "size")
    rank = parse.require_int(rank, "rank", 0)
    if rank >= size:
        raise ArgumentError(f"rank: got {rank} of {size} ranks; wanted 0 to {size - 1}")
    require_group(num_qo_heads, num_kv_heads, _NAMES)
    if num_qo_heads % size:
        raise ArgumentError(
            f"num_qo_heads: got {num_qo_heads} heads for {size} ranks; wanted a multiple of "
            f"{size}, or a number of ranks that divides the heads"
        )
    if num_kv_heads % size and size % num_kv_heads:
        raise ArgumentError(
            f"num_kv_heads: got {num_kv_heads} heads for {size} ranks; wanted a multiple of {size},"
            f" or one of its divisors, so that every rank has equally many heads of q for each KV "
            "head; use a number of ranks that divides the KV heads, or a multiple of them"
        )
    own_qo = num_qo_heads // size
    num_replicas = max(1, size // num_kv_heads)
    own_kv = max(1, num_kv_heads // size)
    return HeadRange(rank * own_qo, own_qo, rank // num_replicas * own_kv, own_kv, num_replicas)
