"""Attention calls without a plan: lengths, offsets and page tables stay in device memory.

A call is checked by what the host can see: shapes, dtypes, strides. A block on the device then
reads the lengths and writes the work list (launch/attention/plan_batch.py) before the kernels,
which are those of the wrappers. The host copies nothing and waits for nothing, so that a graph can
capture a call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import require_output
from ..core import dtypes
from ..errors import WorkspaceError
from ..launch.driver import scratch
from ..launch.driver.enqueue import cuda
from . import planless_reference as reference
from . import row_mask
from .arrays import NO_MORE, Arrays, MoreArrays
from .call_cache import CallOptions
from .check_planless import Call, Options, check
from .kept_list import KeptList
from .planless_cache import CALLS, Append, Asked, insert, prepared_for, repeat_of
from .prepared import Launches, Prepared, is_bool_mask, prepare
from .prepared_lists import prepare_lists
from .views import merge_leading
from .workspace import num_bytes, view_workspace

_Q, _K, _V, _WORKSPACE, _OUT, _LSE = map(
    Arrays._fields.index, ("q", "k", "v", "workspace", "out", "lse")
)


class CallerOptions(Protocol):
    """The options of a function as its caller gave them, by name and hashable.

    With the shapes, strides and dtypes of the arrays they decide all that is checked.
    """

    def resolve(self, arrays: Arrays) -> Options:
        """What the checks go by. Raises ArgumentError and UnsupportedError."""
        ...


def run(
    arrays: Arrays,
    options: CallerOptions,
    append: Append | None = None,
    asked: Asked | None = None,
) -> Any:
    """The output of a call: out, or (out, lse) if `return_lse`.

    append  what writes new keys and values to k and v, once everything is checked
    asked   the call as its caller made it, if `arrays` are others; it was looked up before
    """
    if asked is None or not asked.covers(arrays, append):
        output = run_cached(arrays, options, append)
        if output is not None:
            return output
        asked = Asked(arrays, options, {})
    return _serve(check(arrays, options.resolve(arrays)), arrays, asked, append)


def _serve(call: Call, arrays: Arrays, asked: Asked, append: Append | None) -> Any:
    """The output of a checked call, which `run_cached` finds as it was asked from now on."""
    vq = call.q
    vworkspace = _view_workspace(arrays.workspace, call)
    have = None if vworkspace is None else num_bytes(vworkspace)

    # --- 1. Compute on the CPU ---
    if vq.device.kind == "cpu":
        if have is not None and vq.shape[0]:
            _require_size(have, prepare(_with_outputs(call), have).num_bytes)
        return reference.attend(call, arrays, append)

    # --- 2. Make outputs that are not passed ---
    out, lse = arrays.out, arrays.lse
    if out is None:
        out = array.empty(call.out_shape, call.geometry.spec.dtype_o, vq)
        call.out = merge_leading(array.view(out, "out"), "out", 2)
    if lse is None and call.return_lse:
        lse = array.empty(call.lse_shape, dtypes.float32, vq)
        call.lse = call.view_lse(lse)
    prepared: Launches | None = None
    if call.launches:
        if cuda().is_debugging:
            reference.check_values(call)
        prepared = prepare(call, have) if call.lists is None else prepare_lists(call)
        if have is not None:
            _require_size(have, prepared.num_bytes)

    # --- 3. Launch on the caller's stream ---
    if append is not None:  # nothing is refused from here on
        append()
    if prepared is not None:
        _launch(call, prepared, vworkspace)
        # What is made in a graph that is captured is the graph's.
        is_kept = not asked.shared or not cuda().is_capturing(array.current_stream(vq))
        if is_kept and not cuda().is_debugging:
            repeat = repeat_of(call, arrays, prepared)
            if repeat is not None:
                insert(asked, call, asked.again(repeat, arrays, append))
    out = array.deliver(out, vq)
    return (out, array.deliver(lse, vq)) if call.return_lse else out


def run_cached(
    arrays: Arrays,
    options: CallOptions,
    append: Append | None = None,
    more: MoreArrays | None = None,
    kept: KeptList | None = None,
) -> Any:
    """The output of `run` if such a call is in the cache, else None. kept: a work list that may
    serve it."""
    known = CALLS.lookup(arrays if more is None else arrays + more, options)
    if known is None:
        return None
    cached, addresses = known
    call = cached.call
    if call.outputs and cached.apart.get(addresses[_K]) != addresses:
        if not cached.is_apart(addresses, _K):
            return None  # its arrays do not fit each other
    checked = call.checked
    prepared = cached.prepared or prepared_for(cached)
    if prepared is None:
        return None
    out, lse = arrays.out, arrays.lse
    if out is None:
        if call.make_like is None:
            out = call.make_out((cached.lengths[_Q], *checked.row_shape))
        else:
            out = call.make_like(arrays.q)
        addresses[_OUT] = call.address(out)
    if lse is None and checked.return_lse:
        lse = call.make_lse(prepared.lse_shape)
        addresses[_LSE] = call.address(lse)
    addresses[_V] = (addresses[_V] or addresses[_K]) + checked.v_offset
    for index, address, _ in prepared.shared:
        addresses[index] = addresses[index] or address
    owner: object = None
    stream = call.current_stream()
    if not addresses[_WORKSPACE] and prepared.num_bytes:
        addresses[_WORKSPACE], owner = scratch.workspace(
            prepared.num_bytes, prepared.device_index, stream, checked.allocate
        )
    if append is not None:
        append()
    elif prepared.before is not None:
        space = addresses[_WORKSPACE] + prepared.num_bytes - prepared.before.num_bytes
        prepared.before.launch(addresses, space, stream)
    if kept is None:
        prepared.launch(addresses, stream, checked.allocate)
    else:
        kept.launch(prepared, addresses, stream, checked.allocate)
    del owner  # memory for one call may go once everything is enqueued
    return (out, lse) if checked.return_lse else out


def _view_workspace(x: Any, call: Call) -> ArrayView | None:
    """The workspace, checked. A JAX array, which cannot be written, counts as none."""
    if x is None or array.view(x, "workspace_buffer").framework == "jax":
        return None
    v = view_workspace(x, "workspace_buffer")
    inputs = call.inputs
    array.same_device(**inputs, workspace_buffer=v)
    require_output(v, "workspace_buffer", **inputs, **{call.names.out: call.out, "lse": call.lse})
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
        lse = call.view_lse(np.empty(call.lse_shape, np.float32))
    return replace(call, out=out, lse=lse)


def _launch(call: Call, prepared: Launches, vworkspace: ArrayView | None) -> None:
    vq = call.q
    stream = array.current_stream(vq)
    owner: object = None
    allocate, workspace = scratch.allocator(vq), 0
    if vworkspace is not None:
        workspace = vworkspace.ptr
    elif prepared.num_bytes:
        workspace, owner = allocate(prepared.num_bytes)
    views = _views(call)
    used = [v for v in (*views, vworkspace) if v is not None and v is not vq]
    array.acquire(vq, *used)
    addresses = Arrays(*(0 if x is None else x.ptr for x in views))
    mask = addresses.mask
    if call.mask is not None and is_bool_mask(call):
        assert isinstance(prepared, Prepared)
        mask = workspace + prepared.mask.address
        row_mask.pack(call.mask, vq.shape[0], call.mask_bits, mask, stream)
    addresses = addresses._replace(workspace=workspace, mask=mask)
    prepared.launch(addresses + (0,) * len(NO_MORE), stream, allocate)
    array.release(vq, vq, *used)
    del owner  # memory for one call may go once everything is enqueued


def _views(call: Call) -> Arrays:
    """Its arrays as launches take them, by role."""
    indices, scales, queries, pages = call.indices, call.scales, call.queries, call.pages
    of_roles = {name: v for name, v in zip(scales.names, scales.views, strict=True) if name}
    return Arrays(
        q=call.q,
        k=call.keys.k,
        v=call.keys.v if pages is None else None,
        block_tables=call.block_tables,
        kv_lens=indices.kv_lens,
        out=call.out,
        lse=call.lse,
        qo_lens=indices.qo_lens,
        qo_offsets=indices.qo_offsets,
        kv_offsets=indices.kv_offsets,
        sinks=call.sinks,
        mask=call.mask,
        kv_begin=indices.kv_begin,
        alibi_slopes=call.alibi_slopes,
        output_gate=call.output_gate,
        q_rope=None if queries is None else queries.rope,
        k_rope=None if pages is None else pages.rope,
        max_logits=call.max_logits,
        lists=call.lists,
        **of_roles,
    )
