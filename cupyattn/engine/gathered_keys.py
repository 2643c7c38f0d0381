"""Lists of latent keys of one or two caches, in any of FlashMLA's rows, as one list of 16-bit rows.

Attention then reads one list of each token. On a GPU a launch puts the listed keys side by side; on
the CPU the caches are joined, as float32 where rows have scales. Hopper's kernels of latent rows
have 64 rope columns behind 512: where there are none, zeros are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import match_contiguous, require_contiguous, require_dtype
from ..core import dtypes
from ..core.device import device_props
from ..errors import ArgumentError, UnsupportedError
from ..launch.ops import gather_keys
from ..reference import latent_rows

# Columns of q, and what a form of fp8 rows is called.
_SCALED = {
    latent_rows.NUM_BYTES: (576, gather_keys.SCALED_ROWS),
    latent_rows.PAGED_BYTES: (latent_rows.PAGED_COLUMNS, gather_keys.SCALED_PAGES),
}
# Rows of a page of 584 bytes a token lie so far apart; their scales lie behind all rows.
_PAGED_ROW = latent_rows.PAGED_BYTES - 8
_LATENT, _ROPE = 512, 64  # columns that Hopper's kernels have
_PAGE_SIZE = 64  # of the keys side by side: any number serves
MAX_BYTES = 1 << 28  # of keys side by side, beyond which a call is served in parts
_SLOTS = 2**31 - 1


class ListedCache(NamedTuple):
    """A cache and its lists, as given, and what messages call them."""

    keys: Any
    entries: Any
    lens: Any
    names: tuple[str, str, str]


class _Checked(NamedTuple):
    """keys [pages, page_size, 1, columns or bytes], entries [b, tokens, length], lens [b]."""

    keys: ArrayView
    entries: ArrayView
    lens: ArrayView | None


class Gathered(NamedTuple):
    """Lists of one cache that attention reads.

    q       as given; on the CPU float32 where rows have scales
    q_rope  zeros [b, tokens, heads, 64] where keys end in such, else None
    keys    [pages, page_size, 1, columns]; entries int32 [b, tokens, all entries]
    """

    q: Any
    q_rope: Any
    keys: Any
    entries: Any


class ListedCaches:
    """The caches of a call, checked.

    num_bytes  that the keys of a token take side by side
    zeros      columns of zeros behind those of the caches
    """

    def __init__(
        self, q: Any, caches: Sequence[ListedCache], has_scales: bool, latent: int = _LATENT
    ) -> None:
        """Raises ArgumentError and UnsupportedError. has_scales: rows may be of fp8 with scales;
        latent: columns that are the value."""
        self.q = array.view(q, "q")
        count, tokens, _, columns = self.q.shape
        self._own = [_check(x, (count, tokens)) for x in caches]
        self._names = [x.names[0] for x in caches]
        self.form = _form_of(self.q, self._own[0].keys, self._names[0], has_scales)
        self.length = sum(x.entries.shape[2] for x in self._own)
        if not self.length:
            raise ArgumentError(f"{caches[0].names[1]}: has lists of 0 entries; wanted some")
        self.zeros = _columns_of_zeros(self.q, latent)
        self.num_bytes = self.length * (columns + self.zeros) * self.q.dtype.itemsize
        first = self._own[0].keys
        for own, name in zip(self._own[1:], self._names[1:], strict=True):
            if own.keys.shape[3] != first.shape[3] or (
                self.form == gather_keys.PLAIN and own.keys.dtype is not first.dtype
            ):
                raise ArgumentError(
                    f"{name}: rows are {own.keys.shape[3]} {own.keys.dtype}; wanted those of "
                    f"{self._names[0]}, {first.shape[3]} {first.dtype}"
                )
        array.same_device(q=self.q, **self.inputs)
        for own, name in zip(self._own, self._names, strict=True):
            self._require_rows(own.keys, name)

    @property
    def inputs(self) -> dict[str, ArrayView | None]:
        """The arrays by name."""
        inputs: dict[str, ArrayView | None] = {}
        for name, own in zip(self._names, self._own, strict=True):
            inputs |= {
                name: own.keys,
                f"{name}'s indices": own.entries,
                f"{name}'s counts": own.lens,
            }
        return inputs

    def _require_rows(self, keys: ArrayView, name: str) -> None:
        """Rows of a page without gaps where scales lie behind them, and vectors on a GPU."""
        if self.form == gather_keys.SCALED_PAGES:
            is_whole = keys.shape[1] == 1 or keys.strides[1] == keys.shape[3]
            if not is_whole or keys.shape[2] != 1:
                raise ArgumentError(
                    f"{name}: strides are {list(keys.strides)} in bytes; wanted pages of "
                    f"{keys.shape[1] * keys.shape[3]} bytes without gaps"
                )
        if keys.device.kind == "cpu":
            return
        if self.form != gather_keys.PLAIN and self.q.dtype is not dtypes.bfloat16:
            raise UnsupportedError(
                f"q: dtype {self.q.dtype} has no kernel for rows of {keys.shape[3]} bytes, whose "
                "rope columns are bfloat16; pass q in bfloat16"
            )
        page_bytes, row_bytes = self._steps(keys)
        if (keys.ptr | page_bytes | row_bytes) % gather_keys.VECTOR:
            raise UnsupportedError(
                f"{name}: pages are {page_bytes} bytes apart and rows {row_bytes}; on a GPU both "
                "and its address must be multiples of 16"
            )

    def _steps(self, keys: ArrayView) -> tuple[int, int]:
        """Bytes from a page, and from a row within it, to the next."""
        size = keys.dtype.itemsize
        row = _PAGED_ROW if self.form == gather_keys.SCALED_PAGES else keys.strides[1] * size
        return keys.strides[0] * size, row

    def gather(self, q: Any) -> Gathered:
        """What attention reads; on a GPU it is launched on the caller's stream."""
        return self._join(q) if self.q.device.kind == "cpu" else self._gather_on_gpu(q)

    def _gather_on_gpu(self, q: Any) -> Gathered:
        count, tokens, heads, columns = self.q.shape
        rows, width = count * tokens * self.length, columns + self.zeros
        num_pages = max(1, -(-rows // _PAGE_SIZE))
        keys = array.empty((num_pages, _PAGE_SIZE, 1, width), self.q.dtype, self.q)
        entries = array.empty((count, tokens, self.length), dtypes.int32, self.q)
        vk, ve = array.view(keys, "keys"), array.view(entries, "entries")
        size = self.q.dtype.itemsize
        target = gather_keys.Target(
            vk.ptr, ve.ptr, count * tokens, tokens, columns * size, width * size
        )
        lists = [self._listed(own) for own in self._own]
        used = [x for x in self.inputs.values() if x is not None]
        array.acquire(self.q, *used)
        stream = array.current_stream(self.q)
        gather_keys.launch(self.form, lists, target, self.q.device.index, stream)
        array.release(self.q, *used)
        q_rope = None
        if self.zeros:  # those of the first key serve all
            shape = count, tokens, heads, self.zeros
            q_rope = array.restride(keys, "keys", shape, (0, 0, 0, 1), columns)
        return Gathered(q, q_rope, keys, entries)

    def _listed(self, own: _Checked) -> gather_keys.ListedKeys:
        """As a launch is told of a cache and its lists."""
        page_bytes, row_bytes = self._steps(own.keys)
        num_pages, page_size = own.keys.shape[:2]
        request_step, token_step, _ = own.entries.strides
        return gather_keys.ListedKeys(
            keys=own.keys.ptr,
            entries=own.entries.ptr,
            lens=0 if own.lens is None else own.lens.ptr,
            page_bytes=page_bytes,
            row_bytes=row_bytes,
            request_step=request_step,
            token_step=token_step,
            length=own.entries.shape[2],
            num_slots=min(num_pages * page_size, _SLOTS),
            page_size=page_size,
        )

    def _join(self, q: Any) -> Gathered:
        """Both caches, one behind the other, and one list of their slots."""
        rows, entries, begin = [], [], 0
        for own in self._own:
            keys = _unpacked(array.as_numpy(own.keys), self.form)
            listed = array.as_numpy(own.entries).astype(np.int64)
            is_key = (listed >= 0) & (listed < len(keys))
            if own.lens is not None:
                counts = array.as_numpy(own.lens)[:, None, None]
                is_key &= np.arange(listed.shape[2]) < counts
            rows.append(keys)
            entries.append(np.where(is_key, listed + begin, -1).astype(np.int32))
            begin += len(keys)
        joined = np.concatenate(rows)[:, None, None]
        if self.form != gather_keys.PLAIN:
            q = array.from_numpy(array.as_numpy(self.q).astype(np.float32), self.q)
        lists = np.concatenate(entries, -1)
        return Gathered(q, None, array.from_numpy(joined, self.q), array.from_numpy(lists, self.q))


def _columns_of_zeros(q: ArrayView, latent: int) -> int:
    if q.device.kind == "cpu" or device_props(q.device.index).arch != "sm_90a":
        return 0
    return _ROPE if q.shape[3] == latent == _LATENT else 0


def has_pages_of_584(keys: Any) -> bool:
    """Whether a cache has rows of 584 bytes, which only lists are read from."""
    v = array.view(keys, "k_cache")
    return v.shape[-1:] == (latent_rows.PAGED_BYTES,) and v.dtype.itemsize == 1


def _check(cache: ListedCache, requests: tuple[int, int]) -> _Checked:
    """Shapes and dtypes of a cache and its lists."""
    count, tokens = requests
    of_keys, of_entries, of_lens = cache.names
    keys, entries = array.view(cache.keys, of_keys), array.view(cache.entries, of_entries)
    match_contiguous(keys, "num_blocks page_size 1 columns", {}, of_keys)
    if not keys.shape[1]:
        raise ArgumentError(f"{of_keys}: has pages of 0 tokens; wanted some")
    match_contiguous(entries, f"{count} {tokens} topk", {}, of_entries)
    require_dtype(entries, dtypes.int32, of_entries)
    lens = None
    if cache.lens is not None:
        lens = array.view(cache.lens, of_lens)
        match_contiguous(lens, f"{count}", {}, of_lens)
        require_dtype(lens, dtypes.int32, of_lens)
        require_contiguous(lens, of_lens)
    return _Checked(keys, entries, lens)


def _form_of(q: ArrayView, keys: ArrayView, name: str, has_scales: bool) -> int:
    """Which form of rows these are. ArgumentError where they do not fit q."""
    columns, width = q.shape[3], keys.shape[3]
    if has_scales and width in _SCALED and keys.dtype.itemsize == 1:
        wanted, form = _SCALED[width]
        if wanted != columns:
            raise ArgumentError(
                f"{name}: rows of {width} bytes have {wanted} columns, and q has {columns}"
            )
        return form
    if width != columns or keys.dtype is not q.dtype:
        raise ArgumentError(
            f"{name}: rows are {width} {keys.dtype}; wanted {columns} {q.dtype} as q has, or with "
            "is_fp8_kvcache rows of 656 bytes beside 576 columns, or of 584 beside 512"
        )
    return gather_keys.PLAIN


def _unpacked(keys: np.ndarray, form: int) -> np.ndarray:
    """Rows [slots, columns] of a cache [pages, page_size, 1, columns or bytes]."""
    rows = keys[:, :, 0]
    if form == gather_keys.SCALED_ROWS:
        rows = latent_rows.unpack_rows(np.ascontiguousarray(rows).view(np.uint8))
    elif form == gather_keys.SCALED_PAGES:
        rows = latent_rows.unpack_pages(np.ascontiguousarray(rows).view(np.uint8))
    return rows.reshape(-1, rows.shape[-1])
