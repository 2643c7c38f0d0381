"""Launches a selection: scores of blocks of index rows, then for each row of them the greatest.

Between these two, scores of softmax are made of what each head has of a block, for which it must be
known what it has of all. Candidates of a group are as those of a token of that group's heads alone.

Lengths and offsets of tokens stay on the device, so that the grid is for all that may be there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ... import jit
from ...core import dtypes, recording
from ...core.device import device_props, overlaps_launches
from ...core.dtypes import DType
from ...core.selection import SelectProblem
from ..driver import params, scratch
from ..driver.enqueue import Launch, cuda, enqueue, load_function
from ..driver.scratch import Allocate
from . import select_softmax, select_topk

# kernels/cupyattn/params/select.cuh
TOKENS = struct.Struct("<2Q 8i")
SELECT_SCORES = struct.Struct(f"<9Q 6q {TOKENS.size}s 4I 3i I 3i I i f 2i")
MAX_HEADS = 64
# Offsets of rows are counted in 16 bytes, by 32 bits.
MAX_INDEX_BYTES = 16 * 2**32
# Blocks of a request are numbered by 31 bits, rounded up.
MAX_KEYS = 2**31 - 4096
# The keys of a request that has no pages are one: a page of more rows than there are.
_ONE_PAGE = 1 << 30
_WARPS, _MAX_TILES = 4, 16
# Eights of rows of a warp's step, and steps whose rows are on their way at a time: in all as many
# as have registers.
_STEPS = 4, 1
_SHORT_STEPS = 2, 1
_SHORT_STEPS_OF_BYTES = 2, 2
# So many tiles of eight columns are worth products of four warps.
_TILES_OF_FOUR = 8
_MAX_SHARED_BYTES = 40 << 10
# Scores of so many bytes are chosen from before the next tokens have theirs.
_MAX_SCORE_BYTES = 256 << 20
# Blocks that run at a time have equal parts of the rows. Where a tile would have so few of them
# that some idle there are so many times more blocks, whose ends even out.
_FEW_PARTS, _WAVES_OF_FEW = 4, 8
# What the queries of many columns cost a block before its rows, in rows (measured on an H200).
_ROWS_OF_QUERIES = 512
# A block of few columns is soon under way: it reads no more than this, if blocks are not too many.
_PART_BYTES, _MAX_WAVES = 128 << 10, 16
_FEW_TILES, _TILES_THAT_SHARE = 2, 4


class SelectShape(NamedTuple):
    """What launches are told of a selection, besides addresses. Strides in elements.

    request_tokens  of each request; 0: offsets say it
    page_size       0 where there are no pages
    max_kv_len      keys a request has room for
    strides         q (token, head), k (page, row), k_scales (page, in floats), table (request),
                    weights (token), out (token, group), values (token, group), candidates (token)
    num_candidates  of a token, or of each of its groups, candidate_stride_group apart
    kv_lens_are_steps  lengths are the steps of offsets of index rows
    """

    num_requests: int
    request_tokens: int
    page_size: int
    max_kv_len: int
    q_strides: tuple[int, int]
    k_strides: tuple[int, int]
    scale_stride: int
    table_stride: int
    weight_stride: int
    out_strides: tuple[int, int]
    values_strides: tuple[int, int]
    is_causal: bool
    kv_lens_are_steps: bool
    sm_scale: float
    candidate_stride: int = 0
    candidate_stride_group: int = 0
    num_candidates: int = 0


class SelectAddresses(NamedTuple):
    """Where the arrays of a call lie; 0 for what there is not."""

    q: int
    k: int
    k_scales: int
    k_scale: int
    weights: int
    table: int
    kv_lens: int
    qo_offsets: int
    kv_offsets: int
    out: int
    values: int
    candidates: int = 0


def refusal(problem: SelectProblem) -> str | None:
    """Why no kernel serves a problem, as a sentence; None for those that are served."""
    q, k, share = problem.dtype_q, problem.dtype_k, problem.num_heads // problem.num_groups
    columns, max_dim = (64, 128) if k.is_fp8 else (32, 256)
    if not (q.is_float16 or q.is_fp8):
        return f"q_index: dtype {q} has no GPU kernel; pass float16, bfloat16 or float8_e4m3fn"
    if problem.head_dim % columns or problem.head_dim > max_dim:
        return (
            f"q_index: head_dim {problem.head_dim} has no GPU kernel; wanted a multiple of "
            f"{columns} up to {max_dim} with index rows of {k}"
        )
    is_any_share = problem.score == "softmax"
    if problem.num_heads > MAX_HEADS or not (is_any_share or share in (1, 2, 4) or share % 8 == 0):
        return (
            f"groups: {problem.num_groups} of {problem.num_heads} index heads have no GPU kernel; "
            f"wanted 1, 2, 4 or a multiple of 8 heads a group, and {MAX_HEADS} heads at most"
        )
    return None


class _Tiles(NamedTuple):
    """A kernel of scores: its Config, and what of it launches need.

    tokens  of a tile, and its columns; unit: rows that a block reads at a time; blocks_per_sm: that
            run at a time
    """

    config: jit.Config
    tokens: int
    columns: int
    unit: int
    blocks_per_sm: int


@lru_cache(maxsize=256)
def choose_tiles(problem: SelectProblem, tokens: int, shares: bool, arch: str) -> _Tiles:
    """For so many tokens of a request. shares: the warps of a block share blocks of keys, so that
    few of those keep all SMs busy."""
    heads, block_rows = problem.num_heads, problem.block_rows
    if problem.candidate_block:
        tokens = 1
    num_tiles = _num_tiles(problem, tokens, arch)
    has_sums = problem.score == "softmax"
    by_four = arch == "sm_90a" and num_tiles >= _TILES_OF_FOUR and problem.head_dim % 64 == 0
    by_four = by_four and not has_sums
    is_short = by_four or num_tiles <= 2 or problem.head_dim > 128
    eights, ahead = _SHORT_STEPS if is_short else _STEPS
    if problem.dtype_k.is_fp8 and eights == 2 and num_tiles <= _TILES_OF_FOUR:
        eights, ahead = _SHORT_STEPS_OF_BYTES
    step = 8 * eights
    sharing = min(_WARPS, max(1, block_rows // step)) if shares else 1
    blocks_per_sm = _blocks_per_sm(problem, num_tiles, by_four)
    config = jit.Config(
        {
            "DTypeQ": problem.dtype_q,
            "DTypeK": problem.dtype_k,
            "DTypeW": problem.dtype_w or dtypes.float32,
            "kSum": problem.score == "relu_sum",
            "kSoftmax": problem.score == "softmax",
            "kRowScales": problem.row_scales != "",
            "kCandidates": problem.candidate_block > 0,
            "kWarpgroup": by_four,
            "kEights": eights,
            "kAhead": ahead,
            "kHeadDim": problem.head_dim,
            "kHeads": heads,
            "kGroups": problem.num_groups,
            "kBlockRows": block_rows,
            "kTiles": num_tiles,
            "kWarps": _WARPS,
            "kSharing": sharing,
            "kBlocksPerSm": blocks_per_sm,
        }
    )
    unit = max(block_rows, step * sharing) * (_WARPS // sharing)
    own_tokens = 1 if problem.candidate_block else 8 * num_tiles // heads
    return _Tiles(config, own_tokens, 8 * num_tiles, unit, blocks_per_sm)


def _num_tiles(problem: SelectProblem, tokens: int, arch: str) -> int:
    """Tiles of eight columns: whole tokens lie in whole tiles, or several in one."""
    heads = problem.num_heads
    max_tiles = min(_MAX_TILES, _MAX_SHARED_BYTES // (8 * 2 * problem.head_dim))
    # Registers.
    has_own_scores = problem.dtype_k.is_fp8 or heads == problem.num_groups
    is_narrow = has_own_scores and arch != "sm_90a"
    if problem.head_dim > 128 or is_narrow or problem.score == "softmax":
        max_tiles = min(max_tiles, _MAX_TILES // 2)
    num_tiles = -(-heads // 8)
    while 8 * num_tiles < tokens * heads and 2 * num_tiles <= max_tiles:
        num_tiles *= 2
    return num_tiles


def _blocks_per_sm(problem: SelectProblem, num_tiles: int, by_four: bool) -> int:
    """Blocks that run at a time: as many as have registers enough."""
    if problem.head_dim > 128 or problem.score == "softmax":
        return 2
    if not by_four:
        if num_tiles == 1 and not problem.dtype_k.is_fp8:
            return 4
        return 3 if num_tiles <= 2 else 2
    # Scores of few heads, and the largest of many rows, have registers of their own.
    share = problem.num_heads // problem.num_groups
    is_small = share >= 8 and problem.block_rows == 1 and not problem.candidate_block
    is_small = is_small and problem.score == "relu_sum" and problem.dtype_k.is_fp8
    return (3 if num_tiles > _TILES_OF_FOUR else 4) - (not is_small)


def configs(kinds: Iterable[tuple[DType, DType]], arch: str) -> Iterator[jit.Config]:
    """The Configs of selections of models, of queries and keys of these dtypes: MiniMax-M3's blocks
    of 128 keys by four heads, and sums of four heads for each row of four keys; and shares of
    blocks of 64 keys."""
    kind = dtypes.bfloat16
    of_blocks = SelectProblem(kind, kind, 128, 4, num_groups=4, block=128, topk=16, last=1)
    of_rows = replace(of_blocks, num_groups=1, score="relu_sum", block=4, ratio=4)
    of_shares = replace(of_blocks, score="softmax", block=64)
    for q, k in kinds:
        if k is dtypes.float8_e5m2:
            continue
        for problem in (of_blocks, of_rows, of_shares):
            for tokens, shares in product((1, 4, 32), (False, True)):
                asked = replace(problem, dtype_q=q, dtype_k=k)
                yield choose_tiles(asked, tokens, shares, arch).config


def scored(problem: SelectProblem) -> SelectProblem:
    """The problem that the kernel of scores has: for softmax each head's own, and of groups with
    candidates of their own the heads of one."""
    if problem.score == "softmax":
        return replace(
            problem, num_groups=problem.num_heads, candidate_block=0, group_candidates=False
        )
    if problem.group_candidates:
        return replace(problem, num_heads=problem.num_heads // problem.num_groups, num_groups=1)
    return problem


class _ScoreLaunch(NamedTuple):
    """A launch of scores, the numbers of its struct behind the tokens, and its tiles."""

    launch: Launch
    numbers: tuple[float, ...]
    tiles: _Tiles

    @property
    def words(self) -> str:
        """How scores are shared out."""
        constants = dict(self.tiles.config)
        num_tiles, parts, _ = self.launch.grid
        products = "four warps together" if constants["kWarpgroup"] else "each warp"
        sharing = constants["kSharing"]
        own = "of its own" if sharing == 1 else f"that {sharing} warps share"
        return (
            f"scores of {num_tiles:,} tiles of {self.tiles.columns} columns in {parts:,} parts of "
            f"the rows, products of {products}, which has blocks of keys {own}"
        )


class SelectLauncher:
    """Serves every selection of one problem and device."""

    def __init__(self, problem: SelectProblem, device_index: int) -> None:
        self.problem, self.device_index = problem, device_index
        self.scored = scored(problem)
        self._shifts = problem.ratio.bit_length() - 1, problem.block_rows.bit_length() - 1
        props = device_props(device_index)
        self._num_sms, self._arch = props.num_sms, props.arch
        self._is_dependent = overlaps_launches(props.arch)

    def launch(
        self,
        at: SelectAddresses,
        shape: SelectShape,
        num_tokens: int,
        stream: int,
        allocate: Allocate,
    ) -> None:
        """Enqueue one call."""
        self.prepare(shape, num_tokens).launch(at, stream, allocate)

    def prepare(self, shape: SelectShape, num_tokens: int) -> PreparedSelection:
        """What calls of one shape launch."""
        max_rows = shape.max_kv_len // self.problem.ratio
        max_blocks = max(-(-max_rows // self.problem.block_rows), 1)
        rows = self.problem.num_groups
        # Rows of scores of softmax lie behind those of heads.
        log_rows = self.scored.num_groups if self.problem.score == "softmax" else 0
        score_stride = -(-max_blocks // 4) * 4
        chunk = max(1, min(num_tokens, _MAX_SCORE_BYTES // (4 * score_stride * (rows + log_rows))))
        counts = dict.fromkeys(min(chunk, num_tokens - at) for at in range(0, num_tokens, chunk))
        choices = {
            count: select_topk.prepare(
                self.problem, score_stride, max_blocks, count, self.device_index
            )
            for count in counts
        }
        has_scores = max_rows and (shape.num_candidates or not self.scored.candidate_block)
        launches = {
            count: self._shape_scores(shape, count, count == num_tokens)
            for count in counts
            if has_scores
        }
        return PreparedSelection(
            self, shape, num_tokens, chunk, score_stride, log_rows, launches, choices
        )

    def score(
        self, at: SelectAddresses, shape: SelectShape, target: tuple[int, int], stream: int
    ) -> None:
        """Enqueue the scores alone, into float32 [tokens * groups, stride] at an address; what a
        token does not see stays as it is. All requests have equally many tokens."""
        tokens = self.pack_tokens(at, shape, 0)
        count = shape.num_requests * shape.request_tokens
        launch = self._shape_scores(shape, count, True)
        self.enqueue_scores(launch, at, shape, tokens, target, stream)

    def pack_tokens(self, at: SelectAddresses, shape: SelectShape, first: int) -> bytes:
        return TOKENS.pack(
            at.kv_lens,
            at.qo_offsets,
            shape.num_requests,
            shape.request_tokens,
            shape.max_kv_len,
            shape.is_causal,
            shape.kv_lens_are_steps,
            *self._shifts,
            first,
        )

    def enqueue_scores(
        self,
        scores: _ScoreLaunch,
        at: SelectAddresses,
        shape: SelectShape,
        tokens: bytes,
        target: tuple[int, int],
        stream: int,
    ) -> None:
        """Enqueue the scores of a launch's tokens, of which SelectTokens tell."""
        arguments = params.this_thread.launch_buffer
        SELECT_SCORES.pack_into(
            arguments.buffer,
            arguments.offset,
            at.q,
            at.k,
            at.k_scales,
            at.k_scale,
            at.weights,
            at.table,
            at.kv_offsets,
            at.candidates,
            target[0],
            shape.table_stride,
            shape.weight_stride,
            target[1],
            shape.scale_stride,
            shape.candidate_stride,
            shape.candidate_stride_group,
            tokens,
            *scores.numbers,
        )
        enqueue(scores.launch, arguments, self.device_index, stream)

    def _shape_scores(self, shape: SelectShape, count: int, is_whole: bool) -> _ScoreLaunch:
        """The launch of the scores of so many tokens, all those of the call if `is_whole`."""
        problem = self.scored
        max_rows = shape.max_kv_len // problem.ratio
        candidate_rows = problem.candidate_block // problem.ratio
        if candidate_rows:
            max_rows = shape.num_candidates * candidate_rows
        each = shape.request_tokens or -(-count // max(shape.num_requests, 1))
        tiles = self._tiles(min(each, count), shape.num_requests, max_rows)
        request_tiles = 0
        if shape.request_tokens and is_whole:
            request_tiles = -(-shape.request_tokens // tiles.tokens)
            num_tiles = request_tiles * shape.num_requests
        else:
            num_tiles = count // tiles.tokens + shape.num_requests
        times = self.problem.num_groups if problem.group_candidates else 1
        parts = self._parts(tiles, max(num_tiles * times, 1), max_rows)
        page_size = shape.page_size or _ONE_PAGE
        numbers = (
            *(x * problem.dtype_q.itemsize // 16 for x in shape.q_strides),
            *(x * problem.dtype_k.itemsize // 16 for x in shape.k_strides),
            count,
            request_tiles,
            page_size,
            *params.divisor(page_size),
            shape.num_candidates,
            candidate_rows,
            *params.divisor(max(candidate_rows, 1)),
            shape.sm_scale,
            self.problem.num_groups,
            0,
        )
        function = load_function("select_scores", tiles.config, self.device_index)
        grid = num_tiles, parts, times
        launch = Launch(function, grid, 32 * _WARPS, 0, is_dependent=self._is_dependent)
        return _ScoreLaunch(launch, numbers, tiles)

    def _tiles(self, tokens: int, num_requests: int, max_rows: int) -> _Tiles:
        """Warps share blocks of keys, but those of many columns only where these are too few for
        all warps that run at a time."""
        alone = choose_tiles(self.scored, tokens, False, self._arch)
        num_tiles = num_requests * -(-tokens // alone.tokens)
        units = num_tiles * -(-max_rows // alone.unit)
        are_few = units < 2 * alone.blocks_per_sm * self._num_sms
        if alone.columns <= 8 * _TILES_THAT_SHARE or are_few:
            return choose_tiles(self.scored, tokens, True, self._arch)
        return alone

    def _parts(self, tiles: _Tiles, num_tiles: int, max_rows: int) -> int:
        """In how many parts each tile's rows are divided."""
        slots = tiles.blocks_per_sm * self._num_sms
        parts = slots // num_tiles
        if tiles.columns <= 8 * _FEW_TILES:
            row_bytes = self.scored.head_dim * self.scored.dtype_k.itemsize
            by_bytes = -(-max_rows * row_bytes // _PART_BYTES)
            parts = max(parts, min(by_bytes, -(-_MAX_WAVES * slots // num_tiles)))
        elif tiles.columns > 8 * _TILES_OF_FOUR:
            # Of what all blocks do before their rows, and what the last one does.
            best = math.sqrt(max_rows * slots / (num_tiles * _ROWS_OF_QUERIES))
            waves = max(1, round(num_tiles * best / slots))
            parts = waves * slots // num_tiles or round(best)
        elif parts < _FEW_PARTS:
            parts = -(-_WAVES_OF_FEW * slots // num_tiles)
        return max(1, min(parts, -(-max_rows // tiles.unit)))


@dataclass(frozen=True, slots=True)
class PreparedSelection:
    """What selections of one problem and shape launch, wherever their arrays are.

    chunk       tokens that have scores at a time
    log_rows    rows of what heads have, of a token; 0 but for softmax
    scores, choices  launches by how many tokens they have; no scores where nothing has one
    """

    owner: SelectLauncher
    shape: SelectShape
    num_tokens: int
    chunk: int
    score_stride: int
    log_rows: int
    scores: dict[int, _ScoreLaunch]
    choices: dict[int, select_topk.PreparedChoice | None]

    def launches(self) -> Iterator[tuple[str, list[Launch]]]:
        """How scores and lists are shared out, and their launches, by numbers of tokens."""
        for count, choice in self.choices.items():
            known = [x for x in (self.scores.get(count), choice) if x is not None]
            yield "; ".join(x.words for x in known), [x.launch for x in known]

    def launch(self, at: SelectAddresses, stream: int, allocate: Allocate) -> None:
        """Enqueue a call."""
        owner, problem, shape = self.owner, self.owner.problem, self.shape
        row_bytes = 4 * self.score_stride
        log_bytes = self.chunk * row_bytes * self.log_rows
        score_bytes = self.chunk * row_bytes * problem.num_groups
        memory, _memory = scratch.workspace(
            log_bytes + score_bytes, owner.device_index, stream, allocate
        )
        scores = memory + log_bytes
        for first in range(0, self.num_tokens, self.chunk):
            count = min(self.chunk, self.num_tokens - first)
            tokens = owner.pack_tokens(at, shape, first)
            if problem.candidate_block:
                # What has no score does not compete: a NaN.
                recording.spoil()
                cuda().runtime.memsetAsync(scores, 0xFF, score_bytes, stream)
            if self.scores:
                target = memory, self.score_stride
                owner.enqueue_scores(self.scores[count], at, shape, tokens, target, stream)
                if self.log_rows:
                    shares = self._shares(at, (memory, scores), tokens, count)
                    select_softmax.launch(shares, problem.dtype_w, owner.device_index, stream)
            choice = self.choices[count]
            if choice is not None:
                lists = select_topk.Lists(
                    at.out + 4 * first * shape.out_strides[0],
                    shape.out_strides,
                    at.values and at.values + 4 * first * shape.values_strides[0],
                    shape.values_strides,
                )
                choice.enqueue(scores, lists, tokens, stream)

    def _shares(
        self, at: SelectAddresses, memory: tuple[int, int], tokens: bytes, count: int
    ) -> select_softmax.Shares:
        problem, shape = self.owner.problem, self.shape
        return select_softmax.Shares(
            logs=memory[0],
            scores=memory[1],
            weights=at.weights,
            candidates=at.candidates,
            score_stride=self.score_stride,
            weight_stride=shape.weight_stride,
            candidate_strides=(shape.candidate_stride, shape.candidate_stride_group),
            tokens=tokens,
            num_tokens=count,
            num_heads=problem.num_heads,
            num_groups=problem.num_groups,
            num_candidates=shape.num_candidates,
            candidate_blocks=max(problem.candidate_block // problem.block, 1),
        )


@lru_cache(maxsize=256)
def launcher(problem: SelectProblem, device_index: int) -> SelectLauncher:
    """The launcher of a problem on a device."""
    return SelectLauncher(problem, device_index)
