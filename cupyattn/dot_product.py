"""One call for attention: dense, ragged and paged requests, in arrays of any framework."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from . import array
from .array import ArrayView
from .core import dtypes, overloads, parse
from .core.dtypes import DType
from .core.logits import LogitsExpression
from .core.names import refuse_names
from .core.tracing import JAX_CALLS, exported, is_exporting, of_jax, untraced
from .decode import single_decode_with_kv_cache
from .engine import logits
from .engine import run_single as single
from .engine.index_arrays import compute, progression
from .engine.output_gate import require_shape
from .engine.placement import Placement
from .engine.spec import RawOptions
from .errors import ArgumentError, UnsupportedError
from .flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from .prefill import single_prefill_with_kv_cache
from .typing import Array

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
@overloads.dot_product_attention
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
    return_lse: bool = False,
    return_residual: bool = False,
    logits_transform: str | None = None,
    mask_fn: str | None = None,
    logits_params: Mapping[str, Any] | None = None,
    causal_alignment: Literal["last", "first"] = "last",
    output_gate: Array | None = None,
) -> Any:
    """softmax(query keyᵀ * scale) value, of one request or of many, without a plan.

    The arrays say which kind of batch it is:

    dense
        query [b, t, num_heads, head_dim], key and value [b, s, num_kv_heads, head_dim]; all three
        without b for one request.
    ragged
        query [rows, num_heads, head_dim], key and value [n, num_kv_heads, head_dim]: rows of all
        requests, one request after another, by cu_seqlens_q and cu_seqlens_k.
    paged
        key and value are pages [num_pages, page_size, num_kv_heads, head_dim] of block_table, with
        kv_lens keys of each request; query [b, t, num_heads, head_dim], or rows with cu_seqlens_q.

    Parameters
    ----------
    query
        float16 or bfloat16, on the CPU float32 too; or float8_e4m3fn with key and value of it, and
        then the output is bfloat16. Any strides but a contiguous last dimension.
    key, value
        Keys and values have query's dtype, or fp8. value's head_dim may differ. Any number of query
        heads shares a key head.
    bias
        float32 or of 16 bits, broadcastable to [b, num_heads, t, s] ([num_heads, t, s] without b),
        contiguous: added to the scaled logits, behind a soft cap. Only for dense batches; one
        kernel launch per request, and the kernel is compiled on its first use.
    mask
        bool, of the same shapes: True where a row sees a key. Only for dense batches; one kernel
        launch per request. is_causal, the window and lengths hold besides. A mask that differs by
        head, or comes with a bias, is served as a bias is.
    scale
        Of the logits; default 1 / sqrt(head_dim).
    is_causal
        A row sees no key behind its own position, which causal_alignment says.
    causal_alignment
        Where rows are among the keys, for is_causal and local_window_size. "last": the last query
        of a request is at its last key, row i of t at key i + s - t. "first": the first query is at
        the first key, row i at key i, as jax.nn and torch have it; for dense requests. Both mean
        the same where a request has as many queries as keys. With lengths "first" takes a mask of
        all rows and keys.
    query_seq_lengths
        [b]: how many rows of each dense or paged request count; the others give 0.
    key_value_seq_lengths, kv_lens
        [b], by either name: how many keys of each request count.
    local_window_size
        (left, right): keys before and after a row's own position that it sees, both ends included,
        -1 for all; one number stands for both sides.
    cu_seqlens_q, cu_seqlens_k
        [b + 1]: the first row of each request, and the end of the last.
    max_seqlen_q, max_seqlen_k
        Upper bounds of the rows and keys of one request; they affect speed only.
    block_table
        [b, most pages]: the pages of each request in the order of its keys; entries past its last
        page may hold anything.
    logits_soft_cap
        c > 0: logits become c * tanh(logit / c).
    sinks
        [num_heads]: logits of keys without values, natural and unscaled.
    output_gate
        Like query, without its last axis or with that of value, query's dtype or float32: the
        output is multiplied by its sigmoid before it is rounded.
    out
        Array to write instead of a new one.
    return_lse, return_residual
        Either one: return the log-sum-exp of each row too. For JAX's arrays return_residual has
        query's dtype, as in jax.nn.
    logits_transform, mask_fn, logits_params
        Expressions over each logit and its position, as in single_prefill_with_kv_cache. Only for
        dense batches without length arrays; one launch per request.
    implementation
        Accepted for compatibility.

    Returns
    -------
    out
        [..., num_heads, head_dim of value] in query's framework, dtype and device, or (out, lse):
        float32, out's shape without its last dimension, natural logarithms. A row that sees no key
        gives 0 and -inf. With query_seq_lengths the lse of rows that do not count is undefined.
        JAX's tracers are taken once cupyattn.integrations.jax has been imported.

    Raises
    ------
    CupyAttnError
        ArgumentError for arguments that do not fit each other, UnsupportedError for what is not
        served, before anything is written.

    Notes
    -----
    Lengths, offsets and tables are int32 or int64. They stay on their device: nothing is copied to
    the host and nothing waits, so that a CUDA graph may capture the call.

    Semantics: jax.nn.dot_product_attention, which is causal_alignment="first".

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> q = np.ones((2, 5, 8, 64), np.float16)  # [requests, tokens, heads, head dim]
    >>> k = v = np.ones((2, 9, 2, 64), np.float16)
    >>> cupyattn.dot_product_attention(q, k, v, is_causal=True).shape
    (2, 5, 8, 64)
    >>> lengths = np.array([9, 4], np.int32)
    >>> o, lse = cupyattn.dot_product_attention(
    ...     q, k, v, key_value_seq_lengths=lengths, return_lse=True
    ... )
    >>> lse.shape
    (2, 5, 8)
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
    call = _Call(query, key, value, query_seq_lengths, lens, block_table, options)
    offsets = cu_seqlens_q, cu_seqlens_k
    try:
        _check_gate(output_gate, query, value)
        if not bias is mask is logits_transform is mask_fn is logits_params is None:
            expressions = logits_transform, mask_fn, logits_params
            result = _hidden(call, offsets, bias, mask, expressions, is_first)
        elif is_first:
            _refuse_given((*offsets, block_table), _FIRST)
            result = _first(call)
        elif cu_seqlens_q is not None or cu_seqlens_k is not None:
            options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
            result = _ragged(call, offsets)
        else:
            result = _dense(call)
    except (ArgumentError, UnsupportedError) as error:
        if bias is mask is mask_fn is logits_transform is None and is_exporting():
            return exported(dot_product_attention, locals())
        raise _with_order(renamed(error, kv_lens is not None), query, key) from error
    if return_residual and array.view(query, "query").framework == "jax":
        return result[0], result[1].astype(query.dtype)
    return result


