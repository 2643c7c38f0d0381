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
# Shape and look of an array that is not given.
_ABSENT: Any = ((None, None), None)

_reader_of: dict[type, _Read] = {}
_pack_optional = params.OPTIONAL.pack
_ADDRESSES: dict[str, Callable[[Any], int]] = {
    "torch": lambda x: x.data_ptr(),
    "cupy": lambda x: x.data.ptr,
}


@dataclass(frozen=True, slots=True)
class _Known:
    """What runs of one look share.

    v_offset   bytes from k to v, if they are one tensor
    reach      (a, b) of q, k and v: n rows (pages) lie within a * n + b bytes
    reach_out, reach_lse  those of the answers
    address    the address of an array that `empty` has made
    """

    variant: Variant
    v_offset: int
    reach: tuple[int, ...]
    reach_out: tuple[int, int]
    reach_lse: tuple[int, int]
    strides: bytes
    sm_scale: float
    output_scale: float
    row_shape: tuple[int, int]
    empty: Callable[[tuple[int, ...]], Any]
    empty_lse: Callable[[tuple[int, ...]], Any]
    address: Callable[[Any], int]
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
    v_read = o_read = lse_read = sinks_read = _ABSENT
    num_rows = batch.num_rows
    try:
        q_ptr, q_shape, q_look = read(q)
        k_ptr, k_shape, k_look = read(k)
        num_keys = k_shape[axis]
        if v is not None:
            v_ptr, *v_read = read(v)
            if v_read[0][axis] != num_keys:
                return None
        if out is not None:
            o_ptr, *o_read = read(out)
            if o_read[0][0] != num_rows:
                return None
        if lse is not None:
            lse_ptr, *lse_read = read(lse)
            if lse_read[0][0] != num_rows:
                return None
        if sinks is not None:
            sinks_ptr, *sinks_read = read(sinks)
        is_aligned = (q_ptr | k_ptr | v_ptr | o_ptr) & 15 == 0
        seen = (
            *(q_shape, q_look, k_shape, k_look, *v_read, *o_read, *lse_read, *sinks_read),
            *(return_lse, is_aligned, plan.framework),
        )
        # Most runs look like the last one, to the last length, and comparing is cheaper than
        # hashing. Scales must be the same object: an array of one number may equal a number.
        last_scales, last_seen, known = geometry.last_run
        if scales is not last_scales or seen != last_seen:
            known = geometry.looks.get(_look(seen, scales, axis))
            if known is not None:
                geometry.last_run = scales, seen, known
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
        or q_ptr < LOWEST_ADDRESS
        or k_ptr < LOWEST_ADDRESS
        or v_ptr < LOWEST_ADDRESS
        or (sinks is not None and sinks_ptr < LOWEST_ADDRESS)
    ):
        return None
    mask_ptr, mask_end = plan.mask_range
    if out is not None or lse is not None:
        # The two answers, the sinks and the mask, then q, k and v: nothing may meet an answer.
        o_end = lse_end = 0
        if out is not None:
            a, b = known.reach_out
            o_end = o_ptr + a * num_rows + b
        if lse is not None:
            a, b = known.reach_lse
            lse_end = lse_ptr + a * num_rows + b
            if lse_ptr < LOWEST_ADDRESS or (lse_ptr < o_end and o_ptr < lse_end):
                return None
        if out is not None and o_ptr < LOWEST_ADDRESS:
            return None
        sinks_end = sinks_ptr + 4 * known.row_shape[0]
        q_n, q_0, k_n, k_0, v_n, v_0 = known.reach
        for low, high in ((o_ptr, o_end), (lse_ptr, lse_end)):
            if (
                (q_ptr < high and low < q_ptr + q_n * num_rows + q_0)
                or (k_ptr < high and low < k_ptr + k_n * num_keys + k_0)
                or (v_ptr < high and low < v_ptr + v_n * num_keys + v_0)
                or (mask_ptr < high and low < mask_end)
                or (sinks_ptr < high and low < sinks_end)
            ):
                return None
    if out is None:
        out = known.empty((num_rows, *known.row_shape))
        o_ptr = known.address(out)
    if return_lse and lse is None:
        lse = known.empty_lse((num_rows, known.row_shape[0]))
        lse_ptr = known.address(lse)
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


def _look(seen: tuple[Any, ...], scales: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    """What of a run decides whether it passes the checks, besides addresses and lengths.

    seen: shape and look of q, k, v, out, lse and sinks, and the rest.
    """
    q_shape, q, k_shape, k, v_shape, v, o_shape, o, lse_shape, lse, *sinks_and_rest = seen
    return (
        *(q_shape[1:], q, k_shape[1 - axis], k_shape[2:], k, v_shape[1 - axis], v_shape[2:], v),
        *(o_shape[1:], o, lse_shape[1:], lse, *sinks_and_rest, scales),
    )


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
    seen: list[Any] = []
    for x in (q, k, v, out, lse, sinks):
        seen += _ABSENT if x is None else read(x)[1:]
    looks = plan.geometry.looks
    if len(looks) >= _MAX_LOOKS:
        looks.clear()
    _reader_of[type(q)] = read
    pointers = [vq.ptr, keys.k.ptr, 0 if v is None else keys.v.ptr, 0 if out is None else vout.ptr]
    is_aligned = not any(pointer & 15 for pointer in pointers)
    seen += return_lse, is_aligned, framework
    looks[_look(tuple(seen), scales, axis)] = _Known(
        variant=variant,
        v_offset=keys.v.ptr - keys.k.ptr,
        reach=tuple(number for pair in pairs[:3] for number in pair),
        reach_out=pairs[3],
        reach_lse=pairs[4],
        strides=strides,
        sm_scale=factors[0],
        output_scale=factors[1],
        row_shape=(plan.geometry.num_qo_heads, plan.geometry.problem.head_dim_vo),
        empty=array.allocator(plan.geometry.problem.dtype_o, vq),
        empty_lse=array.allocator(dtypes.float32, vq),
        address=_ADDRESSES[framework],
        current_stream=array.stream_reader(vq),
    )
