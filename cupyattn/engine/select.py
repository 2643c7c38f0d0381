"""Selections of blocks of keys: calls of sparse.select, checked, and answered on the CPU; on a GPU
by select_gpu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import array, reference
from ..array import ArrayView
from ..array.match import (
    match_output,
    require_contiguous,
    require_contiguous_last,
    require_dtype,
    require_same_dtype,
)
from ..core import dtypes, parse
from ..core.parse import require_int
from ..core.selection import MAX_TOPK, SCORES, SelectProblem
from ..errors import ArgumentError
from . import select_gpu
from .key_lists import require_granularity
from .views import read_scale

_QUERY_DTYPES = dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float8_e4m3fn


class SelectArrays(NamedTuple):
    """The arrays of a selection as given; None where there is none."""

    q: Any
    index_cache: Any
    table: Any = None
    lengths: Any = None
    weights: Any = None
    indptr: Any = None
    kv_indptr: Any = None
    candidates: Any = None
    k_scale: Any = None
    k_scales: Any = None
    out: Any = None
    values: Any = None


class SelectOptions(NamedTuple):
    """Its options as given."""

    topk: Any
    block: Any
    score: Any
    groups: Any
    first: Any
    last: Any
    ratio: Any
    tail: Any
    causal: Any
    candidate_block: Any
    sm_scale: Any
    k_scale: Any
    return_values: Any


class Index(NamedTuple):
    """The index rows of all requests.

    rows        [pages, page_size, head_dim], [requests, rows, head_dim], or [rows, head_dim] of all
    scales      float32 of each row, like `rows` without its last axis; or None
    is_fused    rows are DeepGEMM's pages of bytes, whose scales lie behind their rows
    """

    rows: ArrayView
    scales: ArrayView | None
    is_fused: bool
    head_dim: int
    dtype: dtypes.DType


@dataclass(slots=True)
class Call:
    """A checked selection."""

    problem: SelectProblem
    is_causal: bool
    sm_scale: float
    q: ArrayView
    index: Index
    table: ArrayView | None
    lengths: ArrayView | None
    weights: ArrayView | None
    indptr: ArrayView | None
    kv_indptr: ArrayView | None
    candidates: ArrayView | None
    k_scale: ArrayView | None
    out: ArrayView | None
    values: ArrayView | None
    num_requests: int
    request_tokens: int

    @property
    def list_shape(self) -> tuple[int, int, int]:
        return self.q.shape[0], self.problem.num_groups, self.problem.list_len


def run(arrays: SelectArrays, options: SelectOptions) -> Any:
    """The lists of a selection, with their scores if `return_values`."""
    result = select_gpu.run_cached(arrays, options)
    if result is not None:
        return result if options.return_values else result[0]
    call = check(arrays, options)
    if call.q.device.kind != "cpu":
        lists, values = select_gpu.run(call, arrays, options)
        return (lists, values) if parse.flag(options.return_values, "return_values") else lists
    lists, values = _answer(call)
    own = slice(None)
    if call.out is not None:
        array.as_numpy(call.out)[own] = lists
    if call.values is not None:
        array.as_numpy(call.values)[own] = values
    result = arrays.out if call.out is not None else array.from_numpy(lists, call.q)
    if not parse.flag(options.return_values, "return_values"):
        return result
    return result, arrays.values if call.values is not None else array.from_numpy(values, call.q)


# --- checks ---


def check(arrays: SelectArrays, options: SelectOptions) -> Call:
    """The call, checked as far as the host can. Raises ArgumentError, UnsupportedError."""
    vq = array.view(arrays.q, "q_index")
    if len(vq.shape) != 3:
        raise ArgumentError(
            f"q_index: shape is {list(vq.shape)}; wanted [tokens, index_heads, head_dim]"
        )
    require_dtype(vq, _QUERY_DTYPES, "q_index")
    require_contiguous_last(vq, "q_index")
    index = _view_index_rows(arrays, vq)
    problem = _problem(arrays, options, vq, index)
    table, lengths, kv_indptr, count = _view_lengths(arrays, index)
    indptr, request_tokens = _view_tokens(arrays, vq.shape[0], count)
    default = 1.0 / math.sqrt(vq.shape[2]) if problem.score == "softmax" else 1.0
    k_number, held = read_scale(arrays.k_scale, "k_scale")
    k_number *= parse.finite(options.k_scale, "k_scale", 1.0)
    call = Call(
        problem=problem,
        is_causal=parse.flag(options.causal, "causal"),
        sm_scale=parse.finite(options.sm_scale, "sm_scale", default) * k_number,
        q=vq,
        index=index,
        table=table,
        lengths=lengths,
        weights=_view_weights(arrays.weights, vq),
        indptr=indptr,
        kv_indptr=kv_indptr,
        candidates=_view_candidates(arrays.candidates, problem, vq.shape[0]),
        k_scale=None if held is None else array.view(held, "k_scale"),
        out=None if arrays.out is None else array.view(arrays.out, "out"),
        values=None if arrays.values is None else array.view(arrays.values, "values"),
        num_requests=count,
        request_tokens=request_tokens,
    )
    _check_places(call)
    return call


def _view_index_rows(arrays: SelectArrays, vq: ArrayView) -> Index:
    """The index cache, without an axis of one head."""
    name, head_dim = "index_cache", vq.shape[2]
    v = array.view(arrays.index_cache, name)
    require_contiguous_last(v, name)
    if len(v.shape) == 4 and v.shape[2] == 1:
        shape, strides = (*v.shape[:2], v.shape[3]), (*v.strides[:2], v.strides[3])
        v = array.as_strided(v, shape, strides)
    if v.dtype is dtypes.uint8:
        return _view_fused_pages(arrays, v, head_dim)
    wanted = (2,) if arrays.table is None and arrays.kv_indptr is not None else (3,)
    if len(v.shape) not in wanted or v.shape[-1] != head_dim or 0 in v.shape[1:]:
        raise ArgumentError(
            f"{name}: shape is {list(v.shape)}; wanted [pages, page_size, {head_dim}] with table, "
            f"[rows, {head_dim}] with kv_indptr, or [requests, rows, {head_dim}]"
        )
    is_fp8 = v.dtype is dtypes.float8_e4m3fn
    if not is_fp8:
        require_same_dtype(v, name, vq, "q_index")
    scales = None
    if arrays.k_scales is not None:
        scales = array.view(arrays.k_scales, "k_scales")
        require_dtype(scales, dtypes.float32, "k_scales")
        if tuple(scales.shape) != tuple(v.shape[:-1]):
            raise ArgumentError(
                f"k_scales: shape is {list(scales.shape)}; wanted {list(v.shape[:-1])}, one for "
                f"each row of {name}"
            )
        require_contiguous_last(scales, "k_scales")
    return Index(v, scales, False, head_dim, v.dtype)


def _view_fused_pages(arrays: SelectArrays, v: ArrayView, head_dim: int) -> Index:
    """DeepGEMM's pages: e4m3 rows, and behind those of a page their float32 scales."""
    name = "index_cache"
    if arrays.table is None:
        raise ArgumentError(f"{name}: is pages of uint8, and table is None; pass both")
    if arrays.k_scales is not None:
        raise ArgumentError(f"k_scales: given beside {name} of uint8, which has its own; pass None")
    v = fused_pages(v, head_dim, name)
    return Index(v, None, True, head_dim, dtypes.float8_e4m3fn)


