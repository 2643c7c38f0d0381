"""Attention of a layer over a step's metadata: calls without a plan, and merges of two passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import array
from ..core import dtypes, parse
from ..core.dtypes import DType
from ..core.key_share import KeyShare
from ..engine import merge_states as merge
from ..engine.arrays import Arrays, make_arrays
from ..engine.check_planless import Options, options_of
from ..engine.latent_rows import Dims
from ..engine.run_planless import run
from ..engine.views import Names, next_power_of_two, number_or_array
from ..errors import ArgumentError, UnsupportedError
from .metadata import AttentionMetadata, ForwardMetadata
from .modes import BackendConfig, LayerSpec

LSE_LAYOUTS = "ht", "th"
_LN_2 = math.log(2.0)
# Beyond that one kernel serves any number of rows.
MANY_ROWS = 65
_NAMES = Names(
    q="q",
    k="k_cache",
    v="v_cache",
    block_tables="page_table",
    kv_lens="cache_seqlens",
    qo_lens="qo_lens",
    qo_offsets="cu_seqlens_q",
    kv_offsets="kv_offsets",
    sm_scale="softmax_scale",
    k_scale="k_scale",
    output_scale="v_scale",
    q_len="q_len",
    max_q_len="max_seqlen_q",
    max_kv_len="max_seqlen_k",
    kv_begin="seq_lens",
    has_layout=False,
)


class Mask(NamedTuple):
    """Which keys rows see, beyond what the metadata says."""

    causal: bool
    window: tuple[int, int] = (-1, -1)


@dataclass(frozen=True, slots=True)
class Pass:
    """One attention call: its requests, which keys rows see, and whether sinks count in it."""

    over: AttentionMetadata
    mask: Mask
    has_sinks: bool = True


class Cache(NamedTuple):
    """Keys and values of a layer as pages; of latent attention rows of both parts, or of the latent
    part with rope apart, and no values."""

    k: Any
    v: Any
    is_fp8: bool
    dim_v: int
    rope: Any = None


class Workspace:
    """Memory that calls in captured graphs keep, where the framework has none for them.

    max_rows   query tokens of a call at most; 0: each call has memory of its own
    """

    def __init__(self, memory: Any = None, max_rows: int = 0) -> None:
        self.memory, self.max_rows = memory, max_rows
        self._states: dict[tuple[int, int], tuple[Any, ...]] = {}

    def states(self, q: Any, dim_v: int) -> tuple[Any, ...] | None:
        """(v, s, v, s) of two passes over the rows of q, or None."""
        if not self.max_rows:
            return None
        rows, heads, _ = q.shape
        states = self._states.get((heads, dim_v))
        if states is None:
            vq = array.view(q, "q")
            shape = self.max_rows, heads
            shapes = (*shape, dim_v), shape, (*shape, dim_v), shape
            states = tuple(array.empty(each, dtypes.float32, vq) for each in shapes)
            self._states[heads, dim_v] = states
        return tuple(x[:rows] for x in states)


class LayerOptions(NamedTuple):
    """The options of a pass, checked. dims: of latent rows."""

    names: Names
    sm_scale: float
    q_len: int
    max_q_len: int
    max_kv_len: int
    causal: bool
    kv_len_limit: int | None
    window: tuple[int, int] = (-1, -1)
    logits_soft_cap: float = 0.0
    output_scale: float = 1.0
    dims: Dims | None = None
    return_lse: bool = False
    o_dtype: DType | None = None
    key_share: KeyShare | None = None

    def resolve(self, arrays: Arrays) -> Options:
        left, right = self.window
        return options_of(
            self,
            window_left=left,
            window_right=right,
            scales_by_head=self.dims is None,
            has_table_offsets=self.kv_len_limit is not None,
        )


@dataclass(frozen=True, slots=True)
class Call:
    """A pass over a layer, as a call without a plan takes it: arrays by their roles there, and the
    options. scale_k, scale_v and options_of_fp8 are of fp8 caches alone, scale_q and
    options_of_8_bits, where queries have a scale, of queries of 8 bits over them.

    arrays, function  of its layout of keys: the call's arrays by their roles, and what runs it.
                    All that a layout lacks is left out: each name takes time
    """

    arrays: Callable[..., Arrays]
    function: Callable[[Arrays, Any], Any]
    page_size: int
    block_tables: Any
    kv_lens: Any
    qo_offsets: Any
    kv_offsets: Any
    sinks: Any
    options: Any
    options_of_fp8: Any
    qo_lens: Any = None
    mask: Any = None
    options_of_8_bits: Any = None
    scale_q: Any = None
    scale_k: Any = None
    scale_v: Any = None
    whole_lens: Any = None
    _asked: dict[tuple[int, bool, DType | None], Any] = field(default_factory=dict)

    def run(
        self,
        q: Any,
        q_rope: Any,
        cache: Cache,
        out: Any,
        lse: Any,
        return_lse: bool,
        memory: Any,
        o_dtype: DType | None = None,
    ) -> Any:
        """out, or (out, lse [rows, heads] of base 2)."""
        is_fp8 = cache.is_fp8
        arrays = self.arrays(self, q, q_rope, cache, out, lse, memory)
        options = self.options_of_fp8 if is_fp8 else self.options
        has_8_bits = is_fp8 and self.options_of_8_bits is not None and _has_8_bits(q)
        if has_8_bits:
            arrays, options = arrays._replace(scale_q=self.scale_q), self.options_of_8_bits
        if return_lse or o_dtype is not None:
            options = self._options(options, is_fp8 + has_8_bits, return_lse, o_dtype)
        return self.function(arrays, options)

    def _options(self, options: Any, which: int, return_lse: bool, o_dtype: DType | None) -> Any:
        key = which, return_lse, o_dtype
        cached = self._asked.get(key)
        if cached is None:
            cached = self._asked[key] = options._replace(return_lse=return_lse, o_dtype=o_dtype)
        return cached


def _arrays(
    call: Call, q: Any, q_rope: None, cache: Cache, out: Any, lse: Any, memory: Any
) -> Arrays:
    is_fp8 = cache.is_fp8
    return make_arrays(
        q=q,
        k=cache.k,
        v=cache.v,
        workspace=memory,
        block_tables=call.block_tables,
        kv_lens=call.kv_lens,
        out=out,
        lse=lse,
        qo_lens=call.qo_lens,
        qo_offsets=call.qo_offsets,
        kv_offsets=call.kv_offsets,
        sinks=call.sinks,
        scale_k=call.scale_k if is_fp8 else None,
        scale_v=call.scale_v if is_fp8 else None,
        mask=call.mask,
    )


def _has_8_bits(q: Any) -> bool:
    return array.view(q, "q").dtype.itemsize == 1


def of_share(arrays: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """`arrays` of a call over a rank's share of the keys, with whole lengths."""

    def arrays_of_share(call: Call, *arguments: Any) -> Arrays:
        return arrays(call, *arguments)._replace(kv_begin=call.whole_lens)

    return arrays_of_share


