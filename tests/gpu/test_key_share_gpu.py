"""Ranks that share keys on one GPU, one after the other: their states merge to the whole answer."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import key_shares
from helpers.key_shares import Case, Rank, Whole
from helpers.on_gpu import capture, framework, workspace
from helpers.poison import download, upload
from helpers.share import some

import cupyattn

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

BLOCK = 30


def error(case: Case, xp: ModuleType) -> float:
    put = functools.partial(upload, xp=xp)
    got = key_shares.merged(case, put, download, workspace(xp))
    return key_shares.error(got, Whole.of(case).expected())


def check(case: Case, xp: ModuleType) -> None:
    """The error is that of one rank with all keys."""
    assert error(case, xp) <= 1.02 * error(case.alone(), xp) + 1e-5


@pytest.mark.parametrize("kind", key_shares.KINDS)
@pytest.mark.parametrize("first", range(0, 2 * BLOCK, BLOCK))
def test_random_cases(kind: str, first: int) -> None:
    for seed in range(first, first + some(BLOCK)):
        check(key_shares.random_case(seed, kind, dim=(64, 128)[seed % 2], most=900), cupy)


LONG = {
    "decode": Case(1, "decode", 4, 16, (30_000, 7, 12_345), (1, 1, 1), heads=(8, 2), dim=128),
    "verify": Case(2, "verify", 3, 1, (30_000, 9, 12_345), (4, 4, 4), heads=(8, 2), dim=128),
    "window": Case(3, "verify", 2, 64, (30_000, 500), (4, 4), dim=128, window_left=1023),
    "drafts": Case(4, "tree", 4, 16, (20_000, 300), (33, 33), heads=(8, 1), dim=128),
    "prompts": Case(5, "prefill", 2, 16, (9000, 700), (3000, 700), heads=(4, 1), dim=128),
    "rows": Case(6, "ragged", 3, 256, (5000, 800), (2000, 64), dim=128, window_left=600),
    "latent": Case(7, "mla", 4, 64, (20_000, 100), (2, 2), heads=(16, 1), page_size=64),
    "latent prompts": Case(8, "mla", 2, 64, (3000, 900), (200, 7), heads=(16, 1), page_size=64),
}


@pytest.mark.parametrize("name", LONG)
def test_long_sequences(name: str) -> None:
    check(LONG[name], cupy)


@pytest.mark.parametrize("name", ["fp8", "capped"])
def test_options(name: str) -> None:
    changes: dict[str, Any] = {
        "fp8": {"kv_dtype": "float8_e4m3fn"},
        "capped": {"soft_cap": 20.0},
    }
    for case in LONG.values():
        if case.kind not in ("mla", "ragged"):
            check(replace(case, **changes[name]), cupy)


def test_both_frameworks_give_the_same_bits() -> None:
    case = LONG["verify"]
    whole = Whole.of(case)
    for share in case.shares:
        rank, outputs = Rank.of(whole, share), []
        for xp in (framework(0), framework(1)):
            put = functools.partial(upload, xp=xp)
            found = key_shares.answer(whole, rank, put, workspace(xp))
            outputs.append([download(x) for x in found])
        for one, other in zip(*outputs, strict=True):
            np.testing.assert_array_equal(one, other)


def test_replays_follow_later_plans() -> None:
    """A captured run sees keys by the lengths of the newest plan."""
    torch = pytest.importorskip("torch")
    put = functools.partial(upload, xp=torch)
    base = replace(LONG["verify"], qo_len=(4, 4))
    buffers = [put(np.zeros(n, np.int32)) for n in (3, 4096, 2)]
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace(torch), "NHD", True, False, *buffers)
    q = put(np.zeros((8, 8, 128), np.float16))
    k, v = (put(np.zeros((200, 16, 2, 128), np.float16)) for _ in range(2))
    out, lse = put(np.zeros((8, 8, 128), np.float32)), put(np.zeros((8, 8), np.float32))
    run = functools.partial(w.run, q, (k, v), out=out, lse=lse, return_lse=True)
    replay = None
    for lengths in ((5000, 17), (900, 300)):
        case = replace(base, kv_len=lengths)
        whole = Whole.of(case)
        rank = Rank.of(whole, case.shares[1])
        w.plan(
            rank.indptr,
            rank.indices,
            rank.last_page_len,
            *case.heads,
            case.dim,
            case.page_size,
            q_len_per_req=4,
            o_data_type="float32",
            cp_tot_seqused_k=np.array(lengths),
            **rank.arguments,
        )
        for target, values in ((q, whole.q), (k, rank.k), (v, rank.v)):
            target[: len(values)].copy_(put(values))
        if replay is None:
            run()
            replay = capture(torch, torch, run)
        replay()
        torch.cuda.synchronize()
        wanted = key_shares.answer(whole, rank, put, workspace(torch))
        for got, other in zip((out, lse), wanted, strict=True):
            np.testing.assert_allclose(download(got), download(other), atol=2e-3)
