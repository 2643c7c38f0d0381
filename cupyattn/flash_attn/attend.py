"""The one call behind flash_attn's functions: what they take, as a call without a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import Dims, match_array
from ..core import dtypes, parse
from ..core.parse import require_int
from ..core.problem import MAX_LENGTH
from ..core.records import maker
from ..engine.arrays import Arrays, make_arrays
from ..engine.check_planless import Options
from ..engine.chunks import split_by_chunks
from ..engine.index_arrays import compute, progression, steps_of
from ..engine.run_planless import run
from ..engine.views import Names, merge_leading, next_power_of_two
from ..engine.widening import widened, widened_pair
from ..errors import ArgumentError, UnsupportedError
from .batch import Batch
from .caches import with_even_rows
from .padding import copy_into_kernel_dims, narrowed, needs_copies

# Beyond so many rows of a request one kernel serves any number.
MANY_ROWS = 65
# From so many rows of a KV head on, those of its group for the tokens of one request, and from so
# many logits of a call on, fp8 keys are converted ahead of attention: 1.1 to 1.4 times as fast, by
# calls of 0.3 ms and more. Shorter ones wait for the host.
WIDENING_ROWS, WIDENING_LOGITS = 4096, 2**29
_FP8_VECTOR = 16


class FlashOptions(NamedTuple):
    """The options of a call over the arrays that kernels read.

    max_q_len   the most rows of one request where they differ, as far as it matters
    max_kv_len  the most keys of one, rounded up; None where the page table says it
    """

    names: Names
    max_q_len: int | None
    max_kv_len: int | None
    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    num_splits: Any
    attention_chunk: Any = 0
    has_kv_steps: bool = False
    return_lse: bool = False
    has_table_offsets: bool = False
    sharers: int = 1

    def resolve(self, arrays: Arrays) -> Options:
        """Checked. What kernels split keys into is bounded by the most keys that are likely."""
        shape: tuple[int, ...] = tuple(arrays.q.shape)
        q_len = shape[1] if len(shape) == 4 and arrays.qo_offsets is None else 0
        left, right = parse_window(self.window_size)
        max_kv_len = self.max_kv_len
        if require_int(self.num_splits, "num_splits", 0) == 1:
            max_kv_len = 1
        cap = parse.finite(self.softcap, "softcap", 0.0)
        if cap < 0.0:
            raise ArgumentError(f"softcap: got {self.softcap!r}; wanted 0 (off) or a positive cap")
        return Options(
            self.names,
            "NHD",
            q_axes=(len(shape),),
            q_len=q_len,
            max_q_len=q_len or self.max_q_len,
            max_kv_len=max_kv_len,
            sm_scale=_scale(self.softmax_scale, 1.0 / math.sqrt(max(1, shape[-1]))),
            window_left=left,
            window_right=right,
            causal=parse.flag(self.causal, "causal"),
            pads_lse=self.return_lse and q_len > 0,
            return_lse=self.return_lse,
            logits_soft_cap=cap,
            scales_by_head=True,
            attention_chunk=require_int(self.attention_chunk, "attention_chunk", 0),
            has_table_offsets=self.has_table_offsets,
            cumulative_kv_lens=self.has_kv_steps,
            sharers=self.sharers,
        )


class DenseOptions(NamedTuple):
    """The options of a call of requests of one length, by which it is known again as its caller
    gave it. The shapes say which rows of k and v the requests have."""

    q_shape: Any
    k_shape: Any
    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    num_splits: Any


make_options, make_dense_options = maker(FlashOptions), maker(DenseOptions)


@dataclass(frozen=True, slots=True)
class Common:
    """The arguments that all functions take, as given."""

    softmax_scale: Any
    causal: Any
    window_size: Any
    attention_chunk: Any
    softcap: Any
    num_splits: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    alibi_slopes: Any
    sinks: Any
    out: Any
    return_lse: Any


def attend(batch: Batch, common: Common) -> Any:
    """out, or (out, lse) if `return_lse`: natural logarithms, [h, rows] or [b, h, s]."""
    names = batch.names
    vq = array.view(batch.q, "q")
    is_ragged = batch.qo_offsets is not None
    if len(vq.shape) != (3 if is_ragged else 4):
        wanted = "[batch, seqlen, heads, head_dim]"
        if is_ragged:
            wanted = f"[rows, heads, head_dim], with {names.qo_offsets}"
        raise ArgumentError(f"q: shape is {list(vq.shape)}; wanted {wanted}")
    if math.prod(vq.shape[:-2]) > MAX_LENGTH:
        raise UnsupportedError(f"q: shape is {list(vq.shape)}; at most {MAX_LENGTH} rows")
    if vq.dtype.is_fp8:
        batch.is_fp8_q, batch.q = True, widened_queries(vq, batch.k, names)
        vq = array.view(batch.q, "q")
    if needs_copies(batch, vq):
        return _attend_copies(batch, common, vq)
    if not is_ragged:
        batch.q, vq = with_even_rows(batch.q, vq)
    if batch.are_causal is not None:
        return _attend_mixed(batch, common, vq)
    if common.attention_chunk and vq.device.kind == "cuda":
        return _attend_by_chunks(batch, common, vq)
    _widen_keys(batch, vq)
    q_len = 0 if is_ragged else vq.shape[1]
    if not (is_ragged or q_len):
        batch.qo_offsets = progression(vq.shape[0] + 1, 0, 0, vq)
    return _attend(batch, common, vq, q_len)


def _attend_copies(batch: Batch, common: Common, vq: ArrayView) -> Any:
    """The same of head dims that kernels do not have, by copies with columns of zeros, and of
    queries that are multiplied with values."""
    scale, return_lse = common.softmax_scale, parse.flag(common.return_lse, "return_softmax_lse")
    dim = array.view(batch.v, batch.names.v).shape[-1]
    if scale is None:
        scale = 1.0 / math.sqrt(max(1, vq.shape[-1] + (0 if batch.qv is None else dim)))
    batch, target = copy_into_kernel_dims(batch, vq, common.out)
    answer = attend(batch, replace(common, softmax_scale=scale, out=target))
    made, lse = answer if return_lse else (answer, None)
    made = narrowed(made, dim, vq, common.out)
    return (made, array.deliver(lse, vq)) if return_lse else made


def _attend(
    batch: Batch, common: Common, vq: ArrayView, q_len: int, *, has_table_offsets: bool = False
) -> Any:
    """The same, of q_len rows a request, or 0 where offsets say it."""
    return_lse = parse.flag(common.return_lse, "return_softmax_lse")
    pads_lse = return_lse and q_len > 0
    lse = _empty_lse(vq) if return_lse else None
    out = _run(batch, common, vq, q_len, lse, pads_lse, has_table_offsets)
    if lse is None:
        return out
    # Padded rows have natural logarithms, others base 2.
    lse = lse if pads_lse else array.scaled(lse, math.log(2.0))
    return out, array.deliver(lse, vq)


def _attend_mixed(batch: Batch, common: Common, vq: ArrayView) -> Any:
    """A causal call some of whose requests see all their keys: each kind of requests has a call of
    its own, in which those of the other have no rows."""
    if common.attention_chunk:
        raise UnsupportedError("dynamic_causal: is not supported with attention_chunk; pass None")
    names = batch.names
    flags = array.view(batch.are_causal, "dynamic_causal")
    offsets = array.view(batch.qo_offsets, names.qo_offsets)
    count = offsets.shape[0] - 1 if len(offsets.shape) == 1 else 0
    kinds = dtypes.bool_, dtypes.uint8, dtypes.int32, dtypes.int64
    match_array(flags, "b", kinds, "dynamic_causal", Dims(b=count))
    if batch.qo_lens is None:
        lens = array.view(compute(steps_of, offsets), names.qo_lens)
    else:
        lens = array.view(batch.qo_lens, names.qo_lens)
        match_array(lens, "b", (dtypes.int32, dtypes.int64), names.qo_lens, Dims(b=count))
    array.same_device(**{names.q: vq, "dynamic_causal": flags, names.qo_lens: lens})
    of_each = compute(lambda n, x: [n * (x != 0), n * (x == 0)], lens, flags)
    return_lse = parse.flag(common.return_lse, "return_softmax_lse")
    lse = _empty_lse(vq) if return_lse else None
    out = common.out
    for causal, qo_lens in zip((True, False), of_each, strict=True):
        own = replace(batch, qo_lens=qo_lens, are_causal=None)
        out = _run(own, replace(common, causal=causal, out=out), vq, 0, lse, False, False)
    if lse is None:
        return out
    return out, array.deliver(array.scaled(lse, math.log(2.0)), vq)


def _run(
    batch: Batch,
    common: Common,
    vq: ArrayView,
    q_len: int,
    lse: Any,
    pads_lse: bool,
    has_table_offsets: bool,
) -> Any:
    """out; `lse` is written, unless it is None."""
    return_lse = lse is not None
    sinks = None if common.sinks is None else float32_sinks(common.sinks)
    lse_rows = None if lse is None else lse.swapaxes(-1, -2)
    of_q, of_k, of_v = _descales(batch, common, vq)
    arrays = make_arrays(
        q=batch.q,
        k=batch.k,
        v=batch.v,
        block_tables=batch.table,
        kv_lens=batch.kv_lens,
        out=common.out,
        lse=lse_rows,
        qo_lens=batch.qo_lens,
        qo_offsets=batch.qo_offsets,
        kv_offsets=batch.kv_offsets,
        sinks=sinks,
        scale_q=of_q,
        scale_k=of_k,
        scale_v=of_v,
        kv_begin=batch.kv_begin,
        alibi_slopes=common.alibi_slopes,
    )
    most = batch.max_seqlen_q
    options = make_options(
        names=batch.names,
        max_q_len=None if most is None else min(max(most, 1), MANY_ROWS),
        max_kv_len=next_power_of_two(batch.max_seqlen_k),
        softmax_scale=common.softmax_scale,
        causal=common.causal,
        window_size=common.window_size,
        softcap=common.softcap,
        num_splits=common.num_splits,
        attention_chunk=common.attention_chunk,
        has_kv_steps=batch.has_kv_steps,
        return_lse=return_lse,
        has_table_offsets=has_table_offsets,
        sharers=batch.sharers,
    )
    answer = run(arrays, options, batch.append)
    return answer[0] if return_lse else answer


def _attend_by_chunks(batch: Batch, common: Common, vq: ArrayView) -> Any:
    """Each chunk that a request's rows lie in as a request of its own."""
    shape, has_table = tuple(vq.shape), batch.table is not None
    chunk = require_int(common.attention_chunk, "attention_chunk", 0)
    batch, out = split_by_chunks(batch, vq, chunk), common.out
    common = replace(common, attention_chunk=0)
    if len(shape) == 3:
        return _attend(batch, common, vq, 0, has_table_offsets=has_table)
    batch.q = _merged(batch.q, "q")
    if out is not None:
        common = replace(common, out=_merged(out, "out"))
    answer = _attend(batch, common, array.view(batch.q, "q"), 0, has_table_offsets=has_table)
    made, lse = answer if common.return_lse else (answer, None)
    made = made.reshape(*shape[:-1], made.shape[-1]) if out is None else out
    if lse is None:
        return made
    return made, lse.reshape(-1, *shape[:2]).swapaxes(0, 1)