def renamed(error: ArgumentError | UnsupportedError, has_kv_lens: bool = False) -> Exception:
    """An error of what is called here, with the names that arguments have here."""
    name = "kv_lens" if has_kv_lens else "key_value_seq_lengths"
    names = _NAMES | {"cache_seqlens": name, "seqused_k": name}
    return type(error)(_NAME.sub(lambda match: names[match[0]], str(error)))


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


def _refuse_given(arguments: tuple[Any, ...], why: str) -> None:
    """UnsupportedError if one of these is given."""
    if any(x is not None for x in arguments):
        raise UnsupportedError(why)


_FIRST = (
    "causal_alignment: 'first' is for dense requests; pass 'last' with cu_seqlens_q, cu_seqlens_k "
    "or block_table, which is the same for as many queries as keys"
)
_MASK = (
    "mask: is for dense requests; pass none with cu_seqlens_q, cu_seqlens_k or block_table, or "
    "plan a BatchPrefillWithPagedKVCacheWrapper with custom_mask"
)
_EXPRESSION = (
    "logits_transform, mask_fn: are for dense requests of whole arrays here; pass no mask (name it "
    "in logits_params and mask_fn), lengths, cu_seqlens or block_table, or plan a "
    "BatchPrefillWithPagedKVCacheWrapper or BatchPrefillWithRaggedKVCacheWrapper with them"
)


class _Call(NamedTuple):
    """Arrays, lengths, and the options in the words of flash_attn's functions."""

    q: Any
    k: Any
    v: Any
    q_lens: Any
    kv_lens: Any
    table: Any
    options: dict[str, Any]

    @property
    def wants_lse(self) -> bool:
        return bool(self.options["return_softmax_lse"])

    def changed(self, **options: Any) -> _Call:
        return self._replace(options=self.options | options)

    def placement(self, is_first: bool) -> Placement:
        """Where rows stand among keys in dense requests, with a batch axis or without one."""
        shapes = [array.view(x, name).shape for x, name in ((self.q, "q"), (self.k, "k"))]
        if any(len(shape) not in (3, 4) for shape in shapes):
            raise ArgumentError(
                f"q, k: shapes are {list(shapes[0])} and {list(shapes[1])}; wanted [batch, tokens, "
                "heads, head_dim], or both without batch"
            )
        left, right = self.options["window_size"]
        right = 0 if self.options["causal"] else right
        return Placement(shapes[0][-3], shapes[1][-3], left, right, is_first)


