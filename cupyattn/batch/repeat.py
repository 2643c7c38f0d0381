"""The short way of a run that looks like an earlier one of the same geometry.

As in _repeat.py: what the checks depend on, besides addresses and lengths, is the look of a run,
and a look that has passed them passes them again. Nothing is raised here: whatever is uncommon goes
the general way (_batch_run.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .. import array
from ..array import LOWEST_ADDRESS, ArrayView
from ..core import dtypes
from ..inputs.geometry import Variant
from ..launch.attention.bound_run import BoundRun
from ..launch.driver import params
from ..single.repeat import _READERS, _reach, _Read

if TYPE_CHECKING:
    from ..inputs.kv_cache import Keys
    from ..inputs.row_mask import MaskBits
    from .plan import Plan, Prepared

_Maybe: TypeAlias = "ArrayView | None"

_MAX_LOOKS = 1024
# The shape of an array that is not given.
_NO_SHAPE: Any = (None, None)

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
    reach      (a, b) of q, k, v, out and lse: n rows (pages) lie within a * n + b bytes
    bits       the mask of the run, which may be at another address
    address    the address of an array that `empty` has made
    """

    variant: Variant
    v_offset: int
    reach: tuple[tuple[int, int], ...]
    strides: bytes
    bits: MaskBits | None
    factors: tuple[float, float]
    row_shape: tuple[int, int]
    empty: Callable[[tuple[int, ...]], Any]
    empty_lse: Callable[[tuple[int, ...]], Any]
    address: Callable[[Any], int]
    current_stream: Callable[[], int]


class _LastRun(NamedTuple):
    """A run of a plan. One of which the same is seen has passed all checks but those of addresses.

    sizes  bytes within which q, k, v, out, lse and the mask lie
    """

    seen: tuple[Any, ...]
    scales: tuple[Any, ...]
    workspace: int
    known: _Known
    sizes: tuple[int, ...]
    bound: BoundRun

    def has_scales(self, scales: tuple[Any, ...]) -> bool:
        """Whether they are the same numbers; an array of one number may equal a number."""
        return [*map(type, scales)] == [*map(type, self.scales)] and scales == self.scales


def repeat(
    plan: Plan,
    workspace: int,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    sinks: Any,
    mask: Any,
    scales: tuple[Any, ...],
    return_lse: bool,
) -> Any:
    """The answer, or None: take the general way."""
    read = _reader_of.get(type(q))
    if read is None or not plan.is_uniform:
        return None
    v_ptr = o_ptr = lse_ptr = sinks_ptr = 0
    v_shape = o_shape = lse_shape = sinks_shape = mask_shape = _NO_SHAPE
    v_look = o_look = lse_look = sinks_look = mask_look = None
    mask_ptr = plan.bits.address
    try:
        q_ptr, q_shape, q_look = read(q)
        k_ptr, k_shape, k_look = read(k)
        if v is not None:
            v_ptr, v_shape, v_look = read(v)
        if out is not None:
            o_ptr, o_shape, o_look = read(out)
        if lse is not None:
            lse_ptr, lse_shape, lse_look = read(lse)
        if sinks is not None:
            sinks_ptr, sinks_shape, sinks_look = read(sinks)
        if mask is not None:
            mask_ptr, mask_shape, mask_look = read(mask)
        is_aligned = (q_ptr | k_ptr | v_ptr | o_ptr) & 15 == 0
        seen = (
            q_shape, q_look, k_shape, k_look, v_shape, v_look, o_shape, o_look,
            lse_shape, lse_look, sinks_shape, sinks_look, mask_shape, mask_look,
            return_lse, is_aligned,
        )  # fmt: skip
        last = plan.last_run
        if (
            last is None
            or seen != last.seen
            or workspace != last.workspace
            or not (scales is last.scales or last.has_scales(scales))
        ):
            last = _find(plan, workspace, seen, scales)
            if last is None:
                return None
    except Exception:  # arguments raise what they like when they are read or hashed
        return None
    known = last.known
    if v is None:
        v_ptr = k_ptr + known.v_offset
    if q_ptr < LOWEST_ADDRESS or k_ptr < LOWEST_ADDRESS or v_ptr < LOWEST_ADDRESS:
        return None
    if sinks is not None and sinks_ptr < LOWEST_ADDRESS:
        return None
    if mask is not None and mask_ptr < LOWEST_ADDRESS:
        return None
    if out is not None or lse is not None:
        # The two answers, the sinks and the mask, then q, k and v: nothing may meet an answer.
        q_size, k_size, v_size, o_size, lse_size, mask_size = last.sizes
        answers = () if out is None else ((o_ptr, o_size),)
        if lse is not None:
            if lse_ptr < o_ptr + o_size and o_ptr < lse_ptr + lse_size:
                return None
            answers = (*answers, (lse_ptr, lse_size))
        sinks_end = sinks_ptr + 4 * known.row_shape[0]
        for low, size in answers:
            high = low + size
            if (
                low < LOWEST_ADDRESS
                or (q_ptr < high and low < q_ptr + q_size)
                or (k_ptr < high and low < k_ptr + k_size)
                or (v_ptr < high and low < v_ptr + v_size)
                or (mask_ptr < high and low < mask_ptr + mask_size)
                or (sinks_ptr < high and low < sinks_end)
            ):
                return None
    if out is None:
        out = known.empty((plan.batch.num_rows, *known.row_shape))
        o_ptr = known.address(out)
    if return_lse and lse is None:
        lse = known.empty_lse((plan.batch.num_rows, known.row_shape[0]))
        lse_ptr = known.address(lse)
    if lse_ptr or sinks_ptr or mask_ptr:
        optional = _pack_optional(lse_ptr, mask_ptr, sinks_ptr, 0, 0, 0)
    else:
        optional = params.NO_OPTIONAL
    last.bound.launch(q_ptr, k_ptr, v_ptr, o_ptr, optional, known.current_stream())
    return (out, lse) if return_lse else out


