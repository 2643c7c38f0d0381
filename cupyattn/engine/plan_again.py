"""A plan() whose arguments are those of an earlier one, but for what its tables hold.

Tables on the GPU: the call cache compares all arguments (call_cache.py), so no check of them
is made again. What the tables hold is checked by the launch that brings them to the host, which
also makes the work list of most decodes (launch/attention/read_tables.py). Tables on the host: the
other arguments are compared with those of the wrapper's last plan, and what the tables hold is
checked in few passes. A plan() that differs from earlier ones, or whose tables are wrong or rare,
is made as any other, and its errors say what is wrong.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .. import array
from ..array import ArrayView, Device
from ..array.match import is_contiguous
from ..core import dtypes
from ..core.problem import MAX_LENGTH
from ..launch.attention import read_tables
from ..launch.attention.layout import BatchSchedule
from ..launch.attention.read_tables import Built, DeviceTables, Planner
from ..launch.driver.enqueue import cuda
from ..schedule.batch import BatchRequests, are_equal
from .call_cache import Argument, CallCache, after_launch
from .geometry import Geometry, Variant
from .mask import NO_MASK
from .requests import (
    INTEGERS,
    Batch,
    PageNames,
    QueryRows,
    read_page_ids,
    require_row_limit,
    uniform_rows,
)
from .staging import Staging
from .workspace import meets, num_bytes, require_apart, require_workspace
from .wrapper import BatchWrapper, Plan, Prepared

_NO_IDS = np.zeros(0, np.int32)
_IS_WIDE = {dtypes.int32: False, dtypes.int64: True}
_F = TypeVar("_F", bound=Callable[..., Any])


class _Checked(NamedTuple):
    """What plans of one signature share. tables: those of the first one. state: attributes of the
    wrapper."""

    geometry: Geometry
    split: tuple[int, bool]
    tables: DeviceTables
    state: dict[str, Any]


_CALLS: CallCache[_Checked] = CallCache(
    Argument("kv_indptr", 0),
    Argument("kv_indices", 0),
    Argument("lengths", 0),
    Argument("qo_indptr", 0),
)


class _OnHost(NamedTuple):
    """The last plan() of a wrapper with tables on the host: its other arguments, and what was made
    of them."""

    scalars: tuple[object, ...]
    types: tuple[type, ...]
    geometry: Geometry
    split: tuple[int, bool]
    kind: int
    q_len: int
    page_size: int
    state: dict[str, Any]


# A number stands for each set of facts about wrappers that plans depend on.
_numbers: dict[tuple[object, ...], int] = {}


def repeated(*tables: str, state: tuple[str, ...] = ()) -> Callable[[_F], _F]:
    """Let plans be made by `plan_again`, where there was one with such arguments before.

    tables: the first arguments of plan(): qo_indptr, if it takes that; kv_indptr; kv_indices and
    lengths, if keys are in pages. state: attributes that plan() sets besides the plan.
    """
    count, has_rows = len(tables), tables[0] == "qo_indptr"
    absent = [None] * (4 - count)
    has_keys, names = "kv_len_arr" in tables, PageNames(*tables[-3:]) if count > 2 else None

    def decorate(plan: _F) -> _F:
        @functools.wraps(plan)
        def planned(wrapper: BatchWrapper, *args: Any, **kwargs: Any) -> None:
            table_args, rest = args[:count], kwargs
            if len(table_args) < count:
                table_args += tuple(kwargs.get(name) for name in tables[len(table_args) :])
                rest = {name: x for name, x in kwargs.items() if name not in tables}
            is_on_host = type(table_args[0]) is np.ndarray or not getattr(
                table_args[0], "is_cuda", True
            )
            is_new = wrapper._is_graph or wrapper._is_probe
            if is_new and is_on_host:
                plan(wrapper, *map(_faster, args[:count]), *args[count:], **kwargs)
                return
            if is_new:
                plan(wrapper, *args, **kwargs)
                return
            if is_on_host:
                scalars = (*args[count:], *rest.values(), *rest)
                table_args = tuple(map(_faster, table_args))
                arrays = (
                    (*table_args[1:], *absent, table_args[0]) if has_rows else (*table_args, None)
                )
                if not _plan_on_host(wrapper, arrays, scalars, names):
                    plan(wrapper, *table_args[: len(args)], *args[count:], **kwargs)
                    _remember_on_host(wrapper, arrays, scalars, has_keys, state)
                return
            arrays = (*table_args[1:], *absent, table_args[0]) if has_rows else table_args
            scalars = (*args[count:], *rest.values(), *rest, _number_of(wrapper))
            if not plan_again(wrapper, arrays, scalars):
                plan(wrapper, *args, **kwargs)
                kept = {name: getattr(wrapper, name) for name in state}
                _remember(wrapper, arrays, scalars, has_keys, kept)

        return planned  # type: ignore[return-value]

    return decorate


def _faster(x: Any) -> Any:
    """A tensor of torch on the CPU as a NumPy array, which takes less time to read."""
    if type(x) is not np.ndarray and not getattr(x, "is_cuda", True):
        with contextlib.suppress(Exception):  # plan() says why it cannot be read
            return x.numpy()
    return x


def _plan_on_host(
    wrapper: BatchWrapper, arrays: Sequence[Any], scalars: tuple[Any, ...], names: PageNames | None
) -> bool:
    """Plan, if the wrapper's last plan() had these scalars, and tables that need no second look;
    else nothing changes."""
    known = wrapper._on_host
    # With types that are the same too, True is not 1, and no array is compared.
    if known is None or tuple(map(type, scalars)) != known.types or scalars != known.scalars:
        return False
    batch = _batch_on_host(arrays, known.kind, known.q_len, known.page_size)
    if batch is None or wrapper._is_debugging():
        return False
    if names is not None:
        read_page_ids(batch, arrays[1], names, is_bounded=False)
        if batch.page_ids_device is not None:
            require_apart(wrapper._workspace, kv_indices=batch.page_ids_device)
    require_row_limit(batch, known.geometry.spec.group_size)
    framework = wrapper._workspace.framework
    plan = Plan(known.geometry, batch, known.split, None, NO_MASK, framework)
    if not _take_listed(wrapper, plan):
        wrapper._take(plan)
    wrapper.__dict__.update(known.state)
    return True


def _take_listed(wrapper: BatchWrapper, plan: Plan) -> bool:
    """Let an idle GPU make the list of a decode, as it does from tables of its own, and make this
    the current plan; whether it did. While it works on something else, the host, which would wait
    for that, makes the list."""
    batch, requests = plan.batch, plan.batch.requests
    device, count, v = wrapper._workspace.device, batch.num_requests, batch.page_ids_device
    if device.kind == "cpu" or plan.split != (0, True) or requests.uniform <= 0:
        return False
    if (v is None and batch.page_ids is None) or are_equal(requests.kv_len):
        return False  # the host remembers lists of equal lengths
    if v is not None:
        is_plain = v.dtype is dtypes.int32 and (v.device, v.framework) == _device_and_framework(
            wrapper
        )
        if not is_plain or not is_contiguous(v):
            return False
    (variant,) = wrapper._variants(plan.geometry)
    if variant.needs_places:
        return False
    launcher = plan.geometry.launcher(variant)
    planner = read_tables.planner(launcher, count, requests.uniform)
    if planner is None:
        return False
    stream = wrapper._current_stream()
    wrapper._refuse_capture(stream)
    if not cuda().is_idle(stream):
        return False
    # --- 1. Put the tables where the GPU reads them ---
    ids = _NO_IDS if batch.page_ids is None else batch.page_ids[: batch.num_page_ids]
    at_lengths = -(-(count + 1) // 4) * 4
    at_ids = at_lengths + -(-count // 4) * 4
    if wrapper._staging is None:
        wrapper._staging = Staging(device.index)
    block = wrapper._staging.block(at_ids + ids.size)
    block[: count + 1] = batch.kv_indptr
    block[at_lengths : at_lengths + count] = requests.kv_len
    block[at_ids : at_ids + ids.size] = ids
    # --- 2. Make the list; ids of pages come behind it ---
    address, page_size = wrapper._staging.address, plan.geometry.spec.page_size
    pointers = 0, False, address, False, address + 4 * at_lengths, False
    tables = DeviceTables(pointers, read_tables.KEYS, count, requests.uniform, page_size)
    begin = -(-planner.num_words // 4) * 4
    words = wrapper._next_words.reserve(begin + ids.size)
    numbers = read_tables.read(tables, planner, words, device.index, stream)
    _, is_bad, _, _, *built = numbers[: read_tables.HEAD].tolist()
    schedule = None if is_bad else _schedule_of(wrapper, planner, Built._make(built))
    if schedule is None:
        return False
    if v is None:
        plan.page_ids = words + 4 * begin
        wrapper._staging.send([(at_ids, ids.size, plan.page_ids)], stream)
    else:
        plan.page_ids, plan.views = v.ptr, (v,)
    # --- 3. Make it the current plan ---
    plan.prepared[variant] = _prepared_by_gpu(wrapper, plan, launcher, schedule)
    plan.is_uniform = plan.framework in ("torch", "cupy")
    plan.owner = wrapper._turns.begin()
    wrapper._current = plan
    return True


def _batch_on_host(arrays: Sequence[Any], kind: int, q_len: int, page_size: int) -> Batch | None:
    """The batch without its page table; None of tables that are wrong, and where a request has no
    rows or pages."""
    kv_indptr, _, lengths, qo_indptr = arrays
    if not _is_table(kv_indptr):
        return None
    kv_indptr = kv_indptr.astype(np.int64)
    num_pages, tokens = kv_indptr[1:] - kv_indptr[:-1], page_size or 1
    count, end = num_pages.size, int(kv_indptr[-1]) if kv_indptr.size else 0
    if not count or num_pages[num_pages.argmin()] <= 0 or end * tokens > MAX_LENGTH:
        return None
    rows = uniform_rows(count, q_len) if q_len else _rows_on_host(qo_indptr, count)
    if kv_indptr[0] < 0 or rows is None:
        return None
    last, kv_len = None, num_pages
    if kind != read_tables.NO_LENGTHS:
        if not _is_table(lengths) or lengths.size != count:
            return None
        last = lengths.astype(np.int64)
        room = num_pages * page_size
        # As unsigned numbers, so that one pass finds lengths beyond either end.
        if kind == read_tables.KEYS:
            kv_len, last = last, None
            if np.count_nonzero(kv_len.view(np.uint64) > room.view(np.uint64)):
                return None
        else:
            missing = page_size - last
            unsigned = missing.view(np.uint64)
            if unsigned[unsigned.argmax()] >= page_size:
                return None
            kv_len = np.subtract(room, missing, out=room)
    qo_indptr, qo_len, uniform = rows
    requests = BatchRequests(qo_len, kv_len, qo_indptr[:-1], kv_indptr[:-1], None, uniform)
    return Batch(requests, int(qo_indptr[-1]), 0 if page_size else end, qo_indptr, kv_indptr, last)


def _rows_on_host(qo_indptr: Any, count: int) -> QueryRows | None:
    """The rows of so many requests; None as above."""
    if not _is_table(qo_indptr) or qo_indptr.size != count + 1 or qo_indptr[0]:
        return None
    qo_indptr = qo_indptr.astype(np.int64)
    lengths = qo_indptr[1:] - qo_indptr[:-1]
    shortest, end = int(lengths[lengths.argmin()]), int(qo_indptr[-1])
    if shortest <= 0 or end > MAX_LENGTH:
        return None
    if shortest * count == end:
        return uniform_rows(count, shortest)
    return QueryRows(qo_indptr, lengths, -1)


def _is_table(x: Any) -> bool:
    return type(x) is np.ndarray and x.ndim == 1 and x.dtype in INTEGERS


def _remember_on_host(
    wrapper: BatchWrapper,
    arrays: Sequence[Any],
    scalars: tuple[Any, ...],
    has_keys: bool,
    state: tuple[str, ...],
) -> None:
    """Let later plans with these scalars be made by `_plan_on_host`. The wrapper's plan was."""
    plan = wrapper._current
    wrapper._on_host = None
    if plan is None or not _is_plain(wrapper, plan, scalars):
        return
    kind = read_tables.NO_LENGTHS
    if plan.geometry.spec.page_size:
        kind = read_tables.KEYS if has_keys else read_tables.LAST_PAGE
    q_len = 0 if arrays[3] is not None else plan.batch.requests.uniform
    page_size, kept = plan.geometry.spec.page_size, {x: getattr(wrapper, x) for x in state}
    wrapper._on_host = _OnHost(
        scalars=scalars,
        types=tuple(map(type, scalars)),
        geometry=plan.geometry,
        split=plan.split,
        kind=kind,
        q_len=q_len,
        page_size=page_size,
        state=kept,
    )


