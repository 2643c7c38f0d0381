"""One call for attention: dense, ragged and paged requests, in arrays of any framework."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import array
from .array import ArrayView
from .core import dtypes, parse
from .core.logits import LogitsExpression
from .core.names import refuse_names
from .core.tracing import JAX_CALLS, exported, is_exporting, of_jax, untraced
from .decode import single_decode_with_kv_cache
from .engine import logits
from .engine import run_single as single
from .engine.index_arrays import compute, progression
from .engine.output_gate import require_shape
from .engine.placement import Placement
from .errors import ArgumentError, UnsupportedError
from .flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from .prefill import single_prefill_with_kv_cache
from .typing import Array, query_returns_lse

__all__ = ["dot_product_attention"]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)

# What the calls below name their arguments, and what this one does.
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "k_cache": "key",
    "v_cache": "value",
    "page_table": "block_table",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "causal": "is_causal",
    "window_size": "local_window_size",
    "softcap": "logits_soft_cap",
    "custom_mask": "mask",
    "seqused_q": "query_seq_lengths",
    "return_softmax_lse": "return_lse",
}
_NAME = re.compile(rf"(?<![\w.])({'|'.join([*_NAMES, 'cache_seqlens', 'seqused_k'])})(?!\w)")


@untraced
@query_returns_lse
def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_table: Array | None = None,
    kv_lens: Array | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    out: Array | None = None,
    return_lse: Literal[False] = False,
    return_residual: bool = False,
    logits_transform: str | None = None,
    mask_fn: str | None = None,
    logits_params: Mapping[str, Any] | None = None,
    causal_alignment: Literal["last", "first"] = "last",
    output_gate: Array | None = None,
) -> Any:
    """softmax(query keyᵀ * scale) value, of one request or of many, without a plan.

    The arrays say which kind of batch it is:

    dense   query [b, t, num_heads, head_dim], key and value [b, s, num_kv_heads, head_dim]; all
            three without b for one request.
    ragged  query [rows, num_heads, head_dim], key and value [n, num_kv_heads, head_dim]: rows of
            all requests, one request after another, by cu_seqlens_q and cu_seqlens_k.
    paged   key and value are pages [num_pages, page_size, num_kv_heads, head_dim] of block_table,
            with kv_lens keys of each request; query [b, t, num_heads, head_dim], or rows with
            cu_seqlens_q.

    query   float16 or bfloat16, on the CPU float32 too. key and value have its dtype or are fp8;
            value's head_dim may differ. Any number of query heads shares a key head. Any strides
            but a contiguous last dimension.
    bias    float32 or of 16 bits, broadcastable to [b, num_heads, t, s] ([num_heads, t, s] without
            b), contiguous: added to the scaled logits, behind a soft cap. Dense requests alone,
            each a launch of its own; the kernel is compiled on its first use.
    mask    bool, of the same shapes: True where a row sees a key. Dense requests alone; is_causal,
            the window and lengths hold besides. Each request is a launch of its own then. One that
            differs by head, or comes with a bias, is taken as the bias is.
    scale   of the logits; default 1 / sqrt(head_dim).
    is_causal   a row sees no key behind its own place, which causal_alignment says.
    causal_alignment   where rows are among the keys, for is_causal and local_window_size. "last":
            the last query of a request is at its last key, row i of t at key i + s - t. "first":
            the first query is at the first key, row i at key i, as jax.nn and torch have it; for
            dense requests. Both mean the same where a request has as many queries as keys. With
            lengths "first" takes a mask of all rows and keys.
    query_seq_lengths   [b]: how many rows of each dense or paged request count; the others give 0.
    key_value_seq_lengths, kv_lens   two names of [b]: how many keys of each request count.
    local_window_size   (left, right): keys beside a row's own place that it sees, both ends
            included, -1 for all; one number stands for both sides.
    cu_seqlens_q, cu_seqlens_k   [b + 1]: the first row of each request, and the end of the last.
    max_seqlen_q, max_seqlen_k   the most of one, as far as the host knows: they choose the kernel,
            never the answer.
    block_table   [b, most pages]: the pages of each request in the order of its keys; entries past
            its last page may hold anything.
    logits_soft_cap   c > 0: logits become c * tanh(logit / c).
    sinks   [num_heads]: logits of keys without values, natural and unscaled.
    output_gate   like query, without its last axis or with that of value, query's dtype or float32:
            the output is multiplied by its sigmoid before it is rounded.
    out     array to write instead of a new one.
    return_lse, return_residual   two names of: return the log-sum-exp of each row too. For JAX's
            arrays return_residual has query's dtype, as in jax.nn.
    logits_transform, mask_fn, logits_params   expressions over each logit and its place, as in
            single_prefill_with_kv_cache: dense requests of whole arrays, each a launch of its own.
    implementation: accepted for compatibility.

    Lengths, offsets and tables are int32 or int64. They stay on their device: nothing is copied to
    the host and nothing waits, so that a CUDA graph may capture the call.

    Returns out [..., num_heads, head_dim of value] in query's framework, dtype and device, or
    (out, lse): float32, out's shape without its last dimension, natural logarithms. A row that sees
    no key gives 0 and -inf. With query_seq_lengths the lse of rows that do not count is undefined.
    JAX's tracers are taken once cupyattn.integrations.jax has been imported.

    Raises ArgumentError for arguments that do not fit each other, UnsupportedError for what is not
    served, before anything is written. Semantics: jax.nn.dot_product_attention, which is
    causal_alignment="first".
    """
    if JAX_CALLS:
        traced = of_jax("dot_product_attention", locals())
        if traced is not None:
            return traced()
    if implementation is not None and not isinstance(implementation, str):
        raise ArgumentError(f"implementation: got {parse.shown(implementation)}; wanted a string")
    wants_lse = parse.flag(return_lse, "return_lse")
    wants_lse = parse.flag(return_residual, "return_residual") or wants_lse
    lens = _either(key_value_seq_lengths, kv_lens)
    causal, window = parse.flag(is_causal, "is_causal"), _window(local_window_size)
    options = {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": window,
        "softcap": 0.0 if logits_soft_cap is None else logits_soft_cap,
        "sinks": sinks,
        "output_gate": output_gate,
        "out": out,
        "return_softmax_lse": wants_lse,
    }
    is_first = _is_first(causal_alignment) and (causal or window != (-1, -1))
    try:
        _check_gate(output_gate, query, value)
        if bias is not None or (mask is not None and logits.differs_by_head(mask)):
            name = "mask" if bias is None else "bias"
            _refuse_with_arrays(name, logits_transform, mask_fn, logits_params)
            _refuse_layouts(name, cu_seqlens_q, cu_seqlens_k, block_table)
            cap = parse.soft_cap(logits_soft_cap)
            logits_transform, mask_fn, logits_params = logits.of_arrays(bias, mask, query, key, cap)
            mask, options["softcap"] = None, cap if bias is None else 0.0
            if is_first or query_seq_lengths is not None or lens is not None:
                placement = _placement(query, key, options, is_first)
                _check_lengths(query, query_seq_lengths, lens)
                mask_fn, own = placement.condition(mask_fn, query_seq_lengths, lens)
                logits_params |= own
                options |= {"causal": False, "window_size": (-1, -1)}
                query_seq_lengths = lens = None
        elif is_first and not logits_transform is mask_fn is None:
            mask_fn, _ = _placement(query, key, options, True).condition(mask_fn, None, None)
            options |= {"causal": False, "window_size": (-1, -1)}
        expression, arrays = logits.read(logits_transform, mask_fn, logits_params)
        if expression is not None:
            others = cu_seqlens_q, cu_seqlens_k, block_table, query_seq_lengths, lens, mask
            _refuse_with_expression(*others)
            answer = _expressed(query, key, value, expression, arrays, options)
        elif mask is not None:
            _refuse_with_mask(cu_seqlens_q, cu_seqlens_k, block_table)
            answer = _masked(query, key, value, mask, query_seq_lengths, lens, options, is_first)
        elif is_first:
            offsets = cu_seqlens_q, cu_seqlens_k
            _refuse_first(*offsets, block_table)
            answer = _first(query, key, value, query_seq_lengths, lens, options)
        elif cu_seqlens_q is not None or cu_seqlens_k is not None:
            most = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
            offsets = cu_seqlens_q, cu_seqlens_k
            answer = _ragged(
                query, key, value, offsets, query_seq_lengths, lens, block_table, options | most
            )
        else:
            answer = _dense(query, key, value, query_seq_lengths, lens, block_table, options)
    except (ArgumentError, UnsupportedError) as error:
        if bias is mask is mask_fn is logits_transform is None and is_exporting():
            return exported(dot_product_attention, locals())
        raise _with_order(renamed(error, kv_lens is not None), query, key) from error
    if return_residual and array.view(query, "query").framework == "jax":
        return answer[0], answer[1].astype(query.dtype)
    return answer


def renamed(error: ArgumentError | UnsupportedError, has_kv_lens: bool = False) -> Exception:
    """An error of what is called here, with the names that arguments have here."""
    name = "kv_lens" if has_kv_lens else "key_value_seq_lengths"
    names = _NAMES | {"cache_seqlens": name, "seqused_k": name}
    return type(error)(_NAME.sub(lambda found: names[found[0]], str(error)))


def _with_order(error: Exception, query: Any, key: Any) -> Exception:
    """The error of heads that do not fit, with what to do where the axes are torch's."""
    shapes = [tuple(getattr(x, "shape", ())) for x in (query, key)]
    if "wanted a positive multiple" not in str(error) or any(len(x) != 4 for x in shapes):
        return error
    (_, heads, *_), (_, kv_heads, *_) = shapes
    if not heads or not kv_heads or heads % kv_heads:
        return error
    return type(error)(
        f"{error}; arrays [batch, heads, tokens, head_dim], as torch has them, go as "
        "x.swapaxes(1, 2)"
    )


