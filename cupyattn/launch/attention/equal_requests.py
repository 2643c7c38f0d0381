"""Plans of requests of equal lengths: one list serves all that differ by where their keys begin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...schedule.batch import WORK_FIELDS, BatchRequests, Splitting
from ...schedule.masking import Masking
from ..driver.enqueue import MAX_GRID_YZ
from ..tiles.row_classes import DECODE, MAX_ROWS
from .layout import ITEM_BYTES, BatchSchedule, Capacity, Uniform

_Q_START, _QO_LEN, _KV_START, _KV_LEN = map(
    WORK_FIELDS.index, ("q_start", "qo_len", "kv_start", "kv_len")
)


def key_of_equal(
    requests: BatchRequests,
    group_size: int,
    masking: Masking,
    has_table: bool,
    splitting: Splitting,
    capacity: Capacity | None,
) -> tuple[object, ...] | None:
    """What decides the plan of requests with equally many rows and keys, but for places and the
    keys of the last tile; None for others, and where a plan holds more.

    has_table: keys are rotated by a table of angles.
    """
    kv_len, uniform = requests.kv_len, requests.uniform
    if uniform <= 0 or masking.has_mask or not kv_len.size:
        return None
    if requests.key_offset is not None or requests.is_shared is not None:
        return None
    # Each length is the next one's. Bytes are compared five times as fast as short arrays.
    first = int(kv_len[0])
    if kv_len[-1] != first:
        return None
    raw = kv_len.tobytes()
    if raw[kv_len.itemsize :] != raw[: -kv_len.itemsize]:
        return None
    maximum = uniform if capacity is None else max(uniform, capacity.max_qo_len)
    if has_table:  # rotated keys take room by where they are
        return None
    is_long = maximum * group_size > MAX_ROWS[DECODE]
    # No tile is shorter than 16 keys. A window begins anywhere in one, and so do the last keys
    # that a tile of some of the rows sees.
    is_exact = is_long or masking.window_left >= 0
    tiles = first if is_exact else -(-first // 16)
    # One prompt whose keys come first may need no list.
    is_first = kv_len.size == 1 and not requests.kv_start[0]
    return uniform, kv_len.size, tiles, is_first, splitting, capacity


def without_list(requests: BatchRequests, schedule: BatchSchedule, num_parts: int) -> BatchSchedule:
    """The schedule of one launch for one request, where the grid says what a list of items would: a
    block waits for its item, and only then for its pages. The same schedule where a list says more.

    num_parts: of the keys of the only tile of rows of a portable kernel; 0: there are more tiles.
    """
    (part,), count = schedule.parts, requests.qo_len.size
    if count != 1 or requests.mask_start is not None or requests.key_offset is not None:
        return schedule
    if requests.q_start[0] or requests.kv_start[0]:
        return schedule
    qo_len, kv_len = int(requests.qo_len[0]), int(requests.kv_len[0])
    ((launch, first),) = part.launches
    if part.tiles is not None:
        if part.merge is None:
            schedule.uniform = Uniform(qo_len, kv_len, launch.num_items)
    elif 0 < num_parts < MAX_GRID_YZ:
        launch = launch._replace(grid=(launch.grid[0], 1, num_parts))
        schedule.parts = (replace(part, launches=((launch, first),)),)
        schedule.uniform = Uniform(qo_len, kv_len, 1, num_parts)
    return schedule


class EqualRequests:
    """A schedule for requests of equal lengths: that of other ones differs by where keys begin."""

    __slots__ = ("_made", "_num_items", "_requests")

    def __init__(self, built: BatchSchedule, qo_len: int) -> None:
        (part,) = built.parts
        self._num_items = (part.merges - part.items) // ITEM_BYTES
        items = self._items(built.words)
        # Room for more items is behind those of this plan.
        self._num_items = int(np.count_nonzero(items[:, _QO_LEN]))
        self._requests = self._items(built.words)[:, _Q_START] // qo_len
        self._made = built

    def _items(self, words: np.ndarray) -> np.ndarray:
        return words[: self._num_items * len(WORK_FIELDS)].reshape(-1, len(WORK_FIELDS))

    def schedule(self, requests: BatchRequests) -> BatchSchedule:
        """The schedule of requests that have as many rows and tiles of keys."""
        built = self._made
        words = built.words.copy()
        items = self._items(words)
        items[:, _KV_START] = requests.kv_start.take(self._requests)
        items[:, _KV_LEN] = kv_len = int(requests.kv_len[0])
        uniform = built.uniform and built.uniform._replace(kv_len=kv_len)
        longest = kv_len if built.longest else 0
        return BatchSchedule(
            words,
            built.workspace_bytes,
            built.parts,
            longest=longest,
            uniform=uniform,
            candidate=built.candidate,
        )
