"""flash_mla over lists of two caches, and of rows of 584 bytes, and sparse.attend over blocks of
latent rows, on the GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import latent_blocks, listed_latent
from helpers.on_gpu import capture, kernels
from helpers.poison import download, upload
from helpers.share import some

from cupyattn import flash_mla, sparse

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")

PARTS, SEEDS_A_PART = 8, 12


def on_gpu(case: listed_latent.Listed) -> dict[str, Any]:
    put = {n: upload(x, torch) for n, x in case.arguments.items() if isinstance(x, np.ndarray)}
    return case.arguments | put


def check(case: listed_latent.Listed, out: Any, lse: Any) -> None:
    want, want_lse = case.expected()
    found = download(out).astype(np.float64)
    np.testing.assert_allclose(found, want, rtol=1.6e-2, atol=1.6e-2)
    np.testing.assert_allclose(download(lse), want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("is_portable", [False, True])
def test_random_calls(part: int, is_portable: bool) -> None:
    with kernels(is_portable=is_portable):
        for seed in range(part * SEEDS_A_PART, part * SEEDS_A_PART + some(SEEDS_A_PART)):
            case = listed_latent.draw(seed, ml_dtypes.bfloat16)
            arguments = on_gpu(case)
            first = flash_mla.flash_mla_with_kvcache(**arguments)
            check(case, *first)
            again = flash_mla.flash_mla_with_kvcache(**arguments)  # as the cache has it
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "MAX_BYTES", 1)
    for seed in (4, 8):
        case = listed_latent.draw(seed)
        check(case, *flash_mla.flash_mla_with_kvcache(**on_gpu(case)))


def test_a_graph_follows_its_counts() -> None:
    drawn = (listed_latent.draw(seed, form="584 bytes") for seed in range(99))
    case = next(x for x in drawn if x.arguments.get("topk_length", np.zeros(1)).max() > 20)
    arguments = on_gpu(case)
    out, _ = flash_mla.flash_mla_with_kvcache(**arguments)
    replay = capture(torch, torch, lambda: flash_mla.flash_mla_with_kvcache(**arguments, out=out))
    for parts in (1, 2, 5):
        arguments["topk_length"].copy_(upload(case.arguments["topk_length"] // parts, torch))
        want, _ = flash_mla.flash_mla_with_kvcache(**arguments)
        replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("is_portable", [False, True])
def test_blocks_of_latent_rows(part: int, is_portable: bool) -> None:
    with kernels(is_portable=is_portable):
        for seed in range(part * SEEDS_A_PART, part * SEEDS_A_PART + some(SEEDS_A_PART)):
            case = latent_blocks.Case(seed)
            given = case.arguments
            put = {n: upload(x, torch) for n, x in given.items() if isinstance(x, np.ndarray)}
            first = sparse.attend(**given | put)
            want, want_lse = case.expected()
            found = download(first[0]).astype(np.float64)
            np.testing.assert_allclose(found, want, rtol=1.6e-2, atol=1.6e-2)
            np.testing.assert_allclose(download(first[1]), want_lse, rtol=1e-3, atol=1e-3)
            again = sparse.attend(**given | put)  # as the cache has it
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
