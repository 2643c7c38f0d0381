"""Calls without a plan that passed their checks: what later ones of equal signature launch.

Lengths are no part of a signature: a server's step has another number of rows, requests and pages
than all before it. A call of other lengths gets launches of its own, without the checks that only
dtypes, strides and options decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from .. import array
from ..errors import CupyAttnError
from ..launch.attention import find_items
from ..launch.driver import scratch
from ..launch.driver.enqueue import cuda
from .arrays import NO_MORE, ROLES, Arrays, MoreArrays
from .call_cache import Argument, CallCache, CallOptions, Found, after_launch
from .check_planless import Call, Extents, LengthForm
from .prepared import Before, Launches, Prepared, is_bool_mask, of_lengths, plan_of, served_by

_MAX_LENGTHS = 256
_Launches = TypeVar("_Launches", bound=Launches)


class Counts(NamedTuple):
    """How many of what there are: an argument, by its index in Arrays, has `extra` more than there
    are requests."""

    argument: int
    extra: int


@dataclass(frozen=True, slots=True)
class Derivation:
    """How launches for other lengths follow from those of the first call of a signature.

    form          what its lengths are made of
    first         what it launched
    requests      where the number of requests is to be seen
    per_request   arrays that have one entry for each request, or one more
    fixed         arrays of the first extent that they had in the first call
    tokens        rows of q for each entry of its first axis
    """

    form: LengthForm
    first: Prepared
    requests: Counts
    per_request: list[Counts]
    fixed: list[tuple[int, int]]
    tokens: int
    pads_lse: bool


@dataclass(frozen=True, slots=True)
class Checked:
    """What calls of one signature share.

    v_offset      bytes from v, or from the tensor that holds k too, to the first value
    derivation    None where calls of other lengths need the full checks
    allocate      makes a workspace where the call has none
    """

    v_offset: int
    derivation: Derivation | None
    row_shape: tuple[int, ...]
    return_lse: bool
    allocate: scratch.Allocate


class Repeat(NamedTuple):
    """How a call that was launched is launched again; fields as in Checked."""

    prepared: Launches
    v_offset: int = 0
    derivation: Derivation | None = None


class Append(Protocol):
    """What writes new keys to k and v once a call is checked."""

    def __call__(self) -> None: ...

    def roles(self, arrays: Arrays, more: MoreArrays, read: Arrays) -> frozenset[str]:
        """The roles in which attention reads what the append makes of the caller's arrays, and
        those of its own, if it can be launched again from their addresses alone; else none."""
        ...

    def before(self) -> Before:
        """How it is launched again."""
        ...


class Asked(NamedTuple):
    """A call as its caller made it, by which calls like it are found again.

    arrays, more, options   as the caller passed them
    shared   by role what kernels read instead of the caller's array: what all calls of these
             shapes share where the caller has none, or a view that begins where that array does
    """

    arrays: Arrays
    options: CallOptions
    shared: dict[str, Any]
    more: MoreArrays = NO_MORE

    @property
    def signature(self) -> tuple[Any, ...]:
        return self.arrays if self.more is NO_MORE else self.arrays + self.more

    def covers(self, read: Arrays, append: Append | None) -> bool:
        """Whether what kernels read follows from where the caller's arrays are."""
        roles: frozenset[str] = frozenset()
        if append is not None:
            roles = append.roles(self.arrays, self.more, read)
        if read.scale_q is read.scale_k is read.scale_v is None:
            roles |= _SCALES
        others = read + NO_MORE
        return all(
            own is its or name in roles or (its is not None and self.shared.get(name) is its)
            for name, own, its in zip(ROLES, self.signature, others, strict=False)
        )

    def again(self, repeat: Repeat, read: Arrays, append: Append | None) -> Repeat:
        """How a call that this covers is launched again."""
        if self.arrays is read or (append is None and not self.shared):
            return repeat
        prepared, before = repeat.prepared, None if append is None else append.before()
        shared = [
            (index, array.view(read[index], name).ptr, read[index])
            for index, name in enumerate(Arrays._fields)
            if name in self.shared and self.arrays[index] is None and read[index] is not None
        ]
        prepared, derivation = replace(prepared, shared=tuple(shared)), None
        if before is not None:
            prepared = _with_before(prepared, before)
            if repeat.derivation is not None and not shared:
                assert isinstance(prepared, Prepared)  # others have no derivation
                derivation = replace(
                    repeat.derivation,
                    first=prepared,
                    per_request=[*repeat.derivation.per_request, *_counts_of_new(self.more)],
                )
        return Repeat(prepared, repeat.v_offset, derivation)


