"""Random appends to poisoned paged caches, with index arrays that no caller should pass too, and
what must be in the caches afterwards, by loops."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn
from cupyattn.core import dtypes

from . import poison

WIDE = ("float16", "bfloat16", "float32")
FP8 = ("float8_e4m3fn", "float8_e5m2")
DTYPES = [(x, x) for x in (*WIDE, *FP8)] + [(x, fp8) for x in WIDE for fp8 in FP8]


@dataclass(frozen=True)
class AppendCase:
    """`form` is "array", "pair", or "no page axis"; `strides` "packed", "gaps" or "unaligned"."""

    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    num_kv_heads: int = 2
    head_dims: tuple[int, int] = (64, 64)
    page_size: int = 4
    kv_layout: str = "NHD"
    form: str = "array"
    strides: str = "packed"
    scales: tuple[float | None, float | None] = (None, None)
    lengths: tuple[tuple[int, int], ...] = ((5, 3), (0, 7), (9, 0), (2, 1))  # before, appended
    seed: int = 0


@dataclass
class Append:
    """A prepared call. `new` are the keys and values in NumPy, `caches` their poisoned pools."""

    case: AppendCase
    new: list[np.ndarray]
    caches: list[poison.Poisoned]
    arguments: dict[str, Any]
    slots: list[tuple[int, int, int]]  # (row, page, offset)
    inputs: list[poison.Poisoned] = field(default_factory=list)

    @classmethod
    def prepare(cls, case: AppendCase, xp: ModuleType, device: str = "cuda") -> Append:
        rng = np.random.default_rng(case.seed)
        where = {"xp": xp, "device": device}
        pg, heads = case.page_size, case.num_kv_heads
        indptr, indices, last, num_pages = _page_table(case, rng)
        batch, positions, slots = [], [], []
        for b, (before, count) in enumerate(case.lengths):
            for position in range(before, before + count):
                slots.append((len(batch), indices[indptr[b] + position // pg], position % pg))
                batch.append(b)
                positions.append(position)
                if rng.random() < 0.2:  # a row that is skipped, whatever its position
                    batch.append(-int(rng.integers(1, 9)))
                    positions.append(int(rng.integers(-9, 2**31)))
        new = [special(rng, (len(batch), heads, dim), case.dtype) for dim in case.head_dims]
        cache_dtype = dtypes.parse(case.cache_dtype).numpy
        caches = _blank_caches(case, num_pages, cache_dtype, where)
        inputs = [poison.embed(x, poison.gaps(case.strides, x.shape), **where) for x in new]
        names = ("append_key", "append_value", "batch_indices", "positions")
        values = [p.array for p in inputs] + [_upload(x, where) for x in (batch, positions)]
        arguments = dict(zip(names, values, strict=True))
        arguments["paged_kv_cache"] = tuple(c.array for c in caches)
        if case.form == "array":
            arguments["paged_kv_cache"] = caches[0].array
        tables = {"kv_indices": indices, "kv_indptr": indptr, "kv_last_page_len": last}
        arguments |= {name: _upload(x, where) for name, x in tables.items()}
        arguments |= {"kv_layout": case.kv_layout}
        names = ("k_scale", "v_scale")
        arguments |= {n: x for n, x in zip(names, case.scales, strict=True) if x is not None}
        return cls(case, new, caches, arguments, slots, inputs)

    def run(self, **changes: Any) -> None:
        assert cupyattn.append_paged_kv_cache(**(self.arguments | changes)) is None

    def run_and_check(self, **changes: Any) -> None:
        self.run(**changes)
        self.check()

    def check(self) -> None:
        """Every bit of the caches, and of all around them, is as it must be."""
        for index, (got, wanted) in enumerate(zip(self._parts(), self.expected(), strict=True)):
            bits = np.dtype(f"u{got.dtype.itemsize}")
            differs = got.view(bits) != wanted.view(bits)
            if differs.any():
                place = tuple(int(i) for i in np.argwhere(differs)[0])
                raise AssertionError(
                    f"{self.case}: {'KV'[index]} at [page, slot, head, dim] {place} is "
                    f"{got[place]} ({int(got.view(bits)[place]):#x}), wanted {wanted[place]}"
                    f" ({int(wanted.view(bits)[place]):#x}); {differs.sum()} differ"
                )
        for what, p in [*(("cache", c) for c in self.caches), *(("input", x) for x in self.inputs)]:
            p.assert_intact(f"{self.case}: {what}")

    def expected(self) -> list[np.ndarray]:
        """K and V [P, page_size, Hkv, D]: poison but for the rows that were appended."""
        found = []
        for part, x, scale in zip(self._parts(), self.new, self.case.scales, strict=True):
            bits = np.dtype(f"u{part.dtype.itemsize}")
            cache = np.full(part.shape, poison._pattern(part.dtype)).view(part.dtype)
            stored = x if x.dtype == part.dtype else rounded(x, scale or 1.0, part.dtype)
            for row, page, offset in self.slots:
                cache.view(bits)[page, offset] = stored.view(bits)[row]
            found.append(cache)
        return found

    def _parts(self) -> list[np.ndarray]:
        values = [c.values() for c in self.caches]
        if self.case.form == "array":
            values = [values[0][:, 0], values[0][:, 1]]
        if self.case.form == "no page axis":
            return [np.ascontiguousarray(x[:, None]) for x in values]
        axes = (0, 1, 2, 3) if self.case.kv_layout == "NHD" else (0, 2, 1, 3)
        return [np.ascontiguousarray(x.transpose(axes)) for x in values]


def rounded(x: np.ndarray, scale: float, dtype: np.dtype) -> np.ndarray:
    """What ml_dtypes makes of x / scale, with overflow saturated and every NaN 0x7f."""
    with np.errstate(all="ignore"):
        quotient = x.astype(np.float32) / np.float32(scale)
    top = np.float32(ml_dtypes.finfo(dtype).max)
    found = np.minimum(np.maximum(quotient, -top), top).astype(dtype)
    bits = np.where(np.isnan(quotient), np.uint8(0x7F), found.view(np.uint8))
    return bits.view(dtype)


def all_roundings() -> np.ndarray:
    """Every upper half of a float32 with lower halves around each way to round: all fp8 boundaries
    of both formats are there, from either side, and all values of bfloat16."""
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    high = np.arange(2**16, dtype=np.uint32) << 16
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    return np.concatenate([(high[:, None] | low).reshape(-1).view(np.float32), halves])


def special(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bits at all for a tenth of the elements, of every magnitude for the others."""
    kind = dtypes.parse(dtype).numpy
    with np.errstate(all="ignore"):
        x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-18, 18, shape)).astype(kind)
    bits = np.dtype(f"u{kind.itemsize}")
    wild = rng.integers(0, 2 ** (8 * kind.itemsize), shape, dtype=np.uint64).astype(bits)
    return np.where(rng.random(shape) < 0.1, wild, x.view(bits)).view(kind)


