"""Tiles of keys that weigh next to nothing on the GPU: which are left out, bounds, equal bits."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from helpers.on_gpu import workspace
from helpers.poison import download, upload
from helpers.share import some
from helpers.skip_cases import NAME, Call, Case

import cupyattn
from cupyattn.core.device import device_props

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

CASES = {
    "ragged": Case(),
    "pages": Case(page_size=16, qo_len=(200, 70, 190), kv_len=(2000, 1900, 2000), heavy=1792),
    "pages of 64": Case(page_size=64, dtype="bfloat16"),
    "dims 64": Case(dims=(64, 64), heads=(8, 2), qo_len=(250, 200), kv_len=(1000, 900), heavy=672),
    "dims 80": Case(dims=(80, 80), heavy=384),
    "dims 192 and 128": Case(dims=(192, 128), heads=(4, 4), heavy=384),
    "dims 256 and 128": Case(dims=(256, 128), page_size=32, heavy=384),
    "all keys": Case(causal=False, qo_len=(300,) * 9, kv_len=(1800,) * 9, heavy=1600),
}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if device_props(0).arch != "sm_90a":
        pytest.skip("Hopper leaves out tiles")


def made(case: Case) -> Call:
    dtype = np.dtype(np.float16 if case.dtype == "float16" else ml_dtypes.bfloat16)
    xp: ModuleType = cupy
    if case.dtype == "bfloat16":
        xp = pytest.importorskip("torch")
    return Call(case, xp, workspace(xp), dtype)


@pytest.mark.parametrize("name", CASES)
def test_light_tiles_are_left_out(name: str) -> None:
    case = CASES[name]
    call = made(case)
    near = 0.02 if case.dtype == "bfloat16" else 2e-3
    least = min(case.kv_len) / max(case.kv_len)
    for factor, keeps_light in ((2.0 / least, False), (0.5 * least, True), (0.0, True)):
        answer = [
            download(x).astype(np.float64) for x in call.run(case.factor(factor * case.weight))
        ]
        out, lse = call.expected(keeps_light)
        np.testing.assert_allclose(answer[0], out, rtol=near, atol=near)
        np.testing.assert_allclose(answer[1], lse, atol=1e-3)


@pytest.mark.parametrize("name", ["ragged", "pages"])
def test_many_runs_are_the_same_bits(name: str) -> None:
    case = replace(CASES[name], qo_len=(500, 900, 66, 1200), kv_len=(1000, 900, 700, 1500))
    call = made(case)
    rng = np.random.default_rng(3)
    arguments = list(call.arguments)
    arguments[0] = upload(rng.standard_normal(call.q.shape).astype(call.q.dtype) * 4, cupy)
    keys = (arguments[1],) if not case.page_size else arguments[1][:1]
    for k in keys:
        k += upload(rng.standard_normal(k.shape).astype(np.float16), cupy)
    call.arguments = tuple(arguments)
    first = [download(x).tobytes() for x in call.run(30.0)]
    plain = call.run(None)
    assert download(plain[0]).tobytes() != first[0]
    for _ in range(some(300)):
        assert [download(x).tobytes() for x in call.run(30.0)] == first


@pytest.mark.parametrize("factor", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("length", [512, 3000])
def test_what_rows_lose_is_bounded(length: int, factor: float) -> None:
    rng = np.random.default_rng(length)
    q, k, v = (rng.standard_normal((length, h, 128)).astype(np.float16) for h in (4, 2, 2))
    k[..., 0] = 3.0 * rng.integers(-3, 4, -(-length // 128)).repeat(128)[:length, None]
    q[..., 0] = 4.0
    q, k, v = (upload(x, cupy) for x in (q, k, v))
    exact, lse = cupyattn.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    got, got_lse = cupyattn.single_prefill_with_kv_cache(
        q, k, v, causal=True, return_lse=True, **{NAME: factor}
    )
    most = 2.0 * factor * float(cupy.abs(v).max()) + 4e-3
    assert float(cupy.abs(got.astype(cupy.float32) - exact.astype(cupy.float32)).max()) <= most
    assert bool((got_lse <= lse + 1e-3).all())
    assert bool((got_lse >= lse - np.log2(1.0 + factor) - 1e-3).all())
