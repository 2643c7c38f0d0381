"""Lists of latent keys of one or two caches, in any of FlashMLA's rows, as one list of 16-bit rows.

Attention then reads one list of each token. On a GPU a launch puts the listed keys side by side; on
the CPU the caches are joined, as float32 where rows have scales. Hopper's kernels of latent rows
have 64 rope columns behind 512: where there are none, zeros are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import match_contiguous, require_contiguous, require_dtype
from ..core import dtypes
from ..core.device import device_props
from ..errors import ArgumentError, UnsupportedError
from ..launch.driver.enqueue import cuda
from ..launch.ops import gather_keys
from ..reference import latent_rows
from . import listed_rows
from .call_cache import Argument, CallCache, CallOptions
from .listed_rows import ListedRows
from .views import view_sinks

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
    columns, dtype  of keys, and of q by name
    """

    q: Any
    q_rope: Any
    keys: Any
    entries: Any
    columns: int
    dtype: str


@dataclass(frozen=True, slots=True)
class _Gather:
    """What calls of one signature share: all but addresses, and what makes keys and entries.

    q_shape  [b, tokens, heads, columns] of q, and zeros behind its columns
    """

    form: int
    lists: tuple[gather_keys.ListedKeys, ...]
    target: gather_keys.Target
    device_index: int
    q_shape: tuple[int, ...]
    zeros: int
    dtype: str
    keys_shape: tuple[int, ...]
    entries_shape: tuple[int, ...]
    make_keys: Callable[[Sequence[int]], Any]
    make_entries: Callable[[Sequence[int]], Any]

    def launch(
        self, addresses: Sequence[int], address_of: Callable[[Any], int], stream: int
    ) -> tuple[Any, Any]:
        """Keys and entries of caches at these addresses: keys, entries, lens of each in turn."""
        keys, entries = self.make_keys(self.keys_shape), self.make_entries(self.entries_shape)
        lists = [
            x._replace(
                keys=addresses[3 * index],
                entries=addresses[3 * index + 1],
                lens=addresses[3 * index + 2],
            )
            for index, x in enumerate(self.lists)
        ]
        target = self.target._replace(keys=address_of(keys), entries=address_of(entries))
        gather_keys.launch(self.form, lists, target, self.device_index, stream)
        return keys, entries

    def gathered(self, q: Any, keys: Any, entries: Any) -> Gathered:
        """What attention reads of them."""
        q_rope, columns = None, self.q_shape[3]
        if self.zeros:  # those of the first key serve all
            shape = *self.q_shape[:3], self.zeros
            q_rope = array.restride(keys, "keys", shape, (0, 0, 0, 1), columns)
        return Gathered(q, q_rope, keys, entries, columns + self.zeros, self.dtype)


# Arrays of a call: q; keys, entries and lens of both caches; sinks; the output.
_NAMES = "q", "keys", "entries", "lens", "more keys", "more entries", "more lens", "sinks", "out"
_CALLS: CallCache[_Gather | ListedRows] = CallCache(
    *(Argument(name, is_output=name == "out") for name in _NAMES)
)
_KEYS, _SINKS, _OUT = map(_NAMES.index, ("keys", "sinks", "out"))