def fused_pages(v: ArrayView, head_dim: int, name: str) -> ArrayView:
    """DeepGEMM's pages as [pages, page_size, head_dim + 4] bytes, checked."""
    require_dtype(v, dtypes.uint8, name)
    if len(v.shape) == 4 and v.shape[2] == 1:
        shape, strides = (*v.shape[:2], v.shape[3]), (*v.strides[:2], v.strides[3])
        v = array.as_strided(v, shape, strides)
    if len(v.shape) != 3 or v.shape[2] != head_dim + 4 or not v.shape[1]:
        raise ArgumentError(
            f"{name}: uint8 of shape {list(v.shape)}; wanted pages [pages, page_size, 1, "
            f"{head_dim + 4}]: rows of {head_dim} e4m3 and behind them their scales"
        )
    page_bytes = v.shape[1] * v.shape[2]
    is_whole = v.shape[1] == 1 or v.strides[1] == v.shape[2]
    if not is_whole or v.strides[0] % 4 or head_dim % 4 or v.ptr % 4:
        raise ArgumentError(
            f"{name}: strides {list(v.strides)} in bytes; wanted pages of {page_bytes} bytes "
            "without gaps, on 4-byte boundaries"
        )
    return v


def _problem(
    arrays: SelectArrays, options: SelectOptions, vq: ArrayView, index: Index
) -> SelectProblem:
    score = parse.choice(options.score, SCORES, "score")
    heads = vq.shape[1]
    groups = options.groups
    if groups is None:
        groups = heads if score == "max" else 1
    groups = require_int(groups, "groups")
    if not heads or heads % groups:
        raise ArgumentError(f"groups: got {groups} for {heads} index heads; wanted a divisor")
    blocks, entries = _blocks(options), _entries(options)
    weights = None if arrays.weights is None else array.view(arrays.weights, "weights")
    if weights is not None and score == "max":
        raise ArgumentError("weights: given with score 'max', which has none; pass None")
    row_scales = "pages" if index.is_fused else "" if index.scales is None else "rows"
    return SelectProblem(
        dtype_q=vq.dtype,
        dtype_k=index.dtype,
        row_scales=row_scales,
        head_dim=index.head_dim,
        num_heads=heads,
        num_groups=groups,
        score=score,
        dtype_w=None if weights is None else weights.dtype,
        block=blocks.block,
        ratio=blocks.ratio,
        topk=entries.topk,
        first=entries.first,
        last=entries.last,
        tail=blocks.tail,
        paged=arrays.table is not None,
        candidate_block=_candidate_block(arrays, options, blocks.block),
        group_candidates=_has_group_candidates(arrays, groups),
        gives_values=arrays.values is not None or options.return_values is True,
    )


