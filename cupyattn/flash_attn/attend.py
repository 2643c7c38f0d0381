"""The one call behind flash_attn's functions: what they take, as a call without a plan."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import Dims, match_array
from ..core import dtypes, parse
from ..core.parse import require_int
from ..core.problem import MAX_LENGTH
from ..engine.chunks import split_by_chunks
from ..engine.index_arrays import compute, progression, steps_of
from ..engine.run_planless import run
from ..engine.views import Names, merge_leading, next_power_of_two
from ..engine.widening import keeps_8bit, widened, widened_pair
from ..errors import ArgumentError, UnsupportedError
from . import padding
from .batch import MANY_ROWS, Batch, parse_window
from .caches import with_even_rows

# From so many rows of a KV head on, those of its group for the tokens of one request, and from so
# many logits of a call on, fp8 keys are converted ahead of attention: 1.1 to 1.4 times as fast, by
# calls of 0.3 ms and more. Shorter ones wait for the host.
WIDENING_ROWS, WIDENING_LOGITS = 4096, 2**29
_FP8_VECTOR = 16
_SCALES = ("scale_q", "scale_k", "scale_v")


def attend(batch: Batch) -> Any:
    """out, or (out, lse) if `return_lse`: natural logarithms, [h, rows] or [b, h, s]."""
    arrays, names = batch.arrays, batch.names
    vq = array.view(arrays.q, "q")
    is_ragged = arrays.qo_offsets is not None
    if len(vq.shape) != (3 if is_ragged else 4):
        wanted = "[batch, seqlen, heads, head_dim]"
        if is_ragged:
            wanted = f"[rows, heads, head_dim], with {names.qo_offsets}"
        raise ArgumentError(f"q: shape is {list(vq.shape)}; wanted {wanted}")
    if math.prod(vq.shape[:-2]) > MAX_LENGTH:
        raise UnsupportedError(f"q: shape is {list(vq.shape)}; at most {MAX_LENGTH} rows")
    if vq.dtype.itemsize == 1:
        batch.is_fp8_q = True
        if vq.dtype.is_fp8 and not _keeps_8bit(batch, vq):
            batch.take(q=widened_queries(vq, arrays.k, names))
            vq = array.view(batch.arrays.q, "q")
    if padding.needs_copies(batch, vq):
        return _attend_copies(batch, vq)
    if not is_ragged:
        q, vq = with_even_rows(batch.arrays.q, vq)
        batch.take(q=q)
        gate = batch.arrays.output_gate
        vgate = None if gate is None else array.view(gate, "output_gate")
        if vgate is not None and len(vgate.shape) > 2:
            batch.take(output_gate=with_even_rows(gate, vgate)[0])
    if batch.are_causal is not None:
        return _attend_mixed(batch, vq)
    if batch.options.attention_chunk and vq.device.kind == "cuda":
        return _attend_by_chunks(batch, vq)
    _widen_keys(batch, vq)
    if not is_ragged and not vq.shape[1]:
        batch.take(qo_offsets=progression(vq.shape[0] + 1, 0, 0, vq))
    return _attend(batch, vq, 0 if is_ragged else vq.shape[1])


def _attend_copies(batch: Batch, vq: ArrayView) -> Any:
    """The same of head dims that kernels do not have, by copies with columns of zeros, and of
    queries that are multiplied with values."""
    options, out = batch.options, batch.arrays.out
    return_lse = parse.flag(options.return_lse, "return_softmax_lse")
    dim = array.view(batch.arrays.v, batch.names.v).shape[-1]
    if options.softmax_scale is None:
        columns = vq.shape[-1] + (0 if batch.qv is None else dim)
        batch.options = options._replace(softmax_scale=1.0 / math.sqrt(max(1, columns)))
    padding.copy_into_kernel_dims(batch, vq)
    result = attend(batch)
    output, lse = result if return_lse else (result, None)
    output = padding.narrowed(output, dim, vq, out)
    return (output, array.deliver(lse, vq)) if return_lse else output


def _attend(batch: Batch, vq: ArrayView, q_len: int) -> Any:
    """The same, of q_len rows a request, or 0 where offsets say it."""
    return_lse = parse.flag(batch.options.return_lse, "return_softmax_lse")
    pads_lse = return_lse and q_len > 0
    lse = _empty_lse(vq) if return_lse else None
    out = _run(batch, vq, lse)
    if lse is None:
        return out
    # Padded rows have natural logarithms, others base 2.
    lse = lse if pads_lse else array.scaled(lse, math.log(2.0))
    return out, array.deliver(lse, vq)


def _attend_mixed(batch: Batch, vq: ArrayView) -> Any:
    """A causal call some of whose requests see all their keys: each kind of requests has a call of
    its own, in which those of the other have no rows."""
    if batch.options.attention_chunk:
        raise UnsupportedError("dynamic_causal: is not supported with attention_chunk; pass None")
    arrays, names = batch.arrays, batch.names
    flags = array.view(batch.are_causal, "dynamic_causal")
    offsets = array.view(arrays.qo_offsets, names.qo_offsets)
    count = offsets.shape[0] - 1 if len(offsets.shape) == 1 else 0
    kinds = dtypes.bool_, dtypes.uint8, dtypes.int32, dtypes.int64
    match_array(flags, "b", kinds, "dynamic_causal", Dims(b=count))
    if arrays.qo_lens is None:
        lens = array.view(compute(steps_of, offsets), names.qo_lens)
    else:
        lens = array.view(arrays.qo_lens, names.qo_lens)
        match_array(lens, "b", (dtypes.int32, dtypes.int64), names.qo_lens, Dims(b=count))
    array.same_device(**{names.q: vq, "dynamic_causal": flags, names.qo_lens: lens})
    of_each = compute(lambda n, x: [n * (x != 0), n * (x == 0)], lens, flags)
    return_lse = parse.flag(batch.options.return_lse, "return_softmax_lse")
    lse = _empty_lse(vq) if return_lse else None
    batch.are_causal = None
    for causal, qo_lens in zip((True, False), of_each, strict=True):
        batch.options = batch.options._replace(causal=causal)
        batch.take(qo_lens=qo_lens)
        if not causal and parse_window(batch.options.window_size) == (-1, -1):
            batch.take(kv_begin=None)
        out = _run(batch, vq, lse)
        batch.take(out=out)
    if lse is None:
        return out
    return out, array.deliver(array.scaled(lse, math.log(2.0)), vq)


def _run(batch: Batch, vq: ArrayView, lse: Any) -> Any:
    """out; `lse` is written, unless it is None."""
    arrays, max_q_len, return_lse = batch.arrays, batch.max_q_len, lse is not None
    sinks = None if arrays.sinks is None else float32_sinks(arrays.sinks)
    lse_rows = None if lse is None else lse.swapaxes(-1, -2)
    arrays = arrays._replace(sinks=sinks, lse=lse_rows, **_descales(batch, vq))
    options = batch.options._replace(
        max_q_len=None if max_q_len is None else min(max(max_q_len, 1), MANY_ROWS),
        max_kv_len=next_power_of_two(batch.max_kv_len),
        return_lse=return_lse,
        rotary_interleaved=True,  # which the append has done
    )
    result = run(arrays, options, batch.append, batch.asked)
    return result[0] if return_lse else result


def _attend_by_chunks(batch: Batch, vq: ArrayView) -> Any:
    """Each chunk that a request's rows lie in as a request of its own."""
    shape, options, out = tuple(vq.shape), batch.options, batch.arrays.out
    chunk = require_int(options.attention_chunk, "attention_chunk", 0)
    split = split_by_chunks(
        batch.arrays,
        batch.names,
        vq,
        chunk,
        batch.max_q_len,
        has_kv_steps=options.has_kv_steps,
    )
    batch.arrays, batch.max_q_len = split.arrays, split.max_q_len
    batch.max_kv_len = chunk if batch.max_kv_len is None else min(batch.max_kv_len, chunk)
    batch.options = options._replace(
        attention_chunk=0,
        has_kv_steps=False,
        has_table_offsets=split.arrays.block_tables is not None,
        sharers=split.sharers,
    )
    if len(shape) == 3:
        return _attend(batch, vq, 0)
    batch.take(q=_merged(batch.arrays.q, "q"))
    if out is not None:
        batch.take(out=_merged(out, "out"))
    gate = batch.arrays.output_gate
    if gate is not None:
        kept = 1 if len(gate.shape) == 3 else 2
        batch.take(output_gate=_merged(gate, "output_gate", kept))
    result = _attend(batch, array.view(batch.arrays.q, "q"), 0)
    output, lse = result if options.return_lse else (result, None)
    output = output.reshape(*shape[:-1], output.shape[-1]) if out is None else out
    if lse is None:
        return output
    return output, lse.reshape(-1, *shape[:2]).swapaxes(0, 1)


