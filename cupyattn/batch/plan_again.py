"""A plan() whose arguments are those of an earlier one, but for what its tables on the GPU hold.

The call cache compares all arguments (inputs/call_cache.py), so no check of them is made again.
What the tables hold is checked by the launch that brings them to the host (tables.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import array
from ..array import ArrayView, Device
from ..array.match import is_contiguous
from ..core import dtypes
from ..inputs.call_cache import Argument, CallCache
from ..inputs.geometry import Geometry, PlanOptions
from ..launch.attention.read_tables import MOST_REQUESTS, DeviceTables
from . import tables
from .plan import Plan
from .requests import require_row_limit
from .tables import NO_READING, NoReading, TableReading, Tables
from .wrapper import BatchWrapper


class _Checked(NamedTuple):
    """What plans of one signature share. tables: those of the first of them."""

    geometry: Geometry
    split: tuple[int, bool]
    tables: DeviceTables
    has_lengths: bool
    device: Device
    framework: str


# kv_indptr, kv_indices, lengths and qo_indptr: those that plan() takes.
_CALLS: CallCache[_Checked] = CallCache(
    Argument("kv_indptr", 0),
    Argument("kv_indices", 0),
    Argument("lengths", 0),
    Argument("qo_indptr", 0),
)
# Of kinds of wrappers.
_numbers: dict[tuple[object, ...], int] = {}


def plan_again(wrapper: BatchWrapper, arrays: Sequence[Any], scalars: tuple[Any, ...]) -> bool:
    """Plan, if there was such a plan(); else, or if anything is wrong, nothing changes.

    arrays: as _CALLS has them. scalars: all other arguments.
    """
    if wrapper._is_graph or wrapper._is_probe:
        return False
    if wrapper._facts < 0:
        wrapper._facts = _number_of(wrapper)
    answer = _CALLS.lookup(arrays, (wrapper._facts, *scalars))
    if answer is None:
        return False
    found, (kv_indptr, ids, lengths, qo_indptr) = answer
    geometry, split, first, has_lengths, device, framework = found.call.checked
    num_offsets, num_ids, num_lengths, num_rows = found.lengths
    count = num_offsets - 1
    if not 0 < count <= MOST_REQUESTS or (has_lengths and num_lengths != count):
        return False
    if qo_indptr and num_rows != num_offsets:
        return False
    stream = found.call.current_stream()
    wrapper._refuse_capture(stream)
    (_, rows_wide, _, kv_wide, has_read, wide), kind, _, q_len, page_size = first
    read = qo_indptr, rows_wide, kv_indptr, kv_wide, lengths if has_read else 0, wide
    given = DeviceTables(read, kind, count, q_len, page_size)
    plans = geometry if split == (0, True) else None
    with tables.begin(wrapper, given, plans, stream) as reading:
        batch = reading.wait()
    if batch is None:
        return False
    if ids:
        if batch.num_page_ids > num_ids:
            return False
        rest = device, framework, False, arrays[1]
        batch.page_ids_device = ArrayView(ids, (num_ids,), (1,), dtypes.int32, *rest)
    require_row_limit(batch, geometry.spec.group_size)
    plan = Plan(geometry, batch, split, framework, is_uniform=True)
    wrapper._take(plan, reading)
    return True


def _number_of(wrapper: BatchWrapper) -> int:
    workspace = wrapper._workspace
    place = workspace.framework, workspace.device, wrapper._kv_layout
    return _numbers.setdefault((type(wrapper), *place, wrapper._takes_sinks), len(_numbers))


def read(
    wrapper: BatchWrapper,
    given: Tables,
    options: PlanOptions | None = None,
    split: tuple[int, bool] = (0, False),
) -> TableReading | NoReading:
    """A context in which tables that are on the GPU come to the host.

    With the options of a plan the GPU makes its work list too, where it can.
    """
    found = tables.find(given, wrapper._workspace)
    if found is None:
        return NO_READING
    stream = wrapper._current_stream()
    wrapper._refuse_capture(stream)
    plans = options is not None and split == (0, True)
    geometry = None
    if plans and options is not None and not (wrapper._is_graph or wrapper._is_probe):
        geometry = wrapper._geometry(options)
    reading = tables.begin(wrapper, found[0], geometry, stream)
    reading.last = found[1]
    return reading


def remember(
    wrapper: BatchWrapper, arrays: Sequence[Any], scalars: tuple[Any, ...], given: Tables
) -> None:
    """Let later plans of this signature be made by `plan_again`: this one was, of nothing else."""
    plan, workspace = wrapper._current, wrapper._workspace
    if wrapper._is_graph or wrapper._is_probe or wrapper._is_debugging():
        return
    found = tables.find(given, workspace)
    if plan is None or found is None or plan.geometry.spec.logits is not None:
        return
    if not plan.geometry.given.given.is_constant or any(hasattr(x, "__dlpack__") for x in scalars):
        return
    ids = arrays[1]
    if ids is not None:
        v = array.view(ids, "kv_indices")
        if v.dtype is not dtypes.int32 or not is_contiguous(v) or v.device != workspace.device:
            return
    like = array.view(arrays[0], "kv_indptr")
    place = workspace.device, workspace.framework
    checked = _Checked(plan.geometry, plan.split, found[0], given.lengths is not None, *place)
    _CALLS.insert(arrays, (wrapper._facts, *scalars), checked, like, dtypes.int32, None, None)
