"""Queries, keys and values of 8 bits on the GPU, against float64: random calls by seeds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import eight_bit_cases, needles, single_calls
from helpers.batch_calls import planned
from helpers.eight_bit_cases import PREFILL_SM90 as SERVED
from helpers.on_gpu import capture, ints, scratch, try_random, workspace
from helpers.poison import download, upload
from helpers.share import one_of
from helpers.token_blocks import Blocks

import cupyattn
from cupyattn import flash_attn, reference
from cupyattn.choose.candidates import only_form
from cupyattn.launch.tiles.forms import AS_THEY_ARE

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

# Nearly every case has a kernel of its own. So the ordinary suite has one block of four.
BLOCK, NUM_CASES = 25, 800
# These cases draw from all that is served; most are widened to 16 bits.
ALL = replace(eight_bit_cases.EVERYTHING, page_sizes=(16,))
NUM_OF_ALL = 200


@pytest.mark.parametrize("first", one_of(4, range(0, NUM_CASES, BLOCK)))
def test_random_requests(first: int) -> None:
    make = lambda seed, xp: single_calls.Call(eight_bit_cases.single(seed, SERVED), xp)  # noqa: E731
    try_random(first, BLOCK, make)


@pytest.mark.parametrize("first", one_of(4, range(0, NUM_CASES, BLOCK)))
def test_random_batches(first: int) -> None:
    make = lambda seed, xp: planned(eight_bit_cases.batch(seed, SERVED), xp, workspace(xp))  # noqa: E731
    try_random(first, BLOCK, make)


@pytest.mark.parametrize("first", one_of(4, range(0, NUM_OF_ALL, BLOCK)))
def test_random_requests_of_all_options(first: int) -> None:
    make = lambda seed, xp: single_calls.Call(eight_bit_cases.single(seed, ALL), xp)  # noqa: E731
    try_random(first, BLOCK, make)


@pytest.mark.parametrize("first", one_of(4, range(0, NUM_OF_ALL, BLOCK)))
def test_random_batches_of_all_options(first: int) -> None:
    make = lambda seed, xp: planned(eight_bit_cases.batch(seed, ALL), xp, workspace(xp))  # noqa: E731
    try_random(first, BLOCK, make)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
def test_a_graph_widens_the_rows_of_its_plan(torch: Any, kind: str) -> None:
    heads, kv_heads, dim, page, num_pages = 8, 2, 128, 16, 40
    rng = np.random.default_rng(3)

    def made(*shape: int) -> Any:
        x = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).cuda()
        if kind == "int8":
            return (x * 30).clamp(-127, 127).to(torch.int8)
        return x.to(torch.float8_e4m3fn)

    q, k = made(30, heads, dim), made(num_pages, page, kv_heads, dim)
    v = torch.from_numpy(rng.standard_normal((num_pages, page, kv_heads, dim)).astype(np.float32))
    cache = k, v.cuda().to(torch.float8_e4m3fn)
    options = {"q_data_type": kind, "kv_data_type": "float8_e4m3fn"}
    options |= {
        "causal": True,
        "logits_soft_cap": 20.0,
        "sm_scale": 1e-3 if kind == "int8" else 0.1,
    }

    def plan(wrapper: Any, lengths: list[int]) -> None:
        rows = np.cumsum([0, *lengths]).astype(np.int32)
        pages = np.array([0, 12, 30, 40], np.int32)
        ids, last = (
            np.arange(num_pages, dtype=np.int32)[::-1].copy(),
            np.array([3, 16, 9], np.int32),
        )
        wrapper.plan(rows, pages, ids, last, heads, kv_heads, dim, page, **options)

    cls = cupyattn.BatchPrefillWithPagedKVCacheWrapper
    buffers = (ints(torch, 4), ints(torch, 4), ints(torch, 60), ints(torch, 3))
    wrapper, eager = cls(scratch(torch), "NHD", True, *buffers), cls(scratch(torch))
    out = torch.zeros(30, heads, dim, dtype=torch.bfloat16, device="cuda")
    plan(wrapper, [10, 18, 2])
    plan(wrapper, [1, 3, 2])
    run = lambda: wrapper.run(q[:6], cache, out=out[:6])  # noqa: E731
    run()
    replay = capture(torch, torch, run)
    for lengths in ([10, 18, 2], [0, 5, 1], [1, 1, 1], [7, 20, 3]):
        count = sum(lengths)
        plan(wrapper, lengths)
        out.zero_()
        replay()
        plan(eager, lengths)
        wanted = eager.run(q[:count], cache)
        torch.testing.assert_close(out[:count], wanted, rtol=0.02, atol=0.02)
        assert not out[count:].any()


def found_error(xp: ModuleType, seed: int) -> float:
    """The largest error of a request of ragged prompts whose blocks find their items, with
    descales of requests and heads."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 80 if seed % 4 == 0 else 9))
    lengths = rng.integers(0, 700, count) * (rng.random(count) < 0.9)
    lengths[0] = max(lengths[0], 200)
    kv_heads, group, dim = int(rng.integers(1, 4)), int(rng.integers(1, 5)), (64, 128)[seed % 2]
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = (
        rng.standard_normal((offsets[-1], heads, dim), np.float32).astype(needles.E4M3)
        for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    names = ("q_descale", "k_descale", "v_descale")
    descales = {n: rng.uniform(0.5, 2, (count, kv_heads)).astype(np.float32) for n in names}
    bounds, rows = (int(lengths.max()),) * 2, upload(offsets, xp)
    given = {n: upload(x, xp) for n, x in descales.items()}
    out = download(
        flash_attn.flash_attn_varlen_func(
            *(upload(x, xp) for x in (q, k, v)), rows, rows, *bounds, causal=True, **given
        )
    )
    errors = [0.0]
    for i, (first, end) in enumerate(pairwise(offsets)):
        scaled = [
            x[first:end].astype(np.float64) * np.repeat(s[i], x.shape[1] // kv_heads)[:, None]
            for x, s in zip((q, k, v), descales.values(), strict=True)
        ]
        exact, _ = reference.attention(*scaled, causal=True)
        lost = np.square(out[first:end].astype(np.float64) - exact).sum()
        errors.append(float(np.sqrt(lost / max(np.square(exact).sum(), 1e-30))))
    return max(errors)


@pytest.mark.parametrize("seed", range(24))
def test_prompts_with_descales_find_their_items(torch: Any, seed: int) -> None:
    # A request of few keys may lose what rounding takes from each probability, 1 / 16 at most.
    with only_form(AS_THEY_ARE):
        assert found_error(torch, seed) < 1 / 16 + 2**-7


def test_needles_are_found_in_128k_keys() -> None:
    stack = needles.haystack(rows=16, keys=1 << 17)
    assert needles.shares_found(stack, cupy) == {"prompt": 1.0, "append": 1.0, "decode": 1.0}


# Page sizes, 0 for rows; and options beside scales of blocks.
BLOCKS = [(0, {}), (64, {}), (128, {}), (0, {"logits_soft_cap": 3.0}), (128, {"window_left": 90})]


@pytest.mark.parametrize(("page_size", "options"), BLOCKS)
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
def test_blocks_have_scales(torch: Any, kind: str, page_size: int, options: dict[str, Any]) -> None:
    for seed in range(20):
        size = 128 if page_size == 128 and seed % 2 else 64
        drawn = Blocks(seed, kind, size, has_mean=False)
        where, changes = workspace(torch), drawn.arguments(k_mean=None)
        if page_size:
            wrapper, cache, scales = drawn.paged(page_size, where, **options)
            changes |= scales
            keys: tuple[Any, ...] = (tuple(upload(x, torch) for x in cache),)
        else:
            wrapper = drawn.ragged(where, **options)
            keys = upload(drawn.k, torch), upload(drawn.v, torch)
        given = {n: upload(x, torch) for n, x in changes.items() if isinstance(x, np.ndarray)}
        changes |= given
        out, lse = wrapper.run(upload(drawn.q, torch), *keys, return_lse=True, **changes)
        drawn.check(download(out), download(lse), 0.01, **options)
