"""Latent attention and head dims beyond 256 on the GPU: random calls, graphs, long keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import absorbed, batch_calls, compare, mla_calls, planless_calls, single_calls
from helpers.batches import offsets
from helpers.mla_calls import (
    NUM_CASES,
    PROBLEMS,
    WIDE,
    Case,
    few_wide_rows,
    portable,
    random_case,
    wide_case,
    wide_planless,
    wide_single,
)
from helpers.on_gpu import capture, ints, kernels, same, scratch, try_random, workspace
from helpers.poison import download, raw, upload
from helpers.share import some

from cupyattn import flash_mla, mla, reference
from cupyattn.core import dtypes
from cupyattn.errors import UnsupportedError
from cupyattn.reference.latent_rows import pack_rows

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

BLOCK = 100
BASE = Case(1, "wrapper", PROBLEMS[0], (1,), (100,), 16, 64)
SCALE = 192**-0.5


@pytest.fixture(params=["best kernel", "portable kernel"])
def kernel(request: Any) -> Iterator[None]:
    """On Hopper both; elsewhere they are one."""
    with kernels(is_portable=request.param == "portable kernel"):
        yield


@pytest.mark.parametrize("first", range(0, NUM_CASES, BLOCK))
def test_random_calls(first: int) -> None:
    make = lambda seed, xp: mla_calls.Call(random_case(seed), xp, workspace(xp))  # noqa: E731
    try_random(first, BLOCK, make, turn=len(PROBLEMS))


@pytest.mark.parametrize("first", range(0, 440, BLOCK))
def test_random_calls_of_the_portable_kernel(first: int) -> None:
    make = lambda seed, xp: mla_calls.Call(portable(random_case(seed)), xp, workspace(xp))  # noqa: E731
    with kernels(is_portable=True):
        try_random(first, BLOCK, make, turn=len(PROBLEMS))


@pytest.mark.parametrize("index", range(len(WIDE)))
def test_wide_heads(index: int) -> None:
    make = lambda seed, xp: batch_calls.planned(wide_case(index, seed), xp, workspace(xp))  # noqa: E731
    try_random(0, 60, make, turn=3)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("index", range(len(WIDE)))
def test_wide_heads_of_one_request(index: int) -> None:
    make = lambda seed, xp: single_calls.Call(wide_single(index, seed), xp)  # noqa: E731
    try_random(0, 20, make)


@pytest.mark.usefixtures("kernel")
def test_wide_heads_without_a_plan() -> None:
    make = lambda seed, xp: planless_calls.Call(wide_planless(seed), xp, workspace(xp))  # noqa: E731
    try_random(0, 60, make, turn=3)


@pytest.mark.usefixtures("kernel")
def test_absorbed_is_unabsorbed_and_chunks_of_the_prefix_are_the_whole(xp: ModuleType) -> None:
    absorbed.check(xp, workspace(xp))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("heads", [8, 16, 128])
def test_batches_do_not_change_a_request(xp: ModuleType, heads: int) -> None:
    """With splits of one size its bits are the same alone, and beside any others."""
    rng = np.random.default_rng(heads)
    for page, split in ((1, 64), (16, 8), (64, 4)):
        count, tokens = 5, int(rng.integers(1, 4))
        lens = rng.integers(1, 1200, count)
        pages = -(-lens // page)
        pool = upload(rng.standard_normal((pages.sum(), page, 576)).astype(np.float16), xp)
        ids = np.split(rng.permutation(pages.sum()).astype(np.int32), np.cumsum(pages)[:-1])
        q = rng.standard_normal((count, tokens, heads, 576)).astype(np.float16)

        def attend(
            chosen: list[int], page: int = page, split: int = split, tokens: int = tokens,
            lens: Any = lens, pages: Any = pages, ids: Any = ids, q: Any = q, pool: Any = pool,
        ) -> list[np.ndarray]:  # fmt: skip
            """(out, lse) of these requests, in this order."""
            w = mla.BatchMLAPagedAttentionWrapper(workspace(xp))
            table = offsets([tokens] * len(chosen)), offsets(pages[chosen])
            own = np.concatenate([ids[b] for b in chosen]), lens[chosen].astype(np.int32)
            w.plan(
                *table, *own, heads, 512, 64, page, True, SCALE, "float16", "float16",
                fixed_split_size=split,
            )  # fmt: skip
            rows = upload(q[chosen].reshape(-1, heads, 576), xp)
            answer = w.run(query=rows, kv_cache=pool, return_lse=True)
            return [download(x).reshape(len(chosen), tokens, heads, -1) for x in answer]

        together = attend([*range(count)])
        for chosen in ([0], [2], [4, 1], [3, 0, 2, 1]):
            for alone, all_of_them in zip(attend(chosen), together, strict=True):
                compare.assert_bitwise_equal(alone, all_of_them[chosen], (page, chosen))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("heads", [1, 8, 16, 24, 64, 128])
@pytest.mark.parametrize("kv_len", [(30_000, 5, 700), (4096,) * 4, (1200,) * 40])
def test_long_keys(xp: ModuleType, heads: int, kv_len: tuple[int, ...]) -> None:
    """Keys that many blocks share, and the same bits again."""
    case = replace(BASE, heads=heads, qo_len=(1,) * len(kv_len), kv_len=kv_len)
    call = mla_calls.Call(case, xp, workspace(xp))
    first = call.run()
    call.check(*first)
    for a, b in zip(first, call.run(), strict=True):
        assert a is not None and b is not None
        compare.assert_bitwise_equal(a, b, case)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("tokens", [1, 6, 30])
@pytest.mark.parametrize("kv_len", [(20_000, 0, 700), (3000,) * 40])
def test_long_keys_of_wide_heads(
    xp: ModuleType, index: int, tokens: int, kv_len: tuple[int, ...]
) -> None:
    """Splits that the last block merges, of 4 and 24 rows, or a launch; and the same bits again."""
    case = few_wide_rows(index, tokens, kv_len)
    call = batch_calls.planned(case, xp, workspace(xp))
    first = call.run()
    call.check(*first)
    for a, b in zip(first, call.run(), strict=True):
        assert a is not None and b is not None
        compare.assert_bitwise_equal(a, b, case)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("page", [16, 64])
def test_caches_grow(xp: ModuleType, page: int) -> None:
    """Runs that look like earlier ones but for the number of pages read all of them."""
    rng, heads = np.random.default_rng(page), 16
    q = rng.standard_normal((2, heads, 576)).astype(np.float16)
    wrapper = mla.BatchMLAPagedAttentionWrapper(workspace(xp))
    for pages in (4, 4, 60, 7, 61):
        pool = rng.standard_normal((pages, page, 576)).astype(np.float16)
        ids = rng.permutation(pages)[: 2 * (pages // 2)].astype(np.int32)
        each = pages // 2
        table = np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32) * each, ids
        lens = np.full(2, each * page, np.int32)
        wrapper.plan(*table, lens, heads, 512, 64, page, True, SCALE, "float16", "float16")
        got = download(wrapper.run(query=upload(q, xp), kv_cache=upload(pool, xp)))
        for b in range(2):
            keys = pool[ids[b * each : (b + 1) * each]].reshape(-1, 1, 576)
            wanted, _ = reference.attention(q[b : b + 1], keys, keys[..., :512], sm_scale=SCALE)
            np.testing.assert_allclose(got[b : b + 1].astype(np.float64), wanted, atol=2e-3)


@pytest.mark.usefixtures("kernel")
def test_plans_change_between_replays(xp: ModuleType, torch: Any) -> None:
    """A captured run follows later plans, bit for bit as another wrapper of graphs. Plans that no
    graph keeps may split keys otherwise: their answers differ by rounding."""
    rng, count, heads, page = np.random.default_rng(2), 5, 16, 16
    pool = upload(rng.standard_normal((400, page, 576)).astype(np.float16), xp)
    q = upload(rng.standard_normal((count, heads, 576)).astype(np.float16), xp)
    out = upload(np.zeros((count, heads, 512), np.float16), xp)
    lse = upload(np.zeros((count, heads), np.float32), xp)

    def of_graphs() -> tuple[Any, Any]:
        buffers = ints(xp, count + 1), ints(xp, count + 1), ints(xp, 400), ints(xp, count)
        return mla.BatchMLAPagedAttentionWrapper(scratch(xp), True, *buffers), buffers[3]

    (graph_wrapper, kept_lens), (other, _) = of_graphs(), of_graphs()
    eager = mla.BatchMLAPagedAttentionWrapper(scratch(xp))

    def plans() -> None:
        lens = rng.integers(0, 1200, count)
        pages = -(-lens // page)
        ids = rng.permutation(400)[: pages.sum()].astype(np.int32)
        indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
        table = np.arange(count + 1, dtype=np.int32), indptr, ids, lens.astype(np.int32)
        for wrapper in (graph_wrapper, other, eager):
            wrapper.plan(*table, heads, 512, 64, page, True, SCALE, "float16", "float16")
        assert (download(kept_lens) == lens).all()

    plans()
    run = lambda: graph_wrapper.run(  # noqa: E731
        query=q, kv_cache=pool, out=out, lse=lse, return_lse=True
    )
    run()
    replay = capture(torch, xp, run)
    for step in range(some(40)):
        plans()
        raw(out)[...] = 0
        replay()
        wanted = other.run(query=q, kv_cache=pool, return_lse=True)
        same(out, wanted[0], step)
        same(lse, wanted[1], step)
        loosely = eager.run(query=q, kv_cache=pool, return_lse=True)
        for got, expected in zip((out, lse), loosely, strict=True):
            np.testing.assert_allclose(download(got), download(expected), rtol=2e-3, atol=2e-3)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("form", ["pages", "lists", "whole lists"])
def test_lengths_change_between_replays(xp: ModuleType, torch: Any, form: str) -> None:
    """A captured call without a plan follows lengths, tables and lists in device memory."""
    rng, count, heads, page = np.random.default_rng(3), 4, 16, 64
    is_list, width = form != "pages", 700 if form == "whole lists" else 40
    pool = upload(rng.standard_normal((200, page, 576)).astype(np.float16), xp)
    q = upload(rng.standard_normal((count, 1, heads, 576)).astype(np.float16), xp)
    shape = (count, 1, width) if is_list else (count, width)
    table, lens = upload(np.zeros(shape, np.int32), xp), ints(xp, count)
    out = upload(np.zeros((count, 1, heads, 512), np.float16), xp)

    def change() -> None:
        values = rng.integers(-40, 200 * page, shape) if is_list else rng.integers(0, 200, shape)
        lengths = rng.integers(0, width if is_list else width * page, count)
        for target, new in ((table, values), (lens, lengths)):
            target[...] = upload(new.astype(np.int32), xp)

    def run() -> Any:
        named: dict[str, Any] = {"sparse_mla_top_k": width} if is_list else {}
        if form == "lists":
            named["sparse_mla_top_k_lens"] = lens
        return mla.trtllm_batch_decode_with_kv_cache_mla(
            q, pool, scratch_memory, 128, 512, 64, table, lens, width * page, bmm1_scale=SCALE,
            out=out, **named,
        )  # fmt: skip

    scratch_memory = scratch(xp)
    change()
    run()
    replay = capture(torch, xp, run)
    for step in range(some(40)):
        change()
        raw(out)[...] = 0
        replay()
        replayed = download(out)
        run()
        compare.assert_bitwise_equal(replayed, download(out), step)


@pytest.mark.usefixtures("kernel")
def test_parts_far_apart(xp: ModuleType) -> None:
    """Pages more than 2^31 elements from one another."""
    count = 4000
    cache = xp.zeros((count, 1024, 576), dtype=xp.float16, **_on(xp))
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((2, 64, 576)).astype(np.float16)
    for page, values in zip((1, count - 1), rows, strict=True):
        cache[page, :64] = upload(values, xp)
    q = rng.standard_normal((1, 16, 576)).astype(np.float16)
    w = mla.BatchMLAPagedAttentionWrapper(workspace(xp))
    table = np.array([0, 1]), np.array([0, 2]), np.array([1, count - 1]), np.array([1024 + 64])
    w.plan(*table, 16, 512, 64, 1024, True, SCALE, "float16", "float16")
    keys = np.concatenate([rows[0], np.zeros((960, 576), np.float16), rows[1]])[:, None]
    wanted, _ = reference.attention(q, keys, keys[..., :512], sm_scale=SCALE)
    got = download(w.run(query=upload(q, xp), kv_cache=cache))
    np.testing.assert_allclose(got.astype(np.float64), wanted, atol=2e-3)


@pytest.mark.usefixtures("kernel")
def test_a_larger_pool_after_a_small_one(xp: ModuleType) -> None:
    """A run in the call cache reads its own pool to its end, whichever pool passed the checks."""
    from cupyattn import reference

    rng = np.random.default_rng(3)
    q = rng.standard_normal((1, 16, 576)).astype(np.float16)
    w = mla.BatchMLAPagedAttentionWrapper(workspace(xp))
    for count in (2, 40, 3):
        cache = rng.standard_normal((count, 64, 576)).astype(np.float16)
        pool = upload(cache, xp)
        pages = np.array([count - 1, 0])
        table = np.array([0, 1]), np.array([0, 2]), pages, np.array([128])
        w.plan(*table, 16, 512, 64, 64, True, SCALE, "float16", "float16")
        keys = cache[pages].reshape(-1, 1, 576)
        wanted, _ = reference.attention(q, keys, keys[..., :512], sm_scale=SCALE)
        for _ in range(3):
            got = download(w.run(query=upload(q, xp), kv_cache=pool))
            np.testing.assert_allclose(got.astype(np.float64), wanted, atol=4e-3)


def _on(xp: ModuleType) -> dict[str, str]:
    return {"device": "cuda"} if xp.__name__ == "torch" else {}


def test_flash_mla(xp: ModuleType) -> None:
    """Sinks are outside the LSE, and rows of 656 bytes have no kernel beside float16."""
    rng = np.random.default_rng(4)
    q = rng.standard_normal((2, 1, 4, 576)).astype(np.float16)
    cache = rng.standard_normal((5, 4, 1, 576)).astype(np.float16)
    table, lens = np.array([[3, 1, 0], [2, 4, 4]], np.int32), np.array([9, 0], np.int32)
    sink = np.array([0.3, -2.0, 1.5, 3.0], np.float32)
    arrays = [q, cache, table, lens]
    wanted = flash_mla.flash_mla_with_kvcache(*arrays, 512, attn_sink=sink)
    got = flash_mla.flash_mla_with_kvcache(
        *(upload(x, xp) for x in arrays), 512, attn_sink=upload(sink, xp)
    )
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(download(a).astype(float), b.astype(float), atol=3e-3)
    rows = upload(np.zeros((5, 4, 1, 656), np.uint8), xp)
    with pytest.raises(UnsupportedError, match="rows of 656 bytes"):
        flash_mla.flash_mla_with_kvcache(
            upload(q, xp), rows, upload(table, xp), upload(lens, xp), 512, is_fp8_kvcache=True
        )


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("heads", "width"), [(16, 90), (16, 2048), (128, 700)])
def test_lists_of_requests(xp: ModuleType, heads: int, width: int) -> None:
    """A token's list ends where its request does, less the tokens behind it; entries that are no
    slots are no keys, however far they are; requests lie further apart than their tokens."""
    rng = np.random.default_rng(width)
    count, tokens, slots = 3, 3, 4096
    pool = rng.standard_normal((slots // 64, 64, 576)).astype(np.float16)
    apart_q = rng.standard_normal((count, tokens + 1, heads, 584)).astype(np.float16)
    apart = rng.integers(0, slots, (count, tokens + 2, width)).astype(np.int32)
    nothing = np.array([-1, -(2**31), slots, slots + 1, 2**31 - 1], np.int64).astype(np.int32)
    is_none = rng.random(apart.shape) < 0.2
    apart[is_none] = rng.choice(nothing, apart.shape)[is_none]
    for dtype in (np.int32, np.int64):
        lens = np.array([width + 70, width // 2, 1], dtype)
        answers = []
        for module in (np, xp):
            q, lists = (upload(x, module) for x in (apart_q, apart))
            memory = None if module is np else workspace(xp)
            answer = mla.trtllm_batch_decode_with_kv_cache_mla(
                q[:, :tokens, :, :576], upload(pool, module), memory, 128, 512, 64,
                lists[:, :tokens], upload(lens, module), 9999, width, bmm1_scale=SCALE,
                return_lse=True,
            )  # fmt: skip
            answers.append([np.asarray(download(x), np.float64) for x in answer])
        for a, b in zip(*answers, strict=True):
            np.testing.assert_allclose(a, b, atol=4e-3)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("count", "width"), [(3, 3000), (300, 130)], ids=["splits", "whole"])
def test_answers_of_flash_mla_sparse_fwd(xp: ModuleType, count: int, width: int) -> None:
    """Sinks of any size, the largest logits, rows without keys, and entries beyond the cache."""
    rng = np.random.default_rng(count)
    for heads in (8, 64):
        q = rng.standard_normal((count, heads, 576)).astype(np.float16)
        kv = rng.standard_normal((5000, 1, 576)).astype(np.float16)
        lists = rng.integers(-500, 6000, (count, 1, width)).astype(np.int32)
        lists[1] = 114_514
        sinks = rng.normal(0, 3, heads).astype(np.float32)
        sinks[:4] = -np.inf, np.inf, 60.0, 500.0
        answers = []
        for module in (np, xp):
            arrays = [upload(x, module) for x in (q, kv, lists)]
            named = {"attn_sink": upload(sinks, module)}
            answer = flash_mla.flash_mla_sparse_fwd(*arrays, SCALE, **named)
            answers.append([np.asarray(download(x), np.float64) for x in answer])
        for a, b, atol in zip(*answers, (3e-3, 1e-5, 1e-5), strict=True):
            np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("heads", [16, 128])
def test_fp8_queries(xp: ModuleType, heads: int) -> None:
    if xp.__name__ != "torch":
        pytest.skip("CuPy has no fp8 of its own")
    rng, kind = np.random.default_rng(heads), dtypes.float8_e4m3fn.numpy
    q = rng.standard_normal((3, 2, heads, 576)).astype(kind)
    pool = rng.standard_normal((30, 64, 576)).astype(kind)
    table, lens = rng.permutation(30).reshape(3, 10), np.array([600, 2, 77])
    tables = [x.astype(np.int32) for x in (table, lens)]
    answers = []
    for module in (np, xp):
        queries, keys, *ints_of = (upload(x, module) for x in (q, pool, *tables))
        memory = None if module is np else workspace(xp)
        answer = mla.trtllm_batch_decode_with_kv_cache_mla(
            queries, keys, memory, 128, 512, 64, *ints_of, 640, bmm1_scale=SCALE
        )
        answers.append(download(answer).astype(np.float32))
    np.testing.assert_allclose(*answers, atol=6e-3, rtol=1e-2)


def test_heads_of_latent_keys(xp: ModuleType) -> None:
    rng = np.random.default_rng(9)
    q = rng.standard_normal((2, 3, 16, 576)).astype(np.float16)
    cache = rng.standard_normal((9, 64, 2, 576)).astype(np.float16)
    table = rng.permutation(9)[:8].reshape(2, 4).astype(np.int32)
    answers = []
    for module in (np, xp):
        arrays = [upload(x, module) for x in (q, cache, table, np.array([250, 3], np.int32))]
        answer = flash_mla.flash_mla_with_kvcache(*arrays, 512, causal=True)
        answers.append([np.asarray(download(x), np.float64) for x in answer])
    for a, b in zip(*answers, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-3)


@pytest.mark.parametrize("is_portable", [False, True])
@pytest.mark.parametrize("kv_len", [70, 9000])
def test_outputs_of_fp8(xp: ModuleType, kv_len: int, is_portable: bool) -> None:
    if xp.__name__ != "torch":
        pytest.skip("CuPy has no fp8 of its own")
    rng, pages = np.random.default_rng(kv_len), -(-kv_len // 64)
    table = np.arange(2 * pages, dtype=np.int32).reshape(2, pages)
    pool = rng.standard_normal((2 * pages, 64, 576)).astype(np.float16)
    lens = np.array([kv_len, 7], np.int32)

    def answer(q: np.ndarray, module: ModuleType) -> np.ndarray:
        out = upload(np.zeros((2, q.shape[1], 512), dtypes.float8_e4m3fn.numpy), module)
        w = mla.BatchMLAPagedAttentionWrapper(None if module is np else workspace(xp))
        named = {"query": q, "kv_cache": pool, "page_table": table, "kv_len": lens}
        w.run(**{n: upload(x, module) for n, x in named.items()}, out=out, o_scale=0.005)
        return download(out).astype(np.float32)

    for heads in (16, 128):
        q = rng.standard_normal((2, heads, 576)).astype(np.float16)
        with kernels(is_portable):
            got = answer(q, xp)
        np.testing.assert_allclose(got, answer(q, np), rtol=0.13, atol=0.6)


def test_rows_of_656_bytes(xp: ModuleType) -> None:
    """Pages and lists, of few heads and of many."""
    if xp.__name__ != "torch":
        pytest.skip("bfloat16 queries")
    rng = np.random.default_rng(6)
    plain = rng.standard_normal((40, 64, 1, 576)).astype(np.float32)
    plain[..., :512] *= np.exp2(rng.uniform(-6, 1, (40, 64, 1, 1)))
    cache = pack_rows(plain)
    table = rng.permutation(np.arange(1, 40))[:36].reshape(2, 18).astype(np.int32)
    lens, lists = np.array([1100, 7], np.int32), rng.integers(-1, 2560, (2, 2, 700), np.int32)
    for heads in (16, 128):
        q = rng.standard_normal((2, 2, heads, 576)).astype(dtypes.bfloat16.numpy)
        for names in ({"block_table": table, "cache_seqlens": lens}, {"indices": lists}):
            arrays = {"block_table": None, "cache_seqlens": None} | names
            wanted = flash_mla.flash_mla_with_kvcache(
                q, cache, head_dim_v=512, is_fp8_kvcache=True, **arrays
            )
            on_gpu = {k: None if v is None else upload(v, xp) for k, v in arrays.items()}
            got = flash_mla.flash_mla_with_kvcache(
                upload(q, xp), upload(cache, xp), head_dim_v=512, is_fp8_kvcache=True, **on_gpu
            )
            for a, b in zip(got, wanted, strict=True):
                a = a.float().cpu().numpy()
                np.testing.assert_allclose(a, np.asarray(b, np.float32), atol=0.02, rtol=0.01)


def test_scales_of_tokens(xp: ModuleType) -> None:
    """Of e4m3 keys, in pages of one and of many."""
    rng = np.random.default_rng(7)
    kind = dtypes.float8_e4m3fn.numpy
    for page_size, heads in ((1, 16), (64, 128)):
        num_pages = 1280 // page_size
        cache = rng.standard_normal((num_pages, page_size, 576)).astype(kind)
        scales = np.exp2(rng.uniform(-6, 1, (num_pages, page_size))).astype(np.float32)
        q = rng.standard_normal((2, heads, 576)).astype(np.float16)
        count = 640 // page_size
        table = rng.permutation(num_pages).astype(np.int32)
        answers = []
        for module in (np, xp):
            w = mla.BatchMLAPagedAttentionWrapper(None if module is np else workspace(xp))
            indptr = np.array([0, count, 2 * count], np.int32)
            lens = np.array([640, 601], np.int32)
            w.plan(
                np.arange(3, dtype=np.int32), indptr, table[: 2 * count], lens, heads, 512, 64,
                page_size, True, SCALE, "float16", "float8_e4m3fn",
            )  # fmt: skip
            arrays = {
                name: upload(x, module)
                for name, x in (("query", q), ("kv_cache", cache), ("ckv_scale_arr", scales))
            }
            out = w.run(**arrays, kpe_scale=0.7)
            answers.append(out if module is np else download(out))
        np.testing.assert_allclose(
            answers[1].astype(np.float32), answers[0].astype(np.float32), atol=0.01, rtol=0.01
        )


def test_append(xp: ModuleType) -> None:
    """Rows of 16 bits into a cache of fp8, in one array and in two."""
    rng = np.random.default_rng(5)
    ckv, kpe = (rng.standard_normal((3, n)).astype(np.float16) for n in (512, 64))
    kind = dtypes.float8_e4m3fn.numpy
    table = [np.array(x, np.int32) for x in ([0, 0, 1], [4, 5, 0], [2, 0, 1], [0, 2, 3], [2, 1])]
    answers = []
    for module in (np, xp):
        both = upload(np.zeros((4, 4, 576), kind), module)
        parts = [upload(np.zeros((4, 4, n), kind), module) for n in (512, 64)]
        batch, positions, ids, indptr, last = (upload(x, module) for x in table)
        for caches in ((both, None), parts):
            mla.append_paged_mla_kv_cache(
                upload(ckv, module), upload(kpe, module), batch, positions, *caches, ids, indptr,
                last, ckv_scale=0.5, kpe_scale=0.25,
            )  # fmt: skip
        answers.append([download(x).view(np.uint8) for x in (both, *parts)])
    for a, b in zip(*answers, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(answers[0][0], np.concatenate(answers[0][1:], -1))


@pytest.mark.parametrize(("heads", "q_len"), [(64, 1), (128, 1), (72, 2)])
def test_equal_shares_of_all_keys(xp: ModuleType, heads: int, q_len: int) -> None:
    """Requests that are cut where a block's share ends, by a list that is kept and one that is not:
    the same bits, also where other requests are in the batch."""
    rng = np.random.default_rng(heads)
    kv_len = rng.integers(0, 2500, 110).astype(np.int32)
    counts = -(-kv_len // 64)
    pages = rng.permutation(int(counts.sum())).astype(np.int32)
    table = np.zeros((kv_len.size, int(counts.max())), np.int32)
    for index, (first, count) in enumerate(zip(counts.cumsum() - counts, counts, strict=True)):
        table[index, :count] = pages[first : first + count]
    cache = rng.standard_normal((pages.size, 64, 1, 576)).astype(np.float16)
    q = rng.standard_normal((kv_len.size, q_len, heads, 576)).astype(np.float16)
    wanted = flash_mla.flash_mla_with_kvcache(q, cache, table, kv_len, 512, causal=True)
    on_gpu = [upload(x, xp) for x in (q, cache, table, kv_len)]
    metadata, _ = flash_mla.get_mla_metadata()
    first = None
    for given in (None, metadata, metadata, metadata, None):
        out, lse = flash_mla.flash_mla_with_kvcache(*on_gpu, 512, given, causal=True)
        got, got_lse = download(out), download(lse)
        np.testing.assert_allclose(got.astype(np.float32), wanted[0], atol=3e-3)
        np.testing.assert_allclose(got_lse, wanted[1], atol=3e-3)
        first = got if first is None else first
        np.testing.assert_array_equal(got, first)
