"""Attention calls without a plan: lengths, offsets and page tables stay in device memory.

A call is checked by what the host can see: shapes, dtypes, strides. A block on the device then
reads the lengths and writes the work list (launch/attention/plan_batch.py) before the kernels,
which are those of the wrappers. The host copies nothing and waits for nothing, so that a graph can
capture a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import require_output
from ..core import dtypes
from ..errors import WorkspaceError
from ..inputs import row_mask
from ..inputs.call_cache import Found, Scalars, after_launch
from ..inputs.workspace import num_bytes, view_workspace
from ..launch.driver import scratch
from ..launch.driver.enqueue import cuda
from . import reference
from .cached import CALLS, Checked, insert, prepared_for
from .check import Arrays, Call, Options, check, inputs_of
from .prepared import Prepared, is_bool_mask, prepare
from .views import Names, merge_leading

_Q, _K, _V, _WORKSPACE, _OUT, _LSE, _SCALE_Q = map(
    Arrays._fields.index,
    ("q", "k", "v", "workspace", "out", "lse", "scale_q"),
)


class DoorOptions(Protocol):
    """The options of a function as its caller gave them, by name and hashable.

    With the shapes, strides and dtypes of the arrays they decide all that is checked.
    """

    def resolve(self, arrays: Arrays) -> Options:
        """What the checks go by. Raises ArgumentError and UnsupportedError."""
        ...


def run(arrays: Arrays, given: DoorOptions, append: Callable[[], None] | None = None) -> Any:
    """The answer of a call: out, or (out, lse) if `return_lse`.

    append: what writes new keys and values to k and v, once everything is checked.
    """
    answer = run_cached(arrays, given, append)
    if answer is not None:
        return answer

    # --- 1. Validate ---
    options = given.resolve(arrays)
    call = check(arrays, options)
    vq = call.q
    vworkspace = _view_workspace(arrays.workspace, call, options.names)

    # --- 2. Answer on the CPU ---
    if vq.device.kind == "cpu":
        if vworkspace is not None and vq.shape[0]:
            have = num_bytes(vworkspace)
            _require_size(have, prepare(_with_outputs(call), have).num_bytes)
        return reference.answer(call, arrays, options.names, append)

    # --- 3. Launch on the caller's stream ---
    out, lse = arrays.out, arrays.lse
    if out is None:
        out = array.empty(call.out_shape, call.geometry.spec.dtype_o, vq)
        call.out = merge_leading(array.view(out, "out"), "out", 2)
    if lse is None and call.return_lse:
        lse = array.empty(call.lse_shape, dtypes.float32, vq)
        call.lse = array.view(lse, "lse")
        if not call.pads_lse:
            call.lse = merge_leading(call.lse, "lse", 1)
    prepared = None
    if vq.shape[0] or (call.lse is not None and call.pads_lse and call.lse.shape[0]):
        if cuda().is_debugging:
            reference.check_values(call, options.names)
        prepared = prepare(call, None if vworkspace is None else num_bytes(vworkspace))
        if vworkspace is not None:
            _require_size(num_bytes(vworkspace), prepared.num_bytes)
    if append is not None:  # nothing is refused from here on
        append()
    if prepared is not None:
        _launch(call, prepared, vworkspace)
        if call.scales.is_constant and not is_bool_mask(call) and not cuda().is_debugging:
            insert(arrays, given, call, prepared)
    out = array.deliver(out, vq)
    return (out, array.deliver(lse, vq)) if call.return_lse else out


def run_cached(arrays: Arrays, given: Scalars, append: Callable[[], None] | None = None) -> Any:
    """The answer of `run` if such a call is in the cache, else None."""
    answer = CALLS.lookup(arrays, given)
    return None if answer is None else _launch_cached(*answer, arrays, append)


@after_launch
def remember(arrays: Arrays, given: Scalars, read: Arrays, options: DoorOptions) -> None:
    """Let `run_cached` find, by what a caller gave, the call that it finds by what kernels read.

    read: views of the arrays, which begin where theirs do, and what all calls of these shapes share
    """
    CALLS.alias(arrays, given, read, options)


def _launch_cached(
    found: Found[Checked],
    addresses: list[int],
    arrays: Arrays,
    append: Callable[[], None] | None,
) -> Any:
    """The answer of a call that was found; None if its arrays do not fit each other."""
    call = found.call
    if call.outputs and not found.is_apart(addresses, _K):
        return None
    checked = call.checked
    prepared = found.prepared
    if prepared is None:
        prepared = found.prepared = prepared_for(found)
        if prepared is None:
            return None
    out, lse = arrays.out, arrays.lse
    if out is None:
        if call.make_like is None:
            out = call.make_out((found.lengths[_Q], *checked.row_shape))
        else:
            out = call.make_like(arrays.q)
        addresses[_OUT] = call.address(out)
    if lse is None and checked.return_lse:
        lse = call.make_lse(prepared.lse_shape)
        addresses[_LSE] = call.address(lse)
    addresses[_V] = (addresses[_V] or addresses[_K]) + checked.v_offset
    if prepared.has_scales:
        places = checked.scale_places
        scales = [0 if place is None else addresses[place] for place in places]
        addresses[_SCALE_Q : _SCALE_Q + len(scales)] = scales
    owner: object = None
    stream = call.current_stream()
    if not addresses[_WORKSPACE]:
        addresses[_WORKSPACE], owner = scratch.workspace(
            prepared.num_bytes, prepared.launcher.device_index, stream, checked.allocate
        )
    if append is not None:
        append()
    prepared.launch(addresses, stream)
    del owner  # memory for one call may go once everything is enqueued
    return (out, lse) if checked.return_lse else out


def _view_workspace(x: Any, call: Call, names: Names) -> ArrayView | None:
    """The workspace, checked. A JAX array, which cannot be written, counts as none."""
    if x is None or array.view(x, "workspace_buffer").framework == "jax":
        return None
    v = view_workspace(x, "workspace_buffer")
    inputs = inputs_of(call, names)
    array.same_device(**inputs, workspace_buffer=v)
    require_output(v, "workspace_buffer", **inputs, **{names.out: call.out, "lse": call.lse})
    return v


def _require_size(have: int, need: int) -> None:
    if have < need:
        raise WorkspaceError(
            f"workspace_buffer: this call needs {need} bytes and it has {have}; pass a larger one"
        )


def _with_outputs(call: Call) -> Call:
    """On the CPU: the call as it would be launched, with memory for outputs that are not given."""
    out, lse = call.out, call.lse
    if out is None:
        shape = (call.q.shape[0], *call.out_shape[-2:])
        out = array.view(np.empty(shape, call.geometry.spec.dtype_o.numpy), "out")
    if lse is None and call.return_lse:
        shape = call.lse_shape if call.pads_lse else call.q.shape[:2]
        lse = array.view(np.empty(shape, np.float32), "lse")
    return replace(call, out=out, lse=lse)


def _launch(call: Call, prepared: Prepared, vworkspace: ArrayView | None) -> None:
    vq, vout, indices = call.q, call.out, call.indices
    assert vout is not None
    stream = array.current_stream(vq)
    owner: object = None
    if vworkspace is None:
        workspace, owner = scratch.allocator(vq)(prepared.num_bytes)
    else:
        workspace = vworkspace.ptr
    inputs = (call.keys.k, call.keys.v, call.block_tables, call.sinks, call.mask, vworkspace)
    used = [
        v
        for v in (*inputs, call.alibi_slopes, call.lse, *indices, *call.scales.views)
        if v is not None
    ]
    array.acquire(vq, vout, *used)
    mask = 0 if call.mask is None else call.mask.ptr
    if call.mask is not None and is_bool_mask(call):
        mask = workspace + prepared.mask.address
        row_mask.pack(call.mask, vq.shape[0], call.mask_bits, mask, stream)
    views = Arrays(
        vq,
        call.keys.k,
        call.keys.v,
        None,
        call.block_tables,
        indices.kv_lens,
        vout,
        call.lse,
        *(indices.qo_lens, indices.qo_offsets, indices.kv_offsets, None, None),
        call.sinks,
        *call.scales.views,
    )
    addresses = Arrays(*(0 if x is None else x.ptr for x in views))
    kv_begin = 0 if indices.kv_begin is None else indices.kv_begin.ptr
    slopes = 0 if call.alibi_slopes is None else call.alibi_slopes.ptr
    addresses = addresses._replace(
        workspace=workspace, mask=mask, kv_begin=kv_begin, alibi_slopes=slopes
    )
    prepared.launch(addresses, stream)
    array.release(vq, vq, vout, *used)
    del owner  # memory for one call may go once everything is enqueued