def _is_plain(wrapper: BatchWrapper, plan: Plan, scalars: tuple[Any, ...]) -> bool:
    """Whether nothing but tables and scalars decides such plans."""
    spec, raw_options = plan.geometry.spec, plan.geometry.options.raw_options
    is_plain = plan.mask is NO_MASK and spec.logits is None and raw_options.is_constant
    is_plain = is_plain and spec.key_share is None
    # Offsets that count elements need all checks.
    if not is_plain or wrapper._is_debugging() or getattr(wrapper, "_in_elements", False):
        return False
    return not any(hasattr(x, "__dlpack__") for x in scalars)


def plan_again(wrapper: BatchWrapper, arrays: Sequence[Any], scalars: tuple[Any, ...]) -> bool:
    """Plan, if there was such a plan(); else, or if anything is wrong, nothing changes.

    arrays: as _CALLS has them. scalars: all other arguments.
    """
    # --- 1. Find what passed the checks ---
    hit = _CALLS.lookup(arrays, scalars)
    if hit is None:
        return False
    cached, (kv_indptr, ids, lengths, qo_indptr) = hit
    geometry, split, first, state = cached.call.checked
    (_, rows_wide, _, kv_wide, has_read, is_wide), kind, _, q_len, page_size = first
    num_offsets, num_ids, num_lengths, num_rows = cached.lengths
    count = num_offsets - 1
    fits = 0 < count <= read_tables.MAX_REQUESTS and (not page_size or num_lengths == count)
    if not fits or (not q_len and num_rows != num_offsets):
        return False
    # --- 2. Read the tables ---
    stream, (device, framework) = cached.call.current_stream(), _device_and_framework(wrapper)
    wrapper._refuse_capture(stream)
    pointers = qo_indptr, rows_wide, kv_indptr, kv_wide, lengths if has_read else 0, is_wide
    tables = DeviceTables(pointers, kind, count, q_len, page_size)
    planner, words = None, 0
    (variant,) = wrapper._variants(geometry)
    launcher = geometry.launcher(variant)
    if page_size and q_len and split == (0, True) and not variant.needs_places:
        planner = read_tables.planner(launcher, count, q_len)
        if planner is not None:
            words = wrapper._next_words.reserve(planner.num_words)
    numbers = read_tables.read(tables, planner, words, device.index, stream)
    _, is_bad, min_rows, max_rows, *built = numbers[: read_tables.HEAD].tolist()
    if is_bad:
        return False
    batch = _batch_of(numbers, tables, min_rows if min_rows == max_rows else -1)
    if page_size and (batch.num_page_ids > num_ids or meets(wrapper._workspace, ids, 4 * num_ids)):
        return False
    # --- 3. Make it the current plan ---
    require_row_limit(batch, geometry.spec.group_size)
    plan = Plan(geometry, batch, split, None, NO_MASK, framework, is_uniform=True)
    if page_size:
        view = ArrayView(ids, (num_ids,), (1,), dtypes.int32, device, framework, False, arrays[1])
        batch.page_ids_device, plan.page_ids, plan.views = view, ids, (view,)
    if batch.num_rows:
        plan.prepared[variant] = _prepared(
            wrapper, plan, launcher, variant, planner, Built._make(built), stream
        )
    plan.owner = wrapper._turns.begin()
    wrapper._current = plan
    wrapper.__dict__.update(state)
    return True


