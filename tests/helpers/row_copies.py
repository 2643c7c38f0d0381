"""Random copies of rows by the copy_rows kernel, on poisoned memory of the host or of a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn import array
from cupyattn.core import dtypes
from cupyattn.launch.ops import copy_rows

from . import compare, poison

_WIDE = "float16", "bfloat16"
_FP8 = "float8_e4m3fn", "float8_e5m2"


def check(seed: int, xp: Any = np, device: str = "cuda") -> None:
    """One or two arrays, into others of other strides, columns and types."""
    rng = np.random.default_rng(seed)
    source = dtypes.parse(rng.choice((*_WIDE, *_FP8, "float32")), "dtype")
    target = dtypes.parse(rng.choice(_WIDE), "dtype") if source.is_fp8 else source
    lead = tuple(int(x) for x in rng.integers(1, (4, 9, 5)))[int(rng.integers(3)) :]
    if seed % 7 == 0:
        lead = (0, *lead[1:])
    pairs, sources, targets = [], [], []
    for _ in range(1 + seed % 2):
        dims = [int(rng.choice([1, 7, 16, 57, 64, 128, 160])) for _ in range(2)]
        if rng.random() < 0.6:
            dims[1] = dims[0]
        elif rng.random() < 0.5:
            dims[1] = -(-dims[0] // 8) * 8
        bits = rng.integers(0, 2 ** (8 * source.itemsize), (*lead, dims[0]), dtype=np.uint64)
        values = bits.astype(f"u{source.itemsize}").view(source.numpy)
        is_aligned, is_padded = rng.random() < 0.7, rng.random() < 0.5
        where: dict[str, Any] = {"xp": xp, "device": device}
        offset = 0 if is_aligned else int(rng.integers(16))
        strides = poison.strides(values.shape, is_aligned, is_padded)
        sources.append(poison.embed(values, strides, offset=offset, **where))
        shape = (*lead, dims[1])
        strides = poison.strides(shape, is_aligned, rng.random() < 0.5)
        targets.append(poison.blank(shape, target.numpy, strides, **where))
        pairs.append(tuple(array.view(x.array, "x") for x in (sources[-1], targets[-1])))
    copy_rows.launch(pairs, array.current_stream(pairs[0][0]))
    for given, made in zip(sources, targets, strict=True):
        got, x = made.values(), given.values()
        wanted = np.zeros(got.shape, got.dtype)
        count = min(got.shape[-1], x.shape[-1])
        wanted[..., :count] = x[..., :count].astype(target.numpy)
        near = (0.0, 0.0) if source.is_fp8 else None  # NaN is NaN
        compare.assert_bitwise_equal(got, wanted, f"seed {seed}", near=near)
        made.assert_intact("the copy")
        given.assert_intact("the source")
