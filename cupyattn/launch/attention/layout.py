"""Where the parts of a schedule are: in the words that go to the device, and in the workspace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...core.problem import AttentionProblem
from ...schedule.batch import WORK_FIELDS, BatchRequests
from ..driver.enqueue import MAX_GRID_YZ, Launch
from ..tiles.config import TileConfig
from . import merge_levels, merge_splits, scan_mask
from .kernels import Kernels, Rows

ITEM_BYTES = 4 * len(WORK_FIELDS)
# A workspace of so many bytes serves any batch: plans that would take more split keys less.
ANY_BATCH_BYTES = 128 << 20
_MAX_CACHED = 1024
# Rows of partial states are written and read by whole lines: 16 bytes off one, a launch over latent
# keys took 10 to 18 us more.
STATES_ALIGN = 128


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a captured graph freezes.

    num_requests, num_rows  the most requests and query tokens of any later plan
    max_qo_len              query tokens of one request, as the first plan has them: they choose the
                            tile, and later plans may have more (but not under a fixed split)
    num_tokens              the most keys; matters where the size of splits is fixed, or keys are
                            rotated ahead
    levels                  of a cascade: the requests and the query tokens of the longest of each
    """

    num_requests: int
    num_rows: int
    max_qo_len: int
    num_tokens: int = 0
    levels: tuple[tuple[int, int], ...] = ()


class Reserved(NamedTuple):
    """What a kernel's share of a schedule takes.

    merges       int32 words
    split_tiles  of prefill, which merge_splits merges
    counters     split tiles of decode, for each KV head and block of a cluster, or one by which
                 blocks share work
    state_rows   rows of the states of one KV head
    levels       (tokens, levels) for merge_levels, or (0, 0)
    slots        of persistent blocks: as many as the kernel has if 0
    cluster      blocks that share an item
    keeps_order  states are merged in an order that no other request decides
    blocks       that begin with the first items and take others behind them; 0: each item has one
    """

    items: int
    merges: int = 0
    split_tiles: int = 0
    counters: int = 0
    state_rows: int = 0
    levels: tuple[int, int] = (0, 0)
    slots: int = 0
    cluster: int = 1
    keeps_order: bool = False
    blocks: int = 0


class KernelWork(NamedTuple):
    """What one kernel has to do; arrays of the reserved length, or shorter."""

    row_class: Rows
    reserved: Reserved
    items: np.ndarray
    merges: np.ndarray


# Not frozen, because every plan makes some and a frozen one is slow to make. No field changes.
@dataclass(slots=True)
class LaunchPart:
    """One kernel of a schedule. Positions are bytes into the words and the workspace.

    launches  each with its first item
    tiles     of the kernel, where its blocks are persistent
    merge     what merges states afterwards: the splits of a prefill, or the levels of a cascade
    merges    what it reads: an item of each split tile, or the tables of (tokens, levels)
    merge_sizes   (split tiles, 0), or (tokens, levels)
    mask_maps where in the workspace is what the launch ahead of it leaves
    has_counters  blocks share work by counters, or count to know who merges
    row_class  of which kernel it is (kernels.Kernels.get)
    """

    launches: tuple[tuple[Launch, int], ...]
    merge: Launch | None
    items: int
    merges: int
    counters: int
    partial_o: int
    partial_lse: int
    merge_sizes: tuple[int, int] = (0, 0)
    tiles: TileConfig | None = None
    mask_maps: int = 0
    has_counters: bool = True
    row_class: Rows = ""


class Uniform(NamedTuple):
    """Rows and keys of each of equal requests; the tiles of all, and the splits of each."""

    qo_len: int
    kv_len: int
    num_tiles: int
    num_splits: int = 1


@dataclass(slots=True)
class BatchSchedule:
    """One plan, ready for launches; nobody changes it.

    words            int32 [n]: work lists, merge lists and zeroed counters, to be copied to device
                     memory as they are, on a 16-byte boundary
    workspace_bytes  scratch for partial states and for what is found of masks (16-byte aligned)
    positions        bytes into the words, where the positions of rows are; -1 without any
    longest          the most keys that several tiles of rows read, by which heads take turns; 0:
                     no tiles share keys
    all_keys         of all requests, those that several have as often
    uniform          where the kernel reads no work list, because the grid says who does what: for
                     prefill_sm90 one request whose keys are not split, for portable kernels one of
                     a single tile of rows, for lists of keys any number of equal lengths. None: any
                     other
    requests         that were planned; None where a device counts them
    candidate        the name of what serves them (candidates.py)
    rotated          rows of k, or pages, that are rotated ahead of the launches, and the bytes that
                     takes; 0 if none are
    key_rows         of k and v that are widened ahead; 0: as many as the arrays have
    row_room         of a graph whose queries are widened ahead: the most rows of q. row_count:
                     bytes into the words, where this plan's are counted; else 0 and -1
    """

    words: np.ndarray
    workspace_bytes: int
    parts: tuple[LaunchPart, ...]
    positions: int = -1
    longest: int = 0
    all_keys: int = 0
    rotated: int = 0
    rotated_bytes: int = 0
    row_room: int = 0
    row_count: int = -1
    key_rows: int = 0
    uniform: Uniform | None = None
    requests: BatchRequests | None = None
    candidate: str = ""


