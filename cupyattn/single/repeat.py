"""The short way of a call that looks like an earlier one.

Calls of a decoding loop differ in lengths and addresses only. Everything else that the checks
depend on is the call's look, and a look that has passed them (_single.py) passes them again. So a
call of a known look has its lengths and addresses compared, and is launched. No error is raised
here: a call of an unknown look, or with anything uncommon about it, takes the general way, which
knows what is wrong, or that nothing is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import array
from ..array import LOWEST_ADDRESS, ArrayView
from ..inputs.limits import MAX_LENGTH
from ..launch.attention.single import AttentionLauncher
from ..launch.driver import params, scratch
from .geometry import Entry, is_reusable

_MAX_KNOWN = 4096

_Read = Callable[[Any], tuple[int, Any, tuple[object, ...]]]


def _read_torch(x: Any) -> tuple[int, Any, tuple[object, ...]]:
    """The address, the shape, and whatever else of an array the checks depend on."""
    kind = type(x), x.dtype, x.stride(), x.is_cuda, x.get_device(), x.requires_grad, x.is_neg()
    return x.data_ptr(), x.shape, kind


def _read_cupy(x: Any) -> tuple[int, Any, tuple[object, ...]]:
    data = x.data
    is_freed = not data.mem.ptr
    return data.ptr, x.shape, (type(x), x.dtype, x.strides, data.device_id, is_freed)


_READERS: dict[str, _Read] = {"torch": _read_torch, "cupy": _read_cupy}
_reader_of: dict[type, _Read] = {}


@dataclass(frozen=True, slots=True)
class _Known:
    """What calls of one look share.

    `reach` holds a pair (a, b) for each of q, k, v and out: n rows lie within a * n + b bytes.
    """

    launcher: AttentionLauncher
    kv_axis: int
    max_qo_len: int
    reach: tuple[int, ...]
    strides: bytes
    row_shape: tuple[int, int]
    empty: Callable[[tuple[int, ...]], Any]
    current_stream: Callable[[], int]
    allocate: scratch.Allocate


_known: dict[tuple[object, ...], _Known] = {}


def _look(
    read: _Read, q: Any, k: Any, v: Any, out: Any, options: tuple[Any, ...], is_decode: bool
) -> tuple[tuple[object, ...], tuple[int, int, int, int], tuple[Any, Any, Any, Any]]:
    """The look of a call, and what it leaves out: the addresses and shapes of q, k, v and out."""
    q_ptr, q_shape, q_look = read(q)
    k_ptr, k_shape, k_look = read(k)
    v_ptr, v_shape, v_look = read(v)
    o_ptr, o_shape, o_look = (q_ptr, q_shape, None) if out is None else read(out)
    heads = 1 if options[0] == "NHD" else 0
    look = (
        q_look,
        k_look,
        v_look,
        o_look,
        options,
        is_decode,
        q_shape[-2],
        q_shape[-1],
        k_shape[heads],
        k_shape[2],
        v_shape[heads],
        v_shape[2],
        o_shape[-2],
        o_shape[-1],
    )
    return look, (q_ptr, k_ptr, v_ptr, o_ptr), (q_shape, k_shape, v_shape, o_shape)


def repeat(q: Any, k: Any, v: Any, out: Any, options: tuple[Any, ...], is_decode: bool) -> Any:
    """The answer of a call with no optional array and no LSE, or None: take the general way."""
    read = _reader_of.get(type(q))
    if read is None:
        return None
    try:
        look, pointers, shapes = _look(read, q, k, v, out, options, is_decode)
        known = _known.get(look)
    except Exception:  # arguments raise what they like when they are read or hashed
        return None
    if known is None:
        return None
    q_shape, k_shape, v_shape, o_shape = shapes
    q_ptr, k_ptr, v_ptr, o_ptr = pointers
    qo_len = 1 if is_decode else q_shape[0]
    kv_len = k_shape[known.kv_axis]
    if (
        v_shape[known.kv_axis] != kv_len
        or o_shape[0] != q_shape[0]
        or not (0 < kv_len <= MAX_LENGTH and 0 < qo_len <= known.max_qo_len)
        or (q_ptr | k_ptr | v_ptr | o_ptr) & 15
        or min(pointers) < LOWEST_ADDRESS
    ):
        return None
    if out is None:
        out = known.empty(known.row_shape if is_decode else (qo_len, *known.row_shape))
        o_ptr = read(out)[0]
    else:
        # Where ranges of bytes meet, the general way finds out whether it is an overlap.
        q_n, q_0, k_n, k_0, v_n, v_0, o_n, o_0 = known.reach
        o_end = o_ptr + o_n * qo_len + o_0
        if (
            (q_ptr < o_end and o_ptr < q_ptr + q_n * qo_len + q_0)
            or (k_ptr < o_end and o_ptr < k_ptr + k_n * kv_len + k_0)
            or (v_ptr < o_end and o_ptr < v_ptr + v_n * kv_len + v_0)
        ):
            return None
    known.launcher.launch(
        q_ptr,
        k_ptr,
        v_ptr,
        o_ptr,
        params.NO_OPTIONAL,
        known.strides,
        0,  # no mask
        qo_len,
        kv_len,
        known.current_stream(),
        known.allocate,
    )
    return out


def remember(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    options: tuple[Any, ...],
    is_decode: bool,
    entry: Entry,
    views: tuple[ArrayView, ArrayView, ArrayView, ArrayView],
    strides: bytes,
) -> None:
    """Let calls like this one, which has passed every check, go the short way from now on.

    `views` are those of q, k, v and out, made here if `out` is None; `strides` as the launcher
    takes them.
    """
    vq, vk, vv, _ = views
    read = _READERS.get(vq.framework)
    if read is None or entry.launcher is None or not is_reusable(entry.checked, vq, vk, vv):
        return
    for x in views:
        # A tensor that requires grad is refused or not by the mode of the day.
        if x.framework != vq.framework or getattr(x.owner, "requires_grad", False):
            return
        if x.ptr & 15 or any(stride < 0 for stride in x.strides):
            return
    row_axis = None if is_decode else 0
    axes = (row_axis, entry.kv_axis, entry.kv_axis, row_axis)
    pairs = [_reach(x, axis) for x, axis in zip(views, axes, strict=True)]
    if not is_decode and pairs[-1][1] > 0:
        return  # rows of out reach into the next, and may share elements from some length on
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    _reader_of[type(q)] = read
    _known[_look(read, q, k, v, out, options, is_decode)[0]] = _Known(
        launcher=entry.launcher,
        kv_axis=entry.kv_axis,
        max_qo_len=MAX_LENGTH // (entry.num_qo_heads // entry.num_kv_heads),
        reach=tuple(number for pair in pairs for number in pair),
        strides=strides,
        row_shape=(entry.num_qo_heads, entry.problem.head_dim_vo),
        empty=array.allocator(entry.dtype_o, vq),
        current_stream=array.stream_reader(vq),
        allocate=scratch.allocator(vq),
    )


def _reach(v: ArrayView, axis: int | None) -> tuple[int, int]:
    """(a, b): n rows along `axis` lie within a * n + b bytes; strides are not negative."""
    step = 0 if axis is None else v.strides[axis]
    others = [n for n in range(len(v.shape)) if n != axis]
    span = 1 + sum((v.shape[n] - 1) * v.strides[n] for n in others)
    return step * v.dtype.itemsize, (span - step) * v.dtype.itemsize
