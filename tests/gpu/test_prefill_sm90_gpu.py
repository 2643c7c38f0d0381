"""prefill_sm90 a thousand times over, while other work keeps the GPU's timing moving: whoever
reads too early, or writes too late, does so once in a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from helpers import batches, compare, lowprec
from helpers.gpu_calls import download, upload
from helpers.on_gpu import workspace
from helpers.share import some

import cupyattn
from cupyattn.device import device_props
from cupyattn.launch import enqueue

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

HEADS, KV_HEADS = 8, 2


@dataclass(frozen=True)
class Kind:
    """A batch whose requests end within tiles of rows and of keys. page_size: 0 for ragged keys."""

    qo_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    page_size: int = 0
    dim: int = 128
    options: dict[str, Any] = field(default_factory=dict)


SHORT = (33, 40, 129, 64, 17, 300, 18, 70)
CASES = {
    "ragged": Kind(SHORT, SHORT, options={"causal": True}),
    "dim 64": Kind(SHORT, SHORT, dim=64, options={"causal": True}),
    "dim 256": Kind(SHORT, SHORT, dim=256, options={"causal": True}),
    "all keys": Kind((500, 20), (700, 900)),
    "window": Kind((400, 90), (1200, 900), options={"causal": True, "window_left": 200}),
    "soft cap": Kind((400, 90), (400, 900), options={"causal": True, "logits_soft_cap": 20.0}),
    "ALiBi": Kind((400, 90), (400, 900), options={"causal": True, "pos_encoding_mode": "ALIBI"}),
    "RoPE": Kind(
        (400, 90), (400, 900), options={"causal": True, "pos_encoding_mode": "ROPE_LLAMA"}
    ),
    "pages of 16": Kind((300, 70), (3000, 1030), 16, options={"causal": True}),
    "pages of 1": Kind((300, 70), (1500, 1030), 1, options={"causal": True}),
    "split": Kind((20,), (20_000,), 16, options={"causal": True}),
    "beside decodes": Kind((300, *(1,) * 30), (2000, *(900,) * 30), 16, options={"causal": True}),
}


def bind(kind: Kind, b: batches.Batch) -> Callable[[], tuple[Any, Any]]:
    """run() of a planned batch."""
    heads = HEADS, KV_HEADS, kind.dim
    q = upload(b.q, torch)
    if kind.page_size:
        paged = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(torch))
        paged.plan(b.qo_indptr, *b.table, *heads, kind.page_size, **kind.options)
        cache = upload(b.one_tensor(), torch)
        return lambda: paged.run(q, cache, return_lse=True)
    ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace(torch))
    ragged.plan(b.qo_indptr, b.kv_indptr, *heads, **kind.options)
    k, v = (upload(x, torch) for x in b.ragged())
    return lambda: ragged.run(q, k, v, return_lse=True)


def check(got: tuple[Any, Any], b: batches.Batch, options: dict[str, Any]) -> None:
    low = [
        lowprec.attention(b.q[begin:end], k, v, **options)
        for (k, v), begin, end in zip(b.keys, b.qo_indptr[:-1], b.qo_indptr[1:], strict=True)
    ]
    low_o, low_lse = (np.concatenate(x) for x in zip(*low, strict=True))
    ref = b.expected(**options)
    compare.assert_close(*map(download, got), *ref, low_o, low_lse, options)


@pytest.mark.parametrize("name", CASES)
def test_a_thousand_runs_are_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_props(0).arch != "sm_90a":
        pytest.skip("a kernel of sm_90a")
    kind = CASES[name]
    lengths = list(kind.qo_len), list(kind.kv_len)
    b = batches.make(
        *lengths, kind.page_size or 16, heads=(HEADS, KV_HEADS), dims=(kind.dim, kind.dim)
    )
    run = bind(kind, b)
    launched: list[int] = []
    real = enqueue.enqueue
    monkeypatch.setattr(
        "cupyattn.launch.bound.enqueue",
        lambda launch, *rest: (launched.append(launch.num_items), real(launch, *rest)),
    )
    first = run()
    assert any(launched), "no launch of persistent blocks"
    monkeypatch.undo()
    check(first, b, kind.options)
    noise, other = torch.randn(1 << 22, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for index in range(some(1000)):
        if index % 3 == 0:
            with torch.cuda.stream(other):
                noise[: 1 << (10 + index % 13)].mul_(1.0)
        for x, wanted in zip(run(), first, strict=True):
            bits = torch.int16 if x.element_size() == 2 else torch.int32
            wrong += (x.view(bits) != wanted.view(bits)).any()
    assert int(wrong) == 0
