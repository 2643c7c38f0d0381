"""Which kernels serve a batch: one a row class, or one whose blocks are of two kinds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...choose.candidates import MARGIN, Keys, timed_blocks
from ...choose.card import Card, card_of
from ...choose.tile_times import large_tiles, portable_times_of, shape_of, times_of
from ...core.device import device_props
from ...core.problem import AttentionProblem
from ...schedule.batch import BatchRequests, max_of, min_of
from ...schedule.levels import Served
from ...schedule.makespan import TileTimes
from ...schedule.masking import Masking
from ...schedule.sm_partition import DecodeLoad, decode_load_of
from ...schedule.tile_shape import CLUSTERS, DecodeKinds, TileShape
from ..tiles.config import TileConfig
from ..tiles.decode_sm80 import one_an_sm_rows
from ..tiles.row_classes import (
    DECODE,
    MAX_ROWS,
    ONE_AN_SM,
    ROW_CLASSES,
    SMALL,
    VERIFY,
    row_class_of,
)
from .load_kernels import LoadedKernel, load_kernel, load_mixed

# A row class, or the two of a mixed kernel: prefill's, then decode's.
Rows = str | tuple[str, str]
# How often the warps of a block take a row of a tile to merge its parts, at most: more are left to
# a launch, which takes some 2.5 us.
_MAX_PASSES = 2
# States that a warp of a fused merge asks for at a time: more of them are two round trips.
MAX_PARTS = 16
# Parts up to which more warps than those of an ordinary block merge as fast as a launch.
_PARTS_A_WARP = 4
# Requests of each row class have more rows than this.
_ROWS_BELOW = np.array([0, *MAX_ROWS.values()])
# Every kernel looks up each key by itself where a page has fewer keys.
_FEW_KEYS = 8
# The keys of a request that has not been counted yet: many, but few enough for clusters to help.
UNKNOWN_LENGTH = 4096
_MAX_CACHED = 1024


# Plans ask for the same few shapes.
_merged_apart = lru_cache(maxsize=256)(TileShape.merged_apart)


class Kernel(NamedTuple):
    """A kernel, and what a plan must know of each kind of its tiles."""

    loaded: LoadedKernel[Any]
    kinds: tuple[TileConfig, ...]
    shapes: tuple[TileShape, ...]


class KernelGroup(NamedTuple):
    """A kernel and the requests of each kind of its tiles: which they are, and they."""

    row_class: Rows
    kernel: Kernel
    dealt: list[tuple[np.ndarray, BatchRequests]]

    @property
    def kinds(self) -> list[tuple[BatchRequests, TileShape]]:
        return [(x, s) for (_, x), s in zip(self.dealt, self.kernel.shapes, strict=True)]

    def served(self, maximum: int) -> list[Served]:
        """What each kind serves of requests of up to `most` rows."""
        tiles = [kind.tile_q for kind in self.kernel.kinds]
        if len(tiles) == 1:
            rows = self.kernel.shapes[0].tile_q
            return [Served(rows, 0, maximum, tiles[0] - rows)]
        return [Served(tiles[0], tiles[1], maximum), Served(tiles[1], 0, tiles[1])]


class Kernels:
    """The kernels of one problem, page size and device, and who is served by which."""

    def __init__(
        self,
        problem: AttentionProblem,
        num_kv_heads: int,
        group_size: int,
        page_size: int,
        device_index: int,
        is_batch: bool = True,
        finds: str = "",
        form: str = "",
    ) -> None:
        """finds: what blocks find themselves (TileConfig.finding). form: of queries of 8 bits
        (launch/tiles/forms.py)."""
        self.form = form
        self._problem = problem
        self._group_size, self._num_kv_heads = group_size, num_kv_heads
        self._page_size, self._is_batch, self._finds = page_size, is_batch, finds
        self._device_index = device_index
        self._props = device_props(device_index)
        self._card = card_of(self._props)
        self._slower_keys = self._card.fp8_keys if problem.dtype_kv.is_fp8 else 1.0
        self._decode_times = self._card.decode.of_keys(self._slower_keys)
        self._known: dict[Rows, Kernel | None] = {}
        self._large: dict[str, TileShape] | None = None
        self._one_an_sm: dict[str, list[tuple[str, TileShape]]] = {}
        self._blocks: dict[tuple[str, int], tuple[str, TileShape, int]] = {}
        self._portable: dict[str, TileTimes | None] = {}

    def group(self, row_class: Rows, requests: BatchRequests, chosen: np.ndarray) -> KernelGroup:
        """The requests at these indices."""
        kernel = self.get(row_class)
        dealt = self.assign_requests(requests.select(chosen), kernel)
        return KernelGroup(row_class, kernel, [(chosen[x], own) for x, own in dealt])

    def get(self, row_class: Rows) -> Kernel:
        result = self._known.get(row_class) or self.find(row_class)
        assert result is not None, row_class
        return result

    def find(self, row_class: Rows) -> Kernel | None:
        """None if there is no kernel of these two kinds."""
        if row_class in self._known:
            return self._known[row_class]
        result = None
        if isinstance(row_class, str):
            single = load_kernel(
                self._problem,
                row_class,
                self._device_index,
                self._is_batch,
                self._page_size,
                self._finds,
            )
            result = self._kernel_of(single, (single.tiles,), self._times(single.tiles, row_class))
        else:
            large, small = row_class
            mixed = load_mixed(self._problem, large, small, self._device_index)
            if mixed is not None:
                kinds = mixed.tiles.prefill, mixed.tiles.decode
                result = self._kernel_of(mixed, kinds, None)
        self._known[row_class] = result
        return result

    def _times(self, tiles: TileConfig, row_class: str) -> TileTimes | None:
        if not tiles.is_sm90:
            return None
        times = times_of(self._card, self._problem, self._page_size, row_class)
        return times and times.of_group(self._group_size)

    def _kernel_of(
        self, loaded: LoadedKernel[Any], kinds: tuple[TileConfig, ...], times: TileTimes | None
    ) -> Kernel:
        shapes = tuple(
            TileShape(
                tiles.used_rows(self._group_size, self._num_kv_heads),
                tiles.tile_kv,
                loaded.num_slots,
                times=times,
                num_sms=loaded.num_sms,
                is_persistent=tiles.is_persistent,
                takes_cuts=tiles.takes_cuts,
                **_costs(loaded, tiles),
            )
            for tiles in kinds
        )
        return Kernel(loaded, kinds, shapes)

    def known(self) -> list[Kernel]:
        """The kernels that plans have asked for so far."""
        return [kernel for kernel in self._known.values() if kernel is not None]

    @property
    def is_paged(self) -> bool:
        return self._problem.paged

    @property
    def card(self) -> Card:
        """What kernels take on this device."""
        return self._card

    def timed_shapes(self) -> dict[str, TileShape]:
        """Tiles of prefill_sm90 that serve all rows, by name."""
        if self._large is None:
            built = large_tiles(self._problem, self._props, self._page_size)
            self._large = {
                name: shape_of(
                    tiles, times, self._group_size, self._num_kv_heads, self._props.num_sms
                )
                for name, (tiles, times) in built.items()
            }
        return self._large

    def choose(self, row_class: str, keys: Keys, max_rows: int) -> tuple[str, TileShape]:
        """The kernel for a row class, a tile of rows each request, and what a plan must know of its
        only kind of tiles: that by which requests of so many keys are done soonest."""
        if row_class not in ONE_AN_SM:
            return row_class, self.shape(row_class)
        if row_class != VERIFY:
            only, *others = self.decode_blocks(row_class, keys.num_requests, max_rows)
            if not others:
                return only
        decode_work = keys.decode_work(self._num_kv_heads, max_rows, self.key_bytes)
        result = timed_blocks(self, row_class, decode_work, lambda shape: keys.work(shape.tile_kv))
        # Warps of decode divide the keys, and to merge their 32 rows of O takes long. Those of
        # prefill divide the rows, and nothing is merged. The margin keeps SMALL for drafts of a
        # captured graph, whose lengths only the GPU knows. Where the host knows them, rows of an
        # H100 say that SMALL needs none.
        margins = {SMALL: MARGIN[row_class]}
        _, name, shape = min(result, key=lambda x: margins.get(x[1], 1.0) * x[0])
        return name, shape

    def _one_an_sm_shapes(self, row_class: str) -> list[tuple[str, TileShape]]:
        """The blocks for few requests of a row class: those that have an SM each, and clusters."""
        cached = self._one_an_sm.get(row_class)
        if cached is None:
            name = one_an_sm_rows(self._problem, row_class)
            assert name is not None, row_class
            kernel = self.get(name)
            # Clusters need neighbouring SMs, so fewer of them fit than their blocks.
            shape, times = kernel.shapes[0], self.decode_times
            shapes = [
                shape.in_clusters(x, kernel.loaded.max_clusters(x), times.cluster) for x in CLUSTERS
            ]
            # More than 16 rows were timed in clusters only.
            if row_class == DECODE:
                shapes.insert(0, shape.timed(times.one_an_sm))
            cached = self._one_an_sm[row_class] = [(name, shape) for shape in shapes]
        return cached

    def decode_blocks(
        self, row_class: str, num_requests: int, max_rows: int
    ) -> list[tuple[str, TileShape]]:
        """The blocks of decode for requests of a row class: the class of their kernel, and their
        shape."""
        key = row_class, max_rows
        cached = self._blocks.get(key)
        if cached is None:
            if len(self._blocks) >= _MAX_CACHED:
                self._blocks.clear()
            cached = self._blocks[key] = self._any_blocks(row_class, max_rows)
        name, shape, few_blocks = cached
        num_blocks = num_requests * self._num_kv_heads
        if num_blocks > few_blocks:
            return [(name, shape)]
        offered = self._one_an_sm_shapes(row_class)
        return [(name, shape), *(other for other in offered if num_blocks <= other[1].num_slots)]

    def _any_blocks(self, row_class: str, max_rows: int) -> tuple[str, TileShape, int]:
        """The blocks for any number of requests: the class of their kernel and their shape. So many
        and fewer of them may have an SM each; -1: none."""
        kernel = self.get(row_class)
        shape = kernel.shapes[0]
        if not kernel.kinds[0].fused_merge or self._problem.is_wide:
            return row_class, shape, -1
        if max_rows > _MAX_PASSES * shape.rows_at_a_time:
            shape = _merged_apart(shape)
        has_others = one_an_sm_rows(self._problem, row_class) is not None
        few_blocks = kernel.loaded.num_sms if kernel.loaded.has_clusters and has_others else -1
        return row_class, shape, few_blocks

    def shape(self, row_class: str) -> TileShape:
        """The shape of the kernel of a row class."""
        return self.get(row_class).shapes[0]

    def portable_times(self, row_class: str) -> TileTimes | None:
        """What blocks of prefill_sm80 take for a row class; None if they do not serve it, or were
        not timed."""
        if row_class not in self._portable:
            (tiles,), times = self.get(row_class).kinds, None
            if tiles.name == "prefill_sm80":
                area = tiles.tile_q, tiles.tile_kv
                times = portable_times_of(self._card, self._problem, row_class, area)
            self._portable[row_class] = times and times.of_group(self._group_size)
        return self._portable[row_class]

    @property
    def decode_times(self) -> DecodeKinds:
        """What blocks of decode take over these keys."""
        return self._decode_times

    @property
    def key_bytes(self) -> int:
        """Of a key and its value."""
        head_dims = self._problem.head_dim_qk + self._problem.head_dim_vo
        return head_dims * self._problem.dtype_kv.itemsize

    def decode_load_of(self, decodes: Sequence[BatchRequests], masking: Masking) -> DecodeLoad:
        """What launches of decode for these requests read."""
        has_tiny_pages = self._problem.paged and self._page_size < _FEW_KEYS
        return decode_load_of(
            decodes,
            self._num_kv_heads,
            self._slower_keys * self.key_bytes,
            masking,
            self._card.beside,
            has_tiny_pages,
            self._problem.soft_cap,
        )

    def only_blocks(self, num_requests: int, max_rows: int) -> tuple[str, TileShape] | None:
        """The blocks of decode that serve so many requests, however many keys they have; None if
        there are several to choose from."""
        offered = self.decode_blocks(DECODE, num_requests, max_rows)
        return offered[0] if len(offered) == 1 else None

    def merged_by(self, shape: TileShape, max_parts: int) -> TileShape:
        """The shape of a plan where a launch merges, if a tile has more parts than a warp asks for
        at a time; else the same."""
        is_many = max_parts > max(MAX_PARTS, _PARTS_A_WARP * shape.rows_at_a_time)
        return self.merged_if_many(shape) if is_many else shape

    def merged_if_many(self, shape: TileShape) -> TileShape:
        """The shape of a plan some of whose tiles have more than MAX_PARTS."""
        is_fused = shape.is_fused and shape.part_cost > 0 and not self._problem.is_wide
        return _merged_apart(shape) if is_fused and shape.cluster == 1 else shape

    def mixed_rows(self, lengths: np.ndarray) -> tuple[str, str] | None:
        """The row group_by_row_class of a mixed kernel for requests of so many query tokens.

        None if all are of one kind, or there is no such kernel.
        """
        if self._problem.has_tiles_of_prompts:
            return None
        rows, edge = lengths * self._group_size, MAX_ROWS[VERIFY]
        maximum = max_of(rows) if rows.size else 0
        if maximum <= edge or min_of(rows) > edge:
            return None
        large = row_class_of(maximum)
        if self.get(large).kinds[0].is_sm90:
            return None
        small = rows[rows <= edge]
        for name in dict.fromkeys((row_class_of(int(small.max())), DECODE)):
            if self.find((large, name)) is not None:
                return large, name
        return None

    def assign_requests(
        self, requests: BatchRequests, kernel: Kernel
    ) -> list[tuple[np.ndarray, BatchRequests]]:
        """The requests of each kind of a kernel, and which they are."""
        if len(kernel.kinds) == 1:
            return [(np.arange(len(requests.qo_len)), requests)]
        is_small = requests.qo_len * self._group_size <= kernel.kinds[1].tile_q
        chosen = [np.flatnonzero(~is_small), np.flatnonzero(is_small)]
        return [(x, requests.select(x)) for x in chosen]


def group_by_row_class(
    requests: BatchRequests, group_size: int, problem: AttentionProblem
) -> list[tuple[str, BatchRequests]]:
    """The requests of each row class, the largest tiles first."""
    if len(requests.qo_len) == 0:
        return []
    if problem.has_tiles_of_prompts:
        return [(row_class_of(0, problem), requests)]
    minimum, maximum = requests.qo_range()
    name = row_class_of(maximum * group_size)
    if minimum == maximum or row_class_of(minimum * group_size) == name:
        return [(name, requests)]
    classes = _ROWS_BELOW.searchsorted(requests.qo_len * group_size)
    counts, result = np.bincount(classes).tolist(), []
    for index in range(len(counts) - 1, 0, -1):  # those of class 0 have no rows
        if counts[index]:
            (indices,) = (classes == index).nonzero()
            result.append((ROW_CLASSES[index - 1], requests.select(indices)))
    return result


def _costs(loaded: LoadedKernel[Any], tiles: TileConfig) -> dict[str, Any]:
    """What a TileShape says of costs."""
    has_two = loaded.num_slots >= 2 * loaded.num_sms
    # A state of decode has few rows of its tile and is merged by the block that is last, whose
    # warps take a row each: 16 states are one round trip to L2, some 0.25 us.
    if tiles.fused_merge:
        return {
            "state_cost": 0.25,
            "part_cost": 0.03,
            "rows_at_a_time": loaded.tiles.threads // 32,
            "min_share": 0.52 if has_two else 1.0,
        }
    # One of prefill has up to 64 KB, and a launch merges them. Two blocks of few rows an SM take
    # longer than one, because keys are waited for by latency.
    is_small = tiles.name == "prefill_sm80" and tiles.tile_q <= MAX_ROWS[SMALL]
    if is_small:
        return {"state_cost": 2.0, "min_share": 0.7 if has_two else 1.0}
    return {"state_cost": 4.0}