class _Blocks(NamedTuple):
    """Keys of a block, and of an index row; whether a block without a row is listed besides."""

    block: int
    ratio: int
    tail: bool


def _blocks(options: SelectOptions) -> _Blocks:
    block = require_granularity(options.block, "block")
    ratio = require_granularity(options.ratio, "ratio")
    if block % ratio:
        raise ArgumentError(f"ratio: got {ratio}; wanted a divisor of block, which is {block}")
    tail = parse.flag(options.tail, "tail")
    if tail and (ratio == 1 or block != ratio):
        raise ArgumentError(
            f"tail: is for blocks of one index row of several keys; got block {block} and ratio "
            f"{ratio}"
        )
    return _Blocks(block, ratio, tail)


class _Entries(NamedTuple):
    """Entries of a list, of which the first and the last blocks have their share."""

    topk: int
    first: int
    last: int


def _entries(options: SelectOptions) -> _Entries:
    topk = require_int(options.topk, "topk", 1, MAX_TOPK)
    first, last = require_int(options.first, "first", 0), require_int(options.last, "last", 0)
    if first + last > topk:
        raise ArgumentError(
            f"first, last: got {first} and {last}, of lists of {topk}; wanted at most topk together"
        )
    return _Entries(topk, first, last)


def _candidate_block(arrays: SelectArrays, options: SelectOptions, block: int) -> int:
    """Keys of the blocks that candidates name; 0 without them."""
    size = options.candidate_block
    if arrays.candidates is None:
        if size is not None:
            raise ArgumentError("candidate_block: given without candidates; pass both, or none")
        return 0
    size = block if size is None else require_int(size, "candidate_block")
    if size % block:
        raise ArgumentError(f"candidate_block: got {size}; wanted a multiple of block, {block}")
    return size


def _has_group_candidates(arrays: SelectArrays, groups: int) -> bool:
    """Whether each list has candidates of its own."""
    if arrays.candidates is None or groups == 1:
        return False
    shape = array.view(arrays.candidates, "candidates").shape
    return len(shape) == 3 and shape[1] == groups


def _view_lengths(
    arrays: SelectArrays, index: Index
) -> tuple[ArrayView | None, ArrayView | None, ArrayView | None, int]:
    """The page table, lengths, offsets of rows, and the number of requests."""
    table, kv_indptr = None, None
    if arrays.table is not None:
        if arrays.kv_indptr is not None:
            raise ArgumentError("kv_indptr: given beside table; pass one of them")
        table = array.view(arrays.table, "table")
        require_dtype(table, dtypes.int32, "table")
        if len(table.shape) != 2:
            raise ArgumentError(
                f"table: shape is {list(table.shape)}; wanted [requests, most pages]"
            )
        require_contiguous_last(table, "table")
        count = table.shape[0]
        if arrays.lengths is None:
            raise ArgumentError("lengths: got None beside table; wanted the keys of each request")
    elif arrays.kv_indptr is not None:
        kv_indptr = _view_ints(arrays.kv_indptr, "kv_indptr", None)
        count = max(0, kv_indptr.shape[0] - 1)
    else:
        count = index.rows.shape[0]
    lengths = None
    if arrays.lengths is not None:
        lengths = _view_ints(arrays.lengths, "lengths", count)
    return table, lengths, kv_indptr, count


