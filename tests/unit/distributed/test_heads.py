"""Head ranges of tensor parallelism: every head is on its rank, beside the KV head it reads."""

from __future__ import annotations

import numpy as np
import pytest

from cupyattn import ArgumentError
from cupyattn.distributed import head_range


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads", "size"),
    [(8, 8, 1), (8, 8, 4), (32, 8, 8), (32, 8, 16), (32, 1, 4), (6, 3, 3), (24, 2, 8), (64, 8, 2)],
)
def test_every_head_of_q_reads_its_own_kv_head(
    num_qo_heads: int, num_kv_heads: int, size: int
) -> None:
    reads = np.arange(num_qo_heads) // (num_qo_heads // num_kv_heads)
    q_heads, kv_heads = [], []
    for rank in range(size):
        own = head_range(num_qo_heads, num_kv_heads, size, rank)
        q_heads += range(num_qo_heads)[own.qo_heads]
        of_rank = range(num_kv_heads)[own.kv_heads]
        kv_heads += of_rank
        assert own.num_qo_heads % own.num_kv_heads == 0 and len(of_rank) == own.num_kv_heads
        # What attention on the rank does: equally many heads of q a KV head, in order.
        group = own.num_qo_heads // own.num_kv_heads
        for index, head in enumerate(range(num_qo_heads)[own.qo_heads]):
            assert of_rank[index // group] == reads[head]
        assert own.num_replicas == max(1, size // num_kv_heads)
    assert q_heads == list(range(num_qo_heads))
    assert sorted(kv_heads) == sorted([*range(num_kv_heads)] * own.num_replicas)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 2, 3, 0), "num_qo_heads: got 8 heads for 3 ranks; wanted a multiple of 3"),
        ((8, 3, 2, 0), "num_qo_heads, num_kv_heads: 8 query heads over 3 KV heads"),
        ((24, 6, 4, 0), "num_kv_heads: got 6 heads for 4 ranks"),
        ((8, 2, 2, 2), "rank: got 2 of 2 ranks; wanted 0 to 1"),
        ((8, 2, 2, -1), "rank: got -1"),
        ((8, 2, 0, 0), "size: got 0"),
        ((0, 2, 1, 0), "num_qo_heads: got 0"),
        ((8, 2.5, 1, 0), "num_kv_heads: got 2.5"),
    ],
)
def test_bad_input(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message.replace("(", r"\(")):
        head_range(*arguments)