_arrays_of_share = of_share(_arrays)


def bounds_of(config: BackendConfig, over: AttentionMetadata) -> dict[str, Any]:
    """What the options of all layers say of a pass."""
    return {
        "q_len": over.q_len,
        "max_q_len": min(over.max_seqlen_q, MANY_ROWS),
        "max_kv_len": 1 if config.deterministic else next_power_of_two(over.max_seqlen_k),
        "kv_len_limit": None if over.kv_offsets is None else over.max_seqlen_k,
        "key_share": over.key_share,
    }


def sinks_of(layer: LayerSpec, each: Pass) -> Any:
    """The sinks of a pass. Where ranks share the keys, the first one's count."""
    share = each.over.key_share
    return layer.sinks if each.has_sinks and (share is None or not share.cp_rank) else None


def calls_of(config: BackendConfig, layer: LayerSpec, meta: ForwardMetadata) -> list[Call]:
    """The calls of a layer: one, or two over the prefix and the drafts.

    Raises ArgumentError, UnsupportedError for a layer that the engine was not configured for.
    """
    return [_call(config, layer, each) for each in passes_of(config, layer, meta)]


def _call(config: BackendConfig, layer: LayerSpec, each: Pass) -> Call:
    over, mask = each.over, each.mask
    q_number, q_array = number_or_array(layer.q_scale)
    k_number, k_array = number_or_array(layer.k_scale)
    v_number, v_array = number_or_array(layer.v_scale)
    sm_scale = layer.softmax_scale
    default = 1.0 / math.sqrt(config.shape_of(layer)[2])
    sm_scale = parse.finite(sm_scale, "softmax_scale", default)
    cap = parse.finite(layer.softcap, "softcap", 0.0)
    if cap < 0.0:
        raise ArgumentError(f"softcap: got {layer.softcap!r}; wanted 0 (off) or a positive cap")
    qo_offsets = over.cu_seqlens_q if over.qo_offsets is None else over.qo_offsets
    options = LayerOptions(
        _NAMES,
        sm_scale=sm_scale,
        logits_soft_cap=cap,
        causal=mask.causal,
        window=mask.window,
        **bounds_of(config, over),
    )
    # Scales of caches that are not fp8 have no effect, as in FA3.
    options_of_fp8 = options._replace(
        sm_scale=sm_scale * parse.finite(k_number, "k_scale", 1.0),
        output_scale=parse.finite(v_number, "v_scale", 1.0),
    )
    options_of_8_bits = None
    if layer.q_scale is not None:
        of_q = parse.finite(q_number, "q_scale", 1.0)
        options_of_8_bits = options_of_fp8._replace(sm_scale=options_of_fp8.sm_scale * of_q)
    return Call(
        arrays=_arrays if over.key_share is None else _arrays_of_share,
        function=run,
        page_size=over.page_size,
        block_tables=over.page_table,
        kv_lens=over.cache_seqlens,
        qo_lens=over.qo_lens,
        qo_offsets=qo_offsets,
        kv_offsets=over.kv_offsets,
        sinks=sinks_of(layer, each),
        whole_lens=over.whole_lens,
        mask=over.tree_mask,
        options_of_8_bits=options_of_8_bits,
        scale_q=q_array,
        scale_k=k_array,
        scale_v=v_array,
        options=options,
        options_of_fp8=options_of_fp8,
    )


