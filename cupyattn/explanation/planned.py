"""The launches of a schedule, in numbers: who computes what, by the work lists that they read."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..launch.attention.batch import BatchLauncher
from ..launch.attention.kernels import Kernel
from ..launch.attention.layout import ITEM_BYTES, BatchSchedule, LaunchPart
from ..schedule.batch import WORK_FIELDS, listed_parts
from ..schedule.masking import Masking
from .record import PlannedLaunch
from .timeline import BLOCK, LaunchBlocks, Rates

_QO_LEN, _KV_LEN, _FIRST_ROW, _SPLIT, _NUM_SPLITS, _KEY_OFFSET = map(
    WORK_FIELDS.index, ("qo_len", "kv_len", "first_row", "split", "num_splits", "key_offset")
)


class _Work(NamedTuple):
    """The items of a launch: key tiles and keys of each, the kind of its tiles, and its parts."""

    key_tiles: np.ndarray
    keys: np.ndarray
    kind: np.ndarray
    splits: np.ndarray
    shares_keys: bool


def planned_launches(
    launcher: BatchLauncher, schedule: BatchSchedule, rates: Rates
) -> tuple[list[PlannedLaunch], list[LaunchBlocks]]:
    """Each kernel of a schedule, and what its blocks take by the card's rates."""
    result, blocks = [], []
    is_beside, is_of_levels = False, has_levels(schedule)
    for part in schedule.parts:
        if not part.launches:
            continue
        kernel, work = launcher.kernel(part.row_class), _work_of(launcher, schedule, part)
        states = _num_states(launcher, work, is_of_levels)
        may_overlap = is_beside and part.launches[0][0].prologue is None
        launch = _launch(launcher, part, kernel, work, states)
        merge = _merge(part, states, is_of_levels)
        result.append(replace(launch, is_beside=may_overlap, merge=merge))
        times = _block_times(launcher, kernel, work, result[-1], rates)
        blocks.append(_blocks(result[-1], kernel, times, part.merge is not None))
        is_beside |= part.tiles is not None
    return result, blocks


def has_levels(schedule: BatchSchedule) -> bool:
    """Whether it is that of a cascade, whose launches leave states for one merge."""
    return any(part.merge_sizes[1] for part in schedule.parts)


def row_bytes(launcher: BatchLauncher) -> int:
    """Of one key and its value, for one key head."""
    problem = launcher.problem
    columns = problem.head_dim_qk + (0 if problem.latent else problem.head_dim_vo)
    return columns * problem.dtype_kv.itemsize


