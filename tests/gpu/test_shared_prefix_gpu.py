"""Requests that share a prefix in arrays of its own, on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import batches, shared_calls
from helpers.on_gpu import try_random, workspace
from helpers.poison import download, upload
from helpers.share import some
from helpers.shared_calls import random_case

import cupyattn
from cupyattn.errors import PlanError

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

BLOCK = 60


@pytest.mark.parametrize("first", range(0, shared_calls.NUM_CASES, BLOCK))
def test_random_calls(first: int) -> None:
    make = lambda seed, xp: shared_calls.Call(random_case(seed), xp, workspace(xp))  # noqa: E731
    try_random(first, BLOCK, make, turn=3)


def padded_arrays(count: int, length: int, prefix: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng((count, length, prefix))
    shapes = (count, 8, 128), *[(prefix, 2, 128)] * 2, *[(count, length, 2, 128)] * 2
    return tuple(rng.standard_normal(shape).astype(np.float16) for shape in shapes)


def test_padded_calls_of_other_lengths_and_streams() -> None:
    """Plans follow each other while runs of earlier ones wait, on two streams in turn."""
    torch = pytest.importorskip("torch")
    sizes = [(3, 40, 100), (20, 700, 64), (1, 9000, 30), (3, 40, 100), (3, 41, 100)]
    calls = [[upload(x, torch) for x in padded_arrays(*size)] for size in sizes]
    attend = cupyattn.batch_decode_with_shared_prefix_padded_kv_cache
    wanted = [attend(*call).clone() for call in calls]
    for got, size in zip(wanted, sizes, strict=True):
        assert_right(download(got), size)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = []
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
    for _ in range(some(10)):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs += [(attend(*call), index) for index, call in enumerate(calls)]
    torch.cuda.synchronize()
    for out, index in outs:
        assert torch.equal(out, wanted[index])


def assert_right(got: np.ndarray, size: tuple[int, int, int]) -> None:
    q, k, v, own_k, own_v = padded_arrays(*size)
    for row in (0, size[0] - 1):
        keys = (np.concatenate(pair) for pair in ((k, own_k[row]), (v, own_v[row])))
        wanted, _ = cupyattn.reference.attention(q[row : row + 1], *keys)
        np.testing.assert_allclose(got[row : row + 1].astype(np.float64), wanted, atol=2e-3)


def test_padded_calls_refuse_a_capture() -> None:
    torch = pytest.importorskip("torch")
    call = [upload(x, torch) for x in padded_arrays(3, 40, 100)]
    attend = cupyattn.batch_decode_with_shared_prefix_padded_kv_cache
    wanted = attend(*call)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(PlanError, match="cannot be part of a CUDA graph"):
        with torch.cuda.graph(graph):
            attend(*call)
    torch.cuda.synchronize()
    assert torch.equal(attend(*call), wanted)


def test_jax_queries() -> None:
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX is here without CUDA")
    b = batches.make([1, 1], [50, 700], 4, heads=(8, 2), dims=(128, 128))
    q, k, v, *_ = padded_arrays(2, 1, 300)
    w: Any = cupyattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(cupy))
    w.begin_forward(*b.table, 8, 2, 128, 4)
    arrays = [jax.device_put(x, device) for x in (q, k, v, b.one_tensor())]
    got = w.forward(*arrays)
    assert isinstance(got, jax.Array)
    for row, own in enumerate(b.keys):
        keys = (np.concatenate(pair) for pair in zip((k, v), own, strict=True))
        wanted, _ = cupyattn.reference.attention(q[row : row + 1], *keys)
        np.testing.assert_allclose(np.asarray(got[row : row + 1], np.float64), wanted, atol=2e-3)
