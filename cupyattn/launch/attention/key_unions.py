"""Launches attention by lists of many tokens: neighbouring tokens share the keys of their lists.

A first launch makes the union of the lists of some tokens and a KV head, with a bit for each token
whose list names a block. prefill_sm90 then multiplies the rows of all of them by each block of the
union. Nothing of the lists or lengths is read on the host, so the grids have room for any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from ... import jit
from ...core import dtypes
from ...core.device import device_props
from ...core.problem import AttentionProblem
from ...core.spec import AttentionSpec
from ..driver import params, scratch
from ..driver.enqueue import Launch, enqueue, load_function
from ..driver.scratch import Allocate
from ..tiles import prefill_sm90
from ..tiles.config import Field, Target, TileConfig, round_up, struct_of
from ..tiles.row_classes import PERSISTENT
from . import tma_sm90, widen_pages
from .key_list_arrays import ListAddresses, Lists
from .key_union_chunks import UNIT, Chunks, chunks_of, chunks_of_pages
from .load_kernels import LoadedKernel
from .swizzle import swizzle_of

GRANULARITIES = 64, 128
"""Keys of large blocks whose lists may be made unions: halves of a tile, and whole ones."""

# Threads by the entries that they sort.
_THREADS, _MANY_ENTRIES, _MANY_THREADS = 128, 2048, 1024
_MIN_ENTRIES, _MAX_ENTRIES = 128, 8192
# Keys of a block up to which a tile has units of blocks.
_LARGEST_SMALL = 128
# Rows of the least box of large blocks.
_BOX = 8
# Bits of a word, and what is known of a key's place besides its token.
_MAX_TOKENS, _MAX_KEYS = 32, 1 << 26
# kernels/cupyattn/params: WorkItem; UnionTile, CutUnionTile, SmallUnionTile.
_ITEM_BYTES = 48
_TILE_BYTES = {"halves": 16, "cuts": 32, "small": 256}
_ALIGN = 256
# Requests that a warp looks at together (plan/item_finder.cuh).
_TOGETHER = 64
_MAX_PLANS = 256
# How often keys are listed that are worth widening.
_LISTED_WIDENED = 4
_OfKeys = TypeVar("_OfKeys", AttentionSpec, AttentionProblem)


class Costs(NamedTuple):
    """What a block of a union takes, and an entry of a list that is read by itself, in one unit."""

    block: int
    entry: int


# Measured on an H200 (docs/ladder.md). Unions of large blocks lose at narrow heads only.
_NARROW = 64
_OF_NARROW_HEADS = Costs(100, 54)
# Of small blocks, by whether heads have more than 128 columns.
_OF_SMALL_BLOCKS = Costs(100, 33), Costs(100, 52)


class _Room(NamedTuple):
    """Bytes from the beginning of scratch memory to what the first launch leaves, and of all.
    alone: whose lists are read by themselves; 0: nobody's are."""

    chunks: int
    tiles: int
    alone: int
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
    """Serves calls of one problem, device and geometry; `of` says whether any.

    large, small: the tiles of large blocks, and of small ones, if there are any.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        problem: AttentionProblem,
        large: TileConfig | None,
        small: TileConfig | None,
        device_index: int,
    ) -> None:
        # Keys of 8 bits are widened ahead, and multiplied by their scales.
        self._narrow = spec.dtype_kv if spec.dtype_kv.is_fp8 else None
        self.spec, self.problem = _in_16_bits(spec), _in_16_bits(problem)
        self.device_index = device_index
        tiles = large or small
        assert tiles is not None
        self._has_large, self._small = large is not None, small
        self._tile_q = tiles.tile_q
        self._max_tokens = min(tiles.tile_q // spec.group_size, _MAX_TOKENS)
        self._loaded: dict[str, LoadedKernel[TileConfig]] = {}
        self._plans: dict[tuple[object, ...], _Plan | None] = {}

    @property
    def takes_scales(self) -> bool:
        """Whether keys and values may have scales on the device."""
        return self._narrow is not None and self.problem.dtype_q is dtypes.bfloat16

    @classmethod
    def of(
        cls, spec: AttentionSpec, problem: AttentionProblem, device_index: int
    ) -> UnionLauncher | None:
        """What serves a problem; None if nothing does."""
        if spec.dtype_kv.is_fp8 and spec.sm_scale <= 0.0:
            return None
        props = device_props(device_index)
        target = Target(props.arch, props.max_smem_per_block, min(GRANULARITIES))
        large = tiles_of(problem, target)
        small = None if spec.dtype_kv.is_fp8 else small_tiles_of(problem, target)
        tiles = large or small
        if tiles is None or not 2 <= tiles.tile_q // spec.group_size <= _MAX_TOKENS:
            return None
        return cls(spec, problem, large, small, device_index)

    def costs(self, lists: Lists) -> Costs | None:
        """What the GPU weighs unions by; None where a union of any lists takes less than these."""
        if not self._takes_halves(lists):
            return _OF_SMALL_BLOCKS[self.problem.head_dim_vo > 2 * _NARROW]
        return _OF_NARROW_HEADS if self.problem.head_dim_vo <= _NARROW else None

    def plan(
        self, lists: Lists, groups: int, strides: bytes, num_tokens: int, costs: Costs | None = None
    ) -> _Plan | None:
        """The launches of such a call; None where lists serve it better one by one. costs: some
        lists may be left to be read by themselves."""
        key = lists, groups, strides, num_tokens, costs
        if key not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            is_served = self._serves(lists) and self._is_worth_it(lists, num_tokens)
            plan = None
            if is_served:
                plan = self._prepare(lists, groups, strides, num_tokens, costs)
            self._plans[key] = plan
        return self._plans[key]

    def _serves(self, lists: Lists) -> bool:
        return (
            (self._takes_halves(lists) or self._takes_units(lists))
            and lists.num_pages > 0
            and lists.num_requests > 0
            and self.group_tokens(lists) > 1
            and lists.max_kv_len <= _MAX_KEYS
        )

    def _takes_halves(self, lists: Lists) -> bool:
        page_size = self.spec.page_size
        is_boxed = page_size % _BOX == 0 or page_size >= lists.max_kv_len
        return self._has_large and lists.granularity in GRANULARITIES and is_boxed

    def _takes_units(self, lists: Lists) -> bool:
        """Whether tiles have units of small blocks: of pages that hold whole ones."""
        page_size = self.spec.page_size
        return (
            self._small is not None
            and UNIT <= lists.granularity <= _LARGEST_SMALL
            and page_size >= UNIT
            and max(page_size, lists.granularity) % min(page_size, lists.granularity) == 0
            and not lists.window
        )

    def group_tokens(self, lists: Lists) -> int:
        """Tokens that have a union."""
        entries = lists.length + _window_blocks(lists)
        maximum = _MANY_ENTRIES if self._takes_halves(lists) else _MAX_ENTRIES
        return min(self._max_tokens, maximum // entries)

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
        return 2 * tokens >= self.group_tokens(lists) and 2 * num_items >= num_sms

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
        count, together = lists.num_requests, self.group_tokens(lists)
        if count > _TOGETHER:  # places follow from offsets
            return count + num_tokens // together
        if lists.request_tokens:
            return count * -(-lists.request_tokens // together)
        used = min(count, num_tokens)
        return used + (num_tokens - used) // together

    def _prepare(
        self, lists: Lists, groups: int, strides: bytes, num_tokens: int, costs: Costs | None = None
    ) -> _Plan | None:
        wide = None
        if self._narrow is not None:
            if not widen_pages.serves(self.spec, lists, strides):
                return None
            dtypes = self._narrow, self.problem.dtype_q
            wide = widen_pages.prepare(self.spec, dtypes, lists, strides, self.device_index)
            strides = wide.strides
            lists = lists._replace(num_pages=lists.num_requests * wide.pages, kv_step=wide.pages)
        kind, chunks = self._kind(lists, strides)
        if chunks is None:
            return None
        loaded = self._kernel(kind)
        num_items = self._num_items(lists, num_tokens)
        entries = self.group_tokens(lists) * (lists.length + _window_blocks(lists))
        num_tiles = -(-entries * lists.granularity // loaded.tiles.tile_kv)
        spec = replace(
            self.spec,
            page_size=chunks.size,
            causal=lists.is_causal,
            window_left=-1,
            window_right=-1,
        )
        return _Plan(
            union=self._maker(kind, entries, (num_items, groups, 1)),
            of_union=self._pack_union(lists, num_tokens, num_tiles, chunks, costs),
            attention=self._attention(loaded, num_items),
            constants=params.pack_constants(
                spec, sm_scale=spec.sm_scale, output_scale=spec.output_scale
            ),
            strides=chunks.strides,
            groups=groups,
            window=lists.window,
            maps=self._maps(spec, lists, loaded.tiles, chunks, num_items, num_tokens),
            room=_room(
                num_items * groups,
                entries * (lists.granularity // chunks.size),
                num_tiles * _TILE_BYTES[kind],
                num_tokens * groups if costs else 0,
            ),
            wide=wide,
        )

    def _kind(self, lists: Lists, strides: bytes) -> tuple[str, Chunks | None]:
        """Of the tiles that serve lists, and what these take for pages; None where nothing does."""
        page_size = self.spec.page_size
        if not self._takes_halves(lists):
            return "small", chunks_of_pages(page_size, lists, strides)
        chunks = chunks_of(page_size, lists, strides)
        has_cuts = lists.window or (chunks is not None and chunks.num_rows)
        return "cuts" if has_cuts else "halves", chunks

    def _maker(self, kind: str, entries: int, grid: tuple[int, int, int]) -> Launch:
        """The launch that makes unions of so many entries."""
        units = self._kernel(kind).tiles.tile_kv // UNIT if kind == "small" else 0
        maker = config(entries, kind == "cuts", units)
        threads, shared_bytes = maker["kThreads"], maker["kSharedBytes"]
        assert isinstance(threads, int) and isinstance(shared_bytes, int)
        function = load_function("union_lists", maker, self.device_index, shared_bytes)
        return Launch(function, grid, threads, shared_bytes)

    def _attention(self, loaded: LoadedKernel[TileConfig], num_items: int) -> Launch:
        tiles = loaded.tiles
        grid = tiles.grid(num_items, self.spec.num_kv_heads, loaded.num_slots)
        return Launch(loaded.function, grid, tiles.threads, tiles.shared_bytes, num_items)

    def _maps(
        self,
        spec: AttentionSpec,
        lists: Lists,
        tiles: TileConfig,
        chunks: Chunks,
        num_items: int,
        num_tokens: int,
    ) -> tma_sm90.Maps:
        heads = tma_sm90.Heads(
            self.problem, spec.num_kv_heads, spec.group_size, chunks.size, self.device_index
        )
        return tma_sm90.Maps(
            heads,
            tiles,
            num_items,
            swizzle_of(spec, self.problem, lists.max_kv_len, self.device_index),
            chunks.strides,
            num_rows=num_tokens,
            size=chunks.num_chunks,
        )

    def _kernel(self, kind: str) -> LoadedKernel[TileConfig]:
        """kind: "halves", "cuts" or "small"."""
        loaded = self._loaded.get(kind)
        if loaded is None:
            tiles = self._small
            if kind != "small":
                tiles = prefill_sm90.tiles_of_unions(self.problem, kind == "cuts")
            assert tiles is not None
            loaded = self._loaded[kind] = LoadedKernel(tiles, self.device_index)
        return loaded

    def _pack_union(
        self,
        lists: Lists,
        num_tokens: int,
        num_tiles: int,
        chunks: Chunks,
        costs: Costs | None,
    ) -> bytes:
        """What the first launch is told besides addresses."""
        group_tokens = self.group_tokens(lists)
        magic, shift = params.divisor(group_tokens)
        max_groups = -(-(lists.request_tokens or num_tokens) // group_tokens)
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
            group_tokens,
            num_tiles,
            self.spec.page_size,
            chunks.size.bit_length() - 1,
            chunks.step,
            lists.is_causal,
            *lists.steps,
            lists.window,
            _window_blocks(lists),
            chunks.num_rows,
            *self._tokens_of_halves(group_tokens),
            *(costs or (0, 0)),
        )
        return rest + finder

    def _tokens_of_halves(self, group_tokens: int) -> tuple[int, int]:
        """A bit for each token that has rows in each warpgroup's half of a tile."""
        half, group = self._tile_q // 2, self.spec.group_size
        every = (1 << group_tokens) - 1
        first = (1 << ((half - 1) // group + 1)) - 1
        return first & every, every & ~((1 << (half // group)) - 1)

    def launch(
        self,
        plan: _Plan,
        at: ListAddresses,
        optional: bytes,
        stream: int,
        allocate: Allocate,
        read_alone: Callable[[int], None] | None = None,
    ) -> None:
        """Enqueue one call. read_alone: enqueues what reads the lists that are left, which words at
        this address say; wanted where the plan has costs."""
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
            scratch_at + plan.room.alone if plan.room.alone else 0,
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
        if plan.room.alone:
            assert read_alone is not None
            read_alone(scratch_at + plan.room.alone)


def _in_16_bits(x: _OfKeys) -> _OfKeys:
    """With keys of queries' dtype, where they have 8 bits; what is widened to bfloat16, which holds
    any product, is multiplied by its scales."""
    if not x.dtype_kv.is_fp8:
        return x
    if isinstance(x, AttentionProblem) and x.dtype_q is dtypes.bfloat16:
        return replace(x, dtype_kv=x.dtype_q, prescale_logits=False)
    return replace(x, dtype_kv=x.dtype_q)


def tiles_of(problem: AttentionProblem, target: Target) -> TileConfig | None:
    """The tile of prefill_sm90 that serves a problem by unions; None if none does."""
    problem = _in_16_bits(problem)
    if prefill_sm90.refusal(problem, PERSISTENT, target) is not None:
        return None
    return prefill_sm90.tiles(problem, PERSISTENT, target)


def refusal_of_unions(problem: AttentionProblem, target: Target) -> str | None:
    """Why no tile of unions serves a problem; None if one does."""
    return prefill_sm90.refusal(_in_16_bits(problem), PERSISTENT, target)


def small_tiles_of(problem: AttentionProblem, target: Target) -> TileConfig | None:
    """The tile that serves a problem by unions of small blocks; None if none does."""
    return prefill_sm90.tiles_of_small_unions(problem, target)


def all_tiles(problem: AttentionProblem, target: Target) -> list[TileConfig]:
    """The kernels of a problem: of large blocks, of windows and keys in no pages, and of small
    blocks."""
    result: list[TileConfig] = []
    if tiles_of(problem, target) is not None:
        wide = _in_16_bits(problem)
        result = [prefill_sm90.tiles_of_unions(wide, has_cuts) for has_cuts in (False, True)]
    small = None if problem.dtype_kv.is_fp8 else small_tiles_of(problem, target)
    return result if small is None else [*result, small]


def config(entries: int, has_cuts: bool = False, units: int = 0) -> jit.Config:
    """The kernel that makes unions of so many entries of lists. has_cuts: see prefill_sm90. units:
    of a tile of small blocks."""
    room = max(1 << (entries - 1).bit_length(), _MIN_ENTRIES)
    threads = _THREADS if room <= _MANY_ENTRIES else _MANY_THREADS
    shared = struct_of(
        Field(5 * 4 * room), Field(threads // 32 * 4), Field(_ITEM_BYTES, 16), Field(12)
    )
    return jit.Config(
        {
            "kThreads": threads,
            "kEntries": room,
            "kCuts": has_cuts,
            "kUnits": units,
            "kSharedBytes": shared.size,
        }
    )


_ROOMS = tuple(
    1 << bits for bits in range(_MIN_ENTRIES.bit_length() - 1, _MAX_ENTRIES.bit_length())
)
CONFIGS = tuple(
    config(room, has_cuts) for room in _ROOMS if room <= _MANY_ENTRIES for has_cuts in (False, True)
) + tuple(config(room, units=units) for room in _ROOMS for units in (16, 24))


def _window_blocks(lists: Lists) -> int:
    """Blocks that a token's window may reach into."""
    if not lists.window:
        return 0
    return (lists.window + lists.granularity - 2) // lists.granularity + 1


def _room(unions: int, chunks: int, tile_bytes: int, alone: int) -> _Room:
    """Where the chunks and tiles of each union lie behind its item, and behind all so many words of
    who is alone."""
    at_chunks = round_up(unions * _ITEM_BYTES, _ALIGN)
    at_tiles = round_up(at_chunks + 4 * unions * chunks, _ALIGN)
    at_alone = round_up(at_tiles + unions * tile_bytes, _ALIGN)
    return _Room(at_chunks, at_tiles, at_alone if alone else 0, at_alone + 4 * alone)
