"""Blocks that find their items, on the GPU: answers, replays whose lengths change, and launches."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.plain_answers import dense

from cupyattn.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
DIM = 128
RAGGED = (33, 0, 129, 64, 17, 300, 1, 70)
MANY = tuple((7 * i) % 61 for i in range(70))
FEW_ROWS, APPENDED = (2600, 0, 33, 6000, 7), (5000, 900, 40, 8000, 70)


def _offsets(lengths: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _normal(seed: int, *shape: int) -> torch.Tensor:
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, dtype=torch.float16, device="cuda", generator=rng)


def _check(out, q, k, v, rows, keys, causal: bool) -> None:
    for i in range(len(rows) - 1):
        own, its = slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1])
        given = [x.cpu().numpy() for x in (q[own], k[its], v[its])]
        masks = {"scale": DIM**-0.5, "chunk": 0, "causal": causal, "window": (-1, -1)}
        want, _ = dense(*given, **masks)
        np.testing.assert_allclose(out[own].cpu().numpy(), want, 2e-2, 2e-2, err_msg=f"{i}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(333,), RAGGED, MANY, (2000, 1, 700), (128,) * 8])
def test_prompts(lengths: tuple[int, ...], causal: bool) -> None:
    """Twice, and then in a graph whose replay has the lengths in another order."""
    offsets = _offsets(lengths)
    total, longest = int(offsets[-1]), max(lengths)
    q, k, v = _normal(0, total, 8, DIM), _normal(1, total, 2, DIM), _normal(2, total, 2, DIM)
    held = torch.from_numpy(offsets).cuda()

    def call() -> torch.Tensor:
        return flash_attn_varlen_func(q, k, v, held, held, longest, longest, causal=causal)

    for _ in range(2):
        _check(call(), q, k, v, offsets, offsets, causal)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for order in (lengths[::-1], (0,) * (len(lengths) - 1) + (total,), lengths):
        later = _offsets(order)
        held.copy_(torch.from_numpy(later))
        for _ in range(2):
            graph.replay()
            _check(out, q, k, v, later, later, causal)


@pytest.mark.parametrize("rows", [1, 4, 8, 40])
@pytest.mark.parametrize("lengths", [FEW_ROWS, APPENDED, (700,)])
def test_rows_over_pages(rows: int, lengths: tuple[int, ...]) -> None:
    page, count = 16, len(lengths)
    width = -(-(max(lengths) + 4000) // page)
    table = torch.randperm(count * width, device="cuda").int().view(count, width)
    q = _normal(3, count, rows, 8, DIM)
    keys = [_normal(seed, count * width, page, 2, DIM) for seed in (4, 5)]
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        return flash_attn_with_kvcache(q, *keys, cache_seqlens=used, page_table=table, causal=True)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for lens in (lengths, tuple(x + 1500 for x in lengths)):
        used.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        for out in (call(), captured):
            for i, length in enumerate(lens):
                k, v = (x[table[i].long()].reshape(-1, 2, DIM)[:length] for x in keys)
                masks = {"scale": DIM**-0.5, "chunk": 0, "causal": True, "window": (-1, -1)}
                want, _ = dense(*(x.cpu().numpy() for x in (q[i], k, v)), **masks)
                np.testing.assert_allclose(out[i].cpu().numpy(), want, 2e-2, 2e-2)