def _batch_of(numbers: np.ndarray, tables: DeviceTables, uniform: int) -> Batch:
    """The batch without its page table, of what landed on the host."""
    _, kind, count, q_len, page_size = tables
    begin = read_tables.HEAD
    at_keys = begin + count + 1
    at_lengths, at_rows = at_keys + count, at_keys + 2 * count
    kv_indptr, keys = numbers[begin:at_keys], numbers[at_keys:at_lengths]
    if q_len:
        qo_indptr, qo_len, uniform = uniform_rows(count, q_len)
        num_rows = count * q_len
    else:
        qo_indptr = numbers[at_rows : at_rows + count + 1]
        qo_len, num_rows = numbers[at_rows + count + 1 :], int(qo_indptr[-1])
    requests = BatchRequests(
        qo_len, keys, qo_indptr[:-1], kv_indptr[:-1], None, uniform if uniform > 0 else -1
    )
    num_keys = 0 if page_size else int(kv_indptr[-1])
    last = numbers[at_lengths:at_rows] if kind == read_tables.LAST_PAGE else None
    return Batch(requests, num_rows, num_keys, qo_indptr, kv_indptr, last)


def _prepared(
    wrapper: BatchWrapper,
    plan: Plan,
    launcher: Any,
    variant: Variant,
    planner: Planner | None,
    built: Built,
    stream: int,
) -> Prepared:
    """The schedule of a plan on the device: the one that the GPU has made, else the host's."""
    schedule = None if planner is None else _schedule_of(wrapper, planner, built)
    if schedule is not None:
        return _prepared_by_gpu(wrapper, plan, launcher, schedule)
    launcher, schedule = wrapper._schedule_variant(plan, variant)
    require_workspace(wrapper._workspace, schedule.workspace_bytes, "this plan")
    staged = wrapper._reserve_staged(launcher, schedule, plan.batch)
    address = wrapper._send(schedule.words, None, stream)
    owner = wrapper._words.view, wrapper._staged.view
    return Prepared(launcher, schedule, address, owner, staged)


