"""Seeded writes of keys and values into slots, on poisoned arrays."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cupyattn.core import dtypes
from cupyattn.slots import reshape_and_cache

from . import page_cases, poison

_DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
_FP8 = _DTYPES[3:]


class Case:
    def __init__(self, seed: int, xp: ModuleType = np, device: str = "cuda") -> None:
        self.seed, self.xp, self.device = seed, xp, device
        rng = self.rng = np.random.default_rng((seed, 61))
        self.n, self.heads = int(rng.integers(0, 9)), int(rng.integers(1, 4))
        self.dims = tuple(int(rng.choice([8, 20, 64, 72])) for _ in "kv")
        self.page, self.pages = int(rng.choice([1, 3, 16])), int(rng.integers(1, 5))
        self.dtype = dtypes.parse(str(rng.choice(_DTYPES))).numpy
        self.cache_dtype = self.dtype
        if self.dtype.itemsize > 1 and rng.random() < 0.6:
            self.cache_dtype = dtypes.parse(str(rng.choice(_FP8))).numpy
        self.layout = str(rng.choice(["NHD", "HND"]))
        self.is_flat = self.page == 1 and rng.random() < 0.5

    def _put(self, x: np.ndarray, strides: tuple[int, ...] | None = None) -> poison.Poisoned:
        return poison.embed(x, strides, xp=self.xp, device=self.device)

    def run(self) -> None:
        rng, num_slots = self.rng, self.page * self.pages
        converts = self.dtype != self.cache_dtype
        used = rng.permutation(num_slots)[: self.n]
        slots = np.full(self.n, -1)
        slots[: used.size] = used
        slots[rng.random(self.n) < 0.2] = -1
        named: dict[str, Any] = {}
        scales = np.ones((2, self.heads), np.float32)
        for which, name in enumerate(("k_scale", "v_scale")):
            kind = rng.integers(4) if converts else 0
            if kind == 1:
                scales[which] = named[name] = float(np.float32(rng.uniform(0.2, 3)))
            elif kind > 1:
                shape = () if kind == 2 else (self.heads,)
                values = rng.uniform(0.2, 3, shape).astype(np.float32)
                scales[which], named[name] = values, self._put(values).array
        given, targets = slots, slots
        if rng.random() < 0.3:
            table = np.concatenate([rng.permutation(num_slots), [-1]]).astype(np.int64)
            named["slot_map"] = self._put(table).array
            targets = np.where(slots < 0, -1, table[slots])
        new = [
            rng.standard_normal((self.n, self.heads, d)).astype(np.float32).astype(self.dtype)
            for d in self.dims
        ]
        gap = int(rng.choice([0, 8]))
        rows = [self._put(x, (self.heads * (x.shape[2] + gap), x.shape[2] + gap, 1)) for x in new]
        caches = [self._cache(d) for d in self.dims]
        before = [c.values() for c in caches]
        index = self._put(given.astype(rng.choice([np.int32, np.int64])))
        reshape_and_cache(
            *(r.array for r in rows), *(c.array for c in caches), index.array, self.layout, **named
        )
        for which, (cache, old, x) in enumerate(zip(caches, before, new, strict=True)):
            cache.assert_intact(f"cache {which}")
            for token, slot in enumerate(targets):
                if slot < 0:
                    continue
                wanted = x[token]
                if converts:
                    by_head = [
                        page_cases.rounded(row, scale, self.cache_dtype)
                        for row, scale in zip(x[token], scales[which], strict=True)
                    ]
                    wanted = np.stack(by_head)
                self._slot(old, int(slot))[...] = wanted
            bits = np.dtype(f"u{self.cache_dtype.itemsize}")
            label = f"seed {self.seed}, {'kv'[which]}"
            found = cache.values()
            np.testing.assert_array_equal(found.view(bits), old.view(bits), err_msg=label)

    def _cache(self, dim: int) -> poison.Poisoned:
        shape = (self.pages, self.page, self.heads, dim)
        if self.layout == "HND":
            shape = (self.pages, self.heads, self.page, dim)
        if self.is_flat:
            shape = (self.pages, self.heads, dim)
        made = self._put(np.zeros(shape, np.float32).astype(self.cache_dtype))
        made.clear()
        return made

    def _slot(self, cache: np.ndarray, slot: int) -> np.ndarray:
        page, offset = divmod(slot, self.page)
        if self.is_flat:
            return cache[page]
        return cache[page, offset] if self.layout == "NHD" else cache[page, :, offset]