# Fields of Arrays that belong to requests.
_PER_REQUEST = (
    *("kv_lens", "qo_lens", "qo_offsets", "kv_offsets", "o_offsets", "v_offsets", "kv_begin"),
)
_OF_ROWS_OR_KEYS = ("q", "k", "v", "out", "output_gate")
_SCALES = frozenset(("scale_q", "scale_k", "scale_v"))
_LENGTH_AXES = dict.fromkeys((*_OF_ROWS_OR_KEYS, *_PER_REQUEST), 0)
_LENGTH_AXES |= dict.fromkeys((*_SCALES, "alibi_slopes", "new_k", "new_v", "new_offsets"), 0)
_LENGTH_AXES |= {"rotary_begin": 0, "cache_rows": 0, "lists": 0}
CALLS: CallCache[Checked] = CallCache(
    *(
        Argument(
            name,
            _LENGTH_AXES.get(name),
            is_output=name in ("workspace", "out", "lse", "max_logits"),
            written_with="new_k" if name in ("k", "v") else None,
            interleaves=name in ("k", "v"),
            is_free=name in ("block_tables", "lse"),
        )
        for name in ROLES
    )
)
_Q, _K, _V, _WORKSPACE, _TABLE, _KV_LENS, _OUT, _LSE, _GATE = map(
    Arrays._fields.index,
    ("q", "k", "v", "workspace", "block_tables", "kv_lens", "out", "lse", "output_gate"),
)


def _key_of(cached: Found[Checked]) -> tuple[Any, ...]:
    """Lengths, and shapes and strides of the page table and the LSE."""
    free = [
        None
        if index >= len(cached.shapes) or cached.shapes[index] is None
        else (cached.shapes[index], cached.strides(index))
        for index in (_TABLE, _LSE)
    ]
    return (*cached.lengths, *free)


def prepared_for(cached: Found[Checked]) -> Launches | None:
    """What calls of these lengths launch, from now on; None if they need the full checks."""
    checked, by_lengths = cached.call.checked, cached.call.by_lengths
    key = *_, table, lse = _key_of(cached)
    known: Launches | None = by_lengths.get(key)
    derivation = checked.derivation
    if known is not None or derivation is None:
        cached.prepared = known
        return known
    extents = _extents_of(derivation, cached.lengths, table)
    if extents is None:
        return None
    first, pads_lse = derivation.first, derivation.pads_lse
    count = extents.num_requests if pads_lse else cached.lengths[_Q]
    lse_shape, lse_strides = (count, *first.lse_shape[1:]), None
    if lse is not None:
        shape, lse_strides = lse
        if shape != lse_shape or not _is_apart(shape, lse_strides):
            return None
    elif checked.return_lse:
        lse_strides = tuple(math.prod(lse_shape[axis + 1 :]) for axis in range(len(lse_shape)))
    try:
        lengths, may_find = derivation.form.lengths(extents), first.may_find
        first = served_by(first, find_items.serving(first.launcher, lengths))
        plan = plan_of(first.launcher, lengths, may_find=may_find)
    except CupyAttnError:  # which the full checks raise
        return None
    prepared = of_lengths(
        first, plan, extents.num_rows, extents.num_keys, lse_shape, lse_strides, pads_lse
    )
    if first.second is not None:  # latent rows are not counted
        prepared.num_rows = 0
    if first.before is not None:
        before = first.before.of_lengths(cached.lengths, extents)
        if before is None:
            return None
        prepared = _with_before(prepared, before)
    if 0 < cached.sizes[_WORKSPACE] < prepared.num_bytes:
        return None
    if len(by_lengths) >= _MAX_LENGTHS:
        by_lengths.clear()
    by_lengths[key] = cached.prepared = prepared
    return prepared