def _as_batch(call: _Call, attend: Callable[[_Call], Any]) -> Any:
    """The output of one request without a batch axis, as a batch of one."""
    out, options = call.options["out"], call.options
    per_row = {name: options[name] for name in ("out", "output_gate")}
    batch = call.changed(**{name: None if x is None else x[None] for name, x in per_row.items()})
    result = attend(batch._replace(q=call.q[None], k=call.k[None], v=call.v[None]))
    output, lse = result if call.wants_lse else (result, None)
    output = output[0] if out is None else out
    return output if lse is None else (output, lse[0])


def _check_lengths(call: _Call) -> None:
    shape = array.view(call.q, "q").shape
    count = shape[0] if len(shape) == 4 else 1
    for x, name in ((call.q_lens, "seqused_q"), (call.kv_lens, "seqused_k")):
        if x is not None and tuple(array.view(x, name).shape) != (count,):
            got = list(array.view(x, name).shape)
            raise ArgumentError(f"{name}: shape is {got}; wanted [{count}]")


def _with_rows_lse(result: Any, wants_lse: bool) -> Any:
    """The LSE of flash_attn's functions, heads before rows, with the heads last."""
    return (result[0], result[1].swapaxes(-1, -2)) if wants_lse else result


# --- ragged, or pages with offsets of query ---


def _ragged(call: _Call, offsets: tuple[Any, Any]) -> Any:
    of_q, of_k = offsets
    if of_q is None:
        raise ArgumentError("cu_seqlens_q: got None with cu_seqlens_k; wanted offsets of both")
    if of_k is call.table is None:
        raise ArgumentError(
            "cu_seqlens_k: got None with cu_seqlens_q; wanted offsets of both, or a block_table"
        )
    if call.table is not None and call.kv_lens is of_k is None:
        raise ArgumentError("kv_lens: got None with block_table; wanted keys of each request, [b]")
    if call.q_lens is not None:
        raise UnsupportedError(
            "query_seq_lengths: cu_seqlens_q says how many rows each request has; pass one of them"
        )
    result = flash_attn_varlen_func(
        call.q,
        call.k,
        call.v,
        of_q,
        of_k,
        seqused_k=call.kv_lens,
        block_table=call.table,
        **call.options,
    )
    return _with_rows_lse(result, call.wants_lse)


# --- dense, or pages ---


def _dense(call: _Call) -> Any:
    q, k, v, q_lens, kv_lens, table, options = call
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
        return _as_batch(call, _dense)
    if table is None:
        _check_dense(call, vq)
    if q_lens is not None:
        return _with_query_lengths(call, vq)
    if kv_lens is not None:
        options = options | {"cache_seqlens": kv_lens, "page_table": table}
        return _with_rows_lse(flash_attn_with_kvcache(q, k, v, **options), wants_lse)
    if vq.shape[0] == 1 and options["sinks"] is None:
        return _single(call, vq)
    return _with_rows_lse(flash_attn_func(q, k, v, **options), wants_lse)


def _check_dense(call: _Call, vq: ArrayView, is_first: bool = False) -> None:
    vk, vv = array.view(call.k, "k"), array.view(call.v, "v")
    for x, name in ((vk, "k"), (vv, "v")):
        if len(x.shape) != 4 or x.shape[0] != vq.shape[0]:
            raise ArgumentError(
                f"{name}: shape is {list(x.shape)}; wanted [{vq.shape[0]}, tokens, kv_heads, "
                "head_dim], with the batch of query"
            )
    if is_first or call.q_lens is not None or call.kv_lens is None:
        return
    is_placed = call.options["causal"] or call.options["window_size"] != (-1, -1)
    if is_placed and 1 < vq.shape[1] == vk.shape[1]:
        # Aligned to the last key that counts, padded rows would come ahead of the first key.
        raise ArgumentError(
            "query_seq_lengths: got None for requests of as many queries as keys, of which "
            "key_value_seq_lengths count; wanted the same lengths, so that both are padded behind, "
            "or causal_alignment='first'"
        )


def _output(call: _Call, vq: ArrayView, dtype: DType) -> tuple[Any, ArrayView]:
    """The array to write, a new one if none is given, and its view; ArgumentError for one of
    another shape."""
    shape, out = (*vq.shape[:3], array.view(call.v, "v").shape[-1]), call.options["out"]
    if out is None:
        out = array.empty(shape, dtype, vq)
    vout = array.view(out, "out")
    if tuple(vout.shape) != shape or vout.readonly:
        raise ArgumentError(f"out: shape is {list(vout.shape)}; wanted a writable {list(shape)}")
    return out, vout


