"""flash_attn_with_kvcache with `qv`: latent attention, whose rope parts are q and k_cache."""

from __future__ import annotations

import math
from typing import Any

from .. import array
from ..core import parse
from ..core.problem import LATENT_HEAD_DIMS
from ..engine.arrays import Arrays, MoreArrays
from ..engine.check_planless import Options
from ..engine.index_arrays import progression
from ..engine.key_share import WHOLE_LENGTHS
from ..engine.latent_rows import Dims
from ..engine.run_planless import run
from ..engine.views import LATENT_NAMES
from ..errors import ArgumentError
from .batch import FlashOptions, parse_window
from .caches import lengths

_NAMES = LATENT_NAMES.but(
    q="qv",
    q_rope="q",
    k="v_cache",
    k_rope="k_cache",
    block_tables="page_table",
    kv_lens="cache_seqlens",
    qo_offsets="cu_seqlens_q",
    sm_scale="softmax_scale",
    kv_begin=WHOLE_LENGTHS,
)


def is_latent(arrays: Arrays, more: MoreArrays, options: FlashOptions) -> bool:
    """Whether kernels of latent attention serve the call: one head of keys, head dims of theirs,
    and none of the other options. They read values once, and keys in place."""
    others = (
        more.new_k,
        more.new_v,
        more.rotary_cos,
        more.rotary_sin,
        more.cache_rows,
        arrays.kv_begin if options.key_share is None else None,
        options.attention_chunk,
        options.softcap,
        arrays.scale_q,
        arrays.scale_k,
        arrays.scale_v,
        arrays.alibi_slopes,
        arrays.output_gate,
    )
    if any(map(_is_given, others)):
        return False
    parts = {"v_cache": arrays.v, "k_cache": arrays.k, "qv": more.qv, "q": arrays.q}
    views = [array.view(x, name) for name, x in parts.items()]
    if any(len(v.shape) < 2 for v in views) or views[0].shape[-2] != 1:
        return False
    dims = views[2].shape[-1], views[3].shape[-1]
    return dims in LATENT_HEAD_DIMS and dims == tuple(v.shape[-1] for v in views[:2])


def attend_latent(arrays: Arrays, qv: Any, options: FlashOptions, max_seqlen_q: int | None) -> Any:
    """out, or (out, lse)."""
    vq, rope = array.view(qv, "qv"), array.view(arrays.q, "q")
    vk, table, return_lse = array.view(arrays.v, "v_cache"), arrays.block_tables, options.return_lse
    is_ragged = arrays.qo_offsets is not None
    if len(vq.shape) != (3 if is_ragged else 4) or len(rope.shape) != len(vq.shape):
        wanted = "[batch, seqlen, heads, columns]"
        if is_ragged:
            wanted = "[rows, heads, columns] with cu_seqlens_q"
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
    if arrays.kv_lens is None:
        kv_lens = progression(count, room, 0, vk)
    else:
        kv_lens = lengths(arrays.kv_lens, count, vk, "cache_seqlens")
    scale = options.softmax_scale
    left, right = parse_window(options.window_size)
    latent = Options(
        _NAMES,
        dims=dims,
        sm_scale=parse.finite(scale, "softmax_scale", 1.0 / math.sqrt(max(1, dims.both))),
        q_axes=(len(vq.shape),),
        q_len=1 if is_ragged else vq.shape[1],
        max_q_len=max_seqlen_q,
        causal=parse.flag(options.causal, "causal"),
        window_left=left,
        window_right=right,
        natural_lse=return_lse,
        return_lse=return_lse,
        key_share=options.key_share,
    )
    parts = Arrays(
        q=qv,
        q_rope=arrays.q,
        k=arrays.v,
        k_rope=arrays.k,
        block_tables=table,
        kv_lens=kv_lens,
        out=arrays.out,
        qo_offsets=arrays.qo_offsets,
        kv_begin=arrays.kv_begin,
        sinks=arrays.sinks,
    )
    result = run(parts, latent)
    if return_lse:
        return result[0], result[1].swapaxes(-1, -2)
    return result


def _is_given(x: Any) -> bool:
    """Whether an argument is there and on: windows of (-1, -1) and zeros are not."""
    if isinstance(x, (tuple, list)):
        return any(side not in (-1, None) for side in x)
    return x is not None and not (isinstance(x, (int, float)) and x == 0)