def _window(size: Any) -> tuple[int, int]:
    if size is None:
        return -1, -1
    sides = size if isinstance(size, (tuple, list)) else (size, size)
    if len(sides) != 2:
        raise ArgumentError(
            f"local_window_size: got {parse.shown(size)}; wanted one number or (left, right)"
        )
    left, right = (-1 if x is None else parse.window(x, "local_window_size") for x in sides)
    return left, right


def _either(key_value_seq_lengths: Any, kv_lens: Any) -> Any:
    """What one of two names of the lengths has."""
    if kv_lens is not None and key_value_seq_lengths is not None:
        raise ArgumentError(
            "key_value_seq_lengths, kv_lens: are two names of one argument; pass one"
        )
    return key_value_seq_lengths if kv_lens is None else kv_lens


def _check_gate(gate: Any, q: Any, v: Any) -> None:
    """Before requests take their parts of it."""
    if gate is None:
        return
    views = array.view(gate, "output_gate"), array.view(q, "q"), array.view(v, "v")
    require_shape(views[0], (*views[1].shape[:-1], *views[2].shape[-1:]))


def _is_first(causal_alignment: Any) -> bool:
    if not isinstance(causal_alignment, str) or causal_alignment not in ("last", "first"):
        got = parse.shown(causal_alignment)
        raise ArgumentError(f"causal_alignment: got {got}; wanted 'last' or 'first'")
    return bool(causal_alignment == "first")


