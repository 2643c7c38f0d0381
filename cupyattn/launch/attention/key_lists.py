"""Launches attention by lists: each token attends to blocks of keys that a list of its own names.

All lists have one length, so the grid says who does what: a block for each token, head and part of
the list. Nothing is planned, and nothing of the lists or lengths is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...core.device import device_props
from ...core.problem import AttentionProblem
from ...core.spec import AttentionSpec
from ...schedule import Masking
from ...schedule.batch import BatchRequests, Splitting, TileWork, alike_splits
from ...schedule.tile_shape import TileShape
from ..driver import params, scratch
from ..driver.enqueue import MAX_GRID_YZ, Launch, enqueue
from ..driver.scratch import Allocate
from ..tiles import decode_sm80
from ..tiles.config import Target, TileConfig
from ..tiles.decode_sm80 import one_an_sm_rows
from ..tiles.row_classes import DECODE, MAX_ROWS, ONE_AN_SM, VERIFY
from . import log_choices, merge_splits
from .kernels import Kernel, Kernels
from .key_list_arrays import ListAddresses, Lists
from .key_unions import GRANULARITIES, UnionLauncher, refusal_of_unions

# The keys of a request that has no pages are one: a page of more keys than there are.
_ONE_PAGE = 1 << 30
_MAX_PLANS = 4096
# Sizes of clusters that lists are shared by, and the most parts of a list.
_CLUSTERS = 8, 4, 2
_MAX_PARTS = 32
# What blocks that have an SM each take, fitted to models' lists on an H200 (docs/ladder.md): bytes
# that a block reads in a microsecond, the share of the memory's rate that all of them get, and the
# microseconds of a launch that merges. Where both limits are near, neither is reached.
_BLOCK_RATE, _SHARE_OF_MEMORY, _MERGE = 55e3, 0.84, 1.8
_SHARPNESS = 4
_MEMORY_RATE = 3350  # GB/s of a card that does not say its own


class Offer(NamedTuple):
    """What may read each list by itself, and when all would be done, in microseconds."""

    name: str
    time: float | None
    is_taken: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """Launches for so many tokens and keys, each with its share of the Params struct, and the
    scratch memory that they have."""

    parts: tuple[tuple[Launch, bytes], ...]
    partial_o_bytes: int = 0
    partial_bytes: int = 0
    num_counters: int = 0
    merge: Launch | None = None


def serves(problem: AttentionProblem) -> bool:
    """Whether lists may name the keys of a problem: they do not follow one another, so that what
    is known of a range of keys does not hold."""
    return not (
        problem.custom_mask
        or problem.pos_encoding != "NONE"
        or problem.transforms_logits
        or problem.key_share
        or problem.is_wide
        or problem.is_8bit
    )


def row_class_of(rows: int, problem: AttentionProblem, max_shared_bytes: int) -> str:
    """The class of the tiles of tokens with so many rows. Heads whose tiles have 16 rows at most
    take several."""
    if rows > MAX_ROWS[DECODE] and decode_sm80.of_verify(problem, max_shared_bytes) is not None:
        return VERIFY
    return DECODE


class ListLauncher:
    """Serves every call of one problem, device and geometry.

    spec: page_size 0 is for keys in rows. are_of_query_heads: each query head has a list of its
    own; else those of a KV head share one, or all heads do. problem: what the kernel is compiled
    for, if it is more than the spec says.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device_index: int,
        are_of_query_heads: bool = False,
        problem: AttentionProblem | None = None,
    ) -> None:
        # Rows are looked up one by one, so there is one kernel for all page sizes and none.
        problem = replace(problem or spec.problem(), paged=True, sparse=True)
        self.problem, self.device_index = problem, device_index
        # Heads that have lists of their own are key heads to the kernel.
        self._heads_a_key = spec.group_size if are_of_query_heads else 1
        if are_of_query_heads:
            spec = replace(spec, num_kv_heads=spec.num_qo_heads)
        self.spec = spec if spec.page_size else replace(spec, page_size=_ONE_PAGE)
        self._kernels = Kernels(
            problem, spec.num_kv_heads, spec.group_size, self.spec.page_size, device_index
        )
        self._masking = Masking(-1, -1, False)
        # Neighbours among many tokens share what their lists name.
        self.unions = None if are_of_query_heads else UnionLauncher.of(spec, problem, device_index)
        self._plans: dict[tuple[int, int], _Plan] = {}
        self._log = log_choices.log_of(self.spec, problem)

    def plan(self, num_tokens: int, num_keys: int) -> _Plan:
        """The launches for tokens whose lists have so many keys."""
        key = num_tokens, num_keys
        cached = self._plans.get(key)
        if cached is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            cached = self._plans[key] = self._prepare(num_tokens, num_keys)
        return cached

    def _prepare(self, num_tokens: int, num_keys: int) -> _Plan:
        row_class, shape, num_splits = self._choose(num_tokens, num_keys)
        tiles = self._kernels.get(row_class).kinds[0]
        rows, num_heads = self.spec.group_size, self.spec.num_kv_heads
        tiles_a_token = -(-rows // tiles.tile_q)
        num_tiles = num_tokens * tiles_a_token
        starts = range(0, num_tiles, MAX_GRID_YZ)
        parts = tuple(
            self._part(row_class, shape, first, num_tiles, num_splits) for first in starts
        )
        if num_splits == 1:
            return _Plan(parts)
        states = num_tiles * num_splits * num_heads * tiles.tile_q
        o_bytes = 4 * states * self.problem.head_dim_vo
        num_counters, merge = 0, None
        if shape.is_fused:
            num_counters = num_tiles * num_heads * shape.cluster
        else:
            merge = self._merge(tiles, num_tiles * tiles.tile_q)
        return _Plan(parts, o_bytes, o_bytes + 4 * states, num_counters, merge)

    def _choose(self, num_tokens: int, num_keys: int) -> tuple[str, TileShape, int]:
        """The blocks that serve such tokens, and in how many parts each list is divided.

        All lists are as long, so that blocks end together: what counts is that all SMs read.
        """
        shared_bytes = device_props(self.device_index).max_smem_per_block
        row_class = row_class_of(self.spec.group_size, self.problem, shared_bytes)
        kernel = self._kernels.get(row_class)
        num_tiles = -(-self.spec.group_size // kernel.kinds[0].tile_q)
        num_items = num_tokens * num_tiles * self.spec.num_kv_heads
        one_an_sm = one_an_sm_rows(self.problem, row_class)
        if kernel.loaded.has_clusters and one_an_sm and num_items <= kernel.loaded.num_sms:
            offered = self._one_an_sm(one_an_sm, num_items, num_keys)
            _, shape, parts = min(offered, key=lambda x: x[0])
            return one_an_sm, shape, parts
        rows = min(self.spec.group_size, kernel.kinds[0].tile_q)
        (_, shape), *_ = self._kernels.decode_blocks(row_class, num_tokens * num_tiles, rows)
        return row_class, shape, self._splits(num_tokens, num_keys, shape)

    def offers(self, num_tokens: int, num_keys: int) -> list[Offer]:
        """What may read each list by itself, and when all would be done where that is known."""
        row_class, taken, num_parts = self._choose(num_tokens, num_keys)
        tiles = self._kernels.get(row_class).kinds[0]
        if row_class not in ONE_AN_SM.values():
            return [Offer(_words(taken, num_parts), None, True)]
        num_items = num_tokens * -(-self.spec.group_size // tiles.tile_q) * self.spec.num_kv_heads
        offered = self._one_an_sm(row_class, num_items, num_keys)
        soonest = min(time for time, _, _ in offered)
        return [Offer(_words(shape, n), time, time == soonest) for time, shape, n in offered]

    def kernel(self, num_tokens: int, num_keys: int) -> Kernel:
        """What reads each list by itself."""
        return self._kernels.get(self._choose(num_tokens, num_keys)[0])

    def why_apart(self, lists: Lists, num_tokens: int) -> str:
        """Why lists are read by themselves, where they are."""
        if self.unions is None:
            props = device_props(self.device_index)
            target = Target(props.arch, props.max_smem_per_block, min(GRANULARITIES))
            reason = refusal_of_unions(self.problem, target)
            return reason or "2 to 32 tokens of a request have a union, by the heads of a group"
        return self.unions.refusal(lists, num_tokens) or "each list by itself is done sooner"

    def _one_an_sm(
        self, row_class: str, num_items: int, num_keys: int
    ) -> list[tuple[float, TileShape, int]]:
        """The blocks of lists that leave SMs idle, and the parts of a list: alone, in clusters that
        merge without memory, or in parts that a launch merges. And when all are read."""
        kernel = self._kernels.get(row_class)
        alone, loaded = kernel.shapes[0], kernel.loaded
        num_tiles = -(-num_keys // alone.tile_kv)
        offered = [(self._time(num_items, num_keys, num_keys), alone, 1)]
        for cluster in _CLUSTERS:
            num_clusters = loaded.max_clusters(cluster)
            if num_items <= num_clusters and cluster <= num_tiles:
                shape = alone.in_clusters(cluster, num_clusters, self._kernels.decode_times.cluster)
                part = -(-num_keys // cluster)
                offered.append((self._time(num_items, num_keys, part), shape, 1))
        apart = alone.merged_apart()
        for parts in range(2, min(loaded.num_sms // num_items, num_tiles, _MAX_PARTS) + 1):
            part = -(-num_tiles // parts) * alone.tile_kv
            offered.append((self._time(num_items, num_keys, part) + _MERGE, apart, parts))
        return offered

    def _time(self, num_items: int, num_keys: int, part: int) -> float:
        """Microseconds in which all lists are read by blocks that have so many keys each."""
        key_bytes = self._kernels.key_bytes
        rate = device_props(self.device_index).memory_rate or _MEMORY_RATE
        of_block = part * key_bytes / _BLOCK_RATE
        of_all = num_items * num_keys * key_bytes / (_SHARE_OF_MEMORY * 1e3 * rate)
        both = of_block**_SHARPNESS + of_all**_SHARPNESS
        return float(both ** (1 / _SHARPNESS))

    def _splits(self, num_tokens: int, num_keys: int, shape: TileShape) -> int:
        """In how many parts each list is divided."""
        zeros = np.zeros(num_tokens, np.int64)
        requests = BatchRequests(zeros + 1, zeros + num_keys, zeros, zeros, uniform=1)
        works = TileWork(requests, self.spec.group_size, self._masking, splits_alike=True)
        num_heads, rows = self.spec.num_kv_heads, works.max_rows
        return min(alike_splits(works.of(shape), num_heads, rows, shape, Splitting()), MAX_GRID_YZ)

    def _part(
        self, row_class: str, shape: TileShape, first: int, num_tiles: int, num_splits: int
    ) -> tuple[Launch, bytes]:
        constants = params.pack_constants(
            self.spec,
            sm_scale=self.spec.sm_scale,
            output_scale=self.spec.output_scale,
            first=first,
            num_q_tiles=num_tiles,
            num_splits=num_splits,
        )
        loaded = self._kernels.get(row_class).loaded
        grid = (
            self.spec.num_kv_heads * shape.cluster,
            min(num_tiles - first, MAX_GRID_YZ),
            num_splits,
        )
        launch = Launch(
            loaded.function,
            grid,
            loaded.tiles.threads,
            loaded.tiles.shared_bytes,
            cluster=shape.cluster,
        )
        return launch, constants

    def _merge(self, tiles: TileConfig, num_rows: int) -> Launch:
        return merge_splits.prepare(
            self.problem, tiles, num_rows, self.spec.num_kv_heads, self.device_index
        )

    def launch(
        self,
        at: ListAddresses,
        lists: Lists,
        optional: bytes,
        strides: bytes,
        num_tokens: int,
        stream: int,
        allocate: Allocate,
    ) -> None:
        """Enqueue one call. `optional` and `strides` are params.OPTIONAL and params.STRIDES,
        packed; a page's stride is a row's, or a request's, where there are no pages."""
        if self.unions is not None and (self.unions.takes_scales or not at.value_scales):
            groups = self.spec.num_kv_heads if lists.stride_group else 1
            costs = self.unions.costs(lists)
            if costs is not None and self.plan(num_tokens, lists.num_keys).partial_bytes:
                costs = None  # states of lists that are left out would wait for their merge
            unions = self.unions.plan(lists, groups, strides, num_tokens, costs)
            if unions is not None:

                def read_alone(alone: int) -> None:
                    self._read(
                        at, lists, optional, strides, num_tokens, stream, allocate, (alone, groups)
                    )

                self.unions.launch(unions, at, optional, stream, allocate, read_alone)
                if self._log is not None:
                    both = unions.union, unions.attention
                    self._log.lists(lists, num_tokens, "unions of neighbours' lists", both)
                return
        plan = self._read(at, lists, optional, strides, num_tokens, stream, allocate)
        if self._log is not None:
            launches = [launch for launch, _ in plan.parts]
            self._log.lists(lists, num_tokens, _words_of(plan), launches)

    def _read(
        self,
        at: ListAddresses,
        lists: Lists,
        optional: bytes,
        strides: bytes,
        num_tokens: int,
        stream: int,
        allocate: Allocate,
        alone: tuple[int, int] = (0, 0),
    ) -> _Plan:
        """Enqueue what reads each list by itself. alone: the address of the words that say which,
        and groups of these; 0: all."""
        num_keys = lists.num_keys
        plan = self.plan(num_tokens, num_keys)
        partial_o = partial_lse = counters = 0
        # Owners of scratch memory may go once everything is enqueued.
        if plan.partial_bytes:
            partial_o, _partials = scratch.workspace(
                plan.partial_bytes, self.device_index, stream, allocate
            )
            partial_lse = partial_o + plan.partial_o_bytes
        if plan.num_counters:
            counters, _zeros = scratch.counters(
                plan.num_counters, self.device_index, stream, allocate
            )
        arguments = params.this_thread.launch_buffer
        for launch, constants in plan.parts:
            params.ATTENTION.pack_into(
                arguments.buffer,
                arguments.offset,
                at.q,
                at.k,
                at.v,
                at.o,
                optional,
                partial_o,
                partial_lse,
                counters,
                0,
                0,
                at.table,
                0,
                strides,
                0,
                0,
                1,
                num_keys,
                constants,
            )
            begin = arguments.offset + params.ATTENTION.size
            self._pack_lists(arguments.buffer, begin, at, lists, alone)
            enqueue(launch, arguments, self.device_index, stream)
        if plan.merge is not None:
            enqueue(plan.merge, arguments, self.device_index, stream)
        return plan

    def _pack_lists(
        self,
        buffer: bytearray,
        begin: int,
        at: ListAddresses,
        lists: Lists,
        alone: tuple[int, int],
    ) -> None:
        params.KEY_LISTS.pack_into(
            buffer,
            begin,
            at.entries,
            at.kv_lens,
            at.qo_offsets,
            at.kv_offsets,
            lists.stride_n,
            lists.stride_group,
            lists.length,
            lists.granularity.bit_length() - 1,
            lists.window,
            lists.num_requests,
            lists.request_tokens,
            lists.kv_step,
            lists.max_kv_len,
            lists.is_causal,
            self._heads_a_key,
            *params.divisor(self._heads_a_key),
            lists.kv_lens_are_steps,
            *lists.steps,
            lists.k_scale_step,
            lists.v_scale_step,
            lists.v_scale_request_step,
            at.value_scales,
            *alone,
            0,
        )


def _words_of(plan: _Plan) -> str:
    """Who reads a list, for the log of choices."""
    (launch, _), *_ = plan.parts
    return _words_of_parts(launch.cluster, launch.grid[2], plan.merge is not None)


def _words(shape: TileShape, num_parts: int) -> str:
    return _words_of_parts(shape.cluster, num_parts, num_parts > 1 and not shape.is_fused)


def _words_of_parts(cluster: int, num_parts: int, is_merged: bool) -> str:
    if cluster > 1:
        return f"each list by a cluster of {cluster}"
    if num_parts == 1:
        return "each list by a block"
    return f"each list in {num_parts} parts" + ", which a launch merges" * is_merged
