"""Memory of the helpers' calls without what only answers need: values of q, k and v, and poison.

Nothing reads them where no kernel runs, and to make them takes nine tenths of a call's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers import batches, poison

# Fewer numbers are scales and the like, which launches are told.
_FEW = 4096


class _Generator(np.random.Generator):
    """Draws zeros where many normal numbers are asked for."""

    def standard_normal(self, size: Any = None, *rest: Any, **named: Any) -> Any:
        if size is not None and np.prod(size, dtype=np.int64) > _FEW:
            return np.zeros(size)
        return super().standard_normal(size, *rest, **named)

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        if size is not None and np.prod(size, dtype=np.int64) > _FEW:
            return np.zeros(size)
        return super().normal(loc, scale, size)


def _default_rng(seed: Any = None) -> np.random.Generator:
    return _Generator(np.random.PCG64(seed))


def _embed(
    array: np.ndarray,
    strides: Sequence[int] | None = None,
    *,
    offset: int = 0,
    guard: int = poison.GUARD,
    **_: Any,
) -> poison.Poisoned:
    """poison.embed, with zeros for poison; only indices and masks are copied."""
    shape = array.shape
    steps = tuple(strides) if strides is not None else poison._c_strides(shape)
    size = guard + offset + poison._extent(shape, steps) + guard
    flat = np.zeros(size, array.dtype)
    view = poison._strided(flat, shape, steps, guard + offset, np)
    if array.dtype.kind in "iub" and array.size:
        view[...] = array
    return poison.Poisoned(view, flat, np.zeros(0, bool), guard + offset, steps, array.dtype)


def _blank(
    shape: Sequence[int], dtype: Any, strides: Sequence[int] | None = None, **where: Any
) -> poison.Poisoned:
    return _embed(np.zeros(tuple(shape), np.dtype(dtype)), strides, **where)


def patch(patch: pytest.MonkeyPatch) -> None:
    """Let the helpers make such memory."""
    patch.setattr(np.random, "default_rng", _default_rng)
    patch.setattr(poison, "embed", _embed)
    patch.setattr(poison, "blank", _blank)
    patch.setattr(poison.Poisoned, "assert_intact", lambda placed, what: None)
    patch.setattr(batches, "blank_pages", lambda *shape, dtype: np.zeros(shape, dtype))
    patch.setattr(batches, "fill_pages", lambda pool, pages, values: None)
