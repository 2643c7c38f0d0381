"""What the calls without a plan take, viewed and checked: caches, lengths, offsets, scales."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import Dims, match_array, require_contiguous_last, require_dtype
from ..core import dtypes, parse
from ..errors import ArgumentError, UnsupportedError
from ..launch.attention.plan_batch import INDEX_DTYPES
from .kv_cache import Keys, match_pages, select_kv
from .workspace import int32_on_device, refuse_capture


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """What a function calls its arguments, for messages. There is one object of equal names, so
    that records of options which hold it are hashed in no time.

    q_rope, k_rope  of latent attention, whose rows come in two parts
    has_layout  there is a kv_layout, which messages may recommend
    """

    q: str
    k: str
    v: str
    block_tables: str = "block_tables"
    kv_lens: str = "seq_lens"
    qo_lens: str = "actual_seq_lens_q"
    qo_offsets: str = "cum_seq_lens_q"
    kv_offsets: str = "batch_offsets_k"
    sm_scale: str = "bmm1_scale"
    k_scale: str = "k_scale"
    output_scale: str = "bmm2_scale"
    q_len: str = "q_len_per_req"
    max_q_len: str = "max_q_len"
    max_kv_len: str = "max_seq_len"
    out: str = "out"
    o_dtype: str = "out_dtype"
    kv_begin: str = "kv_begin"
    q_rope: str = "query[1]"
    k_rope: str = "kv_cache[1]"
    has_layout: bool = True

    def but(self, **labels: str) -> Names:
        """These names with other labels: the same object each time."""
        return _renamed(self, tuple(labels.items()))


LATENT_NAMES = Names("query", "kv_cache", "kv_cache", kv_offsets="kv_offsets", has_layout=False)


@functools.lru_cache(maxsize=256)
def _renamed(names: Names, labels: tuple[tuple[str, Any], ...]) -> Names:
    return replace(names, **dict(labels))


def merge_leading(v: ArrayView, name: str, kept: int) -> ArrayView:
    """v with all axes but the last `kept` as one; those of an extent of 1 may have any stride."""
    if len(v.shape) == kept + 1:
        return v
    leading = range(len(v.shape) - kept)
    stride, reach = v.strides[0], 1
    for axis in reversed(leading):
        extent, step = v.shape[axis], v.strides[axis]
        if extent == 1:
            continue
        if reach > 1 and step != stride * reach and 0 not in v.shape:
            raise ArgumentError(
                f"{name}: shape {list(v.shape)} with strides {list(v.strides)} has rows that are "
                "not equally far apart; pass a contiguous array"
            )
        stride = stride if reach > 1 else step
        reach *= extent
    count = math.prod(v.shape[axis] for axis in leading)
    return array.as_strided(
        v, (count, *v.shape[len(leading) :]), (stride, *v.strides[len(leading) :])
    )


def merge_spread(v: ArrayView, name: str, kept: int) -> tuple[ArrayView, int]:
    """(`merge_leading`, gap): of [requests, tokens, ...] requests may lie `gap` elements further
    apart than their tokens tell. On the CPU they are copied, and there is none."""
    if len(v.shape) != kept + 2 or 1 in v.shape[:2] or 0 in v.shape:
        return merge_leading(v, name, kept), 0
    (count, tokens), (step, stride) = v.shape[:2], v.strides[:2]
    if step == tokens * stride:
        return merge_leading(v, name, kept), 0
    if v.device.kind == "cpu":
        copied = array.from_numpy(np.ascontiguousarray(array.as_numpy(v)), v)
        return merge_leading(array.view(copied, name), name, kept), 0
    if min(step, stride) < 0:
        raise ArgumentError(
            f"{name}: strides {list(v.strides)} are negative; pass a contiguous array"
        )
    merged = array.as_strided(v, (count * tokens, *v.shape[2:]), (stride, *v.strides[2:]))
    return merged, step - tokens * stride


def view_rows(x: Any, name: str, axes: tuple[int, ...]) -> ArrayView:
    """[..., heads, dim]; `axes` says how many the array may have."""
    v = array.view(x, name)
    if len(v.shape) not in axes:
        wanted = " or ".join(str(n) for n in axes)
        raise ArgumentError(
            f"{name}: shape {list(v.shape)} has {len(v.shape)} dimensions; wanted {wanted}, the "
            "last two being heads and head_dim"
        )
    require_contiguous_last(v, name)
    return v


def view_cache(k: Any, v: Any, kv_layout: str, names: Names, dims: Dims) -> Keys:
    """Pages of keys and values; `dims` as in kv_cache.py.

    v None: k is one tensor [P, 2, ...] of both, or [P, 1, ...] of what serves as both. Tensors
    [P, 2, ...] for k and for v: K of the first and V of the second.
    """
    vk = array.view(k, names.k)
    vv = vk if v is None else array.view(v, names.v)
    if v is None:
        if len(vk.shape) != 5 or vk.shape[1] not in (1, 2):
            axes = "page_size, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, page_size"
            raise ArgumentError(
                f"{names.k}: shape is {list(vk.shape)}; wanted [num_pages, 2, {axes}, head_dim], "
                "or a pair (K, V) without the axis of 2"
            )
        vk, vv = select_kv(vk, 0), select_kv(vv, vv.shape[1] - 1)
    elif len(vk.shape) == len(vv.shape) == 5 and vk.shape[1] == vv.shape[1] == 2:
        vk, vv = select_kv(vk, 0), select_kv(vv, 1)
    return match_pages(vk, vv, kv_layout, dims, (names.k, names.v))


class Tables(NamedTuple):
    """Page tables [B, max_pages] of keys and of values, which are often the same.

    value_pages: entries from a key's to its value's; 0 where the tables are the same.
    """

    keys: ArrayView
    values: ArrayView
    value_pages: int


def as_table(v: ArrayView, name: str, shape: str) -> ArrayView:
    """A table of int32, whose rows lie within what kernels count; int64 is converted."""
    match_array(v, shape, (dtypes.int32, dtypes.int64), name)
    if v.device.kind == "cuda" and v.dtype is dtypes.int64:
        v = int32_on_device(v, name)
    if min(v.strides) < 0 or v.strides[0] * v.shape[0] > 2**31 - 1:
        raise UnsupportedError(
            f"{name}: rows are {v.strides[0]} entries apart; {v.shape[0]} of them must lie within "
            "2^31 entries, pass a contiguous table"
        )
    return v


def view_tables(x: Any, name: str, are_shared: bool) -> Tables:
    """Page tables [B, max_pages], or [B, 2, max_pages] with one for K and one for V, of int32;
    those of int64 are converted at each call."""
    v = array.view(x, name)
    if are_shared and len(v.shape) == 3:
        raise ArgumentError(
            f"{name}: shape {list(v.shape)} has a table each for K and V; wanted one for both, "
            "[B, max_pages], or uses_shared_paged_kv_idx=False where a call takes it"
        )
    v = as_table(v, name, "B max_pages" if are_shared else "B 2 max_pages")
    if are_shared:
        return Tables(v, v, 0)
    return Tables(select_kv(v, 0), select_kv(v, 1), v.strides[1])


def view_index(
    x: Any, name: str, counts: tuple[int, ...], like: ArrayView, may_copy: bool
) -> ArrayView:
    """Lengths or offsets in one axis, `counts` of them; other axes have an extent of 1.

    may_copy: those of the host are copied to the device of `like`, except into a graph.
    """
    v = array.view(x, name)
    require_dtype(v, INDEX_DTYPES, name)
    size = math.prod(v.shape)
    if sum(extent != 1 for extent in v.shape) > 1 or size not in counts:
        wanted = " or ".join(f"[{n}]" for n in counts)
        raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted {wanted}, or [n, 1, ...]")
    if may_copy and v.device.kind == "cpu" and like.device.kind == "cuda":
        refuse_capture(array.current_stream(like), f"{name} on the host", "pass it on the GPU")
        return array.view(array.from_numpy(array.as_numpy(v).reshape(-1), like), name)
    steps = [s for n, s in zip(v.shape, v.strides, strict=True) if n != 1]
    return array.as_strided(v, (size,), (steps[0] if steps else 1,))


def view_sinks(x: Any, num_heads: int) -> ArrayView:
    """float32, one for each query head, in one axis or [num_kv_heads, group]."""
    v = array.view(x, "sinks")
    require_dtype(v, dtypes.float32, "sinks")
    low, high = array.byte_range(v)
    if math.prod(v.shape) != num_heads or len(v.shape) > 2:
        raise ArgumentError(
            f"sinks: shape is {list(v.shape)}; wanted one for each of the {num_heads} query heads"
        )
    if high - low != 4 * num_heads or low != v.ptr:
        raise ArgumentError("sinks: is not contiguous; pass a contiguous array")
    return array.as_strided(v, (num_heads,), (1,))


def view_slopes(x: Any, num_requests: int, num_heads: int) -> ArrayView:
    """Slopes of ALiBi as [B, num_qo_heads]."""
    v = array.view(x, "alibi_slopes")
    require_dtype(v, dtypes.float32, "alibi_slopes")
    if v.device.kind == "cuda" and v.shape and v.shape[-1] > 1 and v.strides[-1] != 1:
        raise ArgumentError("alibi_slopes: is not contiguous; pass a contiguous array")
    if max(v.strides, default=0) > 2**31 - 1 or min(v.strides, default=0) < 0:
        raise ArgumentError("alibi_slopes: rows are too far apart; pass a contiguous array")
    if tuple(v.shape) == (num_heads,):
        return array.as_strided(v, (num_requests, num_heads), (0, v.strides[0]))
    if tuple(v.shape) != (num_requests, num_heads):
        raise ArgumentError(
            f"alibi_slopes: shape is {list(v.shape)}; wanted [{num_heads}] or "
            f"[{num_requests}, {num_heads}], one for each query head"
        )
    return v


def next_power_of_two(length: Any) -> Any:
    """A bound of lengths rounded up, so that calls of growing requests have equal signatures."""
    if type(length) is int and length > 0:
        return 1 << (length - 1).bit_length()
    return length


def bounded(max_kv_len: Any, name: str) -> int | None:
    """A bound of lengths, checked and rounded up as `next_power_of_two` does."""
    if max_kv_len is None:
        return None
    return int(next_power_of_two(parse.require_int(max_kv_len, name, 0, 2**32)))


# In the place of a number of requests that the arrays confirm.
CONFIRMED = "as many as the arrays have"


def confirmed_count(batch_size: Any, per_request: Any) -> Any:
    """batch_size, or CONFIRMED where the array says the same: then calls of other batch sizes have
    equal signatures."""
    shape = getattr(per_request, "shape", None)
    if type(batch_size) is int and isinstance(shape, tuple) and shape and shape[0] == batch_size:
        return CONFIRMED
    return batch_size


class Scales(NamedTuple):
    """Numbers for logits and output; views of what is in device memory, of q, k and v.

    names        fields of check.Arrays that have these scales, None where an array has no effect
    by_head      which of the views have a scale for each KV head: [num_kv_heads], or
                 [B, num_kv_heads]; the others hold one number
    is_constant  whether the numbers are those of all calls of this signature
    """

    logits: float
    output: float
    views: tuple[ArrayView | None, ...]
    names: tuple[str | None, str | None, str | None]
    is_constant: bool
    by_head: tuple[bool, ...] = (False, False, False)

    @property
    def steps(self) -> tuple[int, ...]:
        """Elements from a request's own scales to the next one's, 0 for those that all share."""
        return tuple(0 if v is None or len(v.shape) < 2 else v.strides[0] for v in self.views)


def number_or_array(scale: Any) -> tuple[Any, Any]:
    """A scale as (number, array of one element or None)."""
    if type(scale) is float:
        return scale, None
    if scale is None:
        return 1.0, None
    if isinstance(scale, (int, float, np.generic)) or not hasattr(scale, "shape"):
        return scale, None
    return 1.0, scale


def numbers_and_arrays(logits: Any, output: Any) -> tuple[Any, Any, Any, Any]:
    """`number_or_array` of the scale of the logits and of that of the output."""
    if type(logits) is type(output) is float:
        return logits, None, output, None
    return *number_or_array(logits), *number_or_array(output)


def are_numbers(*scales: Any) -> bool:
    """Whether no scale is an array, whose number may change."""
    return all(type(x) is float or type(x) is int or x is None for x in scales)


def read_scale(scale: Any, name: str) -> tuple[float, Any]:
    """(number, array of one element or None) of a scale; one on the host is read."""
    number, held = number_or_array(scale)
    if held is None:
        return parse.finite(number, name, 1.0), None
    v = _view_number(held, name)
    if v.device.kind == "cpu":
        return parse.finite(float(array.as_numpy(v).ravel()[0]), name, 1.0), None
    return 1.0, held


def view_scales(
    arrays: tuple[Any, ...],
    numbers: tuple[Any, Any, Any],
    names: tuple[str, str, str],
    head_dim: int,
    is_fp8: bool,
    requests_and_heads: tuple[int, int] | None = None,
) -> Scales:
    """Checked: arrays and numbers of (logits, keys and values, output).

    requests_and_heads   how many there are, where arrays may have a scale for each KV head.

    Without a number for keys and values the first two scale the logits. With one they do so where
    keys are fp8, times 1 / sqrt(head_dim), and then it scales the output too (as xqa has it).
    """
    fields: tuple[str | None, str | None, str | None] = "scale_q", "scale_k", "scale_v"
    if requests_and_heads is None:
        scales = [
            None if x is None else _view_number(x, n) for x, n in zip(arrays, names, strict=True)
        ]
    else:
        scales = [
            None if x is None else _view_by_head(x, name, *requests_and_heads)
            for x, name in zip(arrays, names, strict=True)
        ]
    by_head = tuple(v is not None and math.prod(v.shape) != 1 for v in scales)
    logits = parse.finite(numbers[0], names[0], 1.0)
    output = parse.finite(numbers[2], names[2], 1.0)
    if numbers[1] is not None:
        logits /= math.sqrt(max(1, head_dim))
        kv_scale = parse.finite(numbers[1], names[1], 1.0)
        if is_fp8:
            logits, output = logits * kv_scale, output * kv_scale
            fields, scales[2] = ("scale_q", "scale_k", "scale_k"), scales[1]
        else:
            fields, scales[1] = ("scale_q", None, None), None
    # What is in the host's memory is read, for that waits for nothing.
    on_host = [
        v is not None and v.device.kind == "cpu" and not is_by_head
        for v, is_by_head in zip(scales, by_head, strict=True)
    ]
    of_q, of_k, of_v = (
        float(array.as_numpy(v).ravel()[0]) if is_host and v is not None else 1.0
        for v, is_host in zip(scales, on_host, strict=True)
    )
    return Scales(
        parse.finite(logits * of_q * of_k, names[0], 1.0),
        parse.finite(output * of_v, names[2], 1.0),
        tuple(None if is_host else v for v, is_host in zip(scales, on_host, strict=True)),
        fields,
        not any(on_host),
        by_head,
    )


def _view_number(x: Any, name: str) -> ArrayView:
    v = array.view(x, name)
    if math.prod(v.shape) != 1:
        raise ArgumentError(
            f"{name}: shape is {list(v.shape)}; wanted a number, or an array of one element"
        )
    require_dtype(v, dtypes.float32, name)
    return v


def _view_by_head(x: Any, name: str, num_requests: int, num_heads: int) -> ArrayView | None:
    """[1], or scales for each KV head: [num_kv_heads], or [B, num_kv_heads].

    Arrays that repeat an element along an axis (of stride 0) are those without that axis.
    """
    v = array.view(x, name)
    require_dtype(v, dtypes.float32, name)
    shape = tuple(v.shape)
    if math.prod(shape) == 1:
        return array.as_strided(v, (1,), (1,))
    is_repeated = len(shape) == 2 and v.strides[0] == 0 and shape[1] == num_heads
    if shape not in ((num_heads,), (num_requests, num_heads)) and not is_repeated:
        raise ArgumentError(
            f"{name}: shape is {list(shape)}; wanted one number, [{num_heads}], or "
            f"[{num_requests}, {num_heads}], one for each KV head of each request"
        )
    if 0 in shape:
        return None
    if not any(stride for n, stride in zip(shape, v.strides, strict=True) if n > 1):
        return array.as_strided(v, (1,), (1,))
    if v.device.kind == "cpu":
        steps = v.strides if len(shape) == 2 else (0, v.strides[0])
        return array.as_strided(v, (num_requests, num_heads), steps)
    if num_heads > 1 and v.strides[-1] != 1:
        raise ArgumentError(f"{name}: is not contiguous; pass a contiguous array")
    if len(shape) == 2 and v.strides[0]:
        if not 0 < v.strides[0] < 2**31:
            raise ArgumentError(f"{name}: rows are too far apart; pass a contiguous array")
        return array.as_strided(v, (num_requests, num_heads), (v.strides[0], 1))
    return array.as_strided(v, (num_heads,), (1,))