def _placement(q: Any, k: Any, options: dict[str, Any], is_first: bool) -> Placement:
    """Where rows stand among keys in dense requests, with a batch axis or without one."""
    shapes = [array.view(x, name).shape for x, name in ((q, "q"), (k, "k"))]
    if any(len(shape) not in (3, 4) for shape in shapes):
        raise ArgumentError(
            f"q, k: shapes are {list(shapes[0])} and {list(shapes[1])}; wanted [batch, tokens, "
            "heads, head_dim], or both without batch"
        )
    left, right = options["window_size"]
    right = 0 if options["causal"] else right
    return Placement(shapes[0][-3], shapes[1][-3], left, right, is_first)


def _check_lengths(q: Any, q_lens: Any, kv_lens: Any) -> None:
    shape = array.view(q, "q").shape
    count = shape[0] if len(shape) == 4 else 1
    for x, name in ((q_lens, "seqused_q"), (kv_lens, "seqused_k")):
        if x is not None and tuple(array.view(x, name).shape) != (count,):
            got = list(array.view(x, name).shape)
            raise ArgumentError(f"{name}: shape is {got}; wanted [{count}]")


def _refuse_first(cu_seqlens_q: Any, cu_seqlens_k: Any, block_table: Any) -> None:
    if not cu_seqlens_q is cu_seqlens_k is block_table is None:
        raise UnsupportedError(
            "causal_alignment: 'first' is for dense requests; pass 'last' with cu_seqlens_q, "
            "cu_seqlens_k or block_table, which is the same for as many queries as keys"
        )