def _find(
    plan: Plan, workspace: int, seen: tuple[Any, ...], scales: tuple[Any, ...]
) -> _LastRun | None:
    """A run of this plan that looks like an earlier one, which it becomes from now on."""
    geometry, batch = plan.geometry, plan.batch
    axis = geometry.kv_axis
    known = geometry.looks.get(_look(plan, seen, scales))
    prepared = None if known is None else plan.prepared.get(known.variant)
    q_shape, _, k_shape, _, v_shape, _, o_shape, _, lse_shape, *_ = seen
    num_rows, num_keys = batch.num_rows, k_shape[axis]
    if (
        known is None
        or prepared is None
        or q_shape[0] != num_rows
        or v_shape[axis] not in (num_keys, None)
        or o_shape[0] not in (num_rows, None)
        or lse_shape[0] not in (num_rows, None)
        or not num_rows
        or not num_keys
        or num_keys <= batch.max_page
        or num_keys < batch.num_keys
    ):
        return None
    bits = known.bits or plan.bits
    (q_n, q_0), (k_n, k_0), (v_n, v_0), (o_n, o_0), (lse_n, lse_0) = known.reach
    sizes = (
        *(q_n * num_rows + q_0, k_n * num_keys + k_0, v_n * num_keys + v_0),
        *(o_n * num_rows + o_0, lse_n * num_rows + lse_0, bits.num_bytes),
    )
    bound = bind(plan, prepared, workspace, known.strides, num_keys, known.factors, bits)
    # Another thread may be doing the same.
    found = plan.last_run = _LastRun(seen, scales, workspace, known, sizes, bound)
    return found


def bind(
    plan: Plan,
    prepared: Prepared,
    workspace: int,
    strides: bytes,
    num_keys: int,
    factors: tuple[float, float],
    bits: MaskBits,
) -> BoundRun:
    """What runs of a plan enqueue on k and v of so many rows, or pages; factors: (scale of the
    logits, scale of the output)."""
    return prepared.launcher.bind(
        prepared.schedule,
        prepared.words,
        workspace,
        strides,
        num_keys,
        plan.page_ids,
        bits.num_bytes,
        bits.row_bytes,
        factors[1],
        factors[0],
        prepared.rotated,
    )


def _look(plan: Plan, seen: tuple[Any, ...], scales: tuple[Any, ...]) -> tuple[Any, ...]:
    """What of a run decides whether it passes the checks, besides addresses and lengths.

    seen: shape and look of q, k, v, out, lse, sinks and mask, and the rest.
    """
    axis, batch = plan.geometry.kv_axis, plan.batch
    q_shape, q, k_shape, k, v_shape, v, o_shape, o, lse_shape, lse, *sinks_and_rest = seen
    # A mask fits so many rows, which are not counted otherwise.
    rows = None if sinks_and_rest[2] is _NO_SHAPE else (batch.num_rows, batch.requests.uniform)
    return (
        *(q_shape[1:], q, k_shape[1 - axis], k_shape[2:], k, v_shape[1 - axis], v_shape[2:], v),
        *(o_shape[1:], o, lse_shape[1:], lse, *sinks_and_rest, rows, scales, plan.framework),
    )


def remember(
    plan: Plan,
    given: tuple[Any, ...],
    views: tuple[ArrayView, Keys, ArrayView, _Maybe, _Maybe, _Maybe],
    bits: MaskBits,
    scales: tuple[Any, ...],
    return_lse: bool,
    variant: Variant,
    strides: bytes,
    factors: tuple[float, float],
) -> None:
    """Let runs like this one, which has passed every check, go the short way from now on.

    given: q, k, v, out, lse, sinks and mask as the caller gave them; views: q, keys, out, lse,
    sinks and mask, the answers among them made here if they were not given.
    """
    vq, keys, vout, vlse, vsinks, vmask = views
    read = _READERS.get(vq.framework)
    numbers = all(x is None or isinstance(x, (int, float)) for x in scales)
    used = [x for x in (vq, keys.k, keys.v, vout, vlse, vsinks, vmask) if x is not None]
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
    q, _, v, out, *_ = given
    seen: list[Any] = []
    for x in given:
        seen += (_NO_SHAPE, None) if x is None else read(x)[1:]
    looks = plan.geometry.looks
    if len(looks) >= _MAX_LOOKS:
        looks.clear()
    _reader_of[type(q)] = read
    pointers = [vq.ptr, keys.k.ptr, 0 if v is None else keys.v.ptr, 0 if out is None else vout.ptr]
    is_aligned = not any(pointer & 15 for pointer in pointers)
    seen += return_lse, is_aligned
    looks[_look(plan, tuple(seen), scales)] = _Known(
        variant=variant,
        bits=None if vmask is None else bits,
        v_offset=keys.v.ptr - keys.k.ptr,
        reach=tuple(pairs),
        strides=strides,
        factors=factors,
        row_shape=(plan.geometry.num_qo_heads, plan.geometry.problem.head_dim_vo),
        empty=array.allocator(plan.geometry.problem.dtype_o, vq),
        empty_lse=array.allocator(dtypes.float32, vq),
        address=_ADDRESSES[framework],
        current_stream=array.stream_reader(vq),
    )
