"""Latent attention of tokens over lists of rows of 584 bytes, of one or two caches, by the kernel
that reads such rows as they lie. Nothing is copied ahead, and nothing is planned on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import array
from ..array import ArrayView
from ..array.match import are_rows_aligned
from ..core import dtypes
from ..core.device import device_props
from ..errors import UnsupportedError
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.bound_run import BoundRun
from ..launch.attention.layout import BatchSchedule
from ..launch.driver import params, scratch
from ..launch.ops.gather_keys import NO_KEYS, ListedKeys
from .geometry import PlanOptions, Variant, find_geometry
from .spec import RawOptions
from .views import merge_leading, merge_spread

_COLUMNS = 512  # of a row, all of them its value
_PAGE_SIZE = 64  # lists name slots: any number serves
_MAX_BOUND = 256


@dataclass(frozen=True, slots=True)
class ListedRows:
    """What calls of one signature launch: all but addresses.

    lists      what a launch is told of each cache; addresses are filled in
    latent     params.LATENT
    out_shape  of the output; out_strides and lse_shape follow from it
    bound      launches by where their workspace is
    """

    launcher: BatchLauncher
    schedule: BatchSchedule
    lists: tuple[ListedKeys, ...]
    latent: bytes
    strides: bytes
    sm_scale: float
    lse_form: int
    device_index: int
    out_shape: tuple[int, ...]
    make_out: Callable[[Sequence[int]], Any]
    make_lse: Callable[[Sequence[int]], Any]
    allocate: scratch.Allocate
    bound: dict[int, BoundRun] = field(default_factory=dict)

    def attend(
        self,
        addresses: Sequence[int],
        out: Any,
        address_of: Callable[[Any], int],
        stream: int,
    ) -> tuple[Any, Any]:
        """(out, lse) of arrays at these addresses: q; keys, entries and lens of both caches; sinks.
        out None: it is made."""
        if out is None:
            out = self.make_out(self.out_shape)
        lse = self.make_lse(self.out_shape[:-1])
        self._launch(addresses, address_of(out), address_of(lse), stream)
        return out, lse

    def _launch(self, addresses: Sequence[int], out: int, lse: int, stream: int) -> None:
        q, keys, sinks = addresses[0], addresses[1], addresses[7]
        num_bytes, workspace, owner = self.schedule.workspace_bytes, 0, None
        if num_bytes:
            workspace, owner = scratch.workspace(
                num_bytes, self.device_index, stream, self.allocate
            )
        bound = self.bound.get(workspace) or self._bind(workspace)
        optional = params.OPTIONAL.pack(lse, 0, sinks, 0, 0, 0, 0, params.NO_STEPS, b"")
        told = [self.latent]
        for index, x in enumerate(self.lists):
            of_keys, of_entries, of_lens = addresses[3 * index + 1 : 3 * index + 4]
            told.append(x.pack_at(of_keys, of_entries, of_lens))
        behind = b"".join(told)
        bound.launch(q, keys, keys, out, optional, stream, behind)
        del owner

    def _bind(self, workspace: int) -> BoundRun:
        if len(self.bound) >= _MAX_BOUND:
            self.bound.clear()
        bound = self.bound[workspace] = self.launcher.bind(
            self.schedule,
            workspace,
            workspace,
            self.strides,
            0,
            0,
            0,
            0,
            1.0,
            self.sm_scale,
            lse_scale=math.log(2.0),
            lse_form=self.lse_form,
        )
        return bound


def may_read_rows(q: ArrayView, out: ArrayView | None, sm_scale: float) -> bool:
    """Whether Hopper's kernel takes such queries and output."""
    if q.device.kind == "cpu" or device_props(q.device.index).arch != "sm_90a":
        return False
    if q.shape[3] != _COLUMNS or sm_scale <= 0.0 or 0 in q.shape:
        return False
    if q.dtype is not dtypes.bfloat16:
        return False
    rows = [q] if out is None else [q, out]
    pointers = 0
    for x in rows:
        pointers |= x.ptr
    if any(x.strides[3] != 1 for x in rows):
        return False
    return are_rows_aligned(pointers, [(x.strides[:3], x.dtype) for x in rows])


def prepare(
    q: ArrayView,
    out: ArrayView | None,
    lists: Sequence[ListedKeys],
    sm_scale: float,
    lse_form: int,
) -> ListedRows | None:
    """The launches of calls like one with these arrays, for which `may_read_rows` is true; None
    where the device has no such kernel."""
    count, tokens, heads, _ = q.shape
    rows, gap = merge_spread(q, "q", 2)
    q_token, q_head, _ = rows.strides
    raw = RawOptions(
        causal=False,
        sm_scale=sm_scale,
        o_dtype=q.dtype,
        latent=True,
        sparse=True,
    )
    options = PlanOptions(
        q.device, heads, 1, _COLUMNS, _COLUMNS, _PAGE_SIZE, q.dtype, dtypes.float8_e4m3fn, None, raw
    )
    launcher = find_geometry(options).launcher(Variant(True, False, key_scales="pages"))
    length = sum(x.length for x in lists)
    try:
        schedule = launcher.schedule_lists(count * tokens, length)
    except UnsupportedError:
        return None
    assert schedule is not None
    out_token, out_head = heads * _COLUMNS, _COLUMNS
    if out is not None:
        out_token, out_head, _ = merge_leading(out, "out", 2).strides
    latent = (
        params.LATENT_PLACES.pack(0, 0)
        + params.LATENT_REST.pack(0, 0, 0, 0, 1.0, 0, gap, 0)
        + params.LATENT_OF_LISTS.pack(0, 0)
        + params.LATENT_COUNTS.pack(0, tokens, 0, lists[0].num_slots)
    )
    return ListedRows(
        launcher=launcher,
        schedule=schedule,
        lists=tuple((*lists, NO_KEYS)[:2]),
        latent=latent,
        strides=params.STRIDES.pack(
            q_token, q_head, 0, 0, 0, 0, out_token, out_head, heads, 1, 0, 0
        ),
        sm_scale=sm_scale,
        lse_form=lse_form,
        device_index=q.device.index,
        out_shape=(count, tokens, heads, _COLUMNS),
        make_out=array.allocator(q.dtype, q),
        make_lse=array.allocator(dtypes.float32, q),
        allocate=scratch.allocator(q),
    )
