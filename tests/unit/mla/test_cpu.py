"""Latent attention on the CPU: every form of call, and what absorbed attention must equal."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import absorbed, mla_calls
from helpers.batches import WORKSPACE
from helpers.calls import run_and_check
from helpers.mla_calls import NUM_CASES, random_case
from helpers.share import one_of

import cupyattn
from cupyattn import mla, reference
from cupyattn.core import dtypes
from cupyattn.engine import planless_reference
from cupyattn.engine.geometry import Variant
from cupyattn.errors import ArgumentError, UnsupportedError, WorkspaceError
from cupyattn.launch.attention.layout import ANY_BATCH_BYTES

COUNT, BLOCK = 360, 40
SCALE = 1.0 / math.sqrt(128 + 64)


@pytest.mark.parametrize("first", one_of(2, range(0, COUNT, BLOCK)))
def test_random_calls(first: int) -> None:
    for seed in range(first, first + BLOCK):
        run_and_check(mla_calls.Call(random_case(seed), np, WORKSPACE))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(COUNT, NUM_CASES, 100))
def test_many_random_calls(first: int) -> None:
    for seed in range(first, first + 100):
        run_and_check(mla_calls.Call(random_case(seed), np, WORKSPACE))


def planned(lens: list[int], q_lens: list[int], heads: int, causal: bool = True) -> mla_calls.Call:
    case = random_case(0)
    case = replace(
        case,
        way="wrapper",
        qo_len=tuple(q_lens),
        kv_len=tuple(lens),
        heads=heads,
        causal=causal,
        is_split=False,
        is_natural=False,
        has_sinks=False,
        split=None,
        with_out=False,
        sm_scale=SCALE,
    )
    return mla_calls.Call(case, np, WORKSPACE)


def test_absorbed_is_unabsorbed_and_chunks_of_the_prefix_are_the_whole() -> None:
    absorbed.check(np, WORKSPACE)


def test_chunks_of_the_keys_merge_to_the_whole() -> None:
    call = planned([90], [1], 16)
    whole, whole_lse = call.run()
    pool = call.pool[call.ids[: call.kv_indptr[-1]]].reshape(-1, 1, 576)[:90]
    states = []
    for begin, end in ((0, 50), (50, 90)):
        w = mla.BatchMLAPagedAttentionWrapper(WORKSPACE)
        n = np.array([end - begin], np.int32)
        w.plan(
            np.array([0, 1]), np.array([0, n[0]]), np.arange(n[0]), n, 16, 512, 64, 1, False,
            SCALE, call.case.problem.dtype,
        )  # fmt: skip
        states.append(w.run(query=call.q, kv_cache=pool[begin:end], return_lse=True))
    (v_a, s_a), (v_b, s_b) = states
    merged, merged_lse = cupyattn.merge_state(v_a, s_a, v_b, s_b)
    np.testing.assert_allclose(merged.astype(np.float32), whole.astype(np.float32), atol=0.02)
    np.testing.assert_allclose(merged_lse, whole_lse, atol=1e-5)


def test_packed_and_split_parts_are_the_same() -> None:
    call = planned([30, 5], [2, 1], 3)
    q, pool = call.q, call.pool
    (q_nope, q_pe), (ckv, kpe) = (np.split(x, [512], axis=-1) for x in (q, pool))
    answers = [
        call.wrapper.run(query=q, kv_cache=pool),
        call.wrapper.run(q_nope, q_pe, ckv, kpe),
        call.wrapper.run(query=(q_nope, q_pe), kv_cache=pool[:, None]),
        call.wrapper.run(q_nope, q_pe, kv_cache=[ckv[:, :, None], kpe[:, :, None]]),
    ]
    for other in answers[1:]:
        np.testing.assert_array_equal(answers[0], other)


def test_natural_logarithms() -> None:
    call = planned([30, 0], [2, 1], 3)
    arrays = {"query": call.q, "kv_cache": call.pool}
    out, lse = call.wrapper.run(**arrays, return_lse=True)
    given = np.zeros(lse.shape, np.float32)
    for other in (
        call.wrapper.run(**arrays, return_lse=True, return_lse_base_on_e=True),
        call.wrapper.run(**arrays, lse=given, return_lse=True, return_lse_base_on_e=True),
    ):
        np.testing.assert_array_equal(out, other[0])
        np.testing.assert_allclose(other[1], lse * math.log(2.0), rtol=1e-6)
    assert other[1] is given and np.isneginf(given[2]).all() and not out[2].any()


def test_scales_of_fp8() -> None:
    """Of tokens, of the two parts, and none for a cache of 16 bits."""
    rng = np.random.default_rng(1)
    e4m3 = cupyattn.reference.to_fp8
    rows = rng.standard_normal((2, 4, 576)).astype(np.float32)
    kind = dtypes.float8_e4m3fn.numpy
    cache = e4m3(rows, 1.0, kind)
    q = rng.standard_normal((1, 3, 576)).astype(np.float32)
    w = mla.BatchMLAPagedAttentionWrapper(WORKSPACE)
    table = np.array([0, 1]), np.array([0, 2]), np.array([1, 0]), np.array([7])
    w.plan(*table, 3, 512, 64, 4, True, SCALE, "float32", "float8_e4m3fn")
    scales = rng.uniform(0.5, 2.0, (2, 4)).astype(np.float32)
    got = w.run(query=q, kv_cache=cache, ckv_scale_arr=scales, kpe_scale=0.7)
    k = cache.astype(np.float64)
    k[..., :512] *= scales[..., None]
    k[..., 512:] *= 0.7
    k = k[[1, 0]].reshape(-1, 1, 576)[:7]
    wanted, _ = reference.attention(q, k, k[..., :512], causal=True, sm_scale=SCALE)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    with pytest.raises(UnsupportedError, match="scales of groups of columns; only one scale of"):
        w.run(query=q, kv_cache=cache, ckv_scale_arr=np.ones((2, 4, 4), np.float32))
    got = w.run(query=q, kv_cache=cache, ckv_scale=0.3, kpe_scale=0.7, bmm1_scale=0.1, bmm2_scale=2)
    k = cache.astype(np.float64)[[1, 0]].reshape(-1, 1, 576)[:7]
    k[..., :512] *= 0.3
    k[..., 512:] *= 0.7
    wanted, _ = reference.attention(q, k, k[..., :512], causal=True, sm_scale=0.1)
    np.testing.assert_allclose(got, 2 * wanted, atol=1e-5)
    w.plan(*table, 3, 512, 64, 4, True, SCALE, "float32")
    with pytest.raises(ArgumentError, match="only one of fp8 has"):
        w.run(query=q, kv_cache=rows, ckv_scale=0.5)


def test_torch_and_jax() -> None:
    call = planned([30, 5], [2, 1], 3)
    wanted = call.wrapper.run(query=call.q, kv_cache=call.pool)
    torch = pytest.importorskip("torch")
    as_torch = [torch.from_numpy(x.astype(np.float32)).bfloat16() for x in (call.q, call.pool)]
    w = mla.BatchMLAPagedAttentionWrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    lens = torch.tensor(call.case.kv_len, dtype=torch.int32)
    w.plan(
        *map(torch.from_numpy, (call.qo_indptr, call.kv_indptr, call.ids)), lens, 3, 512, 64,
        call.case.page_size, True, SCALE, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    got = w.run(query=as_torch[0], kv_cache=as_torch[1])
    assert isinstance(got, torch.Tensor) and got.dtype == torch.bfloat16
    np.testing.assert_array_equal(got.float().numpy(), wanted.astype(np.float32))
    jax = pytest.importorskip("jax")
    got = mla.trtllm_batch_decode_with_kv_cache_mla(
        jax.numpy.zeros((2, 1, 3, 576), "bfloat16"), jax.numpy.zeros((4, 5, 576), "bfloat16"), None,
        128, 512, 64, jax.numpy.zeros((2, 2), "int32"), jax.numpy.array([3, 0], "int32"), 9,
    )  # fmt: skip
    assert isinstance(got, jax.Array) and got.shape == (2, 1, 3, 512)


def lists(q_len: int, top_k: int, **named: Any) -> Any:
    """A list of keys for each token of three requests, whose keys lie one after another."""
    rng = np.random.default_rng(q_len)
    q = rng.standard_normal((3, q_len, 2, 576)).astype(np.float32)
    pool = rng.standard_normal((40, 1, 576)).astype(np.float32)
    table = np.tile(np.arange(top_k, dtype=np.int32), (3, q_len, 1)) + 8
    call = functools.partial(
        mla.trtllm_batch_decode_with_kv_cache_mla, q, pool, None, 128, 512, 64, table,
        bmm1_scale=SCALE, return_lse=True, max_seq_len=40, sparse_mla_top_k=top_k,
    )  # fmt: skip
    return q, pool, call


@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_a_token_does_not_see_the_tokens_behind_it(q_len: int) -> None:
    """Of lists as long as their requests, or longer."""
    q, pool, call = lists(q_len, 6)
    lens = np.array([20, 6, 2], np.int64)
    out, lse = call(seq_lens=lens)
    every, _ = call(seq_lens=None)
    rows = np.arange(q_len)
    for b, n in enumerate(lens):
        for t in rows:
            count = min(6, max(0, n - (q_len - 1 - t)))
            k = pool[8 : 8 + count]
            wanted, wanted_lse = reference.attention(q[b, t][None], k, k[..., :512], sm_scale=SCALE)
            np.testing.assert_allclose(out[b, t], wanted[0], atol=1e-5)
            np.testing.assert_allclose(lse[b, t], wanted_lse[0], atol=1e-5)
    k = pool[8:14]
    wanted, _ = reference.attention(q[2], k, k[..., :512], sm_scale=SCALE)
    np.testing.assert_allclose(every[2], wanted, atol=1e-5)
    counts = np.array([6, 3, 0] * q_len, np.int32)
    given = call(seq_lens=lens, sparse_mla_top_k_lens=counts)
    np.testing.assert_array_equal(given[0].reshape(-1, 2, 512)[2], 0.0)


def test_lists_of_any_number_of_tokens() -> None:
    q, pool, call = lists(4, 6)
    lens, rows = np.array([20, 6, 2], np.int32), np.array([0, 1, 5, 7], np.int32)
    chosen = [(0, 3), *((1, t) for t in range(4)), (2, 2), (2, 3)]
    wanted, wanted_lse = call(seq_lens=lens)
    some = np.stack([q[at] for at in chosen])
    table = np.tile(np.arange(6, dtype=np.int32), (7, 1)) + 8
    out, lse = mla.trtllm_batch_decode_with_kv_cache_mla(
        some, pool, None, 128, 512, 64, table, lens, 40, 6, bmm1_scale=SCALE, return_lse=True,
        cum_seq_lens_q=rows,
    )  # fmt: skip
    np.testing.assert_array_equal(out, np.stack([wanted[at] for at in chosen]))
    np.testing.assert_array_equal(lse, np.stack([wanted_lse[at] for at in chosen]))


def test_forms_of_the_lse_and_of_tables() -> None:
    q = np.random.default_rng(5).standard_normal((2, 3, 4, 576)).astype(np.float32)
    pool = np.random.default_rng(6).standard_normal((4, 8, 576)).astype(np.float32)
    table, lens = np.array([[2, 0], [1, 3]], np.int32), np.array([11, 16], np.int32)
    given = q, pool, None, 128, 512, 64
    call = functools.partial(mla.trtllm_batch_decode_with_kv_cache_mla, *given, bmm1_scale=SCALE)
    out, lse = call(table, lens, 16, return_lse=True)
    rows = np.zeros((6, 4), np.float32)
    _, found = call(table, lens, 16, return_lse=True, lse=rows)
    assert found is rows
    np.testing.assert_array_equal(rows, lse.reshape(6, 4))
    both = np.stack([table, table], axis=1)
    np.testing.assert_array_equal(call(both, lens, 16, uses_shared_paged_kv_idx=False), out)
    with pytest.raises(ArgumentError, match="lse: shape is"):
        call(table, lens, 16, lse=np.zeros((4, 6), np.float32))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("keys", ["float8_e4m3fn", "float16"])
def test_queries_of_fp8(kind: str, keys: str) -> None:
    """16 bits hold them, so answers are those of queries that were cast."""
    rng = np.random.default_rng(9)
    q = rng.standard_normal((2, 1, 4, 576)).astype(dtypes.parse(kind).numpy)
    pool = rng.standard_normal((4, 8, 576)).astype(dtypes.parse(keys).numpy)
    table, lens = np.array([[2, 0], [1, 3]], np.int32), np.array([11, 16], np.int32)
    given = pool, None, 128, 512, 64, table, lens, 16
    for call in (
        mla.trtllm_batch_decode_with_kv_cache_mla, mla.xqa_batch_decode_with_kv_cache_mla
    ):  # fmt: skip
        wanted = call(q.astype(np.float16), *given, bmm1_scale=SCALE)
        got = call(q, *given, bmm1_scale=SCALE)
        is_fp8 = keys != "float16"
        assert got.dtype == (dtypes.bfloat16 if is_fp8 else dtypes.float16).numpy
        np.testing.assert_allclose(got.astype(np.float32), wanted, rtol=8e-3, atol=1e-3)
        mine = np.zeros(wanted.shape, np.float16)
        call(q, *given, bmm1_scale=SCALE, out=mine)
        np.testing.assert_array_equal(mine, wanted)
    assert mla.xqa_mla(q, pool, pool, table, lens, q_scale=SCALE).dtype == got.dtype


@pytest.mark.parametrize("axes", [3, 4])
def test_xqa_answers_in_the_axes_of_the_query(axes: int) -> None:
    q = np.random.default_rng(7).standard_normal((2, 1, 4, 576)).astype(np.float32)
    pool = np.random.default_rng(8).standard_normal((4, 8, 576)).astype(np.float32)
    table, lens = np.array([[2, 0], [1, 3]], np.int32), np.array([11, 16], np.int32)
    wanted = mla.xqa_mla(q, pool, pool, table, lens, q_scale=SCALE)
    given = pool, None, 128, 512, 64, table, lens, 16
    query = q if axes == 4 else q[:, 0]
    call = functools.partial(
        mla.xqa_batch_decode_with_kv_cache_mla, query, *given, bmm1_scale=SCALE
    )
    out = call()
    assert out.shape == (*query.shape[:-1], 512)
    np.testing.assert_array_equal(out.reshape(wanted.shape), wanted)
    for shape in ((2, 4, 512), (2, 1, 4, 512))[: axes - 2]:
        mine = np.zeros(shape, np.float32)
        assert call(out=mine) is mine
        np.testing.assert_array_equal(mine.reshape(wanted.shape), wanted)


def test_offsets_of_more_requests_than_there_are() -> None:
    """FlashInfer's tests pass kv_indptr of all pages, and lengths of some requests."""
    call = planned([30, 5], [2, 1], 3)
    w = mla.BatchMLAPagedAttentionWrapper(WORKSPACE)
    longer = np.concatenate([call.kv_indptr, [*call.kv_indptr[-1:], 99]])
    w.plan(
        *(call.qo_indptr, longer, call.ids, np.array([30, 5], np.int32)),
        *(3, 512, 64, call.case.page_size, True, SCALE, "bfloat16", "bfloat16"),
    )
    one, other = (x.run(query=call.q, kv_cache=call.pool) for x in (call.wrapper, w))
    np.testing.assert_array_equal(one, other)