def _with_query_lengths(call: _Call, vq: ArrayView) -> Any:
    """Requests whose last rows do not count, as ragged ones: rows of zeros there."""
    count, tokens, heads, _ = vq.shape
    out, vout = _output(call, vq, dtypes.bfloat16 if vq.dtype.is_fp8 else vq.dtype)
    kv_lens, gate = call.kv_lens, call.options["output_gate"]
    if kv_lens is None:
        kv_lens = progression(count, array.view(call.k, "k").shape[1], 0, vq)
    rows = out.reshape(vout.shape[0] * vout.shape[1], *vout.shape[2:])
    if array.view(rows, "out").ptr != vout.ptr:
        raise ArgumentError("out: has rows that are not equally far apart; pass a contiguous one")
    _fill_with_zeros(rows)
    if gate is not None:
        gate = gate.reshape(-1, *gate.shape[2:])
    offsets = progression(count + 1, 0, tokens, vq)
    options = call.options | {"out": rows, "max_seqlen_q": tokens, "output_gate": gate}
    result = flash_attn_varlen_func(
        call.q.reshape(count * tokens, heads, vq.shape[3]),
        call.k,
        call.v,
        offsets,
        None,
        seqused_q=call.q_lens,
        seqused_k=kv_lens,
        block_table=call.table,
        **options,
    )
    output = array.deliver(out, vq) if call.options["out"] is None else out
    if not call.wants_lse:
        return output
    return output, result[1].swapaxes(-1, -2).reshape(count, tokens, heads)


def _fill_with_zeros(x: Any) -> None:
    """On the current stream of its framework."""
    v = array.view(x, "out")
    if v.framework == "torch":
        x.zero_()
    elif v.device.kind == "cpu":
        array.as_numpy(v)[...] = 0
    else:
        array.as_cupy(v, np.dtype(f"u{v.dtype.itemsize}"))[...] = 0


def _single(call: _Call, vq: ArrayView) -> Any:
    """One request: its lengths are known here, so that the plan is made on the host."""
    function, arrays, rows = single_call(call.q, call.k, call.v, vq.shape[1], call.options)
    result = function(*arrays, **rows)
    lead = (None, None) if vq.shape[1] == 1 else (None,)
    output, lse = result if call.wants_lse else (result, None)
    output = output[lead] if call.options["out"] is None else call.options["out"]
    return output if lse is None else (output, array.scaled(lse, math.log(2.0))[lead])


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


def _first(call: _Call) -> Any:
    """Dense requests, by other windows over fewer keys; with lengths, which only the device knows,
    by a mask."""
    placement = call.placement(True)
    placed = placement.from_last() if call.q_lens is call.kv_lens is None else None
    if placed is None:
        return _masked(call, None, True)
    array.view(call.v, "v")
    k, v = (
        x if x.shape[-3] <= placed.keys else x[..., : placed.keys, :, :] for x in (call.k, call.v)
    )
    return _dense(call._replace(k=k, v=v).changed(**placed.options()))


# --- masks and expressions, each request a launch of its own ---


def _hidden(
    call: _Call,
    offsets: tuple[Any, Any],
    bias: Any,
    mask: Any,
    expressions: tuple[Any, Any, Any],
    is_first: bool,
) -> Any:
    """Dense requests with a bias, a mask or expressions (logits_transform, mask_fn and
    logits_params)."""
    transform, mask_fn, params = expressions
    unplaced = {"causal": False, "window_size": (-1, -1)}
    if bias is not None or (mask is not None and logits.differs_by_head(mask)):
        name = "mask" if bias is None else "bias"
        if not transform is mask_fn is params is None:
            raise ArgumentError(
                f"{name}: got an array beside logits_transform, mask_fn or logits_params; name it "
                "there"
            )
        kind = "one" if name == "bias" else "a mask for each head"
        _refuse_given(
            (*offsets, call.table),
            f"{name}: got {kind} beside cu_seqlens or block_table; wanted dense requests",
        )
        cap = parse.soft_cap(call.options["softcap"])
        transform, mask_fn, params = logits.of_arrays(bias, mask, call.q, call.k, cap)
        mask, call = None, call.changed(softcap=cap if bias is None else 0.0)
        if is_first or not call.q_lens is call.kv_lens is None:
            _check_lengths(call)
            placement = call.placement(is_first)
            mask_fn, own = placement.condition(mask_fn, call.q_lens, call.kv_lens)
            params |= own
            call = call._replace(q_lens=None, kv_lens=None).changed(**unplaced)
    elif is_first and not transform is mask_fn is None:
        mask_fn, _ = call.placement(True).condition(mask_fn, None, None)
        call = call.changed(**unplaced)
    expression, arrays = logits.read(transform, mask_fn, params)
    if expression is not None:
        _refuse_given((*offsets, call.table, call.q_lens, call.kv_lens, mask), _EXPRESSION)
        return _expressed(call, expression, arrays)
    _refuse_given((*offsets, call.table), _MASK)
    return _masked(call, mask, is_first)