def _scale(softmax_scale: Any, default: float) -> float:
    scale = parse.finite(softmax_scale, "softmax_scale", default)
    if scale == 0.0:
        raise ArgumentError(
            f"softmax_scale: got {softmax_scale!r}, with which all keys weigh the same; wanted "
            "another number, or None for 1 / sqrt(head_dim). (FlashAttention-2 has dropout_p in "
            "its place: so have the functions of cupyattn.flash_attn)"
        )
    return scale


def parse_window(window_size: Any) -> tuple[int, int]:
    """(left, right) of (left, right) as given, where None and -1 stand for no limit."""
    if window_size is None:
        return -1, -1
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ArgumentError(f"window_size: got {parse.shown(window_size)}; wanted (left, right)")
    left, right = (
        -1 if side is None else parse.window(side, "window_size") for side in window_size
    )
    return left, right


def widened_queries(vq: ArrayView, k: Any, names: Names) -> Any:
    """fp8 queries in 16 bits: those of k, or bfloat16."""
    vk = array.view(k, names.k)
    return widened(vq, vk.dtype if not vk.dtype.is_fp8 else dtypes.bfloat16, "q")


def _widen_keys(batch: Batch, vq: ArrayView) -> None:
    """fp8 keys and values in 16 bits where so many rows read them that one conversion ahead takes
    less than each tile's own. Those of pages stay: a pool holds more than a call reads."""
    if vq.device.kind == "cpu" or batch.table is not None or batch.append is not None:
        return
    views = array.view(batch.k, batch.names.k), array.view(batch.v, batch.names.v)
    if not views[0].dtype.is_fp8 or views[0].dtype is not views[1].dtype:
        return
    rows = vq.shape[1] if batch.qo_offsets is None else batch.max_seqlen_q
    heads = views[0].shape[-2]
    if rows is None or not heads or rows * (vq.shape[-2] // heads) < WIDENING_ROWS:
        return
    if math.prod(vq.shape[:-1]) * (batch.max_seqlen_k or 0) < WIDENING_LOGITS:
        return
    if any(v.shape[-1] % _FP8_VECTOR for v in views) or vq.shape[-1] != views[0].shape[-1]:
        return
    batch.is_fp8_k = True
    batch.k, batch.v = widened_pair(views, vq.dtype, "k, v")


def _merged(x: Any, name: str) -> Any:
    """[b, s, h, d] as [b * s, h, d]."""
    v = merge_leading(array.view(x, name), name, 2)
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


def _descales(batch: Batch, common: Common, vq: ArrayView) -> tuple[Any, Any, Any]:
    """Scales of the logits, by q's and k's, and of the output: of fp8 arrays alone, as in FA3."""
    of_q, of_k, of_v = common.q_descale, common.k_descale, common.v_descale
    if of_q is of_k is of_v is None:
        return None, None, None
    if not (batch.is_fp8_k or array.view(batch.k, batch.names.k).dtype.is_fp8):
        of_k = of_v = None
    if not batch.is_fp8_q:
        of_q = None
    elif of_q is not None and vq.device.kind == "cuda":
        of_q, of_k = _by_key_head(of_q, of_k)
    return of_q, of_k, of_v


def _by_key_head(of_q: Any, of_k: Any) -> tuple[Any, Any]:
    """Kernels have one scale of q for each query head: those of KV heads go to k's."""
    v = array.view(of_q, "q_descale")
    if not any(stride for n, stride in zip(v.shape, v.strides, strict=True) if n > 1):
        return of_q, of_k
    if of_k is None:
        return None, of_q
    return None, compute(lambda a, b: a * b, v, array.view(of_k, "k_descale"))
