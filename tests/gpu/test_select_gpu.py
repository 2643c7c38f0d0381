"""Selections of blocks on the GPU: random calls twice, models' indices, and a graph."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import select_cases
from helpers.on_gpu import capture, framework
from helpers.poison import download, upload
from helpers.select_cases import SelectCase
from helpers.share import some

from cupyattn import sparse

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

PARTS, SEEDS_A_PART = 8, 24


def on_gpu(case: SelectCase, xp: ModuleType) -> dict[str, Any]:
    """The arguments with arrays of the device."""
    return {
        name: upload(x, xp) if isinstance(x, np.ndarray) else x
        for name, x in case.arguments.items()
    }


def framework_of(case: SelectCase, seed: int) -> ModuleType:
    """CuPy and torch in turn; CuPy has no arrays of 8 bits."""
    kinds = {x.dtype.name for x in case.arguments.values() if isinstance(x, np.ndarray)}
    if "float8_e4m3fn" not in kinds:
        return framework(seed)
    return pytest.importorskip("torch")


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls(part: int) -> None:
    for seed in range(part * SEEDS_A_PART, part * SEEDS_A_PART + some(SEEDS_A_PART)):
        case = select_cases.draw(seed, on_gpu=True)
        arguments = on_gpu(case, framework_of(case, seed))
        answers = [[download(x) for x in sparse.select(**arguments)] for _ in range(2)]
        assert [x.tobytes() for x in answers[0]] == [x.tobytes() for x in answers[1]], case
        select_cases.check(case, *answers[0], slack=2e-6)


@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("name", ["m3", "m3 fp8", "dsa", "qsa"])
def test_indices_of_models(name: str, tokens: int) -> None:
    torch = pytest.importorskip("torch")
    rng = torch.Generator("cuda").manual_seed(tokens)
    heads, ratio = (64, 1) if name == "dsa" else (4, 4 if name == "qsa" else 1)
    dtype = torch.float8_e4m3fn if name == "dsa" else torch.bfloat16
    dtype_k = torch.float8_e4m3fn if name in ("dsa", "m3 fp8") else dtype
    lengths, width = [9000, 70, 20000], 160
    pages = torch.randn(3 * width, 128, 128, device="cuda", generator=rng).to(dtype_k)
    q = torch.randn(3 * tokens, heads, 128, device="cuda", generator=rng).to(dtype)
    order = torch.randperm(3 * width, device="cuda", generator=rng).to(torch.int32)
    call: dict[str, Any] = {
        "q_index": q,
        "index_cache": pages,
        "table": order.view(3, width),
        "lengths": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        "block": {"dsa": 1, "qsa": 4}.get(name, 128),
        "topk": {"dsa": 2048, "qsa": 512}.get(name, 16),
        "score": "max" if name.startswith("m3") else "relu_sum",
        "ratio": ratio,
        "return_values": True,
    }
    if name == "dsa":
        call["weights"] = torch.rand(3 * tokens, heads, device="cuda", generator=rng)
    lists, values = sparse.select(**call)
    for token in {0, tokens, 3 * tokens - 1}:
        request = token // tokens
        seen = lengths[request] - (tokens - 1 - token % tokens)
        keys = pages[call["table"][request].long()].reshape(-1, 128)[: seen // ratio].double()
        x = q[token].double() @ keys.T
        if not name.startswith("m3"):
            w = call.get("weights", torch.ones(3 * tokens, heads, device="cuda"))[token].double()
            x = (w[:, None] * x.clamp(min=0)).sum(0, keepdim=True)
        rows = call["block"] // ratio
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % rows), value=-torch.inf)
        scores = x.view(x.shape[0], -1, rows).amax(2)
        count = min(call["topk"], scores.shape[1])
        want = scores.topk(count, 1).values.sort(1).values
        own = lists[token, :, :count].long()
        assert (own.diff(dim=1) > 0).all() and (own >= 0).all()
        assert (lists[token, :, count:] == -1).all()
        torch.testing.assert_close(scores.gather(1, own).sort(1).values, want, rtol=0, atol=1e-3)
        found = values[token, :, :count].double()
        torch.testing.assert_close(found, scores.gather(1, own), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("has_candidates", [False, True])
@pytest.mark.parametrize("heads", [4, 64])
def test_shares_of_long_rows(heads: int, has_candidates: bool) -> None:
    """Softmax by 20,000 keys, of which each group may have candidates of its own."""
    torch = pytest.importorskip("torch")
    rng = torch.Generator("cuda").manual_seed(heads)
    tokens, keys, groups, block, topk = 5, 20_003, 2, 16, 32
    q = torch.randn(tokens, heads, 128, device="cuda", generator=rng).half()
    rows = torch.randn(1, keys, 128, device="cuda", generator=rng).half()
    weights = torch.rand(tokens, heads, device="cuda", generator=rng)
    call: dict[str, Any] = {
        "topk": topk,
        "block": block,
        "score": "softmax",
        "groups": groups,
        "weights": weights,
        "return_values": True,
    }
    count = -(-keys // block)
    if has_candidates:
        order = torch.rand(tokens, groups, count, device="cuda", generator=rng).argsort(2)
        call["candidates"] = order[:, :, :100].int()
    for _ in range(2):  # the second time as the first one found it
        lists, values = sparse.select(q, rows, **call)
    for token in range(tokens):
        seen = keys - (tokens - 1 - token)
        x = (q[token].double() @ rows[0, :seen].double().T) * 128**-0.5
        shares = torch.softmax(x, 1) * weights[token, :, None].double()
        shares = torch.nn.functional.pad(shares, (0, -seen % block)).view(heads, -1, block).sum(2)
        scores = shares.view(groups, heads // groups, -1).sum(1)
        if has_candidates:
            hidden = torch.ones_like(scores, dtype=torch.bool)
            hidden.scatter_(1, call["candidates"][token].long(), False)
            scores = scores.masked_fill(hidden, -torch.inf)
        want = scores.topk(topk, 1).values.sort(1).values
        own = lists[token].long()
        found = scores.gather(1, own)
        torch.testing.assert_close(found.sort(1).values, want, rtol=1e-5, atol=0)
        torch.testing.assert_close(values[token].double(), found, rtol=2e-5, atol=0)


def test_a_graph_follows_its_keys() -> None:
    torch = pytest.importorskip("torch")
    case = select_cases.draw(4, on_gpu=True)
    arguments = on_gpu(case, torch)
    out = torch.full(sparse.select(**arguments)[0].shape, 7, dtype=torch.int32, device="cuda")
    replay = capture(torch, torch, lambda: sparse.select(**arguments, out=out))
    for shift in (0, 1):
        arguments["q_index"].copy_(arguments["q_index"].roll(shift, 0))
        replay()
        found = download(out)
        np.testing.assert_array_equal(found, download(sparse.select(**arguments)[0]))
