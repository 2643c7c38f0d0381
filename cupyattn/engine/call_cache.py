"""The call cache: from the signature of a call to its checked launch.

Calls of a decoding loop differ in addresses, and some of them in lengths. All other facts that the
checks depend on form the signature of a call. Two calls with equal signature pass the same checks,
so only lengths and addresses are compared before the launch. The cache raises no error: a call that
it does not find goes through the full checks, which raise the error if there is one, and a call
that cannot be kept has its outputs all the same.

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
_Params = ParamSpec("_Params")
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
CallOptions: TypeAlias = Any
_Compare: TypeAlias = Callable[[Sequence[Any]], "list[int] | None"]


class _Tensors(NamedTuple):
    """The tensors of a call, each once: where they are, their sizes and strides with None for what
    may be another; and of those that are several arguments, index -> first index."""

    indices: list[int]
    sizes: list[list[Any]]
    strides: list[list[Any]]
    repeated: dict[int, int]

    @classmethod
    def of(
        cls, arrays: Sequence[Any], axes: Sequence[int | None] | None, free: Sequence[int]
    ) -> _Tensors | None:
        """None where a tensor that is several arguments may be another for one of them."""
        tensors = cls([], [], [], {})
        for index, x in enumerate(arrays):
            if x is None:
                continue
            size, stride = [*x.shape], [*x.stride()]
            axis = None if axes is None else axes[index]
            if index in free:
                size, stride = ([None] * x.dim() for _ in "ss")
            elif axis is not None and axis < x.dim():
                size[axis] = None
            first = next((i for i, known in enumerate(tensors.indices) if arrays[known] is x), None)
            if first is None:
                tensors.indices.append(index)
                tensors.sizes.append(size)
                tensors.strides.append(stride)
            elif size == tensors.sizes[first]:
                tensors.repeated[index] = tensors.indices[first]
            else:
                return None
        return tensors

    def guards(self, arrays: Sequence[Any]) -> Callable[..., bool] | None:
        """What compares tensors in C++: types, dtypes, shapes, strides, devices, and whether
        gradients or signs are pending. None of a torch that has that in another form."""
        torch = sys.modules["torch"]
        own = [arrays[index] for index in self.indices]
        try:
            compiled = torch._C._dynamo.guards.TensorGuards(
                *own, dynamic_dims_sizes=self.sizes, dynamic_dims_strides=self.strides
            )
            address_of = torch.Tensor.data_ptr
            is_plain = all(type(x).data_ptr is address_of for x in own)
            return compiled.check if is_plain and compiled.check(*own) else None
        except Exception:
            return None


def _comparer_torch(
    arrays: Sequence[Any],
    facts: list[Any],
    num_arguments: int,
    axes: Sequence[int | None] | None = None,
    free: Sequence[int] = (),
) -> _Compare | None:
    """A comparison of later calls with this one, None where this torch has none. It returns
    num_arguments addresses, though arrays end early.

    axes: of lengths that may be others, free: indices of arrays with any lengths and strides. A
    tensor that is several arguments, such as offsets of q and k, is compared once, and later ones
    must be the same arguments.
    """
    tensors_of = _Tensors.of(arrays, axes, free)
    are_equal = None if tensors_of is None else tensors_of.guards(arrays)
    if tensors_of is None or are_equal is None:
        return None
    indices, repeated = tensors_of.indices, tensors_of.repeated
    # Arguments that are mostly None are the last ones: one look at the slice is all they cost.
    end = max([*indices, *repeated]) + 1
    absent = [index for index in range(end) if arrays[index] is None]
    fills = [(index, repeated.get(index)) for index in range(end) if index not in indices]
    same = list(repeated.items())
    offsets = [facts[index][_OFFSET] for index in indices]
    are_aligned = offsets == [0] * len(indices)
    only = slice(indices[0], indices[0] + 1)
    pick = operator.itemgetter(*indices) if len(indices) > 1 else operator.itemgetter(only)
    rest, no_addresses = (None,) * (len(arrays) - end), [0] * (num_arguments - end)
    lowest, address_of = LOWEST_ADDRESS, sys.modules["torch"].Tensor.data_ptr

    def compare(arrays: Sequence[Any]) -> list[int] | None:
        if len(arrays) < end or (arrays[end:] != rest and any(x is not None for x in arrays[end:])):
            return None
        for index in absent:
            if arrays[index] is not None:
                return None
        for index, first in same:
            if arrays[index] is not arrays[first]:
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
        for index, source in fills:
            addresses.insert(index, 0 if source is None else addresses[source])
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
    """An array that a way to call takes; None stands for an optional array that is not passed.

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

    checked    what the function made of a call that passed its checks
    axes       (index, length_axis) of arrays that are passed and have that axis
    fixed      indices of arrays that have such an axis, and whose length belongs to the signature
    steps, rests   of each array: n rows along its length_axis lie within step * n + rest bytes; of
               a free one the bytes of a unit of stride, and of an element
    outputs    indices of outputs that are passed, each with those of arrays that it may not overlap
    pairs      indices of outputs that may lie within each other, but not at one address
    make_out, make_lse   make outputs of a shape like that of the first call, of any length
    make_like  makes what make_out does, of the first array, in less time; None where that differs
    address    of an array that they have made
    compare    compares all of the signature, not lengths; None where the framework has no such way
    num_renewed  how often that was made anew
    by_lengths   what the way to call made for some lengths, and keeps here
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
    by_lengths: dict[Any, Any] = field(default_factory=dict)

    def overlaps(self, addresses: list[int], sizes: Sequence[int]) -> bool:
        """Whether the bytes of an output meet those of another array; the full checks find out
        whether they share an element."""
        for index, others in self.outputs:
            low = addresses[index]
            high = low + sizes[index]
            for other in others:
                address = addresses[other]
                if address < high and low < address + sizes[other]:
                    return True
        return any(addresses[index] == addresses[other] for index, other in self.pairs)


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
        """`Apart` of calls whose arrays may not lie in the same memory."""
        if len(self.apart_from) >= _MAX_WORKSPACES:
            self.apart_from.clear()
        return self.apart_from.setdefault(clear, Apart())

    def is_apart(self, addresses: list[int], key: int) -> bool:
        """Whether no output has bytes of another array. key: the index of keys."""
        if self.apart.get(addresses[key]) == addresses:
            return True
        if self.call.overlaps(addresses, self.sizes):
            return False
        self.apart.add(addresses[key], addresses.copy())
        return True

    def strides(self, index: int) -> tuple[int, ...]:
        """The strides of a free array, in elements."""
        strides: tuple[int, ...] = self.facts[index][_STRIDES]
        unit, itemsize = self.call.steps[index], self.call.rests[index]
        if unit == itemsize:
            return strides
        return tuple(stride * unit // itemsize for stride in strides)


@dataclass(slots=True, eq=False)
class _Group(Generic[_Checked]):
    """The cached calls with equal options, by facts without lengths.

    last  the last of them: to compare facts is faster than to hash them
    fixed  what these calls have as `CachedCall.fixed`
    zeros_and_ones  indices of options that are numbers 0 or 1, to which a bool would be equal
    """

    last: Found[_Checked]
    calls: dict[tuple[Any, ...], CachedCall[_Checked]]
    fixed: dict[tuple[int, ...], None]
    zeros_and_ones: list[int]


def report(error: Exception) -> None:
    """Say that a call could not be kept. The tests let this raise."""
    _log.warning("a call was served, but cannot be cached: %r", error)


def after_launch(keep: Callable[_Params, _Kept | None]) -> Callable[_Params, _Kept | None]:
    """A decorator of what keeps a call that was launched: it cannot fail the call any more."""

    @functools.wraps(keep)
    def keep_or_report(*args: _Params.args, **named: _Params.kwargs) -> _Kept | None:
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
        self._free = [index for index, argument in enumerate(arguments) if argument.is_free]
        self._absent = [0] * len(arguments)
        # By the type of options too: records of two types with equal fields are not one call.
        self._groups: defaultdict[type, dict[CallOptions, _Group[_Checked]]] = defaultdict(dict)
        self._num_calls = 0
        _caches.append(self)

    def __len__(self) -> int:
        return self._num_calls

    def clear(self) -> None:
        self._groups.clear()
        self._num_calls = 0

    def lookup(
        self, arrays: Sequence[Any], options: CallOptions
    ) -> tuple[Found[_Checked], list[int]] | None:
        """The cached call of equal signature, and addresses of the arrays, 0 for none; or None.

        `arrays` may end early, `options` are all other arguments.
        """
        try:
            # CallOptions are hashed, so that arrays among them are never compared.
            group = self._groups[type(options)].get(options)
            if group is None:
                return None
            for index in group.zeros_and_ones:
                if type(options[index]) in BOOLS:
                    return None
            cached = group.last  # another thread may replace it at any time
            addresses = None if cached.compare is None else cached.compare(arrays)
            if addresses is None:
                other = self._lookup_other(group, arrays)
                if other is None:
                    return None
                cached, addresses = other
        except Exception:  # arguments raise what they like when they are read or hashed
            return None
        if recording.current is not None:
            recording.keep((cached, arrays))
        if len(addresses) < len(self._absent):  # `arrays` ended early
            addresses += self._absent[len(addresses) :]
        return cached, addresses

    def _lookup_other(
        self, group: _Group[_Checked], arrays: Sequence[Any]
    ) -> tuple[Found[_Checked], list[int]] | None:
        """`lookup` of arrays that differ from the last call's in more than addresses, or may."""
        framework = _framework_by_type.get(type(arrays[0]))
        if framework is None:
            return None
        cached = group.last
        if cached.call.compare is not None:
            addresses = cached.call.compare(arrays)
            if addresses is not None:
                cached = group.last = self._last_at_shapes_of(cached, arrays, framework)
                return cached, addresses
        addresses, shapes, facts = framework.read(arrays)
        if shapes == cached.shapes and facts == cached.facts:
            if cached.call.compare is not None:
                self._renew(cached, arrays, framework)
            return cached, addresses
        other = self._of_shapes(group, cached, shapes, facts)
        if other is not None:
            group.last = other
        return None if other is None else (other, addresses)

    def _renew(self, cached: Found[_Checked], arrays: Sequence[Any], framework: _Framework) -> None:
        """Compare later calls with this one, which torch calls different where all facts are equal:
        it was made in another mode, such as inference_mode(), and so will be those behind it."""
        call = cached.call
        if call.num_renewed >= _MAX_RENEWED:
            return
        call.num_renewed += 1
        varying = self._varying(call.fixed)
        call.compare = framework.comparer(
            arrays, cached.facts, len(self._axes), varying, self._free
        )
        cached.compare = framework.comparer(arrays, cached.facts, len(self._axes))

    def _varying(self, fixed: tuple[int, ...]) -> list[int | None]:
        """The axes of lengths that later calls may have others of."""
        return [None if index in fixed else axis for index, axis in enumerate(self._axes)]

    def _of_shapes(
        self, group: _Group[_Checked], last: Found[_Checked], shapes: list[Any], facts: list[Any]
    ) -> Found[_Checked] | None:
        """The call of arrays that the last one's are not like."""
        known = self._last_at_lengths_of(last, shapes) if facts == last.facts else None
        return known or self._find(group, shapes, facts)

    def _last_at_shapes_of(
        self, last: Found[_Checked], arrays: Sequence[Any], framework: _Framework
    ) -> Found[_Checked]:
        """The last call for arrays that differ from its own in nothing but lengths."""
        shapes = [None if x is None else x.shape for x in arrays]
        if shapes == last.shapes and not self._free:
            last.compare = framework.comparer(arrays, last.facts, len(self._axes))
            return last
        facts, lengths = last.facts, self._absent.copy()
        for index, axis in last.call.axes:
            lengths[index] = shapes[index][axis]  # type: ignore[index]
        if self._free:
            facts = [*facts]
            for index in self._free:
                shape = shapes[index] if index < len(shapes) else None
                if shape is not None:
                    kind, dtype, _, *rest = facts[index]
                    facts[index] = kind, dtype, arrays[index].stride(), *rest
                    lengths[index] = shape[0] if shape else 0
            if shapes == last.shapes and facts == last.facts:
                last.compare = framework.comparer(arrays, facts, len(self._axes))
                return last
        return self._at_shapes(last.call, shapes, facts, lengths)

    def _last_at_lengths_of(
        self, last: Found[_Checked], shapes: list[Any]
    ) -> Found[_Checked] | None:
        """The last call with other lengths, None if other extents differ too."""
        lengths, sizes = last.lengths.copy(), last.sizes.copy()
        axes, steps = self._axes, last.call.steps
        for index, (new, old) in enumerate(zip(shapes, last.shapes, strict=True)):
            if new != old:
                axis = axes[index]
                if axis is None or index in last.call.fixed:
                    return None
                known = [*old]
                known[axis] = length = new[axis]
                if known != [*new]:
                    return None
                sizes[index] += (length - lengths[index]) * steps[index]
                lengths[index] = length
        return Found(last.call, shapes, last.facts, lengths, sizes)

    def _find(
        self, group: _Group[_Checked], shapes: list[Any], facts: list[Any]
    ) -> Found[_Checked] | None:
        for fixed in (*group.fixed,):  # another thread may add to it at any time
            key, lengths = self._signature(shapes, facts, fixed)
            call = group.calls.get(key)
            if call is not None:
                return self._at_shapes(call, shapes, facts, lengths)
        return None

    def _axes_of(self, shapes: list[Any]) -> tuple[tuple[int, int], ...]:
        """`CachedCall.axes` of a call with these shapes."""
        pairs = enumerate(zip(self._axes, shapes, strict=False))
        return tuple((at, a) for at, (a, x) in pairs if a is not None and x and a < len(x))

    def _signature(
        self, shapes: list[Any], facts: list[Any], fixed: tuple[int, ...]
    ) -> tuple[tuple[Any, ...], list[int]]:
        """(shapes without lengths, but for `fixed` arrays, and all facts; lengths)."""
        lengths = self._absent.copy()
        extents = [*shapes]
        for index, axis in self._axes_of(shapes):
            shape = shapes[index]
            lengths[index] = shape[axis]
            if index not in fixed:
                extents[index] = shape[:axis], shape[axis + 1 :]
        if self._free:
            facts = [*facts]
            for index in self._free:
                if index < len(shapes) and shapes[index] is not None:
                    kind, dtype, strides, *rest = facts[index]
                    lengths[index] = shapes[index][0] if shapes[index] else 0
                    extents[index] = len(strides)
                    facts[index] = kind, dtype, *rest
        return (*extents, *facts), lengths

    @after_launch
    def insert(
        self,
        arrays: Sequence[Any],
        options: CallOptions,
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
            group = self._groups[type(options)].get(options)
        except (AttributeError, TypeError):  # another framework's; an argument without a hash
            return None
        extents = self._extents_of(framework, arrays, shapes, facts)
        if extents is None:
            return None
        steps, rests = extents
        axes = self._axes_of(shapes)
        fixed = tuple(
            index
            for index, axis in axes
            if shapes[index][axis] == 1
            or (rests[index] > 0 and self._is_written(self._arguments[index], arrays))
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
        key, lengths = self._signature(shapes, facts, fixed)
        if self._num_calls >= _MAX_CALLS:
            self.clear()
            group = None
        cached = self._at_shapes(call, shapes, facts, lengths)
        own_zeros_and_ones = zeros_and_ones(options)
        if group is not None and group.zeros_and_ones != own_zeros_and_ones:
            self._num_calls -= len(group.calls)
            del self._groups[type(options)][options]
            group = None
        if group is None:
            group = self._groups[type(options)][options] = _Group(
                cached, {}, {}, own_zeros_and_ones
            )
        known = group.calls.get(key)
        if known is None:
            self._num_calls += 1
        else:
            call.by_lengths = known.by_lengths
        group.fixed[fixed] = None
        group.calls[key], group.last = call, cached
        _framework_by_type[type(arrays[0])] = framework
        return cached

    def _extents_of(
        self, framework: _Framework, arrays: Sequence[Any], shapes: list[Any], facts: list[Any]
    ) -> tuple[list[int], list[int]] | None:
        """`CachedCall.steps` and `rests`; None if there is an array by which nothing is cached."""
        all_steps, rests = self._absent.copy(), self._absent.copy()
        for index, (x, shape, fact) in enumerate(zip(arrays, shapes, facts, strict=True)):
            if fact is None:
                continue
            _, _, strides, device, is_refused, offset = fact
            if is_refused or offset is None or device != facts[0][_DEVICE]:
                return None
            if 0 in shape or min(strides, default=0) < 0:
                return None
            # Scales and the like may come without any axis.
            axis = self._axes[index]
            if axis is not None and axis >= len(shape):
                axis = None
            unit = framework.stride_bytes(x)
            if self._arguments[index].is_free:
                all_steps[index], rests[index] = unit, framework.itemsize(x)
                continue
            steps = [stride * unit for stride in strides]
            step = 0 if axis is None else steps[axis]
            span = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
            rest = span + framework.itemsize(x) - step * (1 if axis is None else shape[axis])
            all_steps[index], rests[index] = step, rest
        return all_steps, rests

    def _at_shapes(
        self, call: CachedCall[_Checked], shapes: list[Any], facts: list[Any], lengths: list[int]
    ) -> Found[_Checked]:
        sizes = call.rests.copy()
        for index, _ in call.axes:
            sizes[index] += lengths[index] * call.steps[index]
        for index in self._free:
            if index < len(shapes) and shapes[index] is not None:
                reach = 0
                for n, stride in zip(shapes[index], facts[index][_STRIDES], strict=True):
                    reach += (n - 1) * stride
                sizes[index] = reach * call.steps[index] + call.rests[index]
            else:
                sizes[index] = 0
        return Found(call, shapes, facts, lengths, sizes)

    def _outputs(self, arrays: Sequence[Any]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """`CachedCall.outputs` of a call with these arrays."""
        present = [
            (index, argument)
            for index, argument in enumerate(self._arguments)
            if argument.is_planned or (index < len(arrays) and arrays[index] is not None)
        ]
        return tuple(
            (
                index,
                tuple(
                    other
                    for other, other_argument in present
                    if other != index and not (argument.interleaves and other_argument.interleaves)
                ),
            )
            for index, argument in present
            if self._is_written(argument, arrays)
        )

    def _pairs(self, arrays: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """`CachedCall.pairs` of a call with these arrays."""
        within = [
            index
            for index, argument in enumerate(self._arguments[: len(arrays)])
            if argument.interleaves
            and arrays[index] is not None
            and self._is_written(argument, arrays)
        ]
        return tuple(itertools.combinations(within, 2))

    def _is_written(self, argument: Argument, arrays: Sequence[Any]) -> bool:
        if argument.written_with is None:
            return argument.is_output
        index = [x.name for x in self._arguments].index(argument.written_with)
        return index < len(arrays) and arrays[index] is not None


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