def _view_tokens(arrays: SelectArrays, tokens: int, count: int) -> tuple[ArrayView | None, int]:
    """Offsets of tokens, or how many each request has."""
    if arrays.indptr is not None:
        return _view_ints(arrays.indptr, "indptr", count + 1), 0
    if tokens % max(1, count) or (tokens and not count):
        raise ArgumentError(
            f"q_index: has {tokens} tokens of {count} requests; wanted equally many of each, or "
            "indptr"
        )
    return None, tokens // max(1, count)


def _view_ints(x: Any, name: str, count: int | None) -> ArrayView:
    v = array.view(x, name)
    require_dtype(v, dtypes.int32, name)
    if len(v.shape) != 1 or count not in (None, v.shape[0]):
        wanted = "[requests + 1]" if count is None else f"[{count}]"
        raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted {wanted}")
    require_contiguous(v, name)
    return v


def _view_weights(x: Any, vq: ArrayView) -> ArrayView | None:
    if x is None:
        return None
    v = array.view(x, "weights")
    wanted = (dtypes.float32, vq.dtype) if vq.dtype.is_float16 else (dtypes.float32,)
    require_dtype(v, wanted, "weights")
    if tuple(v.shape) != tuple(vq.shape[:2]):
        raise ArgumentError(
            f"weights: shape is {list(v.shape)}; wanted {list(vq.shape[:2])}, one for each index "
            "head of each token"
        )
    require_contiguous_last(v, "weights")
    return v


def _view_candidates(x: Any, problem: SelectProblem, tokens: int) -> ArrayView | None:
    """Candidates [tokens, groups or 1, entries]."""
    if x is None:
        return None
    v = array.view(x, "candidates")
    require_dtype(v, dtypes.int32, "candidates")
    if len(v.shape) == 2:
        v = array.as_strided(v, (v.shape[0], 1, v.shape[1]), (v.strides[0], 0, v.strides[1]))
    groups = problem.num_groups
    if len(v.shape) != 3 or v.shape[0] != tokens or v.shape[1] not in (1, groups):
        raise ArgumentError(
            f"candidates: shape is {list(v.shape)}; wanted [{tokens}, {groups}, entries], or one "
            "list for all groups"
        )
    require_contiguous_last(v, "candidates")
    return v


def _check_places(call: Call) -> None:
    """Where arrays are, and whether the outputs may be written."""
    inputs = {
        "q_index": call.q,
        "index_cache": call.index.rows,
        "k_scales": call.index.scales,
        "k_scale": call.k_scale,
        "table": call.table,
        "lengths": call.lengths,
        "weights": call.weights,
        "indptr": call.indptr,
        "kv_indptr": call.kv_indptr,
        "candidates": call.candidates,
    }
    array.same_device(**inputs, out=call.out, values=call.values)
    match_output(call.out, call.list_shape, dtypes.int32, "out", **inputs, values=call.values)
    match_output(call.values, call.list_shape, dtypes.float32, "values", **inputs)
    for name, v in (("out", call.out), ("values", call.values)):
        if v is not None:
            require_contiguous_last(v, name)


# --- the CPU ---


class _Span(NamedTuple):
    """Tokens of a request, its keys, and its first index row."""

    q_start: int
    q_end: int
    kv_len: int
    first_row: int


