"""DeepGEMM's scores of index keys as a matrix, by the kernel that scores for a selection."""

from __future__ import annotations

from typing import Any

from .. import array
from ..array import ArrayView
from ..core import dtypes
from ..core.selection import SelectProblem
from ..errors import ArgumentError, UnsupportedError
from ..launch.ops import select as launch_select
from ..launch.ops.select import SelectAddresses, SelectShape
from .index_arrays import full

_VECTOR = 16


def logits(
    q: ArrayView,
    pages: ArrayView,
    weights: ArrayView,
    lens: ArrayView,
    table: ArrayView,
    columns: int,
    cleans: bool,
) -> Any:
    """float32 [B * next_n, columns]: of q e4m3 [B, next_n, heads, head_dim], DeepGEMM's pages
    [pages, page_size, head_dim + 4], float32 weights [B * next_n, heads], int32 lens [B] and table
    [B, most pages].

    What a token does not see is -inf if `cleans`, else as the memory was.
    """
    count, each, heads, head_dim = q.shape
    lens = _of_requests(lens, count, each)
    problem = _problem(heads, head_dim)
    sentence = launch_select.refusal(problem) or _refusal(q, pages, lens)
    if sentence is not None:
        raise UnsupportedError(sentence)
    array.acquire(q, pages, weights, lens, table)
    shape = count * each, columns
    out = full(shape, -float("inf"), q) if cleans else array.empty(shape, dtypes.float32, q)
    page_size = pages.shape[1]
    if count and each and columns and table.shape[1]:
        launcher = launch_select.launcher(problem, q.device.index)
        at = SelectAddresses(
            q=q.ptr,
            k=pages.ptr,
            k_scales=pages.ptr + page_size * head_dim,
            k_scale=0,
            weights=weights.ptr,
            table=table.ptr,
            kv_lens=lens.ptr,
            qo_offsets=0,
            kv_offsets=0,
            out=0,
            values=0,
        )
        told = SelectShape(
            num_requests=count,
            request_tokens=each,
            page_size=page_size,
            max_kv_len=min(table.shape[1] * page_size, columns, launch_select.MAX_KEYS),
            q_strides=(q.strides[1], q.strides[2]),
            k_strides=(pages.strides[0], head_dim),
            scale_stride=pages.strides[0] // 4,
            table_stride=table.strides[0],
            weight_stride=weights.strides[0],
            out_strides=(0, 0),
            values_strides=(0, 0),
            is_causal=True,
            kv_lens_are_steps=False,
            sm_scale=1.0,
        )
        target = array.view(out, "logits")
        launcher.score(at, told, (target.ptr, columns), array.current_stream(q))
    array.release(q, q, pages, weights, lens, table)
    return array.deliver(out, q)


def _problem(heads: int, head_dim: int) -> SelectProblem:
    """The selection that has these scores."""
    return SelectProblem(
        dtype_q=dtypes.float8_e4m3fn,
        dtype_k=dtypes.float8_e4m3fn,
        row_scales="pages",
        head_dim=head_dim,
        num_heads=heads,
        score="relu_sum",
        dtype_w=dtypes.float32,
    )


def _of_requests(lens: ArrayView, count: int, each: int) -> ArrayView:
    """[B] lengths. Those of each token would have to be compared on the device."""
    if len(lens.shape) == 2 and lens.shape[1] == each == 1:
        lens = array.as_strided(lens, lens.shape[:1], lens.strides[:1])
    if tuple(lens.shape) == (count, each) and each > 1:
        raise UnsupportedError(
            f"context_lens: lengths of each of {each} tokens have no GPU kernel; pass [{count}], "
            "those of each request's last token"
        )
    if tuple(lens.shape) != (count,) or lens.strides != (1,):
        raise ArgumentError(
            f"context_lens: shape is {list(lens.shape)}; wanted [{count}], contiguous"
        )
    return lens


def _refusal(q: ArrayView, pages: ArrayView, lens: ArrayView) -> str | None:
    starts_at = q.strides[0] == q.shape[1] * q.strides[1] or q.shape[0] <= 1
    if q.ptr % _VECTOR or q.strides[1] % _VECTOR or q.strides[2] % _VECTOR or not starts_at:
        return f"q: strides {list(q.strides)} have no GPU kernel; pass a contiguous array"
    is_whole = pages.ptr % _VECTOR == pages.strides[0] % _VECTOR == 0
    if not is_whole or pages.shape[1] * q.shape[3] % _VECTOR:
        return (
            f"kv_cache: pages of {pages.strides[0]} bytes have no GPU kernel; wanted multiples of "
            f"{_VECTOR}"
        )
    return None
