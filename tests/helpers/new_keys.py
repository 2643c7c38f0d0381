"""New keys and values behind those of a cache, rotated on the way: random calls with spare rows,
absent requests, keys past the table and pages of nobody, and what must be in memory afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from cupyattn.core import dtypes
from cupyattn.engine.arrays import Arrays, MoreArrays
from cupyattn.flash_attn.caches import Append
from cupyattn.flash_attn.rotary import Rotary

from . import calls, compare, poison
from .flash_cases import turned


@dataclass(frozen=True)
class NewKeysCase:
    """half 0: nothing is rotated. moves: rows of q are at positions one after another. dtype: of
    keys; queries beside fp8 ones are of dtype_q."""

    seed: int = 0
    dtype: str = "float16"
    dtype_table: str = "float32"
    head_dim: int = 64
    half: int = 16
    is_interleaved: bool = False
    moves: bool = True
    is_ragged: bool = True
    page_size: int = 3
    strides: str = "packed"
    index: str = "int32"
    num_kv_heads: int = 2
    num_qo_heads: int = 6
    dtype_q: str = "bfloat16"

    def run(self, xp: ModuleType = np, device: str = "cpu") -> None:
        """Make the call and compare all that it may and may not write."""
        placed = calls.Placed(self, xp, self.seed, 77, device=device)
        rng, count, width, size = placed.rng, 5, 4, self.page_size
        new = np.array([2, 0, 3, 1, 4]) if self.is_ragged else np.full(count, 3)
        rows = np.array([1, 0, 4, 2, 3]) if self.is_ragged else np.full(count, 2)
        # An absent request, one whose keys run past its pages, and one with a page of nobody.
        begin = np.array([0, 4, -1, width * size - 1, 5])
        starts = np.array([7, -1, 3, 0, 29]) if self.seed % 2 else begin
        num_pages = count * width + 2
        table = rng.permutation(num_pages)[: count * width].reshape(count, width)
        lost = 0, int(begin[0]) // size
        table[lost] = (-1, num_pages, 2**31 - 1)[self.seed % 3]
        spare = 2 if self.is_ragged else 0
        kind = dtypes.parse(self.dtype, "dtype").numpy
        kind_q = dtypes.parse(self.dtype_q, "dtype").numpy if "8" in self.dtype else kind
        heads, dim = self.num_kv_heads, self.head_dim

        def ints(name: str, values: Any) -> Any:
            return placed.embed(name, np.asarray(values).astype(self.index))

        tokens = int(new.sum()) + spare
        k, v = (rng.normal(0, 1, (tokens, heads, d)).astype(kind) for d in (dim, 24))
        q = rng.normal(0, 1, (int(rows.sum()) + spare, self.num_qo_heads, dim)).astype(kind_q)
        angles = rng.uniform(-3, 3, (30, max(8, self.half)))
        of_tables = dtypes.parse(self.dtype_table, "dtype").numpy
        cos, sin = (f(angles).astype(of_tables) for f in (np.cos, np.sin))
        shapes = [(num_pages, size, heads, d) for d in (dim, 24)]
        caches = [
            placed.blank(f"cache {i}", shape, kind, poison.gaps(self.strides, shape))
            for i, shape in enumerate(shapes)
        ]
        given = [
            placed.embed(name, x, poison.gaps(self.strides, x.shape))
            for name, x in (("k", k), ("v", v), ("q", q))
        ]
        if not self.is_ragged:
            given = [x.reshape(count, -1, *x.shape[1:]) for x in given]
        offsets = [
            ints(f"offsets of {name}", [0, *np.cumsum(n)]) if self.is_ragged else None
            for name, n in (("q", rows), ("k", new))
        ]
        rotated, rotation = None, None
        if self.half:
            tables = placed.embed("cos", cos), placed.embed("sin", sin)
            rotary = Rotary(*tables, ints("starts", starts), self.is_interleaved, self.moves)
            rotated, rotation = rotary.on_gpu(given[2], given[0], offsets[0])
        arrays = Arrays(q=given[2], k=caches[0].array, v=caches[1].array)
        more = MoreArrays(new_k=given[0], new_v=given[1], new_offsets=offsets[1])
        held = placed.embed("table", table.astype(np.int32))
        append = Append(arrays, more, ints("begin", begin), held, rotation)
        append()

        # What must be there.
        after = poison.download(append.after)
        np.testing.assert_array_equal(after, np.where(begin < 0, 0, begin + new), str(self))
        wanted = [poison.blank(shape, kind).values() for shape in shapes]
        ends = np.cumsum(new)
        for index in np.flatnonzero(begin >= 0):
            for i in range(new[index]):
                position, row = int(begin[index]) + i, int(ends[index] - new[index]) + i
                entry = position // size
                if entry >= width or (index, entry) == lost:
                    continue
                slot = table[index, entry], position % size
                wanted[0][slot] = self._rotated(k[row], starts[index], i, cos, sin)
                wanted[1][slot] = v[row]
        for found, want in zip(caches, wanted, strict=True):
            self._compare(found.values(), want)
        placed.assert_intact()
        if rotated is None:
            return
        want_q, ends = q.copy(), np.cumsum(rows)
        for index in range(count):
            for i in range(rows[index]):
                row = int(ends[index] - rows[index]) + i
                want_q[row] = self._rotated(q[row], starts[index], i * self.moves, cos, sin)
        self._compare(poison.download(rotated).reshape(q.shape), want_q)

    def _rotated(
        self, x: np.ndarray, start: int, i: int, cos: np.ndarray, sin: np.ndarray
    ) -> np.ndarray:
        if not self.half or start < 0:
            return x
        at = int(start) + i
        made = turned(x[None], np.array([min(at, len(cos) - 1)]), cos, sin, self.is_interleaved)[0]
        if at >= len(cos):
            made[..., : 2 * self.half] = np.nan
        return made

    def _compare(self, got: np.ndarray, want: np.ndarray) -> None:
        """Equal bits, but that a rotation may differ by one rounding; NaN is NaN."""
        of_rotation = (0.3, 2e-3) if want.itemsize == 1 else (1e-2, 2e-3)
        near = of_rotation if self.half else (0.0, 0.0)
        compare.assert_bitwise_equal(got, want, self, near=near)


def random_new_keys(seed: int) -> NewKeysCase:
    rng = np.random.default_rng((seed, 78))

    def pick(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    half = pick(0, 8, 16, 24)
    return NewKeysCase(
        seed=seed,
        dtype=pick("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        dtype_q=pick("float16", "bfloat16"),
        dtype_table=pick("float32", "float16", "float8_e4m3fn"),
        head_dim=pick(64, 48, 128, 300),
        half=half,
        is_interleaved=bool(pick(0, 1)),
        moves=bool(pick(0, 1)),
        is_ragged=bool(pick(0, 1)),
        page_size=pick(1, 3, 16),
        strides=pick("packed", "gaps", "unaligned"),
        index=pick("int32", "int64"),
        num_kv_heads=pick(1, 2, 5),
        num_qo_heads=pick(1, 6),
    )
