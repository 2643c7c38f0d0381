"""The call cache: from the signature of a call to its checked launch.

Calls of a decoding loop differ in addresses, and some of them in lengths. All other facts that the
checks depend on form the signature of a call. Two calls with equal signature pass the same checks,
so only lengths and addresses are compared before the launch. The cache raises no error: a call that
it does not find goes through the full checks, which raise the error if there is one, and a call
that cannot be kept has its answer all the same.

Most of the cost of a repeated call is to read its signature, attribute by attribute. torch compares
several tensors with earlier ones in one call into C++, by which its compiler guards graphs. Where
this torch has that, calls that repeat the last one but for addresses take the short way.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import operator
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar

from .. import array
from ..array import LOWEST_ADDRESS, ArrayView
from ..core import dtypes, recording
from ..core.dtypes import DType
from ..core.parse import BOOLS, zeros_and_ones

_MAX_CALLS = 4096
# Of a program that changes torch's modes from call to call: it takes as long as such a call.
_MAX_RENEWED = 64
# Arrays of keys for which a call remembers where its other arrays were, and workspaces.
_MAX_APART, _MAX_WORKSPACES = 256, 16

# Addresses, shapes and facts of arrays, see _read_torch.
_Seen: TypeAlias = tuple[list[int], list[Any], list[Any]]
_Read: TypeAlias = Callable[[Sequence[Any]], _Seen]
_Checked = TypeVar("_Checked")
_Given = ParamSpec("_Given")
_Kept = TypeVar("_Kept")
_log = logging.getLogger("cupyattn")


def _read_torch(arrays: Sequence[Any]) -> _Seen:
    """Addresses of arrays, shapes, and all other facts that the checks depend on.

    The facts of an array: type, dtype, strides, device, whether it is refused whatever the rest is
    (tensors that require grad are at times), and the address modulo 16, None for no memory.
    """
    addresses: list[int] = []
    shapes: list[Any] = []
    facts: list[Any] = []
    for x in arrays:
        if x is None:
            addresses.append(0)
            shapes.append(None)
            facts.append(None)
        else:
            address = x.data_ptr()
            addresses.append(address)
            shapes.append(x.shape)
            # Names for its parts would cost an eighth of the time.
            facts.append(
                (
                    type(x),
                    x.dtype,
                    x.stride(),
                    x.get_device(),
                    x.requires_grad or x.is_neg(),
                    address & 15 if address >= LOWEST_ADDRESS else _offset(x, address),
                )
            )
    return addresses, shapes, facts


def _offset(x: Any, address: int) -> int | None:
    """The address modulo 16 of a tensor, None for no memory. Memory of pools that the driver maps
    (cudaMallocAsync, torch's expandable segments) has low addresses too."""
    return address & 15 if address and (address >= LOWEST_ADDRESS or array.has_storage(x)) else None


def _read_cupy(arrays: Sequence[Any]) -> _Seen:
    addresses: list[int] = []
    shapes: list[Any] = []
    facts: list[Any] = []
    for x in arrays:
        if x is None:
            addresses.append(0)
            shapes.append(None)
            facts.append(None)
        else:
            data = x.data
            address = data.ptr
            addresses.append(address)
            shapes.append(x.shape)
            offset = address & 15 if address else None
            is_freed = not data.mem.ptr
            facts.append((type(x), x.dtype, x.strides, data.device_id, is_freed, offset))
    return addresses, shapes, facts


# Addresses of arrays, 0 for none, if they look as they did, else None.
# All arguments but arrays: a tuple or a record, whose fields can be hashed.
Scalars: TypeAlias = Any
_Compare: TypeAlias = Callable[[Sequence[Any]], "list[int] | None"]


class _Tensors(NamedTuple):
    """The tensors of a call, each once: where they are, their sizes and strides with None for what
    may be another, and (place, first place) of those that are in several."""

    places: list[int]
    sizes: list[list[Any]]
    strides: list[list[Any]]
    twins: dict[int, int]

    @classmethod
    def of(
        cls, arrays: Sequence[Any], axes: Sequence[int | None] | None, free: Sequence[int]
    ) -> _Tensors | None:
        """None where a tensor that is in several places may be another in one of them."""
        made = cls([], [], [], {})
        for place, x in enumerate(arrays):
            if x is None:
                continue
            size, stride = [*x.shape], [*x.stride()]
            axis = None if axes is None else axes[place]
            if place in free:
                size, stride = ([None] * x.dim() for _ in "ss")
            elif axis is not None and axis < x.dim():
                size[axis] = None
            first = next((i for i, known in enumerate(made.places) if arrays[known] is x), None)
            if first is None:
                made.places.append(place)
                made.sizes.append(size)
                made.strides.append(stride)
            elif size == made.sizes[first]:
                made.twins[place] = made.places[first]
            else:
                return None
        return made

    def guards(self, arrays: Sequence[Any]) -> Callable[..., bool] | None:
        """What compares tensors in C++: types, dtypes, shapes, strides, devices, and whether
        gradients or signs are pending. None of a torch that has that in another form."""
        torch = sys.modules["torch"]
        tensors = [arrays[place] for place in self.places]
        try:
            made = torch._C._dynamo.guards.TensorGuards(
                *tensors, dynamic_dims_sizes=self.sizes, dynamic_dims_strides=self.strides
            )
            address_of = torch.Tensor.data_ptr
            is_plain = all(type(x).data_ptr is address_of for x in tensors)
            return made.check if is_plain and made.check(*tensors) else None
        except Exception:
            return None


def _comparer_torch(
    arrays: Sequence[Any],
    facts: list[Any],
    num_places: int,
    axes: Sequence[int | None] | None = None,
    free: Sequence[int] = (),
) -> _Compare | None:
    """A comparison of later calls with this one, None where this torch has none. It returns
    num_places addresses, though arrays end early.

    axes: of lengths that may be others, free: places of arrays with any lengths and strides. An
    array in several places, such as offsets of q and k, is compared once, and later ones must be in
    the same.
    """
    tensors_of = _Tensors.of(arrays, axes, free)
    are_equal = None if tensors_of is None else tensors_of.guards(arrays)
    if tensors_of is None or are_equal is None:
        return None
    places, twins, num_arrays = tensors_of.places, tensors_of.twins, len(arrays)
    # Those that are not given most often are the last ones: one look at the slice is all they cost.
    end = max([*places, *twins]) + 1
    absent = [place for place in range(end) if arrays[place] is None]
    fills = [(place, twins.get(place)) for place in range(end) if place not in places]
    same = list(twins.items())
    offsets = [facts[place][_OFFSET] for place in places]
    are_aligned = offsets == [0] * len(places)
    pick: Callable[[Sequence[Any]], tuple[Any, ...]] = operator.itemgetter(*places)
    if len(places) == 1:
        only = places[0]
        pick = lambda arrays: (arrays[only],)  # noqa: E731
    rest, no_addresses = (None,) * (num_arrays - end), [0] * (num_places - end)
    lowest, address_of = LOWEST_ADDRESS, sys.modules["torch"].Tensor.data_ptr

    def compare(arrays: Sequence[Any]) -> list[int] | None:
        if len(arrays) != num_arrays:
            if len(arrays) < end or any(x is not None for x in arrays[end:]):
                return None
        elif arrays[end:] != rest:
            return None
        for place in absent:
            if arrays[place] is not None:
                return None
        for place, first in same:
            if arrays[place] is not arrays[first]:
                return None
        tensors = pick(arrays)
        if not are_equal(*tensors):
            return None
        addresses = [*map(address_of, tensors)]
        is_known = are_aligned
        if is_known:
            for address in addresses:
                if address & 15 or address < lowest:
                    is_known = False
        if not is_known and [*map(_offset, tensors, addresses)] != offsets:
            return None
        for place, twin in fills:
            addresses.insert(place, 0 if twin is None else addresses[twin])
        addresses += no_addresses
        return addresses

    return compare


class _Framework(NamedTuple):
    """How to read arrays, the address of one, its bytes an element and bytes a unit of stride.

    comparer  makes a comparison with arrays, whose facts are known; see _comparer_torch
    """

    read: _Read
    address: Callable[[Any], int]
    itemsize: Callable[[Any], int]
    stride_bytes: Callable[[Any], int]
    comparer: Callable[..., _Compare | None]


_ELEMENT_SIZE = operator.methodcaller("element_size")
_FRAMEWORKS = {
    "torch": _Framework(
        _read_torch,
        operator.methodcaller("data_ptr"),
        _ELEMENT_SIZE,
        _ELEMENT_SIZE,
        _comparer_torch,
    ),
    "cupy": _Framework(
        _read_cupy,
        operator.attrgetter("data.ptr"),
        operator.attrgetter("itemsize"),
        lambda x: 1,
        lambda *arrays_and_facts: None,
    ),
}
_STRIDES, _DEVICE, _IS_REFUSED, _OFFSET = 2, 3, 4, 5
# By type of the first array; only types of calls that passed the checks are here.
_framework_by_type: dict[type, _Framework] = {}


class Argument(NamedTuple):
    """An array that a way to call takes; None stands for an optional array that is not given.

    length_axis  the axis whose extent varies from call to call and is compared at each; all other
                 extents belong to the signature. None: the whole shape does. So it does of one
                 row: it may have any stride, which says nothing about that of several; and of an
                 output whose rows reach into the next, and may share elements from some length on
    is_free      lengths and strides vary from call to call along all axes, and the way to call
                 compares them; the signature has how many axes there are
    is_output    the call writes the array, so no other may overlap it
    written_with  another array where this one is an output if the call gives that one
    is_planned   where a call does not give the array, its plan may hold it
    interleaves  outputs that have this may lie within each other, as K and V of one array do
    """

    name: str
    length_axis: int | None = None
    is_output: bool = False
    written_with: str | None = None
    is_planned: bool = False
    interleaves: bool = False
    is_free: bool = False


@dataclass(slots=True, eq=False)
class CachedCall(Generic[_Checked]):
    """What calls of one signature share. It holds no array of the caller's.

    checked    what the way to call made of a call that passed its checks
    axes       (place, length_axis) of arrays that are given and have that axis
    fixed      places of arrays that have such an axis, and whose length belongs to the signature
    steps, rests   of each array: n rows along its length_axis lie within step * n + rest bytes; of
               a free one the bytes of a unit of stride, and of an element
    outputs    places of outputs that are given, each with the places that it may not overlap
    pairs      places of outputs that may lie within each other, but not at one address
    make_out, make_lse   make outputs of a shape like that of the first call, of any length
    make_like  makes what make_out does, of the first array, in less time; None where that differs
    address    of an array that they have made
    compare    compares all of the signature, not lengths; None where the framework has no such way
    num_renewed  how often that was made anew
    """

    checked: _Checked
    axes: tuple[tuple[int, int], ...]
    fixed: tuple[int, ...]
    steps: list[int]
    rests: list[int]
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    pairs: tuple[tuple[int, int], ...]
    make_out: Callable[[Sequence[int]], Any]
    make_lse: Callable[[Sequence[int]], Any]
    make_like: Callable[[Any], Any] | None
    address: Callable[[Any], int]
    current_stream: Callable[[], int]
    compare: _Compare | None
    num_renewed: int = 0

    def overlaps(self, addresses: list[int], sizes: Sequence[int]) -> bool:
        """Whether the bytes of an output meet those of another array; the full checks find out
        whether they share an element."""
        for place, others in self.outputs:
            low = addresses[place]
            high = low + sizes[place]
            for other in others:
                address = addresses[other]
                if address < high and low < address + sizes[other]:
                    return True
        return any(addresses[place] == addresses[other] for place, other in self.pairs)


class Apart(dict[int, list[int]]):
    """Addresses of arrays that are apart where they must be: no output has bytes of another array,
    and no array has bytes of a workspace.

    By the address of keys, which is another one in each layer of a model: so most calls are like
    one of an earlier step, and need no other look than `apart.get(addresses[key]) == addresses`.
    """

    __slots__ = ()

    def add(self, key: int, addresses: list[int]) -> None:
        """addresses: the list itself is kept."""
        if len(self) >= _MAX_APART:
            self.clear()
        self[key] = addresses


@dataclass(slots=True, eq=False)
class Found(Generic[_Checked]):
    """A cached call for arrays of these shapes.

    lengths  extents of the arrays along their length_axis, of free ones along the first axis, 0
             where there is none
    sizes    bytes from the address of each array to its end
    prepared what the way to call made for these lengths
    compare  compares lengths too, once two calls in a row had them
    apart    of calls of these lengths, and of those with a workspace by where it is
    """

    call: CachedCall[_Checked]
    shapes: list[Any]
    facts: list[Any]
    lengths: list[int]
    sizes: list[int]
    prepared: Any = None
    compare: _Compare | None = None
    apart: Apart = field(default_factory=Apart)
    apart_from: dict[tuple[object, ...], Apart] = field(default_factory=dict)

    def apart_of(self, clear: tuple[object, ...]) -> Apart:
        """`Apart` of calls whose arrays may not lie in the same places."""
        if len(self.apart_from) >= _MAX_WORKSPACES:
            self.apart_from.clear()
        return self.apart_from.setdefault(clear, Apart())

    def is_apart(self, addresses: list[int], key: int) -> bool:
        """Whether no output has bytes of another array. key: the place of keys."""
        if self.apart.get(addresses[key]) == addresses:
            return True
        if self.call.overlaps(addresses, self.sizes):
            return False
        self.apart.add(addresses[key], addresses.copy())
        return True

    def strides(self, place: int) -> tuple[int, ...]:
        """The strides of a free array, in elements."""
        strides: tuple[int, ...] = self.facts[place][_STRIDES]
        unit, itemsize = self.call.steps[place], self.call.rests[place]
        if unit == itemsize:
            return strides
        return tuple(stride * unit // itemsize for stride in strides)


@dataclass(slots=True, eq=False)
class _Group(Generic[_Checked]):
    """The cached calls with equal scalars, by facts without lengths.

    last  the last of them: to compare facts is faster than to hash them
    fixed  what these calls have as `CachedCall.fixed`
    zeros_and_ones  places of scalars that are numbers 0 or 1, to which a bool would be equal
    """

    last: Found[_Checked]
    calls: dict[tuple[Any, ...], CachedCall[_Checked]]
    fixed: dict[tuple[int, ...], None]
    zeros_and_ones: list[int]


def report(error: Exception) -> None:
    """Say that a call could not be kept. The tests let this raise."""
    _log.warning("a call was answered, but cannot be cached: %r", error)


def after_launch(keep: Callable[_Given, _Kept | None]) -> Callable[_Given, _Kept | None]:
    """A decorator of what keeps a call that was launched: it cannot fail the call any more."""

    @functools.wraps(keep)
    def keep_or_report(*args: _Given.args, **named: _Given.kwargs) -> _Kept | None:
        try:
            return keep(*args, **named)
        except Exception as error:
            report(error)
            return None

    return keep_or_report


class CallCache(Generic[_Checked]):
    """The cached calls of one way to call, which takes `arguments` in this order."""

    def __init__(self, *arguments: Argument) -> None:
        self._arguments = arguments
        self._axes = [argument.length_axis for argument in arguments]
        self._free = [place for place, argument in enumerate(arguments) if argument.is_free]
        self._absent = [0] * len(arguments)
        # By the type of scalars too: records of two types with equal fields are not one call.
        self._groups: defaultdict[type, dict[Scalars, _Group[_Checked]]] = defaultdict(dict)
        self._num_calls = 0
        _caches.append(self)

    def __len__(self) -> int:
        return self._num_calls

    def clear(self) -> None:
        self._groups.clear()
        self._num_calls = 0

    def lookup(
        self, arrays: Sequence[Any], scalars: Scalars
    ) -> tuple[Found[_Checked], list[int]] | None:
        """The cached call of equal signature, and addresses of the arrays, 0 for none; or None.

        `arrays` may end early, `scalars` are all other arguments.
        """
        try:
            # Scalars are hashed, so that arrays among them are never compared.
            group = self._groups[type(scalars)].get(scalars)
            if group is None:
                return None
            for place in group.zeros_and_ones:
                if type(scalars[place]) in BOOLS:
                    return None
            found = group.last  # another thread may replace it at any time
            addresses = None if found.compare is None else found.compare(arrays)
            if addresses is None:
                other = self._lookup_other(group, arrays)
                if other is None:
                    return None
                found, addresses = other
        except Exception:  # arguments raise what they like when they are read or hashed
            return None
        if recording.current is not None:
            recording.keep((found, arrays))
        if len(addresses) < len(self._absent):  # `arrays` ended early
            addresses += self._absent[len(addresses) :]
        return found, addresses

    def _lookup_other(
        self, group: _Group[_Checked], arrays: Sequence[Any]
    ) -> tuple[Found[_Checked], list[int]] | None:
        """`lookup` of arrays that differ from the last call's in more than addresses, or may."""
        framework = _framework_by_type.get(type(arrays[0]))
        if framework is None:
            return None
        found = group.last
        if found.call.compare is not None:
            addresses = found.call.compare(arrays)
            if addresses is not None:
                found = group.last = self._refit(found, arrays, framework)
                return found, addresses
        addresses, shapes, facts = framework.read(arrays)
        if shapes == found.shapes and facts == found.facts:
            if found.call.compare is not None:
                self._renew(found, arrays, framework)
            return found, addresses
        other = self._other(group, found, shapes, facts)
        if other is not None:
            group.last = other
        return None if other is None else (other, addresses)

    def _renew(self, found: Found[_Checked], arrays: Sequence[Any], framework: _Framework) -> None:
        """Compare later calls with this one, which torch calls different where all facts are equal:
        it was made in another mode, such as inference_mode(), and so will be those behind it."""
        call = found.call
        if call.num_renewed >= _MAX_RENEWED:
            return
        call.num_renewed += 1
        varying = self._varying(call.fixed)
        call.compare = framework.comparer(arrays, found.facts, len(self._axes), varying, self._free)
        found.compare = framework.comparer(arrays, found.facts, len(self._axes))

    def _varying(self, fixed: tuple[int, ...]) -> list[int | None]:
        """The axes of lengths that later calls may have others of."""
        return [None if place in fixed else axis for place, axis in enumerate(self._axes)]

    def _other(
        self, group: _Group[_Checked], last: Found[_Checked], shapes: list[Any], facts: list[Any]
    ) -> Found[_Checked] | None:
        """The call of arrays that the last one's are not like."""
        known = self._with_lengths(last, shapes) if facts == last.facts else None
        return known or self._find(group, shapes, facts)

    def _refit(
        self, last: Found[_Checked], arrays: Sequence[Any], framework: _Framework
    ) -> Found[_Checked]:
        """The last call for arrays that differ from its own in nothing but lengths."""
        shapes = [None if x is None else x.shape for x in arrays]
        if shapes == last.shapes and not self._free:
            last.compare = framework.comparer(arrays, last.facts, len(self._axes))
            return last
        facts, lengths = last.facts, self._absent.copy()
        for place, axis in last.call.axes:
            lengths[place] = shapes[place][axis]  # type: ignore[index]
        if self._free:
            facts = [*facts]
            for place in self._free:
                shape = shapes[place] if place < len(shapes) else None
                if shape is not None:
                    kind, dtype, _, *rest = facts[place]
                    facts[place] = kind, dtype, arrays[place].stride(), *rest
                    lengths[place] = shape[0] if shape else 0
            if shapes == last.shapes and facts == last.facts:
                last.compare = framework.comparer(arrays, facts, len(self._axes))
                return last
        return self._fit(last.call, shapes, facts, lengths)

    def _with_lengths(self, last: Found[_Checked], shapes: list[Any]) -> Found[_Checked] | None:
        """The last call with other lengths, None if other extents differ too."""
        lengths, sizes = last.lengths.copy(), last.sizes.copy()
        axes, steps = self._axes, last.call.steps
        for place, (new, old) in enumerate(zip(shapes, last.shapes, strict=True)):
            if new != old:
                axis = axes[place]
                if axis is None or place in last.call.fixed:
                    return None
                known = [*old]
                known[axis] = length = new[axis]
                if known != [*new]:
                    return None
                sizes[place] += (length - lengths[place]) * steps[place]
                lengths[place] = length
        return Found(last.call, shapes, last.facts, lengths, sizes)

    def _find(
        self, group: _Group[_Checked], shapes: list[Any], facts: list[Any]
    ) -> Found[_Checked] | None:
        for fixed in (*group.fixed,):  # another thread may add to it at any time
            key, lengths = self._without_lengths(shapes, facts, fixed)
            call = group.calls.get(key)
            if call is not None:
                return self._fit(call, shapes, facts, lengths)
        return None

    def _axes_of(self, shapes: list[Any]) -> tuple[tuple[int, int], ...]:
        """`CachedCall.axes` of a call with these shapes."""
        given = enumerate(zip(self._axes, shapes, strict=False))
        return tuple((at, a) for at, (a, x) in given if a is not None and x and a < len(x))

    def _without_lengths(
        self, shapes: list[Any], facts: list[Any], fixed: tuple[int, ...]
    ) -> tuple[tuple[Any, ...], list[int]]:
        """(shapes without lengths, but for `fixed` places, and all facts; lengths)."""
        lengths = self._absent.copy()
        extents = [*shapes]
        for place, axis in self._axes_of(shapes):
            shape = shapes[place]
            lengths[place] = shape[axis]
            if place not in fixed:
                extents[place] = shape[:axis], shape[axis + 1 :]
        if self._free:
            facts = [*facts]
            for place in self._free:
                if place < len(shapes) and shapes[place] is not None:
                    kind, dtype, strides, *rest = facts[place]
                    lengths[place] = shapes[place][0] if shapes[place] else 0
                    extents[place] = len(strides)
                    facts[place] = kind, dtype, *rest
        return (*extents, *facts), lengths

    @after_launch
    def insert(
        self,
        arrays: Sequence[Any],
        scalars: Scalars,
        checked: _Checked,
        like: ArrayView,
        dtype_o: DType,
        out_shape: Sequence[int] | None,
        lse_shape: Sequence[int] | None,
    ) -> Found[_Checked] | None:
        """Let later calls of this signature skip the checks, which this call has passed. Returns
        what they will find, None if nothing is cached.

        Outputs that later calls make will be like `like`; None for a shape where they make none.
        Nothing is cached where equal signatures do not pass the same checks: torch allows or
        refuses tensors that require grad by its mode, empty arrays may have any strides, and arrays
        of several frameworks are ordered by streams.
        """
        framework = _FRAMEWORKS.get(like.framework)
        if framework is None:
            return None
        try:
            _, shapes, facts = framework.read(arrays)
            group = self._groups[type(scalars)].get(scalars)
        except (AttributeError, TypeError):  # another framework's; an argument without a hash
            return None
        extents = self._extents_of(framework, arrays, shapes, facts)
        if extents is None:
            return None
        steps, rests = extents
        axes = self._axes_of(shapes)
        fixed = tuple(
            place
            for place, axis in axes
            if shapes[place][axis] == 1
            or (rests[place] > 0 and self._is_written(self._arguments[place], arrays))
        )
        varying = self._varying(fixed)
        call = CachedCall(
            checked=checked,
            axes=axes,
            fixed=fixed,
            steps=steps,
            rests=rests,
            outputs=self._outputs(arrays),
            pairs=self._pairs(arrays),
            make_out=_maker(dtype_o, like, out_shape),
            make_lse=_maker(dtypes.float32, like, lse_shape),
            make_like=_maker_like(arrays[0], dtype_o, out_shape),
            address=framework.address,
            current_stream=array.stream_reader(like),
            compare=framework.comparer(arrays, facts, len(self._axes), varying, self._free),
        )
        key, lengths = self._without_lengths(shapes, facts, fixed)
        if self._num_calls >= _MAX_CALLS:
            self.clear()
            group = None
        found = self._fit(call, shapes, facts, lengths)
        places = zeros_and_ones(scalars)
        if group is not None and group.zeros_and_ones != places:
            self._num_calls -= len(group.calls)
            del self._groups[type(scalars)][scalars]
            group = None
        if group is None:
            group = self._groups[type(scalars)][scalars] = _Group(found, {}, {}, places)
        self._num_calls += key not in group.calls
        group.fixed[fixed] = None
        group.calls[key], group.last = call, found
        _framework_by_type[type(arrays[0])] = framework
        return found

    def _extents_of(
        self, framework: _Framework, arrays: Sequence[Any], shapes: list[Any], facts: list[Any]
    ) -> tuple[list[int], list[int]] | None:
        """`CachedCall.steps` and `rests`; None if there is an array by which nothing is cached."""
        all_steps, rests = self._absent.copy(), self._absent.copy()
        for place, (x, shape, fact) in enumerate(zip(arrays, shapes, facts, strict=True)):
            if fact is None:
                continue
            _, _, strides, device, is_refused, offset = fact
            if is_refused or offset is None or device != facts[0][_DEVICE]:
                return None
            if 0 in shape or min(strides, default=0) < 0:
                return None
            # Scales and the like may come without any axis.
            axis = self._axes[place]
            if axis is not None and axis >= len(shape):
                axis = None
            unit = framework.stride_bytes(x)
            if self._arguments[place].is_free:
                all_steps[place], rests[place] = unit, framework.itemsize(x)
                continue
            steps = [stride * unit for stride in strides]
            step = 0 if axis is None else steps[axis]
            span = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
            rest = span + framework.itemsize(x) - step * (1 if axis is None else shape[axis])
            all_steps[place], rests[place] = step, rest
        return all_steps, rests

    def _fit(
        self, call: CachedCall[_Checked], shapes: list[Any], facts: list[Any], lengths: list[int]
    ) -> Found[_Checked]:
        sizes = call.rests.copy()
        for place, _ in call.axes:
            sizes[place] += lengths[place] * call.steps[place]
        for place in self._free:
            if place < len(shapes) and shapes[place] is not None:
                reach = 0
                for n, stride in zip(shapes[place], facts[place][_STRIDES], strict=True):
                    reach += (n - 1) * stride
                sizes[place] = reach * call.steps[place] + call.rests[place]
            else:
                sizes[place] = 0
        return Found(call, shapes, facts, lengths, sizes)

    def _outputs(self, arrays: Sequence[Any]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Places of outputs that are given, each with the places that it may not overlap."""
        given = [
            (place, argument)
            for place, argument in enumerate(self._arguments)
            if argument.is_planned or (place < len(arrays) and arrays[place] is not None)
        ]
        return tuple(
            (
                place,
                tuple(
                    other
                    for other, beside in given
                    if other != place and not (argument.interleaves and beside.interleaves)
                ),
            )
            for place, argument in given
            if self._is_written(argument, arrays)
        )

    def _pairs(self, arrays: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """`CachedCall.pairs` of a call with these arrays."""
        within = [
            place
            for place, argument in enumerate(self._arguments[: len(arrays)])
            if argument.interleaves
            and arrays[place] is not None
            and self._is_written(argument, arrays)
        ]
        return tuple(itertools.combinations(within, 2))

    def _is_written(self, argument: Argument, arrays: Sequence[Any]) -> bool:
        if argument.written_with is None:
            return argument.is_output
        place = [x.name for x in self._arguments].index(argument.written_with)
        return place < len(arrays) and arrays[place] is not None


def _maker(
    dtype: DType, like: ArrayView, shape: Sequence[int] | None
) -> Callable[[Sequence[int]], Any]:
    """A function that makes contiguous arrays of shapes like this one, of any first extent."""
    if shape is None or like.framework != "torch":
        return array.allocator(dtype, like)
    # A third cheaper than torch.empty, which reads a shape twice.
    torch = sys.modules["torch"]
    return functools.partial(
        torch.empty_strided,
        stride=tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))),
        dtype=getattr(torch, dtype.name),
        device=like.owner.device,
    )


def _maker_like(x: Any, dtype: DType, shape: Sequence[int] | None) -> Callable[[Any], Any] | None:
    """A function that makes contiguous arrays like this one, where outputs have its shape; it takes
    a quarter less than `_maker`'s. None where they do not, or for other frameworks than torch."""
    torch = sys.modules.get("torch")
    if shape is None or torch is None or type(x) is not torch.Tensor:
        return None
    is_alike = tuple(x.shape) == tuple(shape) and x.dtype is getattr(torch, dtype.name, None)
    return torch.empty_like if is_alike and x.is_contiguous() else None


_caches: list[CallCache[Any]] = []


def clear_all() -> None:
    """Forget every call: a forked process and tests have another device under the library."""
    _framework_by_type.clear()
    for cache in _caches:
        cache.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=clear_all)
