"""Eight bits on the GPU: what the CPU computes, bit by bit, in all frameworks' arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import quantize_cases
from helpers.share import one_of

from cupyattn.core import dtypes
from cupyattn.quantize_pages import rope_and_cache

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("first", one_of(10, range(0, 200, 10)))
@pytest.mark.parametrize("kind", [quantize_cases.OfArrays, quantize_cases.OfPages])
def test_random_calls(kind: type, first: int, xp: Any) -> None:
    for seed in range(first, first + 10):
        kind(seed, xp).expect().run()


def test_in_place_in_a_graph() -> None:
    """q and k of a packed qkv, rotated where they are, as an engine has them."""
    torch = pytest.importorskip("torch")
    n, heads, kv_heads, dim = 5, 4, 2, 128
    qkv = torch.randn(n, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16, device="cuda")
    first = qkv.clone()
    cache = torch.zeros(4, kv_heads, 16, 2 * dim, dtype=torch.bfloat16, device="cuda")
    table = torch.randn(32, dim, device="cuda")
    slots = torch.tensor([3, 20, -1, 7, 40], device="cuda")
    positions = torch.tensor([1, 2, 3, 4, 31], device="cuda")

    def call() -> None:
        q, k, v = (
            x.view(n, -1, dim)
            for x in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        )
        k_cache, v_cache = cache.transpose(1, 2).split(dim, dim=-1)
        named = {"q_out": q, "k_out": k, "cos_sin_cache": table}
        rope_and_cache(q, k, v, k_cache, v_cache, slots, positions, **named)

    call()
    qkv.copy_(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    host = first.view(torch.int16).cpu().numpy().view(dtypes.bfloat16.numpy)
    q, k, v = np.split(host, [heads * dim, (heads + kv_heads) * dim], axis=1)
    q, k, v = (np.ascontiguousarray(x).reshape(n, -1, dim) for x in (q, k, v))
    caches = [np.zeros((64, kv_heads, dim), host.dtype) for _ in "kv"]
    numbers = (x.cpu().numpy() for x in (slots, positions, table))
    wanted = _on_cpu(q, k, v, caches, *numbers)
    got = qkv.view(torch.int16).cpu().numpy()
    np.testing.assert_array_equal(got, wanted.view(np.int16))


def _on_cpu(q, k, v, caches, slots, positions, table) -> np.ndarray:  # type: ignore[no-untyped-def]
    """The packed qkv afterwards."""
    named = {"q_out": q, "k_out": k, "cos_sin_cache": table}
    rope_and_cache(q, k, v, *caches, slots, positions, **named)
    return np.concatenate([x.reshape(x.shape[0], -1) for x in (q, k, v)], axis=1)
