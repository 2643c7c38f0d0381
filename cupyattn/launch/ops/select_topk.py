"""Launches the select_topk kernel: the blocks of the greatest scores of each row."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ... import jit
from ...array import ArrayView
from ...core import dtypes
from ...core.device import DeviceProps, device_props, overlaps_launches
from ...core.dtypes import DType
from ...core.selection import SelectProblem
from ..driver import params
from ..driver.enqueue import Launch, enqueue, load_function

# Where clusters have rows: threads of a block, of which more pay where blocks have an SM each, and
# the bytes of kernels/cupyattn/select/topk_cluster.cuh besides lists.
_SHARED_BYTES = {512: 37_456, 1024: 37_968}
_MAX_CLUSTER = 8
# Rows of fewer scores have one block; halving what a block has pays from so many scores on, by
# blocks of the grid for each SM (measured on an H200).
_MIN_SCORES = 8192
_HALVED = ((0.5, 8192), (1.0, 49_152), (2.0, 98_304))
# So many scores of a block make up for the longer barriers of more threads.
_MANY_SCORES = 65_536
# Entries of the list of a warp, with which two blocks have room on an SM, by its shared memory.
_WARP_ROOMS = ((206 << 10, 512), (142 << 10, 256), (0, 128))
# Where a warp has a row: warps of a block, the longest list, and keys that a lane may have.
_ROWS = 4
_LONGEST_LIST = 32
_KEYS = (8, 32)
# kernels/cupyattn/params/select.cuh
TOKENS = struct.Struct("<2Q 8i")
# kernels/cupyattn/params/select_topk.cuh
GIVEN = struct.Struct("<7Q 3q 6i")
SELECT_TOPK = struct.Struct(f"<3Q {TOKENS.size}s 5q 8i {GIVEN.size}s")
_NOT_GIVEN, _NO_TOKENS = bytes(GIVEN.size), bytes(TOKENS.size)


class Given(NamedTuple):
    """Rows of scores as a caller has them: GivenRows of kernels/cupyattn/params/select_topk.cuh.

    Addresses are 0 for arrays that are not there, strides in elements.
    """

    counts: int = 0
    begins: int = 0
    owners: int = 0
    page_begins: int = 0
    offsets: int = 0
    table: int = 0
    columns: int = 0
    stride_group: int = 0
    stride_column: int = 1
    table_stride: int = 0
    num_columns: int = 0
    num_tables: int = 0
    table_width: int = 0
    page_shift: int = 0
    has_late_ties: bool = False


class Choice(NamedTuple):
    """Lists of topk entries, of which the first and the last blocks have theirs; has_tail: one more
    for a block without a score."""

    topk: int
    first: int = 0
    last: int = 0
    has_tail: bool = False


class Lists(NamedTuple):
    """Where lists go, and their scores: addresses, 0 for no scores, and strides of a token and a
    group."""

    out: int
    out_strides: tuple[int, int]
    values: int = 0
    values_strides: tuple[int, int] = (0, 0)


class Shape(NamedTuple):
    """How rows are shared out.

    cluster     blocks that have one row together
    warp_room   entries of the list of each of their warps, a multiple of 128
    threads     of a block
    keys        of a lane of the one warp that has a row; 0: clusters have rows
    """

    cluster: int = 1
    warp_room: int = 128
    threads: int = 512
    keys: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Shared memory besides lists of clusters."""
        return _ROWS * 32 * 8 if self.keys else _SHARED_BYTES[self.threads]

    @property
    def shared_bytes(self) -> int:
        return self.fixed_bytes + (0 if self.keys else self.threads // 32 * self.warp_room * 8)

    def num_blocks(self, num_rows: int) -> int:
        return -(-num_rows // _ROWS) if self.keys else num_rows * self.cluster


def rows_of_warps(keys: int) -> Shape:
    """A warp has a row, of which each lane has so many keys."""
    return Shape(warp_room=0, threads=32 * _ROWS, keys=keys)


@lru_cache(maxsize=64)
def config(
    dtype: DType,
    *,
    is_aligned: bool = True,
    has_candidates: bool = False,
    is_given: bool = False,
    keys: int = 0,
    threads: int = 512,
) -> jit.Config:
    """The kernel's Config."""
    shape = rows_of_warps(keys) if keys else Shape(threads=threads)
    values: dict[str, jit.Constant] = {
        "DType": dtype,
        "kAligned": is_aligned,
        "kCandidates": has_candidates,
        "kGiven": is_given,
        "kKeys": keys,
        "kThreads": shape.threads,
        "kSharedBytes": shape.fixed_bytes,
    }
    return jit.Config(values)


def configs(arch: str) -> Iterator[jit.Config]:
    """The Configs that serve lists of tokens without candidates."""
    yield config(dtypes.float32)
    if overlaps_launches(arch):
        yield config(dtypes.float32, threads=1024)
    for keys in _KEYS:
        yield config(dtypes.float32, keys=keys)


def choose_shape(num_rows: int, max_blocks: int, topk: int, props: DeviceProps) -> Shape:
    """A warp for the shortest rows of which few are chosen, and for short ones that fill the GPU;
    for others as many blocks of a cluster as pay."""
    fills_sms = num_rows > 2 * props.num_sms
    if topk <= _LONGEST_LIST and max_blocks <= 32 * _KEYS[fills_sms]:
        return rows_of_warps(next(keys for keys in _KEYS if max_blocks <= 32 * keys))
    warp_room = next(room for size, room in _WARP_ROOMS if props.smem_per_sm >= size)
    cluster = 1
    if overlaps_launches(props.arch) and max_blocks > _MIN_SCORES:
        while cluster < _MAX_CLUSTER and _pays(num_rows * cluster * 2, props, max_blocks / cluster):
            cluster *= 2
    has_room = 2 * num_rows * cluster <= props.num_sms
    is_many = has_room and max_blocks >= cluster * _MANY_SCORES
    return Shape(cluster, warp_room, threads=1024 if is_many and cluster > 1 else 512)


def _pays(num_blocks: int, props: DeviceProps, num_scores: float) -> bool:
    """Whether this grid is worth halving the scores of a block."""
    for per_sm, fewest in _HALVED:
        if num_blocks <= per_sm * props.num_sms:
            return num_scores >= fewest
    return False


def launch(
    problem: SelectProblem,
    scores: int,
    row_stride: int,
    max_blocks: int,
    tokens: bytes,
    num_tokens: int,
    out: int,
    out_strides: tuple[int, int],
    values: int,
    values_strides: tuple[int, int],
    device_index: int,
    stream: int,
) -> None:
    """Choose from float32 [num_tokens * groups, row_stride], a row a token and group, at the
    address `scores`.

    row_stride   a multiple of 4, and the address one of 16
    max_blocks   that a row may have; what lies behind those it has is not used
    tokens       SelectTokens of kernels/cupyattn/params/select.cuh
    out, values  addresses of [num_tokens, groups, problem.list_len]; values may be 0. Strides are
                 of a token and of a group
    """
    prepared = prepare(problem, row_stride, max_blocks, num_tokens, device_index)
    if prepared is not None:
        lists = Lists(out, out_strides, values, values_strides)
        prepared.enqueue(scores, lists, tokens, stream)


def prepare(
    problem: SelectProblem, row_stride: int, max_blocks: int, num_tokens: int, device_index: int
) -> PreparedChoice | None:
    """What `launch` enqueues, wherever the arrays are; None without rows."""
    rows = _Rows(dtypes.float32, 0, row_stride, num_tokens, problem.num_groups, max_blocks)
    choice = Choice(problem.topk, problem.first, problem.last, problem.tail)
    return _prepare(rows, choice, None, device_index, has_candidates=problem.candidate_block > 0)


def launch_given(
    scores: ArrayView, caller: Given, choice: Choice, lists: Lists, stream: int
) -> None:
    """Choose from [tokens, groups, columns] of any strides."""
    tokens, groups, columns = scores.shape
    caller = caller._replace(
        stride_group=scores.strides[1], stride_column=scores.strides[2], num_columns=columns
    )
    rows = _Rows(scores.dtype, scores.ptr, scores.strides[0], tokens, groups, columns)
    prepared = _prepare(rows, choice, caller, scores.device.index)
    if prepared is not None:
        prepared.enqueue(scores.ptr, lists, _NO_TOKENS, stream)


class _Rows(NamedTuple):
    """Rows of scores, a row a token and group."""

    dtype: DType
    scores: int
    stride_token: int
    num_tokens: int
    num_groups: int
    max_blocks: int

    def is_aligned(self, caller: Given | None) -> bool:
        """Whether four scores can be read at a time."""
        if caller is None:
            return True
        steps = self.stride_token | caller.stride_group
        is_whole = self.scores % (4 * self.dtype.itemsize) == 0 and steps % 4 == 0
        return is_whole and caller.stride_column == 1 and caller.begins == 0


class PreparedChoice(NamedTuple):
    """A launch that chooses from rows of scores, and its struct but for addresses and tokens."""

    launch: Launch
    row_stride: int
    counts: tuple[int, ...]
    caller: bytes
    device_index: int

    @property
    def words(self) -> str:
        """How rows are shared out."""
        if self.launch.cluster > 1:
            return f"lists by clusters of {self.launch.cluster} blocks"
        return "lists by " + ("warps" if self.launch.threads == 32 * _ROWS else "blocks")

    def enqueue(self, scores: int, lists: Lists, tokens: bytes, stream: int) -> None:
        """Enqueue it for scores at an address. tokens: SelectTokens."""
        arguments = params.this_thread.launch_buffer
        SELECT_TOPK.pack_into(
            arguments.buffer,
            arguments.offset,
            scores,
            lists.out,
            lists.values,
            tokens,
            self.row_stride,
            *lists.out_strides,
            *lists.values_strides,
            *self.counts,
            self.caller,
        )
        enqueue(self.launch, arguments, self.device_index, stream)


def _prepare(
    rows: _Rows,
    choice: Choice,
    caller: Given | None,
    device_index: int,
    has_candidates: bool = False,
) -> PreparedChoice | None:
    num_rows = rows.num_tokens * rows.num_groups
    if num_rows == 0:
        return None
    props = device_props(device_index)
    shape = choose_shape(num_rows, rows.max_blocks, choice.topk, props)
    if shape.keys and caller is not None and caller.has_late_ties:
        shape = Shape()
    chosen = config(
        rows.dtype,
        is_aligned=rows.is_aligned(caller),
        has_candidates=has_candidates,
        is_given=caller is not None,
        keys=shape.keys,
        threads=shape.threads,
    )
    function = load_function("select_topk", chosen, device_index, shape.shared_bytes)
    shaped = Launch(
        function,
        (shape.num_blocks(num_rows), 1, 1),
        shape.threads,
        shape.shared_bytes,
        is_dependent=overlaps_launches(props.arch),
        cluster=shape.cluster,
    )
    counts = num_rows, rows.num_groups, *map(int, choice), shape.warp_room, 0
    packed = _NOT_GIVEN if caller is None else GIVEN.pack(*caller, 0)
    return PreparedChoice(shaped, rows.stride_token, counts, packed, device_index)
