"""flash_attn_with_kvcache with `qv`: latent attention, whose rope parts are q and k_cache."""

from __future__ import annotations

import math
from typing import Any

from .. import array
from ..core import parse
from ..core.problem import LATENT_HEAD_DIMS
from ..errors import ArgumentError
from ..inputs.index_arrays import progression
from ..inputs.latent import Dims
from ..planless.arrays import Arrays
from ..planless.latent import NAMES, Options, run
from .caches import lengths

_NAMES = NAMES._replace(
    q="qv",
    q_rope="q",
    k="v_cache",
    k_rope="k_cache",
    block_tables="page_table",
    kv_lens="cache_seqlens",
    qo_offsets="cu_seqlens_q",
    sm_scale="softmax_scale",
)


def is_latent(q: Any, qv: Any, k_cache: Any, v_cache: Any, others: dict[str, Any]) -> bool:
    """Whether kernels of latent attention serve the call: one head of keys, head dims of theirs,
    and none of the other options. They read values once, and keys in place."""
    if any(map(_is_given, others.values())):
        return False
    names = "v_cache", "k_cache", "qv", "q"
    views = [array.view(x, n) for x, n in zip((v_cache, k_cache, qv, q), names, strict=True)]
    if any(len(v.shape) < 2 for v in views) or views[0].shape[-2] != 1:
        return False
    dims = views[2].shape[-1], views[3].shape[-1]
    return dims in LATENT_HEAD_DIMS and dims == tuple(v.shape[-1] for v in views[:2])


def attend_latent(
    parts: tuple[Any, Any, Any, Any],
    table: Any,
    cache_seqlens: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int | None,
    softmax_scale: Any,
    causal: Any,
    sinks: Any,
    out: Any,
    return_lse: bool,
) -> Any:
    """out, or (out, lse); parts are q, qv, k_cache and v_cache."""
    q, qv, k_cache, v_cache = parts
    vq, rope, vk = (array.view(x, n) for x, n in ((qv, "qv"), (q, "q"), (v_cache, "v_cache")))
    is_ragged = cu_seqlens_q is not None
    if len(vq.shape) != (3 if is_ragged else 4) or len(rope.shape) != len(vq.shape):
        wanted = "[rows, heads, columns] with cu_seqlens_q" if is_ragged else (
            "[batch, seqlen, heads, columns]"
        )  # fmt: skip
        raise ArgumentError(
            f"qv, q: shapes are {list(vq.shape)} and {list(rope.shape)}; wanted {wanted}"
        )
    if len(vk.shape) != 4:
        raise ArgumentError(
            f"v_cache: shape is {list(vk.shape)}; wanted [num_pages, page_size, 1, dim]"
        )
    dims = Dims(vq.shape[-1], rope.shape[-1])
    if table is None:
        table = progression(vk.shape[0], 0, 1, vk)[:, None]
    entries = array.view(table, "page_table").shape
    count, room = entries[0], math.prod(entries[1:]) * vk.shape[1]
    if cache_seqlens is None:
        kv_lens = progression(count, room, 0, vk)
    else:
        kv_lens = lengths(cache_seqlens, count, vk, "cache_seqlens")
    q_len = 1 if is_ragged else vq.shape[1]
    options = Options(
        _NAMES,
        dims,
        parse.finite(softmax_scale, "softmax_scale", 1.0 / math.sqrt(max(1, dims.both))),
        q_axes=(len(vq.shape),),
        q_len=q_len,
        max_q_len=max_seqlen_q,
        causal=parse.flag(causal, "causal"),
        pads_lse=return_lse and not is_ragged,
        natural_lse=return_lse,
        return_lse=return_lse,
    )
    arrays = Arrays(
        q=qv,
        q_rope=q,
        k=v_cache,
        k_rope=k_cache,
        block_tables=table,
        kv_lens=kv_lens,
        out=out,
        qo_offsets=cu_seqlens_q,
        sinks=sinks,
    )
    answer = run(arrays, options)
    if return_lse and is_ragged:
        return answer[0], answer[1].swapaxes(-1, -2)
    return answer


def _is_given(x: Any) -> bool:
    """Whether an argument is there and on: windows of (-1, -1) and zeros are not."""
    if isinstance(x, (tuple, list)):
        return any(side not in (-1, None) for side in x)
    return x is not None and not (isinstance(x, (int, float)) and x == 0)