def _refuse_with_mask(cu_seqlens_q: Any, cu_seqlens_k: Any, block_table: Any) -> None:
    if not cu_seqlens_q is cu_seqlens_k is block_table is None:
        raise UnsupportedError(
            "mask: is for dense requests; pass none with cu_seqlens_q, cu_seqlens_k or block_table,"
            " or plan a BatchPrefillWithPagedKVCacheWrapper with custom_mask"
        )


def _with_rows_lse(answer: Any, wants_lse: bool) -> Any:
    """The LSE of flash_attn's functions, heads before rows, with the heads last."""
    return (answer[0], answer[1].swapaxes(-1, -2)) if wants_lse else answer


# --- ragged, or pages with offsets of query ---


def _ragged(
    q: Any,
    k: Any,
    v: Any,
    offsets: tuple[Any, Any],
    q_lens: Any,
    kv_lens: Any,
    table: Any,
    options: dict[str, Any],
) -> Any:
    if offsets[0] is None:
        raise ArgumentError("cu_seqlens_q: got None with cu_seqlens_k; wanted offsets of both")
    if offsets[1] is None and table is None:
        raise ArgumentError(
            "cu_seqlens_k: got None with cu_seqlens_q; wanted offsets of both, or a block_table"
        )
    if table is not None and kv_lens is None and offsets[1] is None:
        raise ArgumentError("kv_lens: got None with block_table; wanted keys of each request, [b]")
    if q_lens is not None:
        raise UnsupportedError(
            "query_seq_lengths: cu_seqlens_q says how many rows each request has; pass one of them"
        )
    answer = flash_attn_varlen_func(
        q, k, v, *offsets, seqused_k=kv_lens, block_table=table, **options
    )
    return _with_rows_lse(answer, options["return_softmax_lse"])


# --- dense, or pages ---


def _dense(
    q: Any, k: Any, v: Any, q_lens: Any, kv_lens: Any, table: Any, options: dict[str, Any]
) -> Any:
    vq = array.view(q, "q")
    wants_lse = options["return_softmax_lse"]
    if table is not None and kv_lens is None:
        raise ArgumentError("kv_lens: got None with block_table; wanted keys of each request, [b]")
    axes = len(vq.shape)
    if axes not in (3, 4):
        raise ArgumentError(
            f"q: shape is {list(vq.shape)}; wanted [batch, tokens, heads, head_dim], or "
            "without batch for one request"
        )
    if axes == 3 and table is not None:
        raise ArgumentError(
            f"q: shape is {list(vq.shape)} with block_table; wanted [batch, tokens, heads, "
            "head_dim], or cu_seqlens_q for rows of all requests"
        )
    if axes == 3:
        return _without_batch(q, k, v, q_lens, kv_lens, options)
    if table is None:
        _check_dense(vq, array.view(k, "k"), array.view(v, "v"), q_lens, kv_lens, options)
    if q_lens is not None:
        return _with_query_lengths(q, k, v, vq, q_lens, kv_lens, table, options)
    if kv_lens is not None:
        options = options | {"cache_seqlens": kv_lens, "page_table": table}
        return _with_rows_lse(flash_attn_with_kvcache(q, k, v, **options), wants_lse)
    if vq.shape[0] == 1 and options["sinks"] is None:
        return _single(q, k, v, vq, options)
    return _with_rows_lse(flash_attn_func(q, k, v, **options), wants_lse)


def _check_dense(
    vq: ArrayView,
    vk: ArrayView,
    vv: ArrayView,
    q_lens: Any,
    kv_lens: Any,
    options: dict[str, Any],
    is_first: bool = False,
) -> None:
    for x, name in ((vk, "k"), (vv, "v")):
        if len(x.shape) != 4 or x.shape[0] != vq.shape[0]:
            raise ArgumentError(
                f"{name}: shape is {list(x.shape)}; wanted [{vq.shape[0]}, tokens, kv_heads, "
                "head_dim], with the batch of query"
            )
    is_placed = not is_first and (options["causal"] or options["window_size"] != (-1, -1))
    if is_placed and q_lens is None and kv_lens is not None and 1 < vq.shape[1] == vk.shape[1]:
        # Aligned to the last key that counts, padded rows would come ahead of the first key.
        raise ArgumentError(
            "query_seq_lengths: got None for requests of as many queries as keys, of which "
            "key_value_seq_lengths count; wanted the same lengths, so that both are padded behind, "
            "or causal_alignment='first'"
        )