def _page_table(
    case: AppendCase, rng: np.random.Generator
) -> tuple[list[int], list[int], list[int], int]:
    lengths = [before + count for before, count in case.lengths]
    counts = [-(-n // case.page_size) for n in lengths]
    indptr = [0, *np.cumsum(counts).tolist()]
    num_pages = indptr[-1] + 3
    indices = rng.permutation(num_pages)[: indptr[-1] + 1].tolist()
    pairs = zip(lengths, counts, strict=True)
    last = [n - max(count - 1, 0) * case.page_size for n, count in pairs]
    return indptr, indices, last, num_pages


def _blank_caches(
    case: AppendCase, num_pages: int, dtype: np.dtype, where: dict[str, Any]
) -> list[poison.Poisoned]:
    pg, heads = case.page_size, case.num_kv_heads
    inner = (pg, heads) if case.kv_layout == "NHD" else (heads, pg)
    shapes = [(num_pages, *inner, dim) for dim in case.head_dims]
    if case.form == "array":
        shapes = [(num_pages, 2, *inner, case.head_dims[0])]
    if case.form == "no page axis":
        assert pg == 1
        shapes = [(num_pages, heads, dim) for dim in case.head_dims]
    # K's and V's own gaps, so that strides must not be mixed up.
    kinds = (case.strides, "packed" if case.strides == "unaligned" else case.strides)
    return [
        poison.blank(shape, dtype, poison.gaps(kind, shape, extra), **where)
        for extra, (shape, kind) in enumerate(zip(shapes, kinds, strict=False))
    ]


def _upload(x: list[int], where: dict[str, Any]) -> Any:
    return poison.embed(np.array(x, np.int32), **where).array


# --- index arrays that no caller should pass ---

STRAY = AppendCase(lengths=((5, 20), (0, 7), (9, 0), (2, 25)), page_size=3)
# The second runs on from STRAY's first request to the pages of its third, which appends nothing.
_BAD_POSITIONS = (-1, 36, -(2**31), 2**31 - 1)


def spoil(append: Append, **where: Any) -> int:
    """Put bad values in the index arrays, and drop the slots of their rows; returns how many."""
    given = append.arguments
    names = ("batch_indices", "positions", "kv_indices")
    batch, positions, indices = (
        poison._download(given[name], np.dtype(np.int32)).copy() for name in names
    )
    num_requests, num_pages = len(append.case.lengths), append.caches[0].array.shape[0]
    before = len(append.slots)
    rows = [row for row, _, _ in append.slots]
    gone = set()
    for row, bad in zip(rows[0::9], (num_requests, num_requests + 7, 2**31 - 1), strict=False):
        batch[row] = bad
        gone.add(row)
    for row, bad in zip(rows[1::9], _BAD_POSITIONS, strict=False):
        positions[row] = bad
        gone.add(row)
    bad_pages = {}
    for row, bad in zip(rows[2::9], (-1, num_pages, 2**31 - 1), strict=False):
        page = next(p for r, p, _ in append.slots if r == row)
        bad_pages[page] = bad
        indices[np.flatnonzero(indices == page)[0]] = bad
    append.slots = [s for s in append.slots if s[0] not in gone and s[1] not in bad_pages]
    changed = zip(names, (batch, positions, indices), strict=True)
    given |= {name: poison.embed(x, **where).array for name, x in changed}
    return before - len(append.slots)


def random_case(seed: int) -> AppendCase:
    rng = np.random.default_rng(seed)

    def pick(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    dtype, cache_dtype = pick(*DTYPES)
    form = pick("array", "pair", "pair", "no page axis")
    dims = pick((128, 128), (64, 64), (1, 1), (7, 7), (100, 100), (256, 256), (520, 520))
    requests = int(rng.integers(0, 9))
    return AppendCase(
        dtype=dtype,
        cache_dtype=cache_dtype,
        num_kv_heads=pick(1, 2, 5, 8, 33, 130),
        head_dims=dims if form == "array" else pick(dims, (192, 128), (64, 9), (8, 16)),
        page_size=1 if form == "no page axis" else pick(1, 2, 5, 16, 33),
        kv_layout=pick("NHD", "HND"),
        form=form,
        strides=pick("packed", "packed", "gaps", "unaligned"),
        scales=pick((None, None), (0.01, 3.3)) if dtype != cache_dtype else (None, None),
        lengths=tuple((int(rng.integers(0, 40)), pick(0, 1, 1, 6, 30)) for _ in range(requests)),
        seed=seed,
    )
