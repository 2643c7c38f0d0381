"""Random appends to poisoned paged caches, with index arrays that no caller should pass too, and
what must be in the caches afterwards, by loops."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn
from cupyattn.core import dtypes

from . import calls, compare, poison

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


class Append(calls.Placed):
    """A call. `new` are the keys and values in NumPy, `caches` their poisoned pools, `slots` the
    (row, page, offset) of what is written."""

    def __init__(self, case: AppendCase, xp: ModuleType, device: str = "") -> None:
        super().__init__(case, xp, case.seed, device=device)
        rng, pg, heads = np.random.default_rng(case.seed), case.page_size, case.num_kv_heads
        indptr, indices, last, num_pages = _page_table(case, rng)
        batch, positions, self.slots = [], [], list[tuple[int, int, int]]()
        for b, (before, count) in enumerate(case.lengths):
            for position in range(before, before + count):
                page = indices[indptr[b] + position // pg]
                self.slots.append((len(batch), page, position % pg))
                batch.append(b)
                positions.append(position)
                if rng.random() < 0.2:  # a row that is skipped, whatever its position
                    batch.append(-int(rng.integers(1, 9)))
                    positions.append(int(rng.integers(-9, 2**31)))
        self.new = [special(rng, (len(batch), heads, dim), case.dtype) for dim in case.head_dims]
        self._make_caches(num_pages)
        names = "append_key", "append_value"
        self.arguments = {
            name: self.embed(name, x, poison.gaps(case.strides, x.shape))
            for name, x in zip(names, self.new, strict=True)
        }
        tables = {"batch_indices": batch, "positions": positions}
        tables |= {"kv_indices": indices, "kv_indptr": indptr, "kv_last_page_len": last}
        pools = tuple(c.array for c in self.caches)
        self.arguments |= {"paged_kv_cache": pools[0] if case.form == "array" else pools}
        self.arguments |= {n: self.embed(n, np.array(x, np.int32)) for n, x in tables.items()}
        self.arguments |= {"kv_layout": case.kv_layout}
        scales = zip(("k_scale", "v_scale"), case.scales, strict=True)
        self.arguments |= {n: x for n, x in scales if x is not None}

    def _make_caches(self, num_pages: int) -> None:
        case, pg, heads = self.case, self.case.page_size, self.case.num_kv_heads
        inner = (pg, heads) if case.kv_layout == "NHD" else (heads, pg)
        shapes = [(num_pages, *inner, dim) for dim in case.head_dims]
        if case.form == "array":
            shapes = [(num_pages, 2, *inner, case.head_dims[0])]
        if case.form == "no page axis":
            assert pg == 1
            shapes = [(num_pages, heads, dim) for dim in case.head_dims]
        # K's and V's own gaps, so that strides must not be mixed up.
        kinds = case.strides, "packed" if case.strides == "unaligned" else case.strides
        dtype = dtypes.parse(case.cache_dtype).numpy
        self.caches = [
            self.blank(f"cache {extra}", shape, dtype, poison.gaps(kind, shape, extra))
            for extra, (shape, kind) in enumerate(zip(shapes, kinds, strict=False))
        ]

    def run(self, **changes: Any) -> None:
        assert cupyattn.append_paged_kv_cache(**(self.arguments | changes)) is None

    def run_and_check(self, **changes: Any) -> None:
        self.run(**changes)
        self.check()

    def check(self) -> None:
        """Every bit of the caches [page, slot, head, dim], and of all around them, is as it must
        be."""
        for name, got, wanted in zip("KV", self._parts(), self.expected(), strict=True):
            compare.assert_bitwise_equal(got, wanted, f"{self.case}: {name}")
        self.assert_intact()

    def expected(self) -> list[np.ndarray]:
        """K and V [P, page_size, Hkv, D]: poison but for the rows that were appended."""
        found = []
        for part, x, scale in zip(self._parts(), self.new, self.case.scales, strict=True):
            cache = poison.blank(part.shape, part.dtype).values()
            stored = x if x.dtype == part.dtype else rounded(x, scale or 1.0, part.dtype)
            for row, page, offset in self.slots:
                poison.raw(cache)[page, offset] = poison.raw(stored)[row]
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


# --- index arrays that no caller should pass ---

STRAY = AppendCase(lengths=((5, 20), (0, 7), (9, 0), (2, 25)), page_size=3)
# The second runs on from STRAY's first request to the pages of its third, which appends nothing.
_BAD_POSITIONS = (-1, 36, -(2**31), 2**31 - 1)


def spoil(append: Append) -> int:
    """Put bad values in the index arrays, and drop the slots of their rows; returns how many."""
    given = append.arguments
    names = ("batch_indices", "positions", "kv_indices")
    batch, positions, indices = (append.owned[name].values() for name in names)
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
    given |= {name: append.embed(name, x) for name, x in changed}
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
