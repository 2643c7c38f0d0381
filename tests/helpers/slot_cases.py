"""Seeded writes of keys and values into slots, on poisoned arrays."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cupyattn.core import dtypes
from cupyattn.slots import reshape_and_cache

from . import calls, compare, page_cases, poison

_DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
_FP8 = _DTYPES[3:]


class Case(calls.Placed):
    def __init__(self, seed: int, xp: ModuleType = np, device: str = "") -> None:
        super().__init__(f"seed {seed}", xp, seed, 61, device=device)
        rng = self.rng
        self.n, self.heads = int(rng.integers(0, 9)), int(rng.integers(1, 4))
        self.dims = tuple(int(rng.choice([8, 20, 64, 72])) for _ in "kv")
        self.page, self.pages = int(rng.choice([1, 3, 16])), int(rng.integers(1, 5))
        self.dtype = dtypes.parse(str(rng.choice(_DTYPES))).numpy
        self.cache_dtype = self.dtype
        if self.dtype.itemsize > 1 and rng.random() < 0.6:
            self.cache_dtype = dtypes.parse(str(rng.choice(_FP8))).numpy
        self.layout = str(rng.choice(["NHD", "HND"]))
        self.is_flat = self.page == 1 and rng.random() < 0.5

    def run(self) -> None:
        rng, num_slots = self.rng, self.page * self.pages
        used = rng.permutation(num_slots)[: self.n]
        slots = np.full(self.n, -1)
        slots[: used.size] = used
        slots[rng.random(self.n) < 0.2] = -1
        scales, named = self._scales()
        given, targets = slots, slots
        if rng.random() < 0.3:
            table = np.concatenate([rng.permutation(num_slots), [-1]]).astype(np.int64)
            named["slot_map"] = self.embed("slot_map", table)
            targets = np.where(slots < 0, -1, table[slots])
        new = [
            rng.standard_normal((self.n, self.heads, d)).astype(np.float32).astype(self.dtype)
            for d in self.dims
        ]
        gap = int(rng.choice([0, 8]))
        rows = [
            self.embed(name, x, (self.heads * (x.shape[2] + gap), x.shape[2] + gap, 1))
            for name, x in zip("kv", new, strict=True)
        ]
        caches = [self._cache(*x) for x in zip("kv", self.dims, strict=True)]
        index = self.embed("slots", given.astype(rng.choice([np.int32, np.int64])))
        reshape_and_cache(*rows, *(c.array for c in caches), index, self.layout, **named)
        for cache, x, scale in zip(caches, new, scales, strict=True):
            wanted = poison.blank(cache.array.shape, self.cache_dtype).values()
            for token, slot in enumerate(targets):
                if slot >= 0:
                    self._slot(wanted, int(slot))[...] = self._stored(x[token], scale)
            compare.assert_bitwise_equal(cache.values(), wanted, self.case)
        self.assert_intact()

    def _scales(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Of K and V, by head; and as arguments: none, numbers, or arrays of one or of all."""
        named: dict[str, Any] = {}
        scales = np.ones((2, self.heads), np.float32)
        for which, name in enumerate(("k_scale", "v_scale")):
            kind = self.rng.integers(4) if self.dtype != self.cache_dtype else 0
            if kind == 1:
                scales[which] = named[name] = float(np.float32(self.rng.uniform(0.2, 3)))
            elif kind > 1:
                shape = () if kind == 2 else (self.heads,)
                values = self.rng.uniform(0.2, 3, shape).astype(np.float32)
                scales[which], named[name] = values, self.embed(name, values)
        return scales, named

    def _stored(self, x: np.ndarray, scales: np.ndarray) -> np.ndarray:
        if self.dtype == self.cache_dtype:
            return x
        heads = zip(x, scales, strict=True)
        return np.stack([page_cases.rounded(*head, self.cache_dtype) for head in heads])

    def _cache(self, name: str, dim: int) -> poison.Poisoned:
        shape: tuple[int, ...] = (self.pages, self.page, self.heads, dim)
        if self.layout == "HND":
            shape = (self.pages, self.heads, self.page, dim)
        if self.is_flat:
            shape = (self.pages, self.heads, dim)
        return self.blank(f"{name} cache", shape, self.cache_dtype)

    def _slot(self, cache: np.ndarray, slot: int) -> np.ndarray:
        page, offset = divmod(slot, self.page)
        if self.is_flat:
            return cache[page]
        return cache[page, offset] if self.layout == "NHD" else cache[page, :, offset]
