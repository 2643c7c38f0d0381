"""Lists of keys: each token attends to blocks of its request's keys that a list of its own names.

An entry is the number of a block among the keys of the token's request. Entries that are no block
which the token sees, negative ones among them, are no keys; a block that its last key cuts gives
the keys before that. The last keys that a token sees may come besides, as a window.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import array
from ..array import ArrayView
from ..array.match import Dims, require_contiguous_last, require_dtype
from ..core import dtypes
from ..core.parse import require_int
from ..errors import ArgumentError

NAME = "lists"
MAX_GRANULARITY = 256


class KeyLists(NamedTuple):
    """What lists name.

    granularity  keys of a block, a power of two
    window       so many last keys that a token sees come besides those of its list, once
    is_causal    a token sees no key behind its own: tokens are the last of their requests
    """

    granularity: int
    window: int = 0
    is_causal: bool = True


def require_granularity(x: object, name: str = "granularity") -> int:
    """A power of two up to MAX_GRANULARITY; ArgumentError for others."""
    size = require_int(x, name)
    if size > MAX_GRANULARITY or size & (size - 1):
        raise ArgumentError(
            f"{name}: got {size}; wanted the keys of a block, a power of two from 1 to "
            f"{MAX_GRANULARITY}"
        )
    return size


def view_lists(x: object, vq: ArrayView, dims: Dims) -> ArrayView:
    """Lists [tokens, groups, entries] of int32, for q as [tokens, heads, columns]; without an axis
    of groups all heads share a list. Raises ArgumentError."""
    v = array.view(x, NAME)
    require_dtype(v, dtypes.int32, NAME)
    if len(v.shape) == 2:
        tokens, entries = v.shape
        v = array.as_strided(v, (tokens, 1, entries), (v.strides[0], 0, v.strides[1]))
    tokens, heads, _ = vq.shape
    wanted = sorted({1, dims["num_kv_heads"], heads})
    if len(v.shape) != 3 or v.shape[0] != tokens or v.shape[1] not in wanted or not v.shape[2]:
        groups = " or ".join(map(str, wanted))
        raise ArgumentError(
            f"{NAME}: shape is {list(v.shape)}; wanted [{tokens}, {groups}, entries], a list for "
            "each token and head, KV head or all heads, of one entry at least"
        )
    require_contiguous_last(v, NAME)
    if min(v.strides[:2]) < 0:
        raise ArgumentError(
            f"{NAME}: strides {list(v.strides)} are negative; pass a contiguous array"
        )
    return v
