"""DeepGEMM's scores of index keys in fp8 over pages, as FlashInfer has them too.

`cupyattn.sparse.select` with score "relu_sum" scores and chooses at once, without a matrix of
scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import array, reference
from .array import ArrayView
from .array.match import match_array, match_output, require_dtype
from .core import dtypes, parse
from .core.names import refuse_names
from .core.parse import require_int
from .core.tracing import untraced
from .engine import geometry, mqa_gpu
from .engine.index_arrays import fresh_progression
from .engine.select import fused_pages, rows_of_pages
from .errors import ArgumentError
from .typing import Array

__all__ = ["fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)


@untraced
def get_paged_mqa_logits_metadata(
    context_lens: Array,
    page_kv: int,
    num_sms: int,
    indices: Any = None,
    *,
    out: Array | None = None,
) -> Any:
    """int32 [num_sms + 1, 2] of zeros, of context_lens' framework and device, which programs pass
    on: nothing here is scheduled ahead.

    Parameters
    ----------
    context_lens
        int32 [B] or [B, next_n], which names the framework and the device.
    page_kv
        Keys of a page.
    num_sms
        SMs of the program's schedule.
    indices
        Must be None.
    out
        The array to return.

    Raises
    ------
    CupyAttnError
        ArgumentError.

    Notes
    -----
    Semantics: DeepGEMM's function of the same name, whose schedule is its own.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import paged_mqa
    >>> paged_mqa.get_paged_mqa_logits_metadata(np.array([21, 16], np.int32), 64, 132).shape
    (133, 2)
    """
    v = array.view(context_lens, "context_lens")
    require_dtype(v, dtypes.int32, "context_lens")
    require_int(page_kv, "page_kv")
    count = require_int(num_sms, "num_sms") + 1
    geometry.refuse("is not supported", indices=indices)
    if out is None:
        return fresh_progression(2 * count, 0, 0, v).reshape(count, 2)
    match_output(array.view(out, "out"), (count, 2), dtypes.int32, "out", context_lens=v)
    return out


@untraced
def fp8_paged_mqa_logits(
    q: Array,
    kv_cache: Array,
    weights: Array,
    context_lens: Array,
    block_table: Array,
    schedule_meta: Any,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Any = None,
) -> Any:
    """Weighted sums of rectified products: for token t and key p of its request scale_p * sum over
    heads of weights[t, h] * max(q[t, h] · key_p, 0).

    Parameters
    ----------
    q
        float8_e4m3fn [B, next_n, heads, head_dim].
    kv_cache
        uint8 [num_pages, page_size, 1, head_dim + 4]: the e4m3 rows of a page, and behind them a
        float32 scale of each.
    weights
        float32 [B * next_n, heads].
    context_lens
        int32 [B, next_n], the keys that each token sees; or [B], those that the last one does, and
        each before it one less.
    block_table
        int32 [B, most pages].
    max_context_len
        Columns of the result.
    schedule_meta
        Accepted for compatibility.
    indices
        Must be None.
    clean_logits
        What a token does not see is -inf, which it always is on the CPU; on a GPU else anything.

    Returns
    -------
    result
        float32 [B * next_n, max_context_len]. A GPU serves up to 64 heads of 64 or 128 columns,
        with lengths [B], which it cuts to what there is room for. `sparse.select` scores and
        chooses without such a matrix.

    Raises
    ------
    CupyAttnError
        ArgumentError and UnsupportedError.

    Notes
    -----
    Semantics: DeepGEMM's function of the same name.

    Examples
    --------
    >>> import ml_dtypes
    >>> import numpy as np
    >>> from cupyattn import paged_mqa
    >>> q = np.ones((2, 1, 32, 64), ml_dtypes.float8_e4m3fn)
    >>> cache, weights = np.zeros((4, 16, 1, 64 + 4), np.uint8), np.ones((2, 32), np.float32)
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([21, 16], np.int32)
    >>> paged_mqa.fp8_paged_mqa_logits(q, cache, weights, lengths, table, None, 32).shape
    (2, 32)
    """
    vq = array.view(q, "q")
    match_array(vq, "B next_n heads head_dim", dtypes.float8_e4m3fn, "q")
    geometry.refuse("is not supported", indices=indices)
    cleans = parse.flag(clean_logits, "clean_logits")
    count, each, heads, head_dim = vq.shape
    columns = require_int(max_context_len, "max_context_len", 0)
    vw, table = array.view(weights, "weights"), array.view(block_table, "block_table")
    match_array(vw, f"{count * each} {heads}", dtypes.float32, "weights")
    match_array(table, f"{count} pages", dtypes.int32, "block_table")
    pages = fused_pages(array.view(kv_cache, "kv_cache"), head_dim, "kv_cache")
    array.same_device(q=vq, kv_cache=pages, weights=vw, block_table=table)
    if vq.device.kind != "cpu":
        lens = array.view(context_lens, "context_lens")
        require_dtype(lens, dtypes.int32, "context_lens")
        array.same_device(q=vq, context_lens=lens)
        return mqa_gpu.logits(vq, pages, vw, lens, table, columns, cleans)
    seen = _seen(context_lens, count, each, min(columns, table.shape[1] * pages.shape[1]))
    logits = np.full((count * each, columns), -np.inf, np.float32)
    queries, by_head = array.as_numpy(vq), array.as_numpy(vw)
    for request in range(count):
        own = array.as_numpy(table)[request]
        rows, scales = rows_of_pages(
            array.as_numpy(pages), own, int(seen[request].max(initial=0)), head_dim, request
        )
        for token in range(each):
            n, row = int(seen[request, token]), request * each + token
            logits[row, :n] = reference.score_blocks(
                queries[request, token],
                rows[:n],
                score="relu_sum",
                row_scales=scales[:n],
                weights=by_head[row],
            )[0]
    return array.from_numpy(logits, vq)


def _seen(context_lens: Any, count: int, each: int, room: int) -> np.ndarray:
    """The keys that each token sees, [count, each]."""
    v: ArrayView = array.view(context_lens, "context_lens")
    require_dtype(v, dtypes.int32, "context_lens")
    lens = array.to_host(v).astype(np.int64)
    if tuple(v.shape) == (count,):
        lens = (lens[:, None] - (each - 1 - np.arange(each))).clip(0)
    if lens.shape != (count, each):
        raise ArgumentError(
            f"context_lens: shape is {list(v.shape)}; wanted [{count}] or [{count}, {each}]"
        )
    if lens.size and not 0 <= lens.min() <= lens.max() <= room:
        raise ArgumentError(
            f"context_lens: holds {lens.reshape(-1).tolist()[:8]}; wanted 0 to {room}, what "
            "block_table and max_context_len have room for"
        )
    return lens
