"""BatchAttention.forward(q, k, v): keys and values in rows, to which kv_indptr counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import batches
from helpers.batches import HKV, HQ, D
from helpers.fake_batch import Device

import cupyattn
from cupyattn import array
from cupyattn.engine import wrapper
from cupyattn.errors import ArgumentError, PlanError

QO_LEN, KV_LEN = [3, 1, 0, 40], [7, 0, 11, 40]


def plan(w: Any, b: batches.Batch, page_size: int, kv_len: list[int] = KV_LEN) -> None:
    tables = b.qo_indptr, b.indptr, b.indices, np.array(kv_len, np.int32)
    w.plan(*tables, HQ, HKV, D, D, page_size, causal=True)


def rows_of(b: batches.Batch) -> list[np.ndarray]:
    """k and v of pages of one token, without the axis of slots."""
    return [x[:, 0] for x in b.cache]


@pytest.mark.parametrize("page_size", [1, 16])
def test_on_the_cpu(page_size: int) -> None:
    w = cupyattn.BatchAttention(device="cpu")
    for seed in range(2):
        b = batches.make(QO_LEN, KV_LEN, 1, seed=seed)
        plan(w, b, page_size)
        for _ in range(2):
            out = w.forward(b.q, *rows_of(b))
            np.testing.assert_array_equal(out, b.expected(causal=True)[0].astype(np.float16))


def test_on_the_gpu(device: Device, only_cached_runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = array.view(device.workspace(), "workspace")
    monkeypatch.setattr(wrapper, "make_workspace", lambda *_: (workspace, False))
    w = cupyattn.BatchAttention()
    for seed in range(2):
        b = batches.make(QO_LEN, KV_LEN, 1, seed=seed)
        plan(w, b, 16)
        for _ in range(2):
            out = w.forward(device.put(b.q), *map(device.put, rows_of(b)))
            np.testing.assert_array_equal(
                device.get(out), b.expected(causal=True)[0].astype(np.float16)
            )
    only_cached_runs()
    w.forward(device.put(b.q), *map(device.put, rows_of(b)))


def test_pages_are_those_of_the_plan() -> None:
    w = cupyattn.BatchAttention(device="cpu")
    b = batches.make(QO_LEN, KV_LEN, 4, dtype="bfloat16")
    plan(w, b, 4)
    out, _ = w.run(b.q, b.cache)
    np.testing.assert_array_equal(w.forward(b.q, *b.cache), out)
    np.testing.assert_array_equal(w.forward(b.q, b.one_tensor()), out)


def test_bad_calls() -> None:
    w = cupyattn.BatchAttention(device="cpu")
    b = batches.make(QO_LEN, KV_LEN, 1)
    with pytest.raises(PlanError, match="plan"):
        w.forward(b.q, *rows_of(b))
    plan(w, b, 16, [7, 0, 12, 40])
    with pytest.raises(ArgumentError, match=r"request 2 has 12 keys.*counts tokens.*11"):
        w.forward(b.q, *rows_of(b))
    plan(w, b, 16)
    with pytest.raises(ArgumentError, match="holds 20 pages"):
        w.forward(b.q, *(x[:20] for x in rows_of(b)))
    w.forward(b.q, *rows_of(b))
    with pytest.raises(ArgumentError, match="page_size"):
        w.run(b.q, tuple(np.zeros((61, 16, HKV, D), np.float16) for _ in "kv"))