def passes_of(config: BackendConfig, layer: LayerSpec, meta: ForwardMetadata) -> list[Pass]:
    left, right = _window(layer)
    if layer.is_cross_attention:
        if meta.encoder is None:
            raise ArgumentError("is_cross_attention: the backend has no encoder; set has_encoder")
        return [Pass(meta.encoder, Mask(False))]
    chunk = layer.attention_chunk
    if chunk and chunk != config.attention_chunk_size:
        raise ArgumentError(
            f"attention_chunk: got {chunk}; the backend was configured for attention_chunk_size "
            f"{config.attention_chunk_size}"
        )
    if layer.uses_swa_pool and not config.is_hybrid:
        raise ArgumentError("uses_swa_pool: the backend has one pool; set is_hybrid")
    if meta.branches:
        return _branching_passes(config, layer, meta, left)
    mask = Mask(layer.causal, (left, -1 if layer.causal else right))
    if not chunk:
        over = meta.swa if layer.uses_swa_pool else meta.main
    else:
        if not layer.causal:
            raise UnsupportedError("attention_chunk: wants causal layers; pass causal=True")
        over = meta.local
    assert over is not None
    if layer.uses_swa_pool and not chunk:
        _require_reach(config, left)
    _require_pool(layer, over)
    return [Pass(over, mask)]


