"""Latent attention of a layer over a step's metadata: absorbed queries over rows of a latent pool.

A row of the pool has latent columns and rope columns, one head of them; the latent columns are the
values too. Which requests and keys a pass has is what it is for all layers, see attend.py.
"""

from __future__ import annotations

from typing import Any

from .. import array
from ..core import parse
from ..engine.arrays import Arrays, make_arrays
from ..engine.latent_rows import Dims
from ..engine.run_planless import run
from ..engine.views import LATENT_NAMES, read_scale
from ..errors import ArgumentError, UnsupportedError
from .attend import Cache, Call, LayerOptions, Pass, bounds_of, of_share, passes_of, sinks_of
from .metadata import ForwardMetadata
from .modes import BackendConfig, LayerSpec
from .pools import view_pages

_NAMES = LATENT_NAMES.but(
    q="q",
    q_rope="q_rope",
    k="key_buffer",
    k_rope="rope_buffer",
    block_tables="page_table",
    kv_lens="cache_seqlens",
    qo_offsets="cu_seqlens_q",
    sm_scale="softmax_scale",
)


def latent_calls_of(config: BackendConfig, layer: LayerSpec, meta: ForwardMetadata) -> list[Call]:
    """The calls of a layer: one, or two over the prefix and the drafts.

    Raises ArgumentError, UnsupportedError for what a latent layer cannot be.
    """
    for name, is_given in (
        ("attention_chunk", layer.attention_chunk != 0),
        ("softcap", layer.softcap != 0.0),
        ("is_cross_attention", layer.is_cross_attention),
    ):
        if is_given:
            raise UnsupportedError(
                f"{name}: got {getattr(layer, name)}; latent attention has no such layers, leave "
                "it out"
            )
    if layer.softmax_scale is None:
        raise ArgumentError(
            "softmax_scale: got None; absorbed queries do not tell it, pass the model's, such as "
            "(128 + 64) ** -0.5"
        )
    return [_call(config, layer, each) for each in passes_of(config, layer, meta)]


def dims_of(heads: tuple[int, ...]) -> Dims:
    """The parts of a row, of a layer's (query heads, KV heads, head_dim, v_head_dim)."""
    _, kv_heads, dim, dim_v = heads
    if kv_heads != 1:
        raise ArgumentError(f"num_kv_heads: got {kv_heads}; a latent pool has one head, pass 1")
    if not 0 < dim_v <= dim:
        raise ArgumentError(
            f"v_head_dim: got {dim_v}; wanted the latent columns, at most head_dim, {dim}"
        )
    return Dims(dim_v, dim - dim_v)


def _call(config: BackendConfig, layer: LayerSpec, each: Pass) -> Call:
    over = each.over
    sm_scale = parse.finite(layer.softmax_scale, "softmax_scale", 1.0)
    number, held = read_scale(layer.k_scale, "k_scale")
    options = LayerOptions(
        _NAMES,
        dims=dims_of(config.shape_of(layer)),
        sm_scale=sm_scale,
        causal=each.mask.causal,
        window=each.mask.window,
        **bounds_of(config, over),
    )
    return Call(
        arrays=_arrays if over.key_share is None else _arrays_of_share,
        function=run,
        page_size=over.page_size,
        block_tables=over.page_table,
        kv_lens=over.cache_seqlens,
        qo_offsets=over.cu_seqlens_q,
        kv_offsets=over.kv_offsets,
        sinks=sinks_of(layer, each),
        whole_lens=over.whole_lens,
        options=options,
        options_of_fp8=options._replace(sm_scale=sm_scale * number, output_scale=number),
        scale_k=held,
    )


def _arrays(
    call: Call, q: Any, q_rope: Any, cache: Cache, out: Any, lse: Any, memory: Any
) -> Arrays:
    """Values are a part of their keys, so that one scale is that of both."""
    scale = call.scale_k if cache.is_fp8 else None
    return make_arrays(
        q=q,
        q_rope=q_rope,
        k=cache.k,
        k_rope=cache.rope,
        workspace=memory,
        block_tables=call.block_tables,
        kv_lens=call.kv_lens,
        out=out,
        lse=lse,
        qo_offsets=call.qo_offsets,
        sinks=call.sinks,
        scale_q=scale,
        scale_v=scale,
        kv_offsets=call.kv_offsets,
    )


_arrays_of_share = of_share(_arrays)


def view_latent_pages(k: Any, rope: Any, page_size: int, dims: Dims) -> Cache:
    """`latent_buffers` of a layer as pages of a size."""
    columns = dims.both if rope is None else dims.latent
    pages = view_pages(k, "key_buffer", page_size, (1, columns))
    if rope is not None:
        rope = view_pages(rope, "rope_buffer", page_size, (1, dims.rope))
    is_fp8 = array.view(k, "key_buffer").dtype.is_fp8
    return Cache(pages, None, is_fp8, dims.latent, rope)


def latent_buffers(pool: Any, layer_id: int) -> tuple[Any, Any]:
    """(rows of both parts, None) of a pool's layer, or (latent rows, rope rows)."""
    get = getattr(pool, "get_latent_buffers", None)
    return (pool.get_key_buffer(layer_id), None) if get is None else get(layer_id)


def check_queries(q: Any, q_rope: Any, heads: tuple[int, ...]) -> None:
    """ArgumentError for queries that are not [tokens, heads, columns], of both parts in one array
    or of each."""
    dims = dims_of(heads)
    wanted = dims.both if q_rope is None else dims.latent
    for name, x, columns in (("q", q, wanted), ("q_rope", q_rope, dims.rope)):
        if x is None:
            continue
        shape: Any = getattr(x, "shape", ())
        if len(shape) != 3 or shape[1] != heads[0] or shape[2] != columns:
            shape = list(array.view(x, name).shape)
            raise ArgumentError(f"{name}: shape is {shape}; wanted [tokens, {heads[0]}, {columns}]")
