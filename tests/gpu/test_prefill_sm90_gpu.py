"""prefill_sm90 a thousand times over, while other work keeps the GPU's timing moving: whoever
reads too early, or writes too late, does so once in a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import batches, compare, lowprec
from helpers.gpu_calls import download, upload
from helpers.on_gpu import workspace
from helpers.prefill_sm90_cases import CASES, Case
from helpers.share import some

import cupyattn
from cupyattn.device import device_props
from cupyattn.launch import enqueue

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")


def bind(case: Case, b: batches.Batch) -> Callable[[], tuple[Any, Any]]:
    """run() of a planned batch."""
    heads = case.num_qo_heads, case.num_kv_heads, case.dim
    q = upload(b.q, torch)
    options = case.plan_options()
    if case.as_bits:
        options["custom_mask"] = torch.from_numpy(options["custom_mask"]).cuda()
    if case.page_size:
        paged = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(torch))
        paged.plan(b.qo_indptr, *b.table, *heads, case.page_size, **options)
        cache = upload(b.one_tensor(), torch)
        return lambda: paged.run(q, cache, return_lse=True)
    ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace(torch))
    ragged.plan(b.qo_indptr, b.kv_indptr, *heads, **options)
    k, v = (upload(x, torch) for x in b.ragged())
    return lambda: ragged.run(q, k, v, return_lse=True)


def check(got: tuple[Any, Any], b: batches.Batch, options: dict[str, Any]) -> None:
    low = [
        lowprec.attention(b.q[begin:end], k, v, **options)
        for (k, v), begin, end in zip(b.keys, b.qo_indptr[:-1], b.qo_indptr[1:], strict=True)
    ]
    low_o, low_lse = (np.concatenate(x) for x in zip(*low, strict=True))
    ref = b.expected(**options)
    is_capped = "logits_soft_cap" in options
    compare.assert_close(
        *map(download, got), *ref, low_o, low_lse, options, has_coarse_cap=is_capped
    )


@pytest.mark.parametrize("name", CASES)
def test_a_thousand_runs_are_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_props(0).arch != "sm_90a":
        pytest.skip("a kernel of sm_90a")
    case = CASES[name]
    lengths = list(case.qo_len), list(case.kv_len)
    heads = case.num_qo_heads, case.num_kv_heads
    b = batches.make(*lengths, case.page_size or 16, heads=heads, dims=case.problem.dims)
    run = bind(case, b)
    launched: list[int] = []
    real = enqueue.enqueue
    monkeypatch.setattr(
        "cupyattn.launch.bound.enqueue",
        lambda launch, *rest: (launched.append(launch.num_items), real(launch, *rest)),
    )
    first = run()
    assert any(launched), "no launch of persistent blocks"
    monkeypatch.undo()
    check(first, b, case.options)
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
