"""Sinks on a GPU: every wrapper, however keys are split, and in graphs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from helpers import batches, calls, sink_calls
from helpers.on_gpu import capture, scratch
from helpers.poison import raw, upload

import cupyattn

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

HEADS, DIM, PAGE, SCALE = (8, 2), 128, 16, 0.1
LENGTHS = {
    "decode": ([1] * 6, [0, 1, 300, 2000, 16, 777]),
    "verification": ([4] * 4, [40, 300, 1999, 4]),
    "append": ([30, 0, 7], [500, 90, 1200]),
    "mixed": ([200, 1, 1, 1], [900, 2000, 33, 0]),
}


def sinks(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, HEADS[0]).astype(np.float32)


def check(got: Any, b: batches.Batch, sink: np.ndarray, what: str) -> None:
    calls.check_batch(got, b, what, causal=True, sinks=sink, sm_scale=SCALE)


@pytest.mark.parametrize("split", [None, 16, 256])
@pytest.mark.parametrize("name", ["torch", "cupy"])
@pytest.mark.parametrize("kind", LENGTHS)
def test_every_wrapper_counts_a_sink_once(kind: str, name: str, split: int | None) -> None:
    xp = pytest.importorskip(name)
    b = batches.make(*LENGTHS[kind], PAGE, heads=HEADS, dims=(DIM, DIM))
    sink, space = sinks(0), scratch(xp)
    put = lambda x: upload(x, xp)  # noqa: E731
    for what, run in sink_calls.every_wrapper(b, sink, SCALE, space, split, put):
        for _ in range(2):
            check(run(), b, sink, f"{kind}, {what}, split {split}")


@pytest.mark.parametrize("kind", ["decode", "append"])
def test_a_graph_reads_the_sinks_of_the_day(kind: str) -> None:
    torch = pytest.importorskip("torch")
    b = batches.make(*LENGTHS[kind], PAGE, heads=HEADS, dims=(DIM, DIM))
    count = len(b.qo_len)
    q, cache, sink = (upload(x, torch) for x in (b.q, b.one_tensor(), sinks(0)))
    buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (count + 1,) * 2]
    buffers += [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (1000, count)]
    w = cupyattn.BatchAttentionWithAttentionSinkWrapper(
        scratch(torch), "NHD", True, *buffers, q_data_type="float16", kv_data_type="float16"
    )
    w.plan(b.qo_indptr, *b.table, *HEADS, DIM, PAGE, causal=True)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    run = functools.partial(w.run, q, cache, sink, SCALE, out=out, lse=lse, return_lse=True)
    run()
    replay = capture(torch, torch, run)
    for seed in range(1, 6):
        new = sinks(seed)
        sink.copy_(upload(new, torch))
        w.plan(b.qo_indptr, *b.table, *HEADS, DIM, PAGE, causal=True)
        raw(out).fill_(-1)
        replay()
        torch.cuda.synchronize()
        check((out, lse), b, new, f"{kind}, replay {seed}")
