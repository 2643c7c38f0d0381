"""Arrays for results that a framework can't make."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from cupyattn.array import memory
from cupyattn.core import dtypes
from cupyattn.errors import UnsupportedError


def test_cupys_refusal_of_fp8_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(shape: Any, dtype: Any) -> None:
        raise ValueError(f"Unsupported dtype {dtype}")

    cupy = SimpleNamespace(empty=empty, cuda=SimpleNamespace(Device=nullcontext))
    monkeypatch.setattr(memory, "cupy_module", lambda: cupy)
    with pytest.raises(UnsupportedError, match="out: CuPy makes no arrays of float8_e4m3fn"):
        memory._empty_cupy(dtypes.float8_e4m3fn.numpy, 0, (2, 3))