def _schedule_of(wrapper: BatchWrapper, planner: Planner, built: Built) -> BatchSchedule | None:
    """The schedule of a list that the GPU has made, if it has, and the workspace has room."""
    schedule = planner.schedule(built)
    if schedule is not None and schedule.workspace_bytes:
        wrapper._enlarge_workspace(schedule.workspace_bytes)
        if schedule.workspace_bytes > num_bytes(wrapper._workspace):
            return None
    return schedule


def _prepared_by_gpu(
    wrapper: BatchWrapper, plan: Plan, launcher: Any, schedule: BatchSchedule
) -> Prepared:
    """The schedule on the device. The list of the plan before was kept, in case this one failed."""
    wrapper._words, wrapper._next_words = wrapper._next_words, wrapper._words
    staged = wrapper._reserve_staged(launcher, schedule, plan.batch)
    owner = wrapper._words.view, wrapper._staged.view
    return Prepared(launcher, schedule, wrapper._words.address, owner, staged)


def _number_of(wrapper: BatchWrapper) -> int:
    """What plans of a wrapper depend on besides their arguments, as a number."""
    if wrapper._facts < 0:
        own = (getattr(wrapper, name, None) for name in ("_takes_sinks", "_in_elements"))
        facts = type(wrapper), wrapper._kv_layout, *_device_and_framework(wrapper), *own
        wrapper._facts = _numbers.setdefault(facts, len(_numbers))
    return wrapper._facts


