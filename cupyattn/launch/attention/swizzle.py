"""The order of items by which keys stay in L2."""

from __future__ import annotations

from typing import NamedTuple

from ...core.device import device_props
from ...core.problem import AttentionProblem
from ...core.spec import AttentionSpec

# The rest is left to q, o, and what comes next.
_SHARE_OF_L2 = 0.6
# One in so many is enough for blocks to end together, by a simulation; they read keys anew.
_TAIL_SHARE = 5


class L2Swizzle(NamedTuple):
    """The order of items: those of `heads_per_swizzle` KV heads come together, so that their keys
    and values stay in L2. has_tail: the shortest items of all heads follow all others."""

    heads_per_swizzle: int
    has_tail: bool

    def num_tail_items(self, num_items: int) -> int:
        return num_items // _TAIL_SHARE if self.has_tail else 0


ONE_HEAD = L2Swizzle(1, False)


def swizzle_of(
    spec: AttentionSpec, problem: AttentionProblem, kv_len: int, device_index: int
) -> L2Swizzle:
    """The order for requests of up to `kv_len` keys on a device."""
    l2_bytes = device_props(device_index).l2_bytes
    return l2_swizzle(problem, spec.num_kv_heads, kv_len, spec.right_limit >= 0, l2_bytes)


def l2_swizzle(
    problem: AttentionProblem,
    num_kv_heads: int,
    kv_len: int,
    has_right_limit: bool,
    l2_bytes: int,
) -> L2Swizzle:
    """The order for requests of up to `kv_len` keys: a power of two of heads that fit into L2, or
    another number where that would leave fewer heads for the last time."""
    row_bytes = problem.dtype_kv.itemsize * (problem.head_dim_qk + problem.head_dim_vo)
    head_bytes = kv_len * row_bytes
    fitting = int(_SHARE_OF_L2 * l2_bytes) // max(1, head_bytes)
    maximum = max(1, min(num_kv_heads, fitting))
    num_heads = 1 << (maximum.bit_length() - 1)
    if num_kv_heads % num_heads:
        num_heads = next(n for n in range(maximum, 0, -1) if num_kv_heads % n == 0)
        if 2 * num_heads < maximum:  # no divisor comes near what fits
            num_heads = -(-num_kv_heads // -(-num_kv_heads // maximum))
    return L2Swizzle(num_heads, has_right_limit and num_heads < num_kv_heads)