def _masked(call: _Call, mask: Any, is_first: bool) -> Any:
    """With a mask of all that hides keys."""
    vq, vm = array.view(call.q, "q"), None if mask is None else array.view(mask, "mask")
    if len(vq.shape) == 3:
        full = None if vm is None else _with_axes(mask, vm, 4)
        return _as_batch(call, lambda batch: _masked(batch, full, is_first))
    _require_batch(vq)
    _check_dense(call, vq, is_first)
    _check_lengths(call)
    seen = _visible(call, mask, vm, vq, call.placement(is_first))
    options = RawOptions(
        sm_scale=call.options["softmax_scale"], logits_soft_cap=call.options["softcap"]
    )
    return _each(call, vq, lambda index: (options, seen[min(index, len(seen) - 1)]))


def _require_batch(vq: ArrayView) -> None:
    if len(vq.shape) != 4:
        raise ArgumentError(
            f"q: shape is {list(vq.shape)}; wanted [batch, tokens, heads, head_dim]"
        )


def _with_axes(mask: Any, vm: ArrayView, axes: int) -> Any:
    return mask.reshape((1,) * (axes - len(vm.shape)) + tuple(vm.shape))


def _visible(
    call: _Call, mask: Any, vm: ArrayView | None, vq: ArrayView, placement: Placement
) -> Any:
    """bool [b or 1, t, s] of torch, CuPy or NumPy."""
    count, tokens, heads, _ = vq.shape
    views = [
        array.view(progression(n, 0, 1, vq), name)
        for n, name in ((tokens, "rows"), (placement.keys, "columns"))
    ]
    names = []
    for x, own, name in (
        (call.q_lens, "seqused_q", "num_rows"),
        (call.kv_lens, "seqused_k", "num_keys"),
    ):
        if x is not None:
            views.append(array.view(x, own))
            names.append(name)
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
        extent in (1, size) for extent, size in zip(vm.shape[::-1], wanted[::-1], strict=False)
    )
    if not fits:
        raise ArgumentError(
            f"mask: shape is {list(vm.shape)}; wanted one that broadcasts to {list(wanted)}"
        )
    array.same_device(query=vq, mask=vm)


def _expressed(call: _Call, expression: LogitsExpression, arrays: tuple[ArrayView, ...]) -> Any:
    """With expressions, which know a request's index in the batch as a number."""
    vq, options = array.view(call.q, "q"), call.options
    if len(vq.shape) == 3:
        return _as_batch(call, lambda batch: _expressed(batch, expression, arrays))
    _require_batch(vq)
    _check_dense(call, vq)
    left, right = options["window_size"]
    common = RawOptions(
        causal=options["causal"],
        window_left=left,
        window_right=right,
        logits_soft_cap=options["softcap"],
        sm_scale=options["softmax_scale"],
    )

    def of_request(index: int) -> tuple[RawOptions, None]:
        own = logits.of_request(expression, arrays, index, vq.shape[0])
        return common._replace(logits=own), None

    return _each(call, vq, of_request, arrays)


def _each(
    call: _Call,
    vq: ArrayView,
    of_request: Callable[[int], tuple[RawOptions, Any]],
    read: tuple[ArrayView, ...] = (),
) -> Any:
    """The requests one by one. of_request: options and mask of one. read: by expressions."""
    (out, _), gate = _output(call, vq, vq.dtype), call.options["output_gate"]
    lse = array.empty(vq.shape[:3], dtypes.float32, vq) if call.wants_lse else None
    for index in range(vq.shape[0]):
        options, mask = of_request(index)
        request = single.Arrays(
            call.q[index],
            call.k[index],
            call.v[index],
            out=out[index],
            lse=None if lse is None else lse[index],
            sinks=call.options["sinks"],
            custom_mask=mask,
            output_gate=None if gate is None else gate[index],
        )
        single.run(request, options, read, return_lse=call.wants_lse, is_decode=False)
    output = array.deliver(out, vq) if call.options["out"] is None else out
    if lse is None:
        return output
    return output, array.deliver(array.scaled(lse, math.log(2.0)), vq)