def test_outputs_of_fp8() -> None:
    """As planned, or of one token of each request without a plan; o_scale gives the answer back."""
    call = planned([30, 5], [1, 1], 3)
    wanted = call.wrapper.run(query=call.q, kv_cache=call.pool).astype(np.float32)
    kind, scale = dtypes.float8_e4m3fn.numpy, 0.01
    w = mla.BatchMLAPagedAttentionWrapper(WORKSPACE)
    w.plan(
        *(call.qo_indptr, call.kv_indptr, call.ids, np.array([30, 5], np.int32)),
        *(3, 512, 64, call.case.page_size, True, 192**-0.5, "bfloat16", "bfloat16"),
        output_dtype="float8_e4m3fn",
    )
    table = np.zeros((2, 10), np.int32)
    for row, (begin, end) in enumerate(itertools.pairwise(call.kv_indptr)):
        table[row, : end - begin] = call.ids[begin:end]
    unplanned = {"page_table": table, "kv_len": np.array([30, 5], np.int32)}
    for given in ({}, unplanned):
        out = np.zeros((2, 3, 512), kind)
        w.run(query=call.q, kv_cache=call.pool, out=out, o_scale=scale, **given)
        np.testing.assert_allclose(out.astype(np.float32) * scale, wanted, rtol=0.07, atol=0.01)


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize(
    ("count", "tokens", "heads", "kv_len"),
    [(157, 17, 16, 97), (157, 17, 16, 9000), (256, 1, 128, 3000), (500, 1, 16, 500)],
)
def test_128_mb_serve_any_batch(
    count: int, tokens: int, heads: int, kv_len: int, is_graph: bool
) -> None:
    """In graph mode by the capacity; off 16-byte boundaries by kernels with other tiles."""
    pages = -(-kv_len // 64)
    offsets = np.arange(count + 1, dtype=np.int32)
    table = offsets * tokens, offsets * pages, np.zeros(count * pages, np.int32)
    lens = np.full(count, kv_len, np.int32)
    buffers = [x.copy() for x in (*table, lens)] if is_graph else []
    w = mla.BatchMLAPagedAttentionWrapper(WORKSPACE, is_graph, *buffers)
    w.plan(*table, lens, heads, 512, 64, 64, True, SCALE, "bfloat16", "bfloat16")
    plan = w._require_plan()
    for variant in (Variant(True, False), Variant(False, False), Variant(True, True)):
        assert w._prepare(plan, variant).schedule.workspace_bytes <= ANY_BATCH_BYTES


@pytest.mark.parametrize("seed", range(12))
def test_128_mb_serve_any_call_without_a_plan(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    heads, top_k = int(rng.choice([1, 16, 64, 128])), int(rng.choice([0, 0, 64, 2048]))
    count, tokens = int(2 ** rng.uniform(0, 9)), int(rng.choice([1, 1, 2, 9]))
    q = np.zeros((count, tokens, heads, 576), np.float16)
    shape = (count, tokens, top_k) if top_k else (count, int(2 ** rng.uniform(0, 8)))
    table, lens = np.zeros(shape, np.int32), np.zeros(count, np.int32)
    pool = np.zeros((2, 64, 576), np.float16)
    call = functools.partial(
        mla.trtllm_batch_decode_with_kv_cache_mla, q, pool, qk_nope_head_dim=128, kv_lora_rank=512,
        qk_rope_head_dim=64, block_tables=table, seq_lens=lens, max_seq_len=1 << 20,
        sparse_mla_top_k=top_k, return_lse=True,
    )  # fmt: skip
    assert len(WORKSPACE) == ANY_BATCH_BYTES
    monkeypatch.setattr(planless_reference, "attend", lambda *given: "fits")
    assert call(workspace_buffer=WORKSPACE) == "fits"


def test_more_lists_than_a_block_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of FlashMLA's tests have 70,000 tokens."""
    n, lists = 70_000, np.zeros((70_000, 1, 8), np.int32)
    q, pool = np.zeros((n, 1, 1, 576), np.float16), np.zeros((2, 64, 576), np.float16)
    monkeypatch.setattr(planless_reference, "attend", lambda *given: "fits")
    for counts in (None, np.zeros(n, np.int32)):
        call = mla.trtllm_batch_decode_with_kv_cache_mla(
            q, pool, WORKSPACE, 128, 512, 64, lists, None, 8, 8, sparse_mla_top_k_lens=counts
        )
        assert call == "fits"


def test_a_workspace_that_is_too_small() -> None:
    """As on a GPU, for a call without a plan too."""
    q, pool = np.zeros((4, 1, 16, 576), np.float16), np.zeros((2, 64, 576), np.float16)
    table, lens = np.zeros((4, 300), np.int32), np.zeros(4, np.int32)
    with pytest.raises(WorkspaceError, match=r"this call needs .* bytes and it has 8"):
        mla.xqa_batch_decode_with_kv_cache_mla(
            q, pool, np.zeros(8, np.uint8), 128, 512, 64, table, lens, 19_200
        )


def test_workspace_size_and_growing_memory() -> None:
    call = planned([3000, 5], [1, 1], 16)
    w = mla.BatchMLAPagedAttentionWrapper(None)
    arguments = (
        *(call.qo_indptr, call.kv_indptr, call.ids, np.array([3000, 5])),
        *(16, 512, 64, call.case.page_size, True, SCALE),
    )
    need, own = w.workspace_size(*arguments)
    assert need > 0 < own
    w.plan(*arguments)
    w.run(query=call.q, kv_cache=call.pool)