def _answer(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Lists and their scores, token by token."""
    problem = call.problem
    lists = np.full(call.list_shape, -1, np.int32)
    values = np.full(call.list_shape, -np.inf, np.float32)
    q, weights = array.as_numpy(call.q), _numpy(call.weights)
    for request, span in enumerate(_spans(call)):
        rows, scales = _rows_of(call, request, span)
        for token in range(span.q_start, span.q_end):
            later = span.q_end - 1 - token if call.is_causal else 0
            seen = max(span.kv_len - later, 0)
            count = seen // problem.ratio
            scores = reference.score_blocks(
                q[token],
                rows[:count],
                score=problem.score,
                num_groups=problem.num_groups,
                block_rows=problem.block_rows,
                sm_scale=call.sm_scale,
                row_scales=None if scales is None else scales[:count],
                weights=None if weights is None else weights[token],
            )
            for group in range(problem.num_groups):
                chosen = reference.choose_blocks(
                    scores[group],
                    problem.topk,
                    first=problem.first,
                    last=problem.last,
                    allowed=_allowed(call, token, group, scores.shape[1]),
                )
                lists[token, group, : chosen.size] = chosen
                with np.errstate(over="ignore"):
                    values[token, group, : chosen.size] = scores[group][chosen]
                if problem.tail and seen % problem.ratio:
                    lists[token, group, chosen.size] = count
    return lists, values


def _numpy(v: ArrayView | None) -> np.ndarray | None:
    return None if v is None else array.as_numpy(v)


def _spans(call: Call) -> Iterator[_Span]:
    """The requests, checked. Raises ArgumentError for what the GPU would cut."""
    tokens, room, problem = call.q.shape[0], call.index.rows.shape, call.problem
    indptr, offsets, lengths = (_numpy(x) for x in (call.indptr, call.kv_indptr, call.lengths))
    for x, limit, name in (
        (indptr, tokens, "indptr"),
        (offsets, room[0], "kv_indptr"),
    ):
        if x is not None and (x[:1].any() or (np.diff(x) < 0).any() or x[-1] > limit):
            raise ArgumentError(
                f"{name}: holds {x.tolist()[:8]}; wanted offsets from 0 on that rise to at most "
                f"{limit}"
            )
    for request in range(call.num_requests):
        first = 0 if offsets is None else int(offsets[request])
        if offsets is not None:
            max_rows = int(offsets[request + 1]) - first
        else:
            max_rows = room[1] * (1 if call.table is None else call.table.shape[1])
        kv_len = max_rows * problem.ratio if lengths is None else int(lengths[request])
        if not 0 <= kv_len // problem.ratio <= max_rows:
            raise ArgumentError(
                f"lengths: request {request} has {kv_len} keys; its index has room for "
                f"{max_rows} rows of {problem.ratio} keys"
            )
        begin = request * call.request_tokens if indptr is None else int(indptr[request])
        end = begin + call.request_tokens if indptr is None else int(indptr[request + 1])
        yield _Span(begin, end, kv_len, first)


def _rows_of(call: Call, request: int, span: _Span) -> tuple[np.ndarray, np.ndarray | None]:
    """The index rows of a request [rows, head_dim], and their scales."""
    index, count = call.index, span.kv_len // call.problem.ratio
    rows, scales = array.as_numpy(index.rows), _numpy(index.scales)
    if call.table is None:
        own = (slice(span.first_row, span.first_row + count),)
        if call.kv_indptr is None:
            own = (request, slice(count))  # type: ignore[assignment]
        return rows[own], None if scales is None else scales[own]
    table = array.as_numpy(call.table)[request]
    if index.is_fused:
        return rows_of_pages(rows, table, count, index.head_dim, request)
    pages = _pages_of(table, rows, count, request)
    own_scales = None if scales is None else scales[pages].reshape(-1)[:count]
    return rows[pages].reshape(-1, index.head_dim)[:count], own_scales


def _pages_of(table: np.ndarray, cache: np.ndarray, count: int, request: int) -> np.ndarray:
    """The pages of a request's first rows. Raises ArgumentError for such as the cache has not."""
    pages = table[: -(-count // cache.shape[1])]
    wrong = pages[(pages < 0) | (pages >= cache.shape[0])]
    if wrong.size:
        raise ArgumentError(
            f"table: request {request} has page {int(wrong[0])}; the cache holds {cache.shape[0]} "
            "pages"
        )
    return pages


def rows_of_pages(
    cache: np.ndarray, table: np.ndarray, count: int, head_dim: int, request: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first rows of a request in DeepGEMM's pages, e4m3 [count, head_dim], and their scales."""
    pages, size = _pages_of(table, cache, count, request), cache.shape[1]
    fused = np.ascontiguousarray(cache[pages]).reshape(len(pages), size * (head_dim + 4))
    split = size * head_dim
    rows = np.ascontiguousarray(fused[:, :split]).view(dtypes.float8_e4m3fn.numpy)
    scales = np.ascontiguousarray(fused[:, split:]).view(np.float32)
    return rows.reshape(-1, head_dim)[:count], scales.reshape(-1)[:count]


def _allowed(call: Call, token: int, group: int, num_blocks: int) -> np.ndarray | None:
    """Which blocks compete; None for all."""
    if call.candidates is None:
        return None
    candidates = array.as_numpy(call.candidates)
    own = candidates[token, min(group, candidates.shape[1] - 1)]
    own = own[own >= 0].astype(np.int64)
    if np.unique(own).size != own.size:
        raise ArgumentError(f"candidates: those of token {token} repeat a block; wanted each once")
    each = call.problem.candidate_block // call.problem.block
    blocks = (own[:, None] * each + np.arange(each)).reshape(-1)
    allowed = np.zeros(num_blocks, np.bool_)
    allowed[blocks[blocks < num_blocks]] = True
    return allowed
