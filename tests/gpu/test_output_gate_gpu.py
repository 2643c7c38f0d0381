"""Gates of the output on the GPU: random calls, and others beside calls without gates."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import batches, compare, gates, gpu_cases
from helpers import prefill_sm90_calls as prompts
from helpers.calls import run_and_check
from helpers.flash_cases import FORMS, Case
from helpers.gates import KINDS, gated, sigmoid
from helpers.on_gpu import capture, kernels, try_random, workspace
from helpers.poison import download, upload
from helpers.share import some
from helpers.single_calls import Call

import cupyattn

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

# Each case has kernels of its own, which one process compiles one after another.
BLOCK = 7
PROMPTS = (
    *("ragged", "dim 64", "dim 256", "dim 72", "one KV head", "all keys", "soft cap", "mask"),
    *("pages of 16", "pages of 1", "split", "beside decodes", "dims 256 and 128"),
)


@pytest.mark.parametrize("first", range(0, gates.NUM_CASES, BLOCK))
def test_random_calls(first: int) -> None:
    try_random(first, BLOCK, lambda seed, xp: gates.random_call(seed, xp, workspace(xp)))


@pytest.mark.parametrize("seed", range(4 * len(FORMS)))
def test_calls_of_flash_attn(torch: Any, seed: int) -> None:
    Case(seed, torch, "cuda", is_gpu=True, gate=gates.of_kind(seed // len(FORMS))).run()


@pytest.mark.parametrize("kind", KINDS[:2])
def test_kernels_of_every_architecture(kind: str) -> None:
    case = gpu_cases.PLAIN
    with kernels(is_portable=True):
        run_and_check(gated(Call(case, cupy), kind, strides="packed"))


def beside_plain(run: Any, q: Any, kind: str, dim: int, xp: ModuleType) -> None:
    """A gated run is one without gates times sigmoids, with the same LSE and the same bits each
    time."""
    rng = np.random.default_rng(dim)
    values = download(q)
    shape = (*values.shape[:-1], dim) if kind.endswith("elements") else values.shape[:-1]
    gate = 2.0 * rng.standard_normal(shape)
    gate = gate.astype(np.float32 if kind.startswith("float32") else values.dtype)
    given = upload(gate, xp)
    plain, plain_lse = map(download, run(return_lse=True))
    out, lse = map(download, run(return_lse=True, output_gate=given))
    wanted = plain.astype(np.float64) * sigmoid(gate)
    np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=2e-3, atol=1e-5)
    compare.assert_bitwise_equal(lse, plain_lse, "lse")
    for _ in range(some(30)):
        again = download(run(output_gate=given))
        compare.assert_bitwise_equal(again, out, "out")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name: str, kind: str) -> None:
    torch = pytest.importorskip("torch")
    call = prompts.Call(prompts.CASES[name], torch, workspace(torch))
    run = functools.partial(call.wrapper.run, *call.arrays)
    beside_plain(run, call.arrays[0], kind, call.case.dims[1], torch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "rows", "keys"),
    [((8, 1), 1, (5000,)), ((16, 2), 4, (3000, 100, 7000)), ((8, 2), 1, (900,) * 300)],
)
def test_decodes(heads: tuple[int, int], rows: int, keys: tuple[int, ...], kind: str) -> None:
    """In clusters, with splits, and of many requests."""
    b = batches.make([rows] * len(keys), list(keys), 16, heads=heads, dims=(128, 128))
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace(cupy))
    w.plan(*b.table, *heads, 128, 16, q_len_per_req=rows)
    q, cache = upload(b.q, cupy), upload(b.one_tensor(), cupy)
    beside_plain(functools.partial(w.run, q, cache), q, kind, 128, cupy)


@pytest.mark.parametrize("rows", [3, 200])
def test_wide_heads(rows: int) -> None:
    b = batches.make([rows] * 2, [900, 2000], 16, heads=(8, 1), dims=(512, 512))
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(cupy))
    w.plan(b.qo_indptr, *b.table, 8, 1, 512, 16, causal=True)
    q, cache = upload(b.q, cupy), upload(b.one_tensor(), cupy)
    for kind in KINDS:
        beside_plain(functools.partial(w.run, q, cache), q, kind, 512, cupy)


def test_a_graph_reads_the_gates_of_the_day() -> None:
    torch = pytest.importorskip("torch")
    heads, dim = (8, 2), 128
    buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (4, 400, 3)]
    w = cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda"), *buffers
    )
    rng = np.random.default_rng(0)
    replay: Any = None
    for step, kv_len in enumerate(([900, 3000, 40], [8, 16, 3100], [2000, 1, 300])):
        b = batches.make([1] * 3, kv_len, 16, heads=heads, dims=(dim, dim), seed=step)
        values = b.q, b.one_tensor(), rng.standard_normal(b.q.shape).astype(np.float16)
        w.plan(*b.table, *heads, dim, 16)
        if replay is None:
            q, gate = upload(values[0], torch), upload(values[2], torch)
            cache = torch.zeros(400, *values[1].shape[1:], dtype=torch.float16, device="cuda")
            out = torch.empty_like(q)
            run = functools.partial(w.run, q, cache, output_gate=gate, out=out)
            run()
            replay = capture(torch, torch, run)
        q.copy_(upload(values[0], torch))
        cache[: len(values[1])].copy_(upload(values[1], torch))
        gate.copy_(upload(values[2], torch))
        replay()
        torch.cuda.synchronize()
        wanted = b.expected()[0] * sigmoid(values[2])
        np.testing.assert_allclose(download(out).astype(np.float64), wanted, atol=4e-3)
