"""Launches the gather_keys kernel: keys that tokens list, of one or two caches, side by side."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ... import jit
from ...core.device import device_props
from ..driver import params
from ..driver.enqueue import MAX_GRID_YZ, Launch, enqueue

_THREADS = 256
_WARPS = _THREADS // 32
# KeyForm of kernels/cupyattn/params/gather_keys.cuh.
PLAIN, SCALED_ROWS, SCALED_PAGES = range(3)
CONFIGS = tuple(jit.Config({"kForm": form, "kThreads": _THREADS}) for form in range(3))
# kernels/cupyattn/params/listed_keys.cuh, gather_keys.cuh
_LIST = struct.Struct("<3Q 4q 4i")
_PARAMS = struct.Struct(f"<{2 * _LIST.size}s 2Q 4i")
VECTOR = 16  # bytes that a thread copies


class ListedKeys(NamedTuple):
    """A cache, and the slots of it that tokens list.

    keys, entries, lens  addresses; lens 0: all entries count
    page_bytes, row_bytes  from a page, and a row within it, to the next
    request_step, token_step  elements from the lists of a request, and a token, to the next
    """

    keys: int
    entries: int
    lens: int
    page_bytes: int
    row_bytes: int
    request_step: int
    token_step: int
    length: int
    num_slots: int
    page_size: int

    def pack(self) -> bytes:
        """As kernels have it."""
        return self.pack_at(self.keys, self.entries, self.lens)

    def pack_at(self, keys: int, entries: int, lens: int) -> bytes:
        """The same of arrays at other addresses."""
        return _LIST.pack(
            keys,
            entries,
            lens,
            self.page_bytes,
            self.row_bytes,
            self.request_step,
            self.token_step,
            self.length,
            self.num_slots,
            self.page_size,
            0,
        )


NO_KEYS = ListedKeys(0, 0, 0, 0, 0, 0, 0, 0, 0, 1)


class Target(NamedTuple):
    """Where keys go, without gaps, and int32 [tokens, all entries] that say which are keys.

    tokens_of_request  of num_tokens, which a request has
    key_bytes, row_bytes  of a key, and of a row there, which ends in zeros; whole vectors
    """

    keys: int
    entries: int
    num_tokens: int
    tokens_of_request: int
    key_bytes: int
    row_bytes: int


def launch(
    form: int, lists: Sequence[ListedKeys], target: Target, device: int, stream: int
) -> None:
    """Enqueue a gather of one or two lists of keys in this form."""
    length = sum(x.length for x in lists)
    if not length or not target.num_tokens:
        return
    kernel = jit.load("gather_keys", CONFIGS[form], device, device_props(device).arch)
    packed = b"".join(x.pack() for x in (*lists, NO_KEYS)[:2])
    arguments = params.this_thread.launch_buffer
    _PARAMS.pack_into(
        arguments.buffer,
        arguments.offset,
        packed,
        target.keys,
        target.entries,
        target.num_tokens,
        target.tokens_of_request,
        target.key_bytes // VECTOR,
        target.row_bytes // VECTOR,
    )
    grid = -(-length // _WARPS), min(target.num_tokens, MAX_GRID_YZ), 1
    enqueue(Launch(kernel.function, grid, _THREADS, 0), arguments, device, stream)
