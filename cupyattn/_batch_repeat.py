"""The short way of a run that looks like an earlier one of the same geometry.

As in _repeat.py: what the checks depend on, besides addresses and lengths, is the look of a run,
and a look that has passed them passes them again. Nothing is raised here: whatever is uncommon goes
the general way (_batch_run.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import array, dtypes
from ._batch_geometry import Variant
from ._repeat import _READERS, _reach, _Read
from .array import LOWEST_ADDRESS, ArrayView
from .launch import params

if TYPE_CHECKING:
    from ._batch import Plan
    from ._batch_keys import Keys

_MAX_LOOKS = 1024

_reader_of: dict[type, _Read] = {}
_pack_optional = params.OPTIONAL.pack


@dataclass(frozen=True, slots=True)
class _Known:
    """What runs of one look share.

    v_offset   bytes from k to v, if they are one tensor
    reach      (a, b) of q, k, v, out and lse: n rows (pages) lie within a * n + b bytes
    """

    variant: Variant
    v_offset: int
    reach: tuple[int, ...]
    strides: bytes
    sm_scale: float
    output_scale: float
    row_shape: tuple[int, int]
    empty: Callable[[tuple[int, ...]], Any]
    empty_lse: Callable[[tuple[int, ...]], Any]
    current_stream: Callable[[], int]


def repeat(
    plan: Plan,
    workspace: int,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    sinks: Any,
    scales: tuple[Any, ...],
    return_lse: bool,
) -> Any:
    """The answer, or None: take the general way."""
    read = _reader_of.get(type(q))
    if read is None or not plan.is_uniform:
        return None
    geometry, batch = plan.geometry, plan.batch
    axis = geometry.kv_axis
    v_ptr = o_ptr = lse_ptr = sinks_ptr = 0
    v_look = o_look = lse_look = sinks_look = None
    num_rows = batch.num_rows
    try:
        q_ptr, q_shape, q_look = read(q)
        k_ptr, k_shape, k_look = read(k)
        num_keys = k_shape[axis]
        if v is not None:
            v_ptr, v_shape, v_look = read(v)
            v_look = v_look, v_shape[2:], v_shape[1 - axis]
            if v_shape[axis] != num_keys:
                return None
        if out is not None:
            o_ptr, o_shape, o_look = read(out)
            o_look = o_look, o_shape[1:]
            if o_shape[0] != num_rows:
                return None
        if lse is not None:
            lse_ptr, lse_shape, lse_look = read(lse)
            lse_look = lse_look, lse_shape[1:]
            if lse_shape[0] != num_rows:
                return None
        if sinks is not None:
            sinks_ptr, sinks_shape, sinks_look = read(sinks)
            sinks_look = sinks_look, sinks_shape
        look = (
            q_look,
            q_shape[1:],
            k_look,
            k_shape[2:],
            k_shape[1 - axis],
            v_look,
            o_look,
            lse_look,
            sinks_look,
            scales,
            return_lse,
            (q_ptr | k_ptr | v_ptr | o_ptr) & 15 == 0,
            plan.framework,
        )
        known = geometry.looks.get(look)
    except Exception:  # arguments raise what they like when they are read or hashed
        return None
    if known is None:
        return None
    if v is None:
        v_ptr = k_ptr + known.v_offset
    prepared = plan.prepared.get(known.variant)
    if (
        prepared is None
        or q_shape[0] != num_rows
        or not num_rows
        or not num_keys
        or num_keys <= batch.max_page
        or num_keys < batch.num_keys
        or min(q_ptr, k_ptr) < LOWEST_ADDRESS
        or (v_ptr < LOWEST_ADDRESS)
        or (sinks is not None and sinks_ptr < LOWEST_ADDRESS)
    ):
        return None
    if out is not None or lse is not None:
        q_n, q_0, k_n, k_0, v_n, v_0, o_n, o_0, lse_n, lse_0 = known.reach
        inputs = (
            (q_ptr, q_ptr + q_n * num_rows + q_0),
            (k_ptr, k_ptr + k_n * num_keys + k_0),
            (v_ptr, v_ptr + v_n * num_keys + v_0),
            (sinks_ptr, sinks_ptr + 4 * known.row_shape[0]),
            plan.mask_range,
            (lse_ptr, lse_ptr + lse_n * num_rows + lse_0),
        )
        if out is not None:
            end = o_ptr + o_n * num_rows + o_0
            if o_ptr < LOWEST_ADDRESS:
                return None
            for low, high in inputs:
                if low < end and o_ptr < high:
                    return None
        if lse is not None:
            end = lse_ptr + lse_n * num_rows + lse_0
            if lse_ptr < LOWEST_ADDRESS:
                return None
            for low, high in inputs[:-1]:
                if low < end and lse_ptr < high:
                    return None
    if out is None:
        out = known.empty((num_rows, *known.row_shape))
        o_ptr = read(out)[0]
    if return_lse and lse is None:
        lse = known.empty_lse((num_rows, known.row_shape[0]))
        lse_ptr = read(lse)[0]
    mask_ptr, mask_end = plan.mask_range
    if lse_ptr or sinks_ptr or mask_ptr:
        optional = _pack_optional(lse_ptr, mask_ptr, sinks_ptr, 0, 0, 0)
    else:
        optional = params.NO_OPTIONAL
    prepared.launcher.launch(
        prepared.schedule,
        prepared.words,
        workspace,
        q_ptr,
        k_ptr,
        v_ptr,
        o_ptr,
        optional,
        known.strides,
        plan.page_ids,
        mask_end - mask_ptr,
        known.output_scale,
        known.sm_scale,
        known.current_stream(),
    )
    return (out, lse) if return_lse else out


def remember(
    plan: Plan,
    given: tuple[Any, ...],
    views: tuple[ArrayView, Keys, ArrayView, ArrayView | None, ArrayView | None],
    scales: tuple[Any, ...],
    return_lse: bool,
    variant: Variant,
    strides: bytes,
    factors: tuple[float, float],
) -> None:
    """Let runs like this one, which has passed every check, go the short way from now on.

    given: q, k, v, out, lse and sinks as the caller gave them; views: q, keys, out, lse and sinks,
    the answers among them made here if they were not given.
    """
    vq, keys, vout, vlse, vsinks = views
    read = _READERS.get(vq.framework)
    numbers = all(x is None or isinstance(x, (int, float)) for x in scales)
    used = [x for x in (vq, keys.k, keys.v, vout, vlse, vsinks) if x is not None]
    framework = plan.framework
    if read is None or not numbers or any(x.framework != framework for x in used):
        return
    for x in used:
        # A tensor that requires grad is refused or not by the mode of the day.
        if getattr(x.owner, "requires_grad", False) or 0 in x.shape:
            return
        if any(stride < 0 for stride in x.strides):
            return
    axis = plan.geometry.kv_axis
    pairs = [_reach(vq, 0), _reach(keys.k, axis), _reach(keys.v, axis), _reach(vout, 0)]
    pairs.append((0, 0) if vlse is None else _reach(vlse, 0))
    if pairs[3][1] > 0 or pairs[4][1] > 0:
        return  # rows reach into the next, and may share elements from some length on
    q, k, v, out, lse, sinks = given
    shape = tuple(k.shape)
    look = [read(q)[2], q.shape[1:], read(k)[2], k.shape[2:], shape[1 - axis]]
    look.append(None if v is None else (read(v)[2], v.shape[2:], v.shape[1 - axis]))
    look += [None if x is None else (read(x)[2], x.shape[1:]) for x in (out, lse)]
    look.append(None if sinks is None else (read(sinks)[2], sinks.shape))
    looks = plan.geometry.looks
    if len(looks) >= _MAX_LOOKS:
        looks.clear()
    _reader_of[type(q)] = read
    pointers = [vq.ptr, keys.k.ptr, 0 if v is None else keys.v.ptr, 0 if out is None else vout.ptr]
    is_aligned = not any(pointer & 15 for pointer in pointers)
    looks[(*look, scales, return_lse, is_aligned, framework)] = _Known(
        variant=variant,
        v_offset=keys.v.ptr - keys.k.ptr,
        reach=tuple(number for pair in pairs for number in pair),
        strides=strides,
        sm_scale=factors[0],
        output_scale=factors[1],
        row_shape=(plan.geometry.num_qo_heads, plan.geometry.problem.head_dim_vo),
        empty=array.allocator(plan.geometry.problem.dtype_o, vq),
        empty_lse=array.allocator(dtypes.float32, vq),
        current_stream=array.stream_reader(vq),
    )
