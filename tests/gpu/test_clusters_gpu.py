"""Few requests on a GPU: clusters of blocks answer what one block does, the same bits each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu]

PAGE = 16
SHAPES = [  # query heads, KV heads, rows a request, keys
    (8, 1, 1, (5000,)),
    (8, 1, 4, (3000, 100, 7000)),
    (32, 8, 8, (8, 4097)),
    (28, 4, 1, (40_000,)),
    (12, 1, 2, (700, 65, 1)),
    (4, 2, 1, (8905, 19_828, 20_074)),  # blocks that have an SM each, as the next
    (5, 1, 1, (460,) * 80),
]


class Batch:
    def __init__(self, heads: int, kv_heads: int, rows: int, keys: tuple[int, ...]) -> None:
        keys = tuple(max(rows, x) for x in keys)
        counts = [-(-x // PAGE) for x in keys]
        generator = torch.Generator("cuda").manual_seed(1)
        kind: dict[str, Any] = {"device": "cuda", "generator": generator}
        self.heads = heads, kv_heads, 128, PAGE
        self.rows, self.longest = rows, max(keys)
        self.pool = torch.randn(sum(counts) + 3, 2, PAGE, kv_heads, 128, **kind).bfloat16()
        self.q = torch.randn(len(keys) * rows, heads, 128, **kind).bfloat16()
        ids = torch.randperm(sum(counts) + 3, **kind).int()[: sum(counts)]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        last = np.array([(x - 1) % PAGE + 1 for x in keys], np.int32)
        self.table = offsets, ids, last
        self.lengths = torch.tensor(keys, dtype=torch.int32, device="cuda")
        self.pages = torch.zeros(len(keys), max(counts), dtype=torch.int32, device="cuda")
        for request, count in enumerate(counts):
            self.pages[request, :count] = ids[offsets[request] : offsets[request + 1]]

    def plan(self, **options: Any) -> Any:
        wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        )
        kinds = {"q_data_type": "bfloat16", "kv_data_type": "bfloat16"}
        wrapper.plan(*self.table, *self.heads, q_len_per_req=self.rows, **kinds, **options)
        return wrapper


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_clusters_answer_what_one_block_does(shape: Any) -> None:
    batch = Batch(*shape)
    wanted, wanted_lse = batch.plan(disable_split_kv=True).run(batch.q, batch.pool, return_lse=True)
    wrapper = batch.plan()
    out, lse = wrapper.run(batch.q, batch.pool, return_lse=True)
    error = (out.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < 4e-3
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-4)
    for _ in range(5):
        assert torch.equal(wrapper.run(batch.q, batch.pool), out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_calls_without_a_plan_form_clusters_too(shape: Any) -> None:
    batch = Batch(*shape)
    wanted = batch.plan(disable_split_kv=True).run(batch.q, batch.pool)
    out = cupyattn.trtllm_batch_decode_with_kv_cache(
        batch.q,
        batch.pool,
        torch.zeros(64 << 20, dtype=torch.uint8, device="cuda"),
        batch.pages,
        batch.lengths,
        batch.longest,
        bmm1_scale=128**-0.5,
        kv_layout="NHD",
        q_len_per_req=batch.rows,
    )
    assert (out.float() - wanted.float()).norm() / wanted.float().norm() < 4e-3