def _without_batch(
    q: Any, k: Any, v: Any, q_lens: Any, kv_lens: Any, options: dict[str, Any]
) -> Any:
    """One request without a batch axis, as a batch of one."""
    out, options = options["out"], _of_one(options)
    answer = _dense(q[None], k[None], v[None], q_lens, kv_lens, None, options)
    made, lse = answer if options["return_softmax_lse"] else (answer, None)
    made = made[0] if out is None else out
    return made if lse is None else (made, lse[0])


def _of_one(options: dict[str, Any]) -> dict[str, Any]:
    """The options of one request as those of a batch of one."""
    per_row = {name: options[name] for name in ("out", "output_gate")}
    return options | {name: None if x is None else x[None] for name, x in per_row.items()}


def _with_query_lengths(
    q: Any,
    k: Any,
    v: Any,
    vq: ArrayView,
    q_lens: Any,
    kv_lens: Any,
    table: Any,
    options: dict[str, Any],
) -> Any:
    """Requests whose last rows do not count, as ragged ones: rows of zeros there."""
    count, tokens, heads, _ = vq.shape
    shape = (*vq.shape[:3], array.view(v, "v").shape[-1])
    out, is_new = options["out"], options["out"] is None
    if is_new:
        dtype = vq.dtype if not vq.dtype.is_fp8 else dtypes.bfloat16
        out = array.empty(shape, dtype, vq)
    vout = array.view(out, "out")
    if tuple(vout.shape) != shape or vout.readonly:
        raise ArgumentError(f"out: shape is {list(vout.shape)}; wanted a writable {list(shape)}")
    if kv_lens is None:
        vk = array.view(k, "k")
        kv_lens = progression(count, vk.shape[1], 0, vq)
    rows = vout.shape[0] * vout.shape[1], *vout.shape[2:]
    flat = out.reshape(rows)
    if array.view(flat, "out").ptr != vout.ptr:
        raise ArgumentError("out: has rows that are not equally far apart; pass a contiguous one")
    _fill_with_zeros(flat)
    gate = options["output_gate"]
    if gate is not None:
        gate = gate.reshape(-1, *gate.shape[2:])
    options = options | {"out": flat, "max_seqlen_q": tokens, "output_gate": gate}
    offsets = progression(count + 1, 0, tokens, vq), None
    flat_q = q.reshape(count * tokens, heads, vq.shape[3])
    answer = flash_attn_varlen_func(
        flat_q, k, v, *offsets, seqused_q=q_lens, seqused_k=kv_lens, block_table=table, **options
    )
    made = array.deliver(out, vq) if is_new else out
    if not options["return_softmax_lse"]:
        return made
    return made, answer[1].swapaxes(-1, -2).reshape(count, tokens, heads)


def _fill_with_zeros(x: Any) -> None:
    """On the current stream of its framework."""
    v = array.view(x, "out")
    if v.framework == "torch":
        x.zero_()
    elif v.device.kind == "cpu":
        array.as_numpy(v)[...] = 0
    else:
        array.as_cupy(v, np.dtype(f"u{v.dtype.itemsize}"))[...] = 0


def _single(q: Any, k: Any, v: Any, vq: ArrayView, options: dict[str, Any]) -> Any:
    """One request: its lengths are known here, so that the plan is made on the host."""
    out, wants_lse = options["out"], options["return_softmax_lse"]
    function, arrays, rows = single_call(q, k, v, vq.shape[1], options)
    answer = function(*arrays, **rows)
    lead = (None, None) if vq.shape[1] == 1 else (None,)
    made, lse = answer if wants_lse else (answer, None)
    made = made[lead] if out is None else out
    return (made, array.scaled(lse, math.log(2.0))[lead]) if wants_lse else made