def _device_and_framework(wrapper: BatchWrapper) -> tuple[Device, str]:
    return wrapper._workspace.device, wrapper._workspace.framework


@after_launch
def _remember(
    wrapper: BatchWrapper,
    arrays: Sequence[Any],
    scalars: tuple[Any, ...],
    has_keys: bool,
    state: dict[str, Any],
) -> None:
    """Let later plans of this signature be made by `plan_again`. The wrapper's plan was.

    has_keys: lengths are those of all keys of a request.
    """
    plan, device_key = wrapper._current, _device_and_framework(wrapper)
    if (
        plan is None
        or device_key[1] not in ("torch", "cupy")
        or not _is_plain(wrapper, plan, scalars)
    ):
        return
    spec = plan.geometry.spec
    views = [None if x is None else array.view(x, "a table") for x in (*arrays, None)[:4]]
    for v in views:
        if v is None:
            continue
        is_read = (v.device, v.framework) == device_key and v.dtype in _IS_WIDE
        if not is_read or len(v.shape) != 1 or not is_contiguous(v):
            return
    kv_indptr, ids, lengths, rows = views
    if kv_indptr is None or (ids is not None and ids.dtype is not dtypes.int32):
        return
    kind = read_tables.KEYS if has_keys else read_tables.LAST_PAGE
    if spec.page_size <= 1 and not has_keys:  # pages of one token are full
        kind, lengths = read_tables.NO_LENGTHS, None
    read = (rows, kv_indptr, lengths)
    facts = [x for v in read for x in ((0, False) if v is None else (v.ptr, _IS_WIDE[v.dtype]))]
    q_len = 0 if rows is not None else plan.batch.requests.uniform
    tables = DeviceTables(tuple(facts), kind, 0, q_len, spec.page_size)  # type: ignore[arg-type]
    checked = _Checked(plan.geometry, plan.split, tables, state)
    _CALLS.insert(arrays, scalars, checked, kv_indptr, dtypes.int32, None, None)
