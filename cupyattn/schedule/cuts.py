"""Equal shares of all key tiles: requests are cut where the share of a block ends.

Think of the requests' key tiles as one line, on which each request also takes what a part costs
besides. Each of the blocks that run at a time takes an equal stretch of it, one part after another,
so that all are done together, whatever the lengths are. A mark where a stretch ends within a
request cuts it.

kernels/cupyattn/plan/cuts.cuh is the same arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .balance import Costs

# No mark cuts off fewer key tiles: such a part is hardly worth its state.
MIN_TILES = 3
# On the device a thread has a request. More of them balance by themselves.
MAX_REQUESTS = 512
# kernels/cupyattn/shared/work.cuh, ListedPart.
_TILE_BITS, _NEXT_BITS = 25, 14
MAX_ITEMS = 1 << _NEXT_BITS


# In the time of a key tile, what a part costs besides its own, and a state that a block merges.
OVERHEAD, STATE = 5, 1.0
# Shares for each request, at most: of more than four parts a launch merges, and equal parts of few
# requests are done sooner.
SHARES_OF_A_REQUEST = 3


class Shares(NamedTuple):
    """Into how many shares a line is divided, and what a part costs besides its key tiles."""

    number: int
    overhead: int = OVERHEAD

    def size_of(self, total: int) -> int:
        """The length of a share of the line."""
        return max(-(-total // self.number), self.overhead + MIN_TILES)

    def time(self, size: int, num_requests: int, costs: Costs) -> float:
        """When all is done, merges included: a share, and what the part that a cut adds costs."""
        num_cuts = self.number - 1
        num_states = num_cuts + min(num_requests, num_cuts)
        return size + self.overhead + costs.merge + STATE * num_states / self.number


class Cuts(NamedTuple):
    """Parts of requests: those with which shares begin, then others, both in the line's order.

    num_heads   how many shares there are
    request     each part's request
    begin, end  its key tiles
    split       which of its request's parts it is
    follower    which of the others follows it in its share; -1: none
    num_splits  of each request
    size        of a share
    """

    num_heads: int
    request: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    split: np.ndarray
    follower: np.ndarray
    num_splits: np.ndarray
    size: int


def cut(key_tiles: np.ndarray, shares: Shares) -> Cuts | None:
    """Cut requests of so many key tiles into shares; None if no mark cuts any.

    Example: three requests of 10 tiles, where a part costs 2, on four blocks. The line has 36, so
    marks are at 9, 18 and 27: parts are 7 and 3, 4 and 6, and 10, which the mark at its beginning
    does not cut.
    """
    overhead, count = shares.overhead, key_tiles.size
    ends = (key_tiles + overhead).cumsum()
    begins = ends - (key_tiles + overhead)
    size = shares.size_of(int(ends[-1]))
    # --- 1. The marks that cut each request ---
    soonest = begins + (overhead + MIN_TILES)
    first = -(-soonest // size)
    num_cuts = np.maximum((ends - MIN_TILES) // size - first + 1, 0)
    num_later = int(num_cuts.sum())
    if not num_later:
        return None
    # --- 2. A mark nearer to either end of a request is there: the next begins a share ---
    is_head = -(-begins // size) * size < np.minimum(soonest, ends)
    last = (ends - 1) // size * size
    is_head[1:] |= ((last >= soonest) & (ends - last < MIN_TILES))[:-1]
    is_head[0] = True
    # --- 3. First parts, and those behind a cut, with which shares begin too ---
    later = np.arange(count).repeat(num_cuts)
    rank = np.arange(num_later) - (num_cuts.cumsum() - num_cuts)[later]
    tiles_ahead = first * size - begins - overhead  # of the first cut
    begin = tiles_ahead[later] + rank * size
    end = np.where(rank + 1 < num_cuts[later], begin + size, key_tiles[later])
    own_end = np.where(num_cuts > 0, tiles_ahead, key_tiles)
    # What follows the last part of a request: the next one, unless that begins a share.
    others = (~is_head).cumsum()
    follower = np.full(count, -1)
    follower[:-1][~is_head[1:]] = others[:-1][~is_head[1:]]
    after_first = np.where(num_cuts > 0, -1, follower)
    after_later = np.where(rank + 1 < num_cuts[later], -1, follower[later])
    # --- 4. Their places ---
    num_heads = num_later + int(is_head.sum())
    heads_ahead = (num_cuts + is_head).cumsum() - num_cuts
    position = np.where(is_head, heads_ahead - 1, num_heads - 1 + others)
    later_position = heads_ahead[later] + rank
    parts = np.empty((5, num_heads + int(others[-1])), np.int64)
    parts[:, position] = np.arange(count), 0 * begins, own_end, 0 * begins, after_first
    parts[:, later_position] = later, begin, end, rank + 1, after_later
    request, begin, end, split, follower = parts
    return Cuts(num_heads, request, begin, end, split, follower, num_cuts + 1, size)


def pack(begin: np.ndarray, end: np.ndarray, following: np.ndarray) -> np.ndarray:
    """What items say of parts: their key tiles, and the item that follows; 0: none does."""
    return (np.maximum(end, 1) << _TILE_BITS | begin) << _NEXT_BITS | following


def unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(begin, end, following) of items; an end of 0 where parts are equal."""
    end = packed >> (_TILE_BITS + _NEXT_BITS)
    begin = np.where(end > 0, packed >> _NEXT_BITS & ((1 << _TILE_BITS) - 1), 0)
    return begin, end, np.where(end > 0, packed & (MAX_ITEMS - 1), 0)
