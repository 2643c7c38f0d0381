"""Latent attention of a layer over a step's metadata: absorbed queries over rows of a latent pool.

A row of the pool has latent columns and rope columns, one head of them; the latent columns are the
values too. Which requests and keys a pass has is what it is for all layers, see attend.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import array
from ..core import parse
from ..core.dtypes import DType
from ..engine.arrays import make_arrays
from ..engine.check_planless_latent import NAMES, Options, read_scale
from ..engine.latent_rows import Dims
from ..engine.run_planless_latent import run
from ..engine.views import next_power_of_two
from ..errors import ArgumentError, UnsupportedError
from .attend import MANY_ROWS, Pass, passes_of
from .metadata import ForwardMetadata
from .modes import BackendConfig, LayerSpec
from .pools import view_pages

_NAMES = NAMES.but(
    q="q",
    q_rope="q_rope",
    k="key_buffer",
    k_rope="rope_buffer",
    block_tables="page_table",
    kv_lens="cache_seqlens",
    qo_offsets="cu_seqlens_q",
    sm_scale="softmax_scale",
)


class LatentCache(NamedTuple):
    """Rows of a layer as pages: of both parts, or of the latent one beside rope."""

    k: Any
    rope: Any
    is_fp8: bool
    dim_v: int


class LatentQueries(NamedTuple):
    """Rows of both parts, or of the latent one beside rope."""

    q: Any
    rope: Any

    @property
    def shape(self) -> Any:
        return self.q.shape


@dataclass(frozen=True, slots=True)
class LatentCall:
    """A pass over a layer, as a call of latent attention without a plan takes it.

    scale    of keys and values, of fp8 caches alone
    options  by whether the cache is fp8, whether the LSE is wanted, and the dtype of the answer
    """

    page_size: int
    block_tables: Any
    kv_lens: Any
    qo_offsets: Any
    kv_offsets: Any
    sinks: Any
    scale: Any
    plain: Options
    of_fp8: Options
    options: dict[tuple[bool, bool, DType | None], Options] = field(default_factory=dict)

    def run(
        self,
        q: LatentQueries,
        cache: LatentCache,
        out: Any,
        lse: Any,
        return_lse: bool,
        memory: Any,
        o_dtype: DType | None = None,
    ) -> Any:
        """out, or (out, lse [rows, heads] of base 2)."""
        key = cache.is_fp8, return_lse, o_dtype
        options = self.options.get(key)
        if options is None:
            options = self.of_fp8 if cache.is_fp8 else self.plain
            options = options._replace(return_lse=return_lse, o_dtype=o_dtype)
            self.options[key] = options
        scale = self.scale if cache.is_fp8 else None
        arrays = make_arrays(
            q=q.q,
            q_rope=q.rope,
            k=cache.k,
            k_rope=cache.rope,
            workspace=memory,
            block_tables=self.block_tables,
            kv_lens=self.kv_lens,
            out=out,
            lse=lse,
            qo_offsets=self.qo_offsets,
            sinks=self.sinks,
            scale_q=scale,
            scale_v=scale,
            kv_offsets=self.kv_offsets,
        )
        return run(arrays, options)


def latent_calls_of(
    config: BackendConfig, layer: LayerSpec, meta: ForwardMetadata
) -> list[LatentCall]:
    """The calls that answer for a layer: one, or two over the prefix and the drafts.

    Raises ArgumentError, UnsupportedError for what a latent layer cannot be.
    """
    for name, is_given in (
        ("window_size", any(side not in (-1, None) for side in layer.window_size)),
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


def _call(config: BackendConfig, layer: LayerSpec, each: Pass) -> LatentCall:
    over = each.over
    sm_scale = parse.finite(layer.softmax_scale, "softmax_scale", 1.0)
    number, held = read_scale(layer.k_scale, "k_scale")
    sinks = layer.sinks if each.has_sinks else None
    options = Options(
        _NAMES,
        dims_of(config.shape_of(layer)),
        sm_scale,
        q_len=over.q_len,
        max_q_len=min(over.max_seqlen_q, MANY_ROWS),
        max_kv_len=1 if config.deterministic else next_power_of_two(over.max_seqlen_k),
        causal=each.mask.causal,
        most_kv_len=None if over.kv_offsets is None else over.max_seqlen_k,
    )
    # Values are a part of their keys, so that one scale is that of both.
    return LatentCall(
        page_size=over.page_size,
        block_tables=over.page_table,
        kv_lens=over.cache_seqlens,
        qo_offsets=over.cu_seqlens_q,
        kv_offsets=over.kv_offsets,
        sinks=sinks,
        scale=held,
        plain=options,
        of_fp8=options._replace(sm_scale=sm_scale * number, output_scale=number),
    )


def view_latent_pages(k: Any, rope: Any, page_size: int, dims: Dims) -> LatentCache:
    """`latent_buffers` of a layer as pages of a size."""
    columns = dims.both if rope is None else dims.latent
    pages = view_pages(k, "key_buffer", page_size, (1, columns))
    if rope is not None:
        rope = view_pages(rope, "rope_buffer", page_size, (1, dims.rope))
    return LatentCache(pages, rope, array.view(k, "key_buffer").dtype.is_fp8, dims.latent)


def latent_buffers(pool: Any, layer_id: int) -> tuple[Any, Any]:
    """(rows of both parts, None) of a pool's layer, or (latent rows, rope rows)."""
    get = getattr(pool, "get_latent_buffers", None)
    return (pool.get_key_buffer(layer_id), None) if get is None else get(layer_id)


def split_queries(q: Any, q_rope: Any, heads: tuple[int, ...]) -> LatentQueries:
    """Checked queries of [tokens, heads, columns]."""
    dims = dims_of(heads)
    wanted = dims.both if q_rope is None else dims.latent
    for name, x, columns in (("q", q, wanted), ("q_rope", q_rope, dims.rope)):
        if x is None:
            continue
        shape: Any = getattr(x, "shape", ())
        if len(shape) != 3 or shape[1] != heads[0] or shape[2] != columns:
            given = list(array.view(x, name).shape)
            raise ArgumentError(f"{name}: shape is {given}; wanted [tokens, {heads[0]}, {columns}]")
    return LatentQueries(q, q_rope)