def serve_again(arrays: Sequence[Any], options: CallOptions) -> Gathered | tuple[Any, Any] | None:
    """What attention reads of a call like one that `ListedCaches.keep` was told of, or its (out,
    lse); None if there was none. arrays: q; keys, entries and lens of both caches; sinks; out."""
    known = _CALLS.lookup(arrays, options)
    if known is None:
        return None
    cached, addresses = known
    call = cached.call
    if call.outputs and not cached.is_apart(addresses, _KEYS):
        return None
    checked, stream = call.checked, call.current_stream()
    if type(checked) is ListedRows:
        return checked.attend(addresses, arrays[_OUT], call.address, stream)
    assert type(checked) is _Gather
    keys, entries = checked.launch(addresses[_KEYS:_SINKS], call.address, stream)
    return checked.gathered(arrays[0], keys, entries)


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
        self.q, self.latent = array.view(q, "q"), latent
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

    def _addresses(self) -> list[int]:
        """The addresses of keys, entries and lens of each cache in turn."""
        return [
            0 if x is None else x.ptr
            for own in self._own
            for x in (own.keys, own.entries, own.lens)
        ]

    def _prepare(self) -> _Gather:
        count, tokens, _, columns = self.q.shape
        rows, width, size = (
            count * tokens * self.length,
            columns + self.zeros,
            self.q.dtype.itemsize,
        )
        num_pages = max(1, -(-rows // _PAGE_SIZE))
        return _Gather(
            form=self.form,
            lists=tuple(self._listed(own) for own in self._own),
            target=gather_keys.Target(0, 0, count * tokens, tokens, columns * size, width * size),
            device_index=self.q.device.index,
            q_shape=tuple(self.q.shape),
            zeros=self.zeros,
            dtype=self.q.dtype.name,
            keys_shape=(num_pages, _PAGE_SIZE, 1, width),
            entries_shape=(count, tokens, self.length),
            make_keys=array.allocator(self.q.dtype, self.q),
            make_entries=array.allocator(dtypes.int32, self.q),
        )

    def _gather_on_gpu(self, q: Any) -> Gathered:
        gather = self._prepare()
        used = [x for x in self.inputs.values() if x is not None]
        array.acquire(self.q, *used)
        stream, addresses = array.current_stream(self.q), self._addresses()
        keys, entries = gather.launch(addresses, lambda x: array.view(x, "keys").ptr, stream)
        array.release(self.q, *used)
        return gather.gathered(q, keys, entries)

    def keep(
        self, arrays: Sequence[Any], options: CallOptions, rows: ListedRows | None = None
    ) -> None:
        """Let later calls of these options and like arrays skip the checks, which this call has
        passed; see serve_again. rows: what `attend_rows` launched, if it did."""
        if self.q.device.kind == "cuda" and not cuda().is_debugging:
            checked, dtype = self._prepare() if rows is None else rows, self.q.dtype
            _CALLS.insert(arrays, options, checked, self.q, dtype, None, None)

    def attend_rows(
        self, sinks: Any, out: Any, sm_scale: float, lse_form: int
    ) -> tuple[tuple[Any, Any], ListedRows] | None:
        """((out, lse), what was launched) where a kernel reads these rows as they lie, else None.
        Raises ArgumentError for sinks."""
        vout = None if out is None else array.view(out, "out")
        if self.form != gather_keys.SCALED_PAGES or self.latent != _LATENT:
            return None
        if not listed_rows.may_read_rows(self.q, vout, sm_scale):
            return None
        vsinks = None if sinks is None else view_sinks(sinks, self.q.shape[2])
        lists = [self._listed(own) for own in self._own]
        rows = listed_rows.prepare(self.q, vout, lists, sm_scale, lse_form)
        if rows is None:
            return None
        used = [x for x in (*self.inputs.values(), vsinks, vout) if x is not None]
        array.same_device(q=self.q, sinks=vsinks)
        array.acquire(self.q, *used)
        no_keys = [0, 0, 0] * (2 - len(self._own))
        at_sinks = 0 if vsinks is None else vsinks.ptr
        addresses = [self.q.ptr, *self._addresses(), *no_keys, at_sinks]
        stream = array.current_stream(self.q)
        output, lse = rows.attend(addresses, out, lambda x: array.view(x, "out").ptr, stream)
        array.release(self.q, *used)
        return (array.deliver(output, self.q), array.deliver(lse, self.q)), rows

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
        keys, entries_of_all = (array.from_numpy(x, self.q) for x in (joined, lists))
        columns = self.q.shape[3]
        return Gathered(q, None, keys, entries_of_all, columns, self.q.dtype.name)


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
