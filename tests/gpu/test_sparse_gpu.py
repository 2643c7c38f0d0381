"""Attention by lists on the GPU: random calls, and a graph whose lists change."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import sparse_cases
from helpers.on_gpu import capture, framework
from helpers.poison import download, upload
from helpers.share import some
from helpers.sparse_cases import AttendCase

from cupyattn import sparse
from cupyattn.errors import UnsupportedError

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}
PARTS, SEEDS_A_PART = 16, 8


def on_gpu(case: AttendCase, xp: ModuleType) -> dict[str, Any]:
    """The arguments with arrays of the device."""
    return {name: _upload(x, xp) for name, x in case.arguments.items()}


def _upload(x: Any, xp: ModuleType) -> Any:
    if isinstance(x, tuple):
        return tuple(_upload(part, xp) for part in x)
    return upload(x, xp) if isinstance(x, np.ndarray) else x


def check(case: AttendCase, out: Any, lse: Any) -> None:
    want, want_lse = sparse_cases.expected(case)
    own, atol = slice(len(case.seen)), TOLERANCE[case.arguments["q"].dtype.name]
    found = download(out)[own].astype(np.float64)
    np.testing.assert_allclose(found, want[own], rtol=atol, atol=atol, err_msg=str(case))
    found_lse = download(lse)[own].astype(np.float64)
    np.testing.assert_allclose(found_lse, want_lse[own], rtol=1e-3, atol=1e-3, err_msg=str(case))


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls(part: int) -> None:
    """Those that only the CPU serves are refused, and skipped here."""
    num_served = 0
    for seed in range(part * SEEDS_A_PART, part * SEEDS_A_PART + some(SEEDS_A_PART)):
        case = sparse_cases.draw(seed)
        arguments = on_gpu(case, framework(seed))
        try:
            first = sparse.attend(**arguments)
        except UnsupportedError:
            continue
        num_served += 1
        check(case, *first)
        again = sparse.attend(**arguments)  # as the cache has it
        for x, y in zip(first, again, strict=True):
            own = slice(len(case.seen))
            np.testing.assert_array_equal(download(x)[own], download(y)[own])
    assert num_served or part


def test_a_graph_follows_its_lists() -> None:
    """Other lists and lengths in the same memory, at each replay."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    case = next(x for x in map(sparse_cases.draw, range(5000)) if _may_change(x))
    for x in case.arguments["cache"]:
        x[...] = rng.standard_normal(x.shape)
    table = case.arguments["table"]
    table[...] = np.where(table >= len(case.arguments["cache"][0]), 0, table)
    arguments = on_gpu(case, torch)
    out, lse = (x.clone() for x in sparse.attend(**arguments))
    arguments |= {"out": out, "lse": lse}
    replay = capture(torch, torch, lambda: sparse.attend(**arguments))
    for _ in range(3):
        lists = rng.integers(-1, 4, size=case.arguments["lists"].shape).astype(np.int32)
        case.arguments["lists"] = lists
        arguments["lists"].copy_(torch.from_numpy(lists))
        replay()
        torch.cuda.synchronize()
        want, want_lse = sparse.attend(**case.arguments)
        own = slice(len(case.seen))
        np.testing.assert_allclose(download(out)[own], want[own], rtol=4e-3, atol=4e-3)
        np.testing.assert_allclose(download(lse)[own], want_lse[own], rtol=1e-3, atol=1e-3)


def _may_change(case: AttendCase) -> bool:
    """Whether other lists of a case have an effect."""
    arguments = case.arguments
    if case.form != "pages" or arguments["window"] or len(case.seen) < 3:
        return False
    q, cache = arguments["q"], arguments["cache"]
    is_half = q.dtype == np.float16 == cache[0].dtype
    return bool(is_half and arguments["lengths"].min() > 10)
