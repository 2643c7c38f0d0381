"""reshape_and_cache on CPU arrays, its errors, and what it launches on a GPU that is not there."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import fake_gpu
from helpers.slot_cases import Case

from cupyattn import slots as slots_module
from cupyattn.errors import ArgumentError
from cupyattn.launch.driver import params
from cupyattn.slots import reshape_and_cache


def test_random_writes() -> None:
    for seed in range(150):
        Case(seed).run()


def test_writes_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for seed in range(200, 230):
        Case(seed, torch, "cpu").run()


def call(**changes: Any) -> None:
    k = np.ones((3, 2, 8), np.float32)
    cache = np.zeros((10, 2, 8), np.float32)
    named = {"k": k, "v": k, "k_cache": cache, "v_cache": cache.copy()}
    named |= {"slot_mapping": np.arange(3), **changes}
    reshape_and_cache(**named)


FP8 = {name: np.zeros((10, 2, 8), "uint8") for name in ("k_cache", "v_cache")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": np.ones((3, 16), np.float32)}, "k: shape"),
        ({"v": np.ones((3, 3, 8), np.float32)}, "v: "),
        ({"v": np.ones((2, 2, 8), np.float32)}, "v: "),
        ({"k": np.ones((3, 2, 8), np.float16)}, "v: dtype"),
        ({"slot_mapping": np.arange(4)}, "slot_mapping"),
        ({"slot_mapping": np.ones(3, np.float32)}, "slot_mapping"),
        ({"slot_mapping": np.array([0, 1, 10])}, "slot_mapping: has slot 10"),
        ({"slot_map": np.arange(2), "slot_mapping": np.array([0, 1, 2])}, "slot_mapping: 2"),
        ({"slot_map": np.arange(8, 13), "slot_mapping": np.array([0, 1, 4])}, "slot_mapping"),
        ({"kv_layout": "NDH"}, "kv_layout"),
        ({"k_scale": 2.0}, "k_scale: got 2.0"),
        ({"k_scale": -1.0}, "k_scale"),
        ({"k_scale": np.ones(3, np.float32)}, "k_scale: shape"),
        ({"k_scale": np.ones(2, np.float16)}, "k_scale"),
        ({"k_cache": np.zeros((10, 2, 8), np.float16)}, "v_cache|k_cache"),
        (FP8, "k_cache"),
        ({"v_cache": np.zeros((10, 2, 4), np.float32)}, "v_cache"),
        ({"v_cache": np.zeros((9, 2, 8), np.float32)}, "v_cache"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(**changes)


def test_caches_that_cannot_be_written() -> None:
    cache = np.zeros((10, 2, 8), np.float32)
    with pytest.raises(ArgumentError, match="one address"):
        call(k_cache=cache, v_cache=cache)
    frozen = cache.copy()
    frozen.flags.writeable = False
    with pytest.raises(ArgumentError, match="k_cache: a read-only"):
        call(k_cache=frozen)
    with pytest.raises(ArgumentError, match="k_cache: overlaps k"):
        call(k=cache[:3], k_cache=cache)


# --- on a GPU that is not there ---


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    fake_gpu.forget()
    make = fake_gpu.maker("torch", monkeypatch)
    make.gpu = fake_gpu.pretend(monkeypatch)  # type: ignore[attr-defined]
    return make


def slots_of(launch: fake_gpu.Launched) -> int:
    """The address of the slots in the kernel's struct, after both rows and their scales."""
    ahead = 2 * (struct.calcsize("<2Q") + params.APPENDED_ROWS.size) + struct.calcsize("<2Q")
    return struct.unpack_from("<Q", launch.params, ahead)[0]


def test_repeated_writes_are_one_signature(make: Any) -> None:
    caches = [make(5, 16, 2, 64, dtype="float8_e4m3fn") for _ in "kv"]
    scale = make(1, dtype="float32")
    for n in (4, 4, 7, 1):
        new = [make(n, 2, 64) for _ in "kv"]
        slots = make(n, dtype="int64")
        reshape_and_cache(*new, *caches, slots, k_scale=scale, v_scale=scale)
    assert [x.kernel for x in make.gpu.launches] == ["store_kv"] * 4
    assert len(slots_module._STORES) == 1
    # 8 threads a token: 256 threads have 32 tokens; K and V, and two heads.
    assert {x.grid for x in make.gpu.launches} == {(1, 2, 2)}


def test_counts_that_differ_are_found_in_repeated_writes(make: Any) -> None:
    caches = [make(5, 16, 2, 64) for _ in "kv"]
    reshape_and_cache(make(4, 2, 64), make(4, 2, 64), *caches, make(4, dtype="int32"))
    with pytest.raises(ArgumentError, match="slot_mapping"):
        reshape_and_cache(make(4, 2, 64), make(4, 2, 64), *caches, make(3, dtype="int32"))
    assert len(make.gpu.launches) == 1


def test_one_strided_slot_is_no_signature_of_several(make: Any) -> None:
    """A column of a table of one row is contiguous, that of a longer one is copied."""
    torch = pytest.importorskip("torch")
    caches = [make(5, 16, 2, 64) for _ in "kv"]
    addresses = []
    for n in (1, 1, 4):
        column = torch.zeros((n, 3), dtype=torch.int32)[:, 1]
        assert column.stride() == (3,)
        reshape_and_cache(make(n, 2, 64), make(n, 2, 64), *caches, column)
        addresses.append((slots_of(make.gpu.launches[-1]), column.data_ptr()))
    assert [used == given for used, given in addresses] == [True, True, False]
