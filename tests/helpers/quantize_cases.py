"""Seeded calls of quantize_qkv and rope_and_cache, on poisoned arrays, against plain loops."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cupyattn.core import dtypes
from cupyattn.quantize import quantize_qkv
from cupyattn.quantize_pages import rope_and_cache

from . import calls, poison

_WIDE = ("float16", "bfloat16")
_DIMS = (8, 20, 64, 96, 128, 192, 256)


E4M3 = dtypes.float8_e4m3fn.numpy


def _numpy(name: str) -> np.dtype:
    return dtypes.parse(name).numpy


def _bits(x: np.ndarray) -> np.ndarray:
    """With one NaN: which one a mean of infinities is, is the processor's."""
    if x.dtype == np.float32:
        x = np.where(np.isnan(x), np.float32(np.nan), x)
    return x.view(f"u{x.dtype.itemsize}")


class OfArrays(calls.Placed):
    """quantize_qkv of some of q, k and v: on a GPU the same bits as on the CPU."""

    def __init__(self, seed: int, xp: ModuleType = np, device: str = "") -> None:
        super().__init__(f"seed {seed}", xp, seed, 62, device=device)
        rng = self.rng
        self.dtype = _numpy(str(rng.choice(_WIDE)))
        self.heads = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        self.hadamard = bool(rng.random() < 0.3)
        dims = (8, 16, 64, 128, 256) if self.hadamard else _DIMS
        self.dims = int(rng.choice(dims)), int(rng.choice(_DIMS))
        self.block_size = int(rng.choice([64, 128]))
        lengths = rng.choice([0, 1, 5, 63, 64, 65, 200], rng.integers(1, 4))
        self.lengths = [int(length) for length in lengths]
        self.is_dense = bool(rng.random() < 0.3)
        if self.is_dense:
            self.lengths = [self.lengths[0]] * len(self.lengths)

    def _drawn(self, name: str, heads: int, dim: int) -> np.ndarray:
        rng, n = self.rng, sum(self.lengths)
        x = rng.standard_normal((n, heads, dim)) * 2.0 ** rng.integers(-6, 7)
        if rng.random() < 0.3:
            x[rng.random(x.shape) < 0.01] *= 50
        if n and rng.random() < 0.2:
            flat = x.reshape(-1)
            odd = [np.nan, np.inf, -np.inf, 0.0, -0.0]
            flat[rng.integers(0, flat.size, 5)] = odd
        if rng.random() < 0.1:
            x[...] = 0
        x = x.astype(np.float32).astype(self.dtype)
        return x

    def expect(self) -> OfArrays:
        """Draw the call and its answer, which arrays on the CPU get."""
        rng = self.rng
        arrays: dict[str, np.ndarray] = {}
        for name in "qkv":
            heads = self.heads[name != "q"]
            arrays[name] = self._drawn(name, heads, self.dims[name == "v"])
        for name in "qkv":
            if len(arrays) > 1 and rng.random() < 0.15:
                del arrays[name]
        named = self._named(arrays)
        batch = len(self.lengths)
        if self.is_dense:
            shape = batch, self.lengths[0]
            arrays = {name: x.reshape(*shape, *x.shape[1:]) for name, x in arrays.items()}
        self.arrays, self.named = arrays, named
        self.options = {
            "dtype": str(rng.choice(["float8_e4m3fn", "int8"])),
            "block_size": self.block_size,
            "hadamard": self.hadamard,
            "scales": str(rng.choice(["block", "head", "tensor"])),
            "smooth_k": "k" in arrays and "k_mean" not in named and bool(rng.random() < 0.4),
        }
        self.wanted = quantize_qkv(**arrays, **named, **self.options)
        return self

    def _named(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Scales, means and offsets."""
        rng, batch = self.rng, len(self.lengths)
        named: dict[str, np.ndarray] = {}
        for name, x in arrays.items():
            shapes = {2: (1,), 3: (x.shape[1],), 4: (batch, x.shape[1])}
            kind = int(rng.integers(5))
            if kind in shapes:
                scale = rng.uniform(0.01, 3, shapes[kind])
                named[f"scale_{name}"] = scale.astype(np.float32)
        if "k" in arrays and rng.random() < 0.4:
            shape = (batch, *arrays["k"].shape[1:])
            named["k_mean"] = rng.standard_normal(shape).astype(np.float32)
        if not self.is_dense:
            offsets = np.cumsum([0, *self.lengths]).astype(rng.choice([np.int32, np.int64]))
            if "q" in arrays:
                named["qo_indptr"] = offsets
            if {"k", "v"} & {*arrays}:
                named["kv_indptr"] = offsets
        return named

    def run(self) -> None:
        """The call on arrays of the framework: the same bits, and nothing else touched."""
        placed: dict[str, Any] = {}
        for name, x in self.arrays.items():
            step = x.shape[-1] + int(self.rng.choice([0, 8, 3]))
            strides = (x.shape[-2] * step, step, 1)
            if self.is_dense:
                strides = (x.shape[1] * strides[0], *strides)
            placed[name] = self.embed(name, x, strides)
        placed |= {name: self.embed(name, x) for name, x in self.named.items()}
        got = quantize_qkv(**placed, **self.options)
        for name, x in self.wanted._asdict().items():
            if x is not None and name not in self.named:
                y = poison.download(getattr(got, name))
                assert y.shape == x.shape, f"{self.case} {name}"
                np.testing.assert_array_equal(_bits(y), _bits(x), f"{self.case} {name}")
        self.assert_intact()


class OfPages(calls.Placed):
    """rope_and_cache: on a GPU what the CPU writes, in bits but where a norm or sines are."""

    def __init__(self, seed: int, xp: ModuleType = np, device: str = "") -> None:
        super().__init__(f"seed {seed}", xp, seed, 63, device=device)
        rng = self.rng
        self.dtype = _numpy(str(rng.choice(_WIDE)))
        self.heads = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        self.hadamard = bool(rng.random() < 0.2)
        self.dims = int(rng.choice((64, 128, 256) if self.hadamard else _DIMS)), 0
        self.dims = self.dims[0], int(rng.choice([self.dims[0], *_DIMS]))
        kinds = (self.dtype.name, "float8_e4m3fn", "float8_e5m2", "int8")
        k_dtype = str(rng.choice(kinds))
        v_dtype = "float8_e4m3fn" if k_dtype == "int8" else k_dtype
        self.cache_dtypes = _numpy(k_dtype), _numpy(v_dtype)
        self.has_blocks = self.cache_dtypes[0].itemsize == 1 and bool(rng.random() < 0.5)
        self.block_size = int(rng.choice([64, 128]))
        if self.has_blocks and max(self.dims) > 128:
            self.block_size = 64
        self.page = self.block_size * int(rng.integers(1, 3)) if self.has_blocks else 16
        self.pages = int(rng.integers(2, 4)) if self.has_blocks else int(rng.integers(2, 30))
        self.layout = str(rng.choice(["NHD", "HND"]))
        self.is_exact = True

    def expect(self) -> OfPages:
        rng, heads = self.rng, self.heads
        self.options: dict[str, Any] = {"kv_layout": self.layout, "hadamard": self.hadamard}
        slots, self.named = self._places()
        n = slots.size
        x = [rng.standard_normal((n, heads[name != "q"], self.dims[name == "v"])) for name in "qkv"]
        self.arrays = {
            name: (a * 3).astype(np.float32).astype(self.dtype)
            for name, a in zip("qkv", x, strict=True)
        }
        self._draw_rotation()
        self._draw_scales()
        self.q_dtype = str(rng.choice([self.dtype.name, "float8_e4m3fn", "int8"]))
        self.options["q_dtype"] = self.q_dtype
        takes_copy = not self.hadamard and not {"k_block_scales", "k_mean"} & {
            *self.outputs,
            *self.named,
        }
        if takes_copy and rng.random() < 0.4:
            self.outputs["k_out"] = np.zeros_like(self.arrays["k"])
        written = {name: x.copy() for name, x in self.outputs.items()}
        out = rope_and_cache(**self.arrays, **self.named, **written, **self.options)
        self.wanted = written | {"q": out}
        return self

    def _places(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Slots in order of requests' keys, some of none; caches and what tells where."""
        rng, total = self.rng, self.page * self.pages
        shapes = [(self.pages, self.page, self.heads[1], dim) for dim in self.dims]
        if self.layout == "HND":
            shapes = [(a, c, b, d) for a, b, c, d in shapes]
        self.outputs = {
            f"{name}_cache": np.zeros(shape, dtype)
            for name, shape, dtype in zip("kv", shapes, self.cache_dtypes, strict=True)
        }
        # Each block of a page gets neighbouring slots, behind those that it has.
        size = self.block_size if self.has_blocks else self.page
        self.before = rng.choice([0, 0, 1, 5, size // 2], total // size)
        counts = np.minimum(rng.choice([0, 1, 3, 40, size], total // size), size - self.before)
        runs = [
            block * size + self.before[block] + np.arange(counts[block])
            for block in rng.permutation(total // size)
        ]
        self.slots = np.concatenate([*runs[:1], [-1], *runs[1:]]).astype(np.int64)
        return self.slots, {"slot_mapping": self.slots.astype(rng.choice([np.int32, np.int64]))}

    def _draw_rotation(self) -> None:
        rng, n, head_dim = self.rng, self.slots.size, self.dims[0]
        if head_dim % 16 == 0 and rng.random() < 0.7:
            rotary_dim = int(rng.choice([d for d in (16, 32, 64, head_dim) if d <= head_dim]))
            positions = rng.integers(0, 50, n)
            self.named["positions"] = positions.astype(rng.choice([np.int32, np.int64]))
            self.options["interleave"] = bool(rng.random() < 0.5)
            if rng.random() < 0.7:
                dtype = _numpy(str(rng.choice(["float32", self.dtype.name])))
                table = rng.uniform(-1, 1, (50, rotary_dim)).astype(np.float32)
                self.named["cos_sin_cache"] = table.astype(dtype)
            else:
                self.options |= {"rope_theta": 1e4, "rope_scale": 2.0, "rotary_dim": rotary_dim}
                self.is_exact = False
        if rng.random() < 0.4:
            for name in ("q_weight", "k_weight"):
                weight = rng.uniform(0.5, 1.5, head_dim).astype(np.float32)
                self.named[name] = weight.astype(self.dtype)
            self.options["weight_bias"] = float(rng.choice([0.0, 1.0]))
            self.options["eps"] = float(rng.choice([1e-6, 2.0]))
            self.is_exact = False

    def _draw_scales(self) -> None:
        rng, heads = self.rng, self.heads
        if self.has_blocks:
            shape = (self.pages, self.page // self.block_size, heads[1])
            has_some = self.before.reshape(*shape[:2], 1) > 0
            for name in "kv":
                old = rng.uniform(0.001, 0.02, shape).astype(np.float32)
                self.outputs[f"{name}_block_scales"] = np.where(has_some, old, np.float32(np.nan))
                cache = self.outputs[f"{name}_cache"]
                stored = rng.uniform(-100, 100, cache.shape).astype(np.float32)
                cache[...] = stored.astype(cache.dtype)
        for name, count in (("scale_q", heads[0]), ("k_scale", heads[1]), ("v_scale", heads[1])):
            if self.has_blocks and name != "scale_q":
                continue
            kind = rng.integers(3)
            if kind == 1:
                self.options[name] = 0.25
            elif kind == 2:
                self.named[name] = rng.uniform(0.1, 2, count).astype(np.float32)
        if rng.random() < 0.2:
            shape = (1, heads[1], self.dims[0])
            self.named["k_mean"] = rng.standard_normal(shape).astype(np.float32)

    def run(self) -> None:
        placed = {}
        for name, x in (*self.arrays.items(), *self.outputs.items()):
            step = x.shape[-1] + int(self.rng.choice([0, 8, 3])) * ("scales" not in name)
            strides = [step, 1]
            for extent in reversed(x.shape[1:-1]):
                strides.insert(0, strides[0] * extent)
            placed[name] = self.embed(name, x, tuple(strides[-x.ndim :]))
        placed |= {name: self.embed(name, x) for name, x in self.named.items()}
        out = rope_and_cache(**placed, **self.options)
        for name, x in self.wanted.items():
            y = out if name == "q" else placed[name]
            self._compare(name, poison.download(y), x)
        self.assert_intact()

    def _compare(self, name: str, got: np.ndarray, wanted: np.ndarray) -> None:
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        if self.is_exact:
            np.testing.assert_array_equal(_bits(got), _bits(wanted), f"{self.case} {name}")
            return
        # A last bit of float32 before rounding: a neighbour of what is stored, here and there.
        a, b = (x.astype(np.float64) for x in (got, wanted))
        step = 1 if wanted.dtype == np.int8 else 2.0 ** -{1: 2, 2: 7, 4: 18}[wanted.dtype.itemsize]
        bound = step if wanted.dtype == np.int8 else step * np.abs(b) + 1e-5
        if wanted.dtype.name == "float8_e4m3fn":
            bound = bound + 2.0**-9
        if wanted.dtype.name == "float8_e5m2":
            bound = 2 * bound + 2.0**-16
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b), f"{self.case} {name}")
        wrong = np.abs(a - b) > bound
        assert not wrong.any(), f"{self.case} {name}: {np.argwhere(wrong)[0]}"
        assert np.mean(a != b) < 0.05 or a.size < 200, f"{self.case} {name}"
