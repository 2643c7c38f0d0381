"""Launches the share_indices kernel: whole lengths and indices to those of a rank's keys."""

from __future__ import annotations

import struct
from typing import NamedTuple

from ... import jit
from ...core.device import device_props
from ...core.key_share import KeyShare
from ..driver import params
from ..driver.enqueue import Launch, enqueue

_THREADS = 256
_MAX_BLOCKS = 2**31 - 1
# ShareForm of kernels/cupyattn/params/page.cuh.
LENGTHS, INDICES, LISTS = range(3)
CONFIGS = tuple(jit.Config({"kForm": form, "kThreads": _THREADS}) for form in range(3))
# kernels/cupyattn/params/page.cuh
SHARE_INDICES = struct.Struct(f"<6Q 2Q 5q 2i {params.KEY_SHARE.size}s")


class Form(NamedTuple):
    """What calls of one signature have in common. Strides are in elements.

    num_columns  of each row of a list, else 1
    rows_of_table  rows that read by one page table
    """

    num_columns: int = 1
    is_wide: bool = False
    are_lens_wide: bool = False
    are_tables_wide: bool = False
    lens_stride: int = 0
    table_stride: int = 0
    table_width: int = 0
    page_size: int = 1


class ShareIndices(NamedTuple):
    """A launch for arrays of one look, wherever they are and however many rows they have."""

    function: int
    form: Form
    is_list: bool
    share: bytes
    device_index: int

    def enqueue(
        self,
        stream: int,
        num_rows: int,
        numbers: int,
        out: int,
        lens: int = 0,
        tables: int = 0,
        counts: int = 0,
        num_tables: int = 1,
    ) -> None:
        """Launch on arrays at these addresses, 0 for those that are not there."""
        form = self.form
        arguments = params.this_thread.launch_buffer
        SHARE_INDICES.pack_into(
            arguments.buffer,
            arguments.offset,
            numbers,
            form.is_wide,
            lens,
            form.are_lens_wide,
            tables,
            form.are_tables_wide,
            out,
            counts,
            num_rows,
            form.num_columns,
            form.lens_stride,
            form.table_stride,
            num_rows // num_tables,
            form.table_width,
            form.page_size,
            self.share,
        )
        blocks = num_rows if self.is_list else -(-num_rows * form.num_columns // _THREADS)
        launch = Launch(self.function, (min(blocks, _MAX_BLOCKS), 1, 1), _THREADS, 0)
        enqueue(launch, arguments, self.device_index, stream)


def prepare(what: int, form: Form, share: KeyShare, device: int) -> ShareIndices:
    """The launch of LENGTHS, INDICES or LISTS on a device."""
    kernel = jit.load("share_indices", CONFIGS[what], device, device_props(device).arch)
    return ShareIndices(kernel.function, form, what == LISTS, params.share_numbers(share), device)