class Layout:
    """Lays out the schedules of one problem, device and geometry."""

    def __init__(
        self,
        kernels: Kernels,
        problem: AttentionProblem,
        num_kv_heads: int,
        group_size: int,
        device_index: int,
    ) -> None:
        self.kernels = kernels
        self._problem = problem
        self._num_kv_heads = num_kv_heads
        self._group_size = group_size
        self._device_index = device_index
        # Parts by what decides them: many plans have the same.
        self._parts: dict[tuple[object, ...], tuple[LaunchPart, int, int]] = {}

    def lay_out(
        self, works: list[KernelWork], positions: np.ndarray | None = None
    ) -> BatchSchedule:
        parts, words_bytes, workspace_bytes = [], 0, 0
        for work in works:
            part, words_bytes, workspace_bytes = self.part(
                work.row_class, work.reserved, words_bytes, workspace_bytes
            )
            parts.append(part)
        if works and works[-1].reserved.levels[0]:
            # Kernels of a cascade leave their states in one place.
            last = parts[-1]
            parts = [
                replace(part, partial_o=last.partial_o, partial_lse=last.partial_lse)
                for part in parts
            ]
        if len(works) == 1 and words_bytes == works[0].items.nbytes and positions is None:
            return BatchSchedule(works[0].items.reshape(-1), workspace_bytes, tuple(parts))
        if len(works) == 1 and not works[0].reserved.merges and positions is None:
            items = works[0].items.reshape(-1)
            words = np.empty(words_bytes // 4, np.int32)
            words[: items.size], words[items.size :] = items, 0
            return BatchSchedule(words, workspace_bytes, tuple(parts))
        num_positions = 0 if positions is None else works[-1].reserved.levels[0]
        words = np.zeros(words_bytes // 4 + num_positions, np.int32)
        for part, work in zip(parts, works, strict=True):
            for begin, values in ((part.items, work.items), (part.merges, work.merges)):
                words[begin // 4 :][: values.size] = values.reshape(-1)
        if positions is None:
            return BatchSchedule(words, workspace_bytes, tuple(parts))
        words[words_bytes // 4 :][: positions.size] = positions
        return BatchSchedule(words, workspace_bytes, tuple(parts), words_bytes)

    def part(
        self, row_class: Rows, reserved: Reserved, words_bytes: int, workspace_bytes: int
    ) -> tuple[LaunchPart, int, int]:
        """The part, and where the next one begins in the words and in the workspace."""
        key = row_class, reserved, words_bytes, workspace_bytes
        cached = self._parts.get(key)
        if cached is None:
            if len(self._parts) >= _MAX_CACHED:
                self._parts.clear()
            cached = self._make_part(row_class, reserved, words_bytes, workspace_bytes)
            self._parts[key] = cached
        return cached

    def _make_part(
        self, row_class: Rows, reserved: Reserved, words_bytes: int, workspace_bytes: int
    ) -> tuple[LaunchPart, int, int]:
        kernel, heads = self.kernels.get(row_class), self._num_kv_heads
        loaded = kernel.loaded
        tiles = loaded.tiles
        persistent = kernel.kinds[0] if kernel.kinds[0].is_sm90 else None
        function, threads, shared_bytes = loaded.function, tiles.threads, tiles.shared_bytes
        launches: tuple[tuple[Launch, int], ...]
        mask_bytes = 0
        if persistent is not None:
            grid = persistent.grid(reserved.items, heads, reserved.slots or loaded.num_slots)
            prologue = scan_mask.prologue(persistent, reserved.items, self._device_index)
            launch = Launch(
                function, grid, threads, shared_bytes, num_items=reserved.items, prologue=prologue
            )
            mask_bytes = 0 if prologue is None else reserved.items * scan_mask.MAP_BYTES
            launches = ((launch, 0),) if reserved.items else ()
        else:
            cluster, launches = reserved.cluster, ()
            num_blocks = reserved.blocks or reserved.items
            for first in range(0, num_blocks, MAX_GRID_YZ):
                grid = heads * cluster, min(num_blocks - first, MAX_GRID_YZ), 1
                launch = Launch(function, grid, threads, shared_bytes, cluster=cluster)
                launches += ((launch, first),)
        merge, merge_sizes = None, reserved.levels
        if reserved.split_tiles:
            merged, merge_sizes = kernel.kinds[0], (reserved.split_tiles, 0)
            num_rows = reserved.split_tiles * merged.tile_q
            merge = merge_splits.prepare(
                self._problem, merged, num_rows, heads, self._device_index, reserved.keeps_order
            )
        elif reserved.levels[0]:
            num_heads = heads * self._group_size
            merge = merge_levels.prepare(
                self._problem, reserved.levels[0], num_heads, self._device_index
            )
        merges = words_bytes + reserved.items * ITEM_BYTES
        counters = merges + 4 * reserved.merges
        lse_bytes = 4 * reserved.state_rows * heads
        workspace_bytes = round_up(workspace_bytes, STATES_ALIGN)
        partial_lse = workspace_bytes + lse_bytes * self._problem.head_dim_vo
        mask_maps = round_up(partial_lse + lse_bytes)
        part = LaunchPart(
            launches,
            merge,
            words_bytes,
            merges,
            counters,
            workspace_bytes,
            partial_lse,
            merge_sizes,
            persistent,
            mask_maps,
            persistent is not None or reserved.counters > 0 or not reserved.split_tiles,
            row_class,
        )
        num_counters = reserved.counters * heads * reserved.cluster if persistent is None else 1
        end = counters + 4 * num_counters
        return part, round_up(end), mask_maps + mask_bytes


def round_up(num_bytes: int, alignment: int = 16) -> int:
    return -(-num_bytes // alignment) * alignment