def _work_of(launcher: BatchLauncher, schedule: BatchSchedule, part: LaunchPart) -> _Work:
    """What the list of a launch says."""
    fields = len(WORK_FIELDS)
    first, count = part.items // 4, (part.merges - part.items) // ITEM_BYTES
    items = schedule.words[first : first + count * fields].reshape(-1, fields).astype(np.int64)
    items = items[items[:, _QO_LEN] > 0]
    kernel, group = launcher.kernel(part.row_class), launcher.group_size
    qo_len, kv_len, splits = (items[:, x] for x in (_QO_LEN, _KV_LEN, _NUM_SPLITS))
    kind = np.zeros(len(items), np.int64)
    if len(kernel.kinds) > 1:
        kind = (qo_len * group <= kernel.kinds[1].tile_q).astype(np.int64)
    tile_q, tile_kv = (
        np.array([getattr(shape, name) for shape in kernel.shapes])[kind]
        for name in ("tile_q", "tile_kv")
    )
    tile_kv = tile_kv * part.launches[0][0].cluster  # whose blocks share keys
    # Rows of a cascade may be behind all keys of a level, which lists do not tell.
    masking = Masking() if has_levels(schedule) else launcher.masking
    row = items[:, _FIRST_ROW]
    first_token, last_token = row // group, (row + tile_q - 1) // group
    max_keys = int(tile_kv.max(initial=1))
    others = items[:, _KEY_OFFSET]
    spans = masking.span_lengths(first_token, last_token, qo_len, kv_len, None, max_keys, others)
    count_of = -(-spans // tile_kv)
    begin = count_of * items[:, _SPLIT] // splits
    end = count_of * (items[:, _SPLIT] + 1) // splits
    if kernel.shapes[0].takes_cuts:
        first_tile, last_tile, _ = listed_parts(items)
        end = np.where(last_tile > 0, np.minimum(last_tile, count_of), end)
        begin = np.where(last_tile > 0, np.minimum(first_tile, end), begin)
    keys = np.maximum(np.minimum(end * tile_kv, spans) - begin * tile_kv, 0)
    return _Work(end - begin, keys, kind, splits, bool((row > 0).any()))


def _launch(
    launcher: BatchLauncher, part: LaunchPart, kernel: Kernel, work: _Work, states: int
) -> PlannedLaunch:
    heads, loaded = launcher.num_kv_heads, kernel.loaded
    launch, _ = part.launches[0]
    blocks = sum(math.prod(each.grid) for each, _ in part.launches)
    slots = loaded.num_slots
    if launch.cluster > 1:
        slots = loaded.max_clusters(launch.cluster) * launch.cluster
    is_persistent = part.tiles is not None and part.tiles.is_persistent
    num_items = work.splits.size * heads
    tile_rows = max(kind.tile_q for kind in kernel.kinds)
    return PlannedLaunch(
        kernel=loaded.tiles.name,
        tiles=part.row_class if isinstance(part.row_class, str) else " + ".join(part.row_class),
        tile_rows=tuple(shape.tile_q for shape in kernel.shapes),
        tile_keys=tuple(shape.tile_kv for shape in kernel.shapes),
        grid=launch.grid,
        blocks=blocks,
        cluster=launch.cluster,
        is_persistent=is_persistent,
        blocks_at_a_time=slots,
        waves=num_items / max(1, blocks) if is_persistent else blocks / slots,
        items=num_items,
        splits=_range(work.splits),
        key_tiles=_range(work.key_tiles),
        read_bytes=int(work.keys.sum()) * row_bytes(launcher) * heads,
        states=states,
        state_bytes=4 * states * tile_rows * (launcher.problem.head_dim_vo + 1),
        merge="",
        is_beside=False,
    )


def _num_states(launcher: BatchLauncher, work: _Work, is_of_levels: bool) -> int:
    """The partial results that a launch leaves: of tiles whose keys are split, or of all."""
    parts = work.splits.size if is_of_levels else int(np.count_nonzero(work.splits > 1))
    return parts * launcher.num_kv_heads


def _merge(part: LaunchPart, states: int, is_of_levels: bool) -> str:
    """Who merges partial results."""
    if part.merge is not None:
        return f"a launch of {math.prod(part.merge.grid):,} blocks"
    if not states:
        return ""
    return "the merge of all levels" if is_of_levels else "the last block of a tile"


def _block_times(
    launcher: BatchLauncher, kernel: Kernel, work: _Work, launch: PlannedLaunch, rates: Rates
) -> np.ndarray:
    """Microseconds that each item takes of its block, or of each block of its cluster: of products,
    or of memory where no tiles share keys."""
    problem = launcher.problem
    rows, keys = (np.array(x)[work.kind] for x in (launch.tile_rows, launch.tile_keys))
    per_sm = max(1, launch.blocks_at_a_time // kernel.loaded.num_sms)
    columns = problem.head_dim_qk + problem.head_dim_vo
    products = 2.0 * rows * keys * columns * per_sm / rates.products
    reading = keys * row_bytes(launcher) * launch.blocks_at_a_time / rates.memory
    key_tile = products if work.shares_keys else np.maximum(products, reading)
    times: np.ndarray = BLOCK + work.key_tiles * key_tile
    return times


def _blocks(
    launch: PlannedLaunch, kernel: Kernel, times: np.ndarray, has_merge: bool
) -> LaunchBlocks:
    num_items = max(1, times.size)
    return LaunchBlocks(
        name=f"{launch.kernel} ({launch.tiles})",
        times=times.repeat(launch.items * launch.cluster // num_items),
        per_sm=max(1, launch.blocks_at_a_time // kernel.loaded.num_sms),
        max_blocks=launch.blocks if launch.is_persistent else 0,
        is_beside=launch.is_beside,
        has_merge=has_merge,
    )


def _range(numbers: np.ndarray) -> tuple[int, int]:
    return (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