def single_call(
    q: Any, k: Any, v: Any, tokens: int, options: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call of one request of `tokens` rows: a function, its arrays and its other arguments."""
    out, window = options["out"], options["window_size"]
    rows = {
        "sm_scale": options["softmax_scale"],
        "return_lse": options["return_softmax_lse"],
        "logits_soft_cap": options["softcap"],
        "window_left": window[0],
    }
    gate = options.get("output_gate")
    if gate is not None:
        rows["output_gate"] = gate[0, 0] if tokens == 1 else gate[0]
    if tokens == 1:
        rows["out"] = None if out is None else out[0, 0]
        return single_decode_with_kv_cache, (q[0, 0], k[0], v[0]), rows
    rows["out"] = None if out is None else out[0]
    rows |= {"causal": options["causal"], "window_right": window[1]}
    return single_prefill_with_kv_cache, (q[0], k[0], v[0]), rows


# --- the first query at the first key ---


def _first(q: Any, k: Any, v: Any, q_lens: Any, kv_lens: Any, options: dict[str, Any]) -> Any:
    """Dense requests, by other windows over fewer keys; with lengths, which only the device knows,
    by a mask."""
    placed = _placement(q, k, options, True).from_last() if q_lens is kv_lens is None else None
    if placed is None:
        return _masked(q, k, v, None, q_lens, kv_lens, options, True)
    array.view(v, "v")
    k, v = (x if x.shape[-3] <= placed.keys else x[..., : placed.keys, :, :] for x in (k, v))
    return _dense(q, k, v, None, None, None, options | placed.options())


# --- masks ---


def _masked(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    q_lens: Any,
    kv_lens: Any,
    options: dict[str, Any],
    is_first: bool,
) -> Any:
    """Request by request, each with a mask of all that hides keys."""
    vq, vk = array.view(q, "q"), array.view(k, "k")
    vm = None if mask is None else array.view(mask, "mask")
    axes = len(vq.shape)
    if axes == 3:
        out, options = options["out"], _of_one(options)
        full = None if vm is None else _with_axes(mask, vm, 4)
        answer = _masked(q[None], k[None], v[None], full, q_lens, kv_lens, options, is_first)
        made, lse = answer if options["return_softmax_lse"] else (answer, None)
        made = made[0] if out is None else out
        return made if lse is None else (made, lse[0])
    if axes != 4:
        raise ArgumentError(
            f"q: shape is {list(vq.shape)}; wanted [batch, tokens, heads, head_dim]"
        )
    _check_dense(vq, vk, array.view(v, "v"), q_lens, kv_lens, options, is_first)
    _check_lengths(q, q_lens, kv_lens)
    seen = _visible(mask, vm, vq, (q_lens, kv_lens), _placement(q, k, options, is_first))
    return _each_masked(q, k, v, vq, seen, options)


def _with_axes(mask: Any, vm: ArrayView, axes: int) -> Any:
    return mask.reshape((1,) * (axes - len(vm.shape)) + tuple(vm.shape))


def _visible(
    mask: Any, vm: ArrayView | None, vq: ArrayView, lens: tuple[Any, Any], placement: Placement
) -> Any:
    """bool [b or 1, t, s] of torch, CuPy or NumPy. lens: of query and of keys, or None."""
    count, tokens, heads, _ = vq.shape
    views = [
        array.view(progression(n, 0, 1, vq), name)
        for n, name in ((tokens, "rows"), (placement.keys, "columns"))
    ]
    names = []
    for x, name in zip(lens, ("seqused_q", "seqused_k"), strict=True):
        if x is not None:
            views.append(array.view(x, name))
            names.append("num_rows" if name == "seqused_q" else "num_keys")
    if vm is not None:
        _check_mask(vm, vq, (count, heads, tokens, placement.keys))
        views.append(array.view(_with_axes(mask, vm, 4), "mask"))

    def combine(rows: Any, columns: Any, *others: Any) -> Any:
        seen = placement.seen(rows, columns, **dict(zip(names, others, strict=False)))
        # With all keys and rows, a mask of extents of 1 is repeated.
        return seen if vm is None else seen & others[-1][:, 0]

    return compute(combine, *views)


def _check_mask(vm: ArrayView, vq: ArrayView, wanted: tuple[int, ...]) -> None:
    if vm.dtype is not dtypes.bool_:
        raise ArgumentError(
            f"mask: dtype is {vm.dtype}; wanted bool, True where a row sees a key; pass what is "
            "added to logits as bias"
        )
    fits = len(vm.shape) <= 4 and all(
        extent in (1, most) for extent, most in zip(vm.shape[::-1], wanted[::-1], strict=False)
    )
    if not fits:
        raise ArgumentError(
            f"mask: shape is {list(vm.shape)}; wanted one that broadcasts to {list(wanted)}"
        )
    array.same_device(query=vq, mask=vm)


def _each_masked(q: Any, k: Any, v: Any, vq: ArrayView, seen: Any, options: dict[str, Any]) -> Any:
    wants_lse, out = options["return_softmax_lse"], options["out"]
    gate = options["output_gate"]
    count, tokens, heads, _ = vq.shape
    shape = (*vq.shape[:3], array.view(v, "v").shape[-1])
    made = array.empty(shape, vq.dtype, vq) if out is None else out
    vout = array.view(made, "out")
    if tuple(vout.shape) != shape:
        raise ArgumentError(f"out: shape is {list(vout.shape)}; wanted {list(shape)}")
    lse = array.empty((count, tokens, heads), dtypes.float32, vq) if wants_lse else None
    for index in range(count):
        single_prefill_with_kv_cache(
            *(q[index], k[index], v[index]),
            custom_mask=seen[min(index, len(seen) - 1)],
            sm_scale=options["softmax_scale"],
            logits_soft_cap=options["softcap"],
            sinks=options["sinks"],
            output_gate=None if gate is None else gate[index],
            out=made[index],
            lse=None if lse is None else lse[index],
            return_lse=wants_lse,
        )
    made = array.deliver(made, vq) if out is None else out
    if lse is None:
        return made
    return made, array.deliver(array.scaled(lse, math.log(2.0)), vq)


# --- expressions ---


def _refuse_with_arrays(name: str, *expressions: Any) -> None:
    if any(x is not None for x in expressions):
        raise ArgumentError(
            f"{name}: got an array beside logits_transform, mask_fn or logits_params; name it there"
        )


def _refuse_layouts(name: str, *others: Any) -> None:
    if any(x is not None for x in others):
        kind = "one" if name == "bias" else "a mask for each head"
        raise UnsupportedError(
            f"{name}: got {kind} beside cu_seqlens or block_table; wanted dense requests"
        )


def _refuse_with_expression(*others: Any) -> None:
    if any(x is not None for x in others):
        raise UnsupportedError(
            "logits_transform, mask_fn: are for dense requests of whole arrays here; pass no mask "
            "(name it in logits_params and mask_fn), lengths, cu_seqlens or block_table, or plan a "
            "BatchPrefillWithPagedKVCacheWrapper or BatchPrefillWithRaggedKVCacheWrapper with them"
        )


def _expressed(
    q: Any,
    k: Any,
    v: Any,
    expression: LogitsExpression,
    arrays: tuple[ArrayView, ...],
    options: dict[str, Any],
) -> Any:
    """Request by request: each knows its place in the batch as a number."""
    vq, out, wants_lse = array.view(q, "q"), options["out"], options["return_softmax_lse"]
    if len(vq.shape) == 3:
        options = _of_one(options)
        answer = _expressed(q[None], k[None], v[None], expression, arrays, options)
        made, lse = answer if wants_lse else (answer, None)
        made = made[0] if out is None else out
        return made if lse is None else (made, lse[0])
    if len(vq.shape) != 4:
        raise ArgumentError(
            f"q: shape is {list(vq.shape)}; wanted [batch, tokens, heads, head_dim]"
        )
    _check_dense(vq, array.view(k, "k"), array.view(v, "v"), None, None, options)
    shape = (*vq.shape[:3], array.view(v, "v").shape[-1])
    made = array.empty(shape, vq.dtype, vq) if out is None else out
    vout = array.view(made, "out")
    if tuple(vout.shape) != shape:
        raise ArgumentError(f"out: shape is {list(vout.shape)}; wanted {list(shape)}")
    lse = array.empty(shape[:3], dtypes.float32, vq) if wants_lse else None
    left, right = options["window_size"]
    gate = options["output_gate"]
    for index in range(shape[0]):
        own = logits.of_request(expression, arrays, index, shape[0])
        given = single.RawOptions(
            causal=options["causal"],
            window_left=left,
            window_right=right,
            logits_soft_cap=options["softcap"],
            sm_scale=options["softmax_scale"],
            logits=own,
        )
        request = single.Arrays(
            q[index],
            k[index],
            v[index],
            out=made[index],
            lse=None if lse is None else lse[index],
            sinks=options["sinks"],
            output_gate=None if gate is None else gate[index],
        )
        single.run(request, given, arrays, return_lse=wants_lse, is_decode=False)
    made = array.deliver(made, vq) if out is None else out
    if lse is None:
        return made
    return made, array.deliver(array.scaled(lse, math.log(2.0)), vq)