def _with_before(prepared: _Launches, before: Before) -> _Launches:
    """The launches behind what is launched ahead of them, which has the end of their workspace."""
    num_bytes = -(-prepared.num_bytes // 16) * 16 + before.num_bytes
    return replace(prepared, before=before, num_bytes=num_bytes)


def _counts_of_new(more: MoreArrays) -> list[Counts]:
    """How many new keys there are, or offsets of them, and positions that they rotate from."""
    counts = [Counts(ROLES.index("new_k"), 0)]
    if more.new_offsets is not None:
        counts = [Counts(ROLES.index("new_offsets"), 1)]
    if more.rotary_begin is not None:
        counts.append(Counts(ROLES.index("rotary_begin"), 0))
    return counts


def _extents_of(
    derivation: Derivation, lengths: Sequence[int], table: tuple[Any, Any] | None
) -> Extents | None:
    """The extents of a call whose arrays fit each other, else None."""
    index, extra = derivation.requests
    count, num_rows = lengths[index] - extra, lengths[_Q]
    num_keys = lengths[_K]
    if count <= 0 or num_rows <= 0 or num_keys <= 0:
        return None
    for at, extra in derivation.per_request:
        if lengths[at] != count + extra:
            return None
    for at, length in derivation.fixed:
        if lengths[at] != length:
            return None
    if lengths[_V] not in (0, num_keys) or {lengths[_OUT], lengths[_GATE]} - {0, num_rows}:
        return None
    num_rows *= derivation.tokens
    if table is None:
        return Extents(count, num_rows, num_keys, None)
    (rows, width), (step, entry) = table
    if width <= 0 or entry != 1 or step < 0 or step * rows > 2**31 - 1:
        return None
    return Extents(count, num_rows, num_keys, (rows, width, step))


def _is_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements share memory, as far as that is plain to see."""
    reach = 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent > 1:
            if stride < reach:
                return False
            reach = stride * extent
    return 0 not in shape


@after_launch
def insert(asked: Asked, call: Call, repeat: Repeat) -> None:
    """Cache a call that was launched."""
    arrays, key, prepared = asked.signature, asked.options, repeat.prepared
    checked = Checked(
        v_offset=repeat.v_offset,
        derivation=repeat.derivation,
        row_shape=call.out_shape[1:],
        return_lse=call.return_lse,
        allocate=scratch.allocator(call.q),
    )
    dtype_o = call.geometry.spec.dtype_o
    cached = CALLS.insert(arrays, key, checked, call.q, dtype_o, call.out_shape, call.lse_shape)
    if cached is not None:
        cached.prepared = cached.call.by_lengths[_key_of(cached)] = prepared


def repeat_of(call: Call, arrays: Arrays, prepared: Launches) -> Repeat | None:
    """How a call is launched again; None if what was made for it has no address to keep."""
    table, kv_lens = call.block_tables, call.indices.kv_lens
    if not call.scales.is_constant or is_bool_mask(call):
        return None
    if table is not None and table.ptr != array.view(arrays.block_tables, "block_tables").ptr:
        return None
    if call.lengths.is_ragged and call.indices.kv_begin is None and arrays.kv_begin is not None:
        return None  # whole lengths that decide nothing, which the planner would read
    if call.queries is not None and arrays.kv_lens is None and kv_lens is not None:
        if cuda().is_capturing(array.current_stream(call.q)):
            return None  # only the graph writes those lengths
        return Repeat(replace(prepared, shared=((_KV_LENS, kv_lens.ptr, kv_lens.owner),)))
    derivation = None
    if isinstance(prepared, Prepared) and _is_derivable(call, arrays):
        per_request, fixed = _counts_of_requests(call, arrays)
        requests = Counts(_TABLE, 0)
        if table is None or call.form.has_table_offsets:
            name = "kv_offsets" if arrays.kv_lens is None else "kv_lens"
            requests = next(x for x in per_request if x.argument == Arrays._fields.index(name))
        if call.queries is not None:
            # What copies boxes of latent pages knows how many there are.
            fixed.append((_K, call.extents.num_keys))
        tokens = math.prod(arrays.q.shape[1:-2])
        of_requests = requests, per_request, fixed, tokens
        derivation = Derivation(call.form, prepared, *of_requests, pads_lse=call.pads_lse)
    v_offset = 0
    if call.queries is None:
        values = array.view(arrays.k if arrays.v is None else arrays.v, "v")
        v_offset = call.keys.v.ptr - values.ptr
    return Repeat(prepared, v_offset, derivation)


def _counts_of_requests(call: Call, arrays: Arrays) -> tuple[list[Counts], list[tuple[int, int]]]:
    """Places whose first extents follow from the number of requests, and such that do not."""
    count = call.extents.num_requests
    per_request: list[Counts] = []
    fixed: list[tuple[int, int]] = []
    for index, (name, x) in enumerate(zip(Arrays._fields, arrays, strict=True)):
        if x is None or name not in _LENGTH_AXES or name in _OF_ROWS_OR_KEYS:
            continue
        v = array.view(x, name)
        if name in _PER_REQUEST:
            per_request.append(Counts(index, math.prod(v.shape) - count))
        elif len(v.shape) == 2 and v.shape[0] == count:
            per_request.append(Counts(index, 0))
        elif v.shape:
            fixed.append((index, v.shape[0]))
    return per_request, fixed


def _are_pages_of_requests(call: Call, arrays: Arrays) -> bool:
    """Whether latent rows are pages of a table's requests, as they are given, without an LSE."""
    table = call.block_tables
    return (
        table is not None
        and tuple(arrays.block_tables.shape) == tuple(table.shape)
        and arrays.k.shape[0] == call.extents.num_keys
        and not (call.return_lse or call.options.is_list or any(call.gaps))
        and call.options.key_share is None
        and arrays.lse is arrays.max_logits is None
    )


def _is_derivable(call: Call, arrays: Arrays) -> bool:
    """Whether arrays of other lengths and equal signature are used as these are."""
    if call.mask is not None or call.value_tables is not call.block_tables:
        return False
    if call.queries is not None and not _are_pages_of_requests(call, arrays):
        return False
    num_axes = len(arrays.q.shape) - 2  # of rows
    for x, used in (
        (arrays.q, call.q),
        (arrays.out, call.out),
        (arrays.output_gate, call.output_gate),
    ):
        if x is not None and used is not None:
            v = array.view(x, "q")
            inner = math.prod(v.shape[1:num_axes])
            if v.strides[0] != used.strides[0] * inner:
                return False
    if arrays.lse is not None and len(arrays.lse.shape) != (3 if call.pads_lse else 2):
        return False
    for name in _PER_REQUEST:
        x, used = getattr(arrays, name), getattr(call.indices, name)
        if x is None or used is None:
            continue
        v = array.view(x, name)
        if math.prod(v.shape) != v.shape[0] or v.strides[0] != used.strides[0]:
            return False
    return True
