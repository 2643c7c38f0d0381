"""Scales of every call without a plan, as numbers and as arrays without and with an axis, on a GPU
that is not there: accepted alike, checked and from the cache."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.fake_gpu import Gpu, pointer
from helpers.wrong_calls import Entry
from helpers.wrong_others import entries

from cupyattn.engine import run_planless as call

Make = Callable[..., Any]


def scales_of(entry: Entry) -> list[str]:
    """Names of arguments "run.name" that may be a number or an array of one."""
    target = entry.steps[-1][1]
    found = []
    for name, parameter in inspect.signature(target).parameters.items():
        is_scale = parameter.annotation == "Scale" or name == "scale" or name.endswith("_descale")
        if is_scale or (entry.name == "latent xqa" and name in ("q_scale", "kv_scale")):
            found.append(f"run.{name}")
    return found


# Scales of single calls are by head, and merges have one for fp8 outputs only.
CALLS = [
    entry
    for entry in entries()
    if len(entry.steps) == 1
    and not any(word in entry.steps[0][1].__name__ for word in ("single", "merge"))
]
CASES = [(e, name) for e in CALLS for name in scales_of(e)]


def on_gpu(make: Make, x: Any, is_fp8: bool = False) -> Any:
    if isinstance(x, (tuple, list)) and any(isinstance(y, np.ndarray) for y in x):
        return type(x)(on_gpu(make, y) for y in x)
    if not isinstance(x, np.ndarray):
        return x
    return make(*x.shape, dtype="float8_e4m3fn" if is_fp8 else x.dtype.name)


def arguments(make: Make, entry: Entry, name: str) -> dict[str, Any]:
    """A call in which this scale has an effect."""
    fp8: tuple[str, ...] = ()
    if name in ("run.kv_scale", "run.q_descale", "run.k_descale", "run.v_descale"):
        if not hasattr(make(1), "untyped_storage"):
            pytest.skip("CuPy has no fp8 of its own")
        fp8 = "run.k", "run.v", "run.k_cache", "run.v_cache"
        fp8 += ("run.q",) if name.endswith("_descale") else ()
    return {n: on_gpu(make, x, n in fp8) for n, x in entry.base.items()}


def test_scales_of_every_call_are_found() -> None:
    assert len({e.steps[0][1] for e, _ in CASES}) >= 13 and len(CASES) >= 28


@pytest.mark.parametrize("entry, name", CASES, ids=[f"{e.name}, {name}" for e, name in CASES])
def test_a_scale_may_be_a_number_or_an_array_with_or_without_an_axis(
    gpu: Gpu, make: Make, entry: Entry, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = arguments(make, entry, name)
    arrays = make(dtype="float32"), make(1, dtype="float32")
    # flash_attn's are arrays there, too.
    given = arrays if name.endswith("_descale") else (2.0, *arrays)
    launched = [repeated(gpu, entry, base, name, scale, monkeypatch) for scale in given]
    assert launched[-2] == launched[-1]


def repeated(
    gpu: Gpu,
    entry: Entry,
    base: dict[str, Any],
    name: str,
    scale: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> list[Any]:
    """What a call launches that the cache has to find."""
    entry.call(base | {name: scale})
    with monkeypatch.context() as patch:
        patch.setattr(call, "check", None)
        gpu.launches.clear()
        entry.call(base | {name: scale})
    if not isinstance(scale, float):
        address = struct.pack("<Q", pointer(scale))
        assert any(address in x.params for x in gpu.launches)
    launched = [(x.kernel, x.grid, x.block, x.shared_bytes) for x in gpu.launches]
    gpu.launches.clear()
    assert launched
    return launched
