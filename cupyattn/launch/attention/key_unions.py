"""Launches attention by lists of many tokens: neighbouring tokens share the keys of their lists.

A first launch makes the union of the lists of some tokens and a KV head, with a bit for each token
whose list names a block. prefill_sm90 then multiplies the rows of all of them by each block of the
union. Nothing of the lists or lengths is read on the host, so the grids have room for any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from ... import jit
from ...core.device import device_props
from ...core.problem import AttentionProblem
from ...core.spec import AttentionSpec
from ..driver import params, scratch
from ..driver.enqueue import Launch, enqueue, load_function
from ..driver.scratch import Allocate
from ..tiles import prefill_sm90
from ..tiles.config import Target, TileConfig, round_up
from ..tiles.row_classes import PERSISTENT
from . import tma_sm90, widen_pages
from .key_list_arrays import ListAddresses, Lists
from .load_kernels import LoadedKernel
from .swizzle import swizzle_of

GRANULARITIES = 64, 128
"""Keys of blocks whose lists may be made unions: halves of a tile, and whole ones."""

_THREADS = 128
_MIN_ENTRIES, _MAX_ENTRIES = 128, 2048
# Bits of a word, and what is known of a key's place besides its token.
_MAX_TOKENS, _MAX_KEYS = 32, 1 << 26
# kernels/cupyattn/params: WorkItem, UnionTile.
_ITEM_BYTES, _TILE_BYTES, _CUT_TILE_BYTES = 48, 16, 32
# Keys of half a tile: those of a chunk where chunks begin at any row.
_HALF = 64
_ALIGN = 256
# Requests that a warp looks at together (plan/item_finder.cuh).
_TOGETHER = 64
_MAX_PLANS = 256
# How often keys are listed that are worth widening.
_LISTED_WIDENED = 4
_OfKeys = TypeVar("_OfKeys", AttentionSpec, AttentionProblem)
# Places of strides of a row and a page of k, and of v, among params.STRIDES.
_ROWS_AND_PAGES = (2, 10), (4, 11)


class _Chunks(NamedTuple):
    """Keys that the copy engine takes for pages.

    size      keys of a chunk
    strides   params.STRIDES of such pages
    step      chunks, or rows, from a page to the next one
    num_chunks  how many there are
    num_rows  of keys, where a chunk may begin at any; else 0
    """

    size: int
    strides: bytes
    step: int
    num_chunks: int
    num_rows: int = 0


class _Room(NamedTuple):
    """Bytes from the beginning of scratch memory to what the first launch leaves, and of all."""

    chunks: int
    tiles: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """The launches for lists and arrays of one look."""

    union: Launch
    of_union: bytes
    attention: Launch
    constants: bytes
    strides: bytes
    groups: int
    window: int
    maps: tma_sm90.Maps
    room: _Room
    wide: widen_pages.WidePages | None


class UnionLauncher:
    """Serves calls of one problem, device and geometry; `of` says whether any."""

    def __init__(
        self, spec: AttentionSpec, problem: AttentionProblem, tiles: TileConfig, device_index: int
    ) -> None:
        # Keys of 8 bits are widened ahead.
        self._narrow = spec.dtype_kv if spec.dtype_kv.is_fp8 else None
        self.spec, self.problem = _in_16_bits(spec), _in_16_bits(problem)
        self.device_index = device_index
        self.group_tokens = min(tiles.tile_q // spec.group_size, _MAX_TOKENS)
        self._loaded: dict[bool, LoadedKernel[TileConfig]] = {}
        self._plans: dict[tuple[object, ...], _Plan | None] = {}

    @classmethod
    def of(
        cls, spec: AttentionSpec, problem: AttentionProblem, device_index: int
    ) -> UnionLauncher | None:
        """What serves a problem; None if nothing does."""
        props = device_props(device_index)
        target = Target(props.arch, props.max_smem_per_block, min(GRANULARITIES))
        tiles = tiles_of(problem, target)
        if tiles is None or not 2 <= tiles.tile_q // spec.group_size <= _MAX_TOKENS:
            return None
        return cls(spec, problem, tiles, device_index)

    def plan(self, lists: Lists, groups: int, strides: bytes, num_tokens: int) -> _Plan | None:
        """The launches of such a call; None where lists serve it better one by one."""
        key = lists, groups, strides, num_tokens
        if key not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            is_served = self._serves(lists) and self._is_worth_it(lists, num_tokens)
            plan = None
            if is_served:
                plan = self._prepare(lists, groups, strides, num_tokens)
            self._plans[key] = plan
        return self._plans[key]

    def _serves(self, lists: Lists) -> bool:
        return (
            lists.granularity in GRANULARITIES
            and lists.num_pages > 0
            and lists.num_requests > 0
            and self.group_tokens * (lists.length + _window_blocks(lists)) <= _MAX_ENTRIES
            and lists.max_kv_len <= _MAX_KEYS
        )

    def _is_worth_it(self, lists: Lists, num_tokens: int) -> bool:
        """Whether tokens have neighbours of their request, and blocks of rows fill the SMs: few
        tokens have their lists divided among more SMs than that. Keys that are widened ahead are
        listed several times."""
        listed = num_tokens * lists.num_keys
        if self._narrow and listed < _LISTED_WIDENED * lists.num_requests * lists.max_kv_len:
            return False
        tokens = lists.request_tokens or num_tokens / lists.num_requests
        num_items = self._num_items(lists, num_tokens) * self.spec.num_kv_heads
        num_sms = device_props(self.device_index).num_sms
        return 2 * tokens >= self.group_tokens and 2 * num_items >= num_sms

    def refusal(self, lists: Lists, num_tokens: int) -> str | None:
        """Why lists are read by themselves; None where they are united."""
        if not self._serves(lists):
            return (
                f"lists of {lists.length:,} blocks of {lists.granularity} keys have no union: "
                "there is none of such blocks, or entries are more than it sorts"
            )
        if not self._is_worth_it(lists, num_tokens):
            return (
                "too few neighbours of a request share a union, or there are fewer of these than "
                "fill half of the SMs"
            )
        return None

    def _num_items(self, lists: Lists, num_tokens: int) -> int:
        """The most groups of tokens, whatever the lengths are."""
        count, together = lists.num_requests, self.group_tokens
        if count > _TOGETHER:  # places follow from offsets
            return count + num_tokens // together
        if lists.request_tokens:
            return count * -(-lists.request_tokens // together)
        used = min(count, num_tokens)
        return used + (num_tokens - used) // together

    def _prepare(self, lists: Lists, groups: int, strides: bytes, num_tokens: int) -> _Plan | None:
        wide = None
        if self._narrow is not None:
            if not widen_pages.serves(self.spec, lists, strides):
                return None
            dtypes = self._narrow, self.problem.dtype_q
            wide = widen_pages.prepare(self.spec, dtypes, lists, strides, self.device_index)
            strides = wide.strides
            lists = lists._replace(num_pages=lists.num_requests * wide.pages, kv_step=wide.pages)
        chunks = _chunks_of(self.spec.page_size, lists, strides)
        if chunks is None:
            return None
        loaded = self._kernel(has_cuts=bool(lists.window or chunks.num_rows))
        tiles = loaded.tiles
        num_items = self._num_items(lists, num_tokens)
        entries = self.group_tokens * (lists.length + _window_blocks(lists))
        num_tiles = -(-entries * lists.granularity // tiles.tile_kv)
        has_cuts = "kUnionCuts" in tiles.config
        room = _room(
            num_items * groups, entries * (lists.granularity // chunks.size), num_tiles, has_cuts
        )
        spec = replace(
            self.spec,
            page_size=chunks.size,
            causal=lists.is_causal,
            window_left=-1,
            window_right=-1,
        )
        heads = tma_sm90.Heads(
            self.problem, spec.num_kv_heads, spec.group_size, chunks.size, self.device_index
        )
        maps = tma_sm90.Maps(
            heads,
            tiles,
            num_items,
            swizzle_of(spec, self.problem, lists.max_kv_len, self.device_index),
            chunks.strides,
            num_rows=num_tokens,
            size=chunks.num_chunks,
        )
        grid = tiles.grid(num_items, spec.num_kv_heads, loaded.num_slots)
        attention = Launch(loaded.function, grid, tiles.threads, tiles.shared_bytes, num_items)
        function = load_function("union_lists", config(entries, has_cuts), self.device_index)
        return _Plan(
            union=Launch(function, (num_items, groups, 1), _THREADS, 0),
            of_union=self._pack_union(lists, num_tokens, num_tiles, chunks),
            attention=attention,
            constants=params.pack_constants(
                spec, sm_scale=spec.sm_scale, output_scale=spec.output_scale
            ),
            strides=chunks.strides,
            groups=groups,
            window=lists.window,
            maps=maps,
            room=room,
            wide=wide,
        )

    def _kernel(self, has_cuts: bool = False) -> LoadedKernel[TileConfig]:
        loaded = self._loaded.get(has_cuts)
        if loaded is None:
            tiles = prefill_sm90.tiles_of_unions(self.problem, has_cuts)
            loaded = self._loaded[has_cuts] = LoadedKernel(tiles, self.device_index)
        return loaded

    def _pack_union(self, lists: Lists, num_tokens: int, num_tiles: int, chunks: _Chunks) -> bytes:
        """What the first launch is told besides addresses."""
        magic, shift = params.divisor(self.group_tokens)
        max_groups = -(-(lists.request_tokens or num_tokens) // self.group_tokens)
        finder = params.FINDER.pack(
            lists.num_requests,
            lists.request_tokens or -1,
            num_tokens,
            lists.kv_step,
            lists.max_kv_len,
            lists.max_kv_len if self.spec.page_size else chunks.num_rows,
            lists.kv_lens_are_steps,
            shift,
            magic,
            1,
            0.0,  # groups of a request come from its last one on, whatever their keys are
            1 << (max(max_groups, 1).bit_length() - 1),
        )
        rest = params.UNION_LISTS_REST.pack(
            lists.stride_n,
            lists.stride_group,
            lists.length,
            lists.granularity.bit_length() - 1,
            self.group_tokens,
            num_tiles,
            self.spec.page_size,
            chunks.size.bit_length() - 1,
            chunks.step,
            lists.is_causal,
            *lists.steps,
            lists.window,
            _window_blocks(lists),
            chunks.num_rows,
            *self._tokens_of_halves(),
        )
        return rest + finder

    def _tokens_of_halves(self) -> tuple[int, int]:
        """A bit for each token that has rows in each warpgroup's half of a tile."""
        half, group = self._kernel().tiles.tile_q // 2, self.spec.group_size
        every = (1 << self.group_tokens) - 1
        first = (1 << ((half - 1) // group + 1)) - 1
        return first & every, every & ~((1 << (half // group)) - 1)

    def launch(
        self,
        plan: _Plan,
        at: ListAddresses,
        optional: bytes,
        stream: int,
        allocate: Allocate,
    ) -> None:
        """Enqueue one call."""
        num_bytes = round_up(plan.room.num_bytes, _ALIGN)
        behind = 0 if plan.wide is None else sum(plan.wide.sizes)
        scratch_at, _unions = scratch.workspace(
            num_bytes + behind, self.device_index, stream, allocate
        )
        k, v, table = at.k, at.v, at.table
        if plan.wide is not None:
            k, v = plan.wide.enqueue(at, scratch_at + num_bytes, self.device_index, stream)
            table = 0
        counters, _zeros = scratch.counters(1, self.device_index, stream, allocate)
        chunks, tiles = scratch_at + plan.room.chunks, scratch_at + plan.room.tiles
        arguments = params.this_thread.launch_buffer
        size = params.UNION_LISTS_REST.size
        params.UNION_LISTS.pack_into(
            arguments.buffer,
            arguments.offset,
            at.entries,
            table,
            scratch_at,
            chunks,
            tiles,
            plan.of_union[:size],
            params.DEVICE_LENGTHS.pack(at.qo_offsets, 0, at.kv_offsets, at.kv_lens),
            plan.of_union[size:],
        )
        enqueue(plan.union, arguments, self.device_index, stream)
        params.ATTENTION.pack_into(
            arguments.buffer,
            arguments.offset,
            at.q,
            k,
            v,
            at.o,
            optional,
            0,
            0,
            counters,
            scratch_at,
            0,
            chunks,
            0,
            plan.strides,
            0,
            0,
            0,
            0,
            plan.constants,
        )
        plan.maps.pack(arguments, at.q, k, v, at.o)
        begin = arguments.offset + params.ATTENTION.size + params.PREFILL_SM90.size
        params.KEY_UNIONS.pack_into(arguments.buffer, begin, tiles, plan.groups, plan.window)
        enqueue(plan.attention, arguments, self.device_index, stream)


def _in_16_bits(x: _OfKeys) -> _OfKeys:
    """With keys of queries' dtype, where they have 8 bits."""
    return replace(x, dtype_kv=x.dtype_q) if x.dtype_kv.is_fp8 else x


def tiles_of(problem: AttentionProblem, target: Target) -> TileConfig | None:
    """The tile of prefill_sm90 that serves a problem by unions; None if none does."""
    problem = _in_16_bits(problem)
    if prefill_sm90.refusal(problem, PERSISTENT, target) is not None:
        return None
    return prefill_sm90.tiles(problem, PERSISTENT, target)


def refusal_of_unions(problem: AttentionProblem, target: Target) -> str | None:
    """Why no tile of unions serves a problem; None if one does."""
    return prefill_sm90.refusal(_in_16_bits(problem), PERSISTENT, target)


def all_tiles(problem: AttentionProblem) -> list[TileConfig]:
    """The kernels of a problem that tiles_of serves: of windows and keys in no pages the second."""
    problem = _in_16_bits(problem)
    return [prefill_sm90.tiles_of_unions(problem, has_cuts) for has_cuts in (False, True)]


def config(entries: int, has_cuts: bool = False) -> jit.Config:
    """The kernel that makes unions of so many entries of lists. has_cuts: see prefill_sm90."""
    room = max(1 << (entries - 1).bit_length(), _MIN_ENTRIES)
    return jit.Config({"kThreads": _THREADS, "kEntries": room, "kCuts": has_cuts})


CONFIGS = tuple(
    config(1 << bits, has_cuts)
    for bits in range(_MIN_ENTRIES.bit_length() - 1, _MAX_ENTRIES.bit_length())
    for has_cuts in (False, True)
)


def _window_blocks(lists: Lists) -> int:
    """Blocks that a token's window may reach into."""
    if not lists.window:
        return 0
    return (lists.window + lists.granularity - 2) // lists.granularity + 1


def _chunks_of(page_size: int, lists: Lists, strides: bytes) -> _Chunks | None:
    """What the copy engine takes for pages: blocks, or their parts in pages, or rows from any on;
    None where it takes nothing."""
    if page_size:
        chunks = _chunks_of_pages(page_size, lists, strides)
        if chunks is not None or page_size < lists.max_kv_len:
            return chunks
    return _chunks_of_rows(page_size, lists.num_pages, strides)


def _chunks_of_pages(page_size: int, lists: Lists, strides: bytes) -> _Chunks | None:
    """Chunks where pages begin whole chunks apart."""
    granularity, num_pages = lists.granularity, lists.num_pages
    if page_size % granularity == 0:
        chunk = granularity
    elif granularity % page_size == 0 and page_size % 8 == 0:
        chunk = page_size
    else:
        return None
    if chunk == page_size:
        return _Chunks(chunk, strides, 1, num_pages)
    unpacked = [*params.STRIDES.unpack(strides)]
    steps = []
    for row, page in _ROWS_AND_PAGES:
        of_chunk = chunk * unpacked[row]
        of_page = unpacked[page] if num_pages > 1 else page_size * unpacked[row]
        if of_chunk <= 0 or of_page % of_chunk or of_page <= 0:
            return None
        steps.append(of_page // of_chunk)
        unpacked[page] = of_chunk
    if steps[0] != steps[1]:
        return None
    count = (num_pages - 1) * steps[0] + page_size // chunk
    return _Chunks(chunk, params.STRIDES.pack(*unpacked), steps[0], count)


def _chunks_of_rows(page_size: int, num_pages: int, strides: bytes) -> _Chunks | None:
    """Chunks that begin at any row: of keys in no pages (page_size 0), whose rows num_pages
    counts, or of requests that have a page each, whole rows apart."""
    unpacked = [*params.STRIDES.unpack(strides)]
    steps = []
    for row, page in _ROWS_AND_PAGES:
        of_row, of_page = unpacked[row], unpacked[page] if num_pages > 1 else 0
        if of_row <= 0 or (page_size and of_page % of_row):
            return None
        steps.append(of_page // of_row)
        unpacked[page] = of_row
    num_rows = num_pages
    if page_size:
        if steps[0] != steps[1]:
            return None
        num_rows = (num_pages - 1) * steps[0] + page_size
    if num_rows < _HALF:
        return None
    count = num_rows - _HALF + 1
    return _Chunks(_HALF, params.STRIDES.pack(*unpacked), steps[0], count, num_rows)


def _room(unions: int, chunks: int, tiles: int, has_cuts: bool) -> _Room:
    """Where the chunks and tiles of each union lie behind its item."""
    at_chunks = round_up(unions * _ITEM_BYTES, _ALIGN)
    at_tiles = round_up(at_chunks + 4 * unions * chunks, _ALIGN)
    num_bytes = at_tiles + unions * tiles * (_CUT_TILE_BYTES if has_cuts else _TILE_BYTES)
    return _Room(at_chunks, at_tiles, num_bytes)