def _branching_passes(
    config: BackendConfig, layer: LayerSpec, meta: ForwardMetadata, left: int
) -> list[Pass]:
    if not layer.causal:
        raise UnsupportedError("causal: drafts that branch want causal layers; pass True")
    if layer.attention_chunk or left >= 0:
        over = meta.chunk_rows if layer.attention_chunk else meta.window_rows
        is_wider = not layer.attention_chunk and left > (config.sliding_window_size or 0)
        if over is None or is_wider:
            raise ArgumentError(
                f"window_size: got {left}; the backend was configured for sliding_window_size "
                f"{config.sliding_window_size}"
            )
        _require_pool(layer, over)
        # Tables hold no key outside of the configured window.
        is_whole = left == (config.sliding_window_size if not layer.attention_chunk else -1)
        return [Pass(over, Mask(True, (-1 if is_whole else left, -1)))]
    if layer.uses_swa_pool:
        raise ArgumentError("uses_swa_pool: wants a window or chunks, which a second pool is for")
    if meta.expand is None:
        return [Pass(meta.main, Mask(False))]
    return [Pass(meta.main, Mask(False)), Pass(meta.expand, Mask(False), has_sinks=False)]


def _require_pool(layer: LayerSpec, over: AttentionMetadata) -> None:
    if layer.uses_swa_pool is not over.uses_swa_pool:
        which = "second" if over.uses_swa_pool else "first"
        raise UnsupportedError(
            f"uses_swa_pool: got {layer.uses_swa_pool}, but layers of this kind find their keys in "
            f"the {which} pool"
        )


def _require_reach(config: BackendConfig, left: int) -> None:
    """The second pool's table begins with the first key that the configuration lets rows see."""
    window, chunk = config.sliding_window_size, config.attention_chunk_size
    if window is None and chunk is None:
        return
    if left < 0 or window is None or left > window:
        raise ArgumentError(
            f"window_size: got {left} on the second pool; the backend was configured for "
            f"sliding_window_size {window}"
        )


def _window(layer: LayerSpec) -> tuple[int, int]:
    sides = layer.window_size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise ArgumentError(f"window_size: got {parse.shown(sides)}; wanted (left, right)")
    left, right = (-1 if x is None else parse.window(x, "window_size") for x in sides)
    return left, right


def attend(
    calls: list[Call],
    q: Any,
    q_rope: Any,
    caches: list[Cache],
    out: Any,
    return_lse: bool,
    lse_layout: str,
    workspace: Workspace,
) -> Any:
    """out [rows, heads, v_head_dim], or (out, lse) in natural logarithms.

    caches: one for each call, whose pages are as large as those of its table.
    """
    memory = workspace.memory
    if len(calls) == 1:
        result = calls[0].run(q, q_rope, caches[0], out, None, return_lse, memory)
        output, lse = result if return_lse else (result, None)
    else:
        partial = []
        states = workspace.states(q, caches[0].dim_v)
        for index, (call, cache) in enumerate(zip(calls, caches, strict=True)):
            v = s = None
            if states is not None:
                v, s = states[2 * index : 2 * index + 2]
            # States are merged in float32, so that the output is rounded once.
            partial.append(call.run(q, q_rope, cache, v, s, True, memory, dtypes.float32))
        (v_a, s_a), (v_b, s_b) = partial
        if out is None:
            vq = array.view(q, "q")
            out = array.empty((*vq.shape[:-1], v_a.shape[-1]), vq.dtype.of_output, vq)
        output, lse = merge.run(
            merge.PAIR, merge.make_arrays(v_a=v_a, v_b=v_b, s_a=s_a, s_b=s_b, out=out), False
        )
    if not return_lse:
        return output
    lse = array.scaled(lse, _LN_2)
    return output, lse.swapaxes(0, 1) if lse_layout == "ht" else lse