def _keeps_8bit(batch: Batch, vq: ArrayView) -> bool:
    """Whether fp8 queries are multiplied as they are."""
    arrays, names = batch.arrays, batch.names
    if batch.qv is not None:
        return False
    vk, vv = array.view(arrays.k, names.k), array.view(arrays.v, names.v)
    is_paged = arrays.block_tables is not None and len(vk.shape) == 4
    scales = arrays.scale_q, arrays.scale_k, arrays.scale_v
    return keeps_8bit(
        vq,
        vk,
        vv,
        vk.shape[1] if is_paged else 0,
        soft_cap=bool(batch.options.softcap),
        pos_encoding="NONE" if arrays.alibi_slopes is None else "ALIBI",
        prescale_logits=any(x is not None for x in scales),
        key_share=batch.options.key_share is not None,
    )


def widened_queries(vq: ArrayView, k: Any, names: Names) -> Any:
    """fp8 queries in 16 bits: those of k, or bfloat16."""
    vk = array.view(k, names.k)
    return widened(vq, vk.dtype if not vk.dtype.is_fp8 else dtypes.bfloat16, "q")


def _widen_keys(batch: Batch, vq: ArrayView) -> None:
    """fp8 keys and values in 16 bits where so many rows read them that one conversion ahead takes
    less than each tile's own. Those of pages stay: a pool holds more than a call reads."""
    arrays = batch.arrays
    if vq.dtype.itemsize == 1:
        return
    if vq.device.kind == "cpu" or arrays.block_tables is not None or batch.append is not None:
        return
    views = array.view(arrays.k, batch.names.k), array.view(arrays.v, batch.names.v)
    if not views[0].dtype.is_fp8 or views[0].dtype is not views[1].dtype:
        return
    rows = vq.shape[1] if arrays.qo_offsets is None else batch.max_q_len
    heads = views[0].shape[-2]
    if rows is None or not heads or rows * (vq.shape[-2] // heads) < WIDENING_ROWS:
        return
    if math.prod(vq.shape[:-1]) * (batch.max_kv_len or 0) < WIDENING_LOGITS:
        return
    if any(v.shape[-1] % _FP8_VECTOR for v in views) or vq.shape[-1] != views[0].shape[-1]:
        return
    batch.is_fp8_k = True
    k, v = widened_pair(views, vq.dtype, "k, v")
    batch.take(k=k, v=v)


def _merged(x: Any, name: str, kept: int = 2) -> Any:
    """[b, s, h, d] as [b * s, h, d]."""
    v = merge_leading(array.view(x, name), name, kept)
    return array.restride(x, name, tuple(v.shape), tuple(v.strides))


def float32_sinks(sinks: Any) -> Any:
    """Sinks of any float type, parameters of a model among them, as float32."""
    if getattr(sinks, "requires_grad", False):
        sinks = sinks.detach()
    v = array.view(sinks, "sinks")
    if v.dtype not in (dtypes.bfloat16, dtypes.float16):
        return sinks
    if v.framework == "torch":
        return sinks.float()
    return compute(lambda x: x.astype(np.float32), v)


def _empty_lse(vq: ArrayView) -> Any:
    """[h, rows], or [b, h, s]."""
    *lead, rows, heads, _ = vq.shape
    shape = (*lead, heads, rows)
    lse = array.empty(shape, dtypes.float32, vq)
    if vq.device.kind == "cpu":
        # Rows of no request stay as they are.
        array.as_numpy(array.view(lse, "lse"))[...] = -np.inf
    return lse


def _descales(batch: Batch, vq: ArrayView) -> dict[str, Any]:
    """Scales of the logits, by q's and k's, and of the output: of fp8 arrays alone, as in FA3."""
    arrays = batch.arrays
    of_q, of_k, of_v = arrays.scale_q, arrays.scale_k, arrays.scale_v
    if of_q is of_k is of_v is None:
        return {}
    if not (batch.is_fp8_k or array.view(arrays.k, batch.names.k).dtype.itemsize == 1):
        of_k = of_v = None
    if not batch.is_fp8_q:
        of_q = None
    elif of_q is not None and vq.device.kind == "cuda":
        of_q, of_k = _by_key_head(of_q, of_k)
    return dict(zip(_SCALES, (of_q, of_k, of_v), strict=True))


def _by_key_head(of_q: Any, of_k: Any) -> tuple[Any, Any]:
    """Kernels have one scale of q for each query head: those of KV heads go to k's."""
    v = array.view(of_q, "q_descale")
    if not any(stride for n, stride in zip(v.shape, v.strides, strict=True) if n > 1):
        return of_q, of_k
    if of_k is None:
        return None, of_q
    return None, compute(lambda a, b: a * b, v, array.view(of_k, "k_descale"))
