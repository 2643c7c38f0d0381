"""Entry points without a plan on CPU arrays: the reference, through every form of argument."""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import poison
from helpers.batches import WORKSPACE
from helpers.calls import run_and_check
from helpers.planless_calls import ENTRIES, Call, random_case
from helpers.share import one_of
from helpers.verify_cases import FORMS

import cupyattn as flashinfer
from cupyattn import reference
from cupyattn.engine.arrays import Arrays
from cupyattn.engine.check_planless import Options
from cupyattn.engine.run_planless import run
from cupyattn.engine.views import Names
from cupyattn.errors import ArgumentError


@pytest.mark.parametrize("first", one_of(2, range(0, 150, 50)))
def test_random_calls(first: int) -> None:
    for seed in range(first, first + 50):
        run_and_check(Call(random_case(seed), np, WORKSPACE))


def test_random_calls_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(poison, "embed", functools.partial(poison.embed, device="cpu"))
    for seed in range(150, 180):
        run_and_check(Call(random_case(seed), torch, torch.from_numpy(WORKSPACE)))


def test_the_random_cases_have_every_form() -> None:
    cases = [random_case(seed) for seed in range(400)]
    assert {case.entry for case in cases} == set(ENTRIES)
    for name, values in {
        "form": {"uniform", "steps", "lens"},
        "v_scale": {"none", "number", "array"},
        "cache": {"one", "pair", "same"},
        "units": {"elements", "tokens"},
        "index_dtype": {"int32", "uint32", "int64"},
        "kv_layout": {"NHD", "HND"},
        "has_workspace": {True, False},
        "has_sinks": {True, False},
        "with_out": {True, False},
        "tree": {"", *FORMS},
    }.items():
        assert {getattr(case, name) for case in cases} == values, name
    assert any(case.page_size == 0 for case in cases) and any(not case.kv_len for case in cases)


# --- conventions, in numbers ---

RNG = np.random.default_rng(0)
HQ, HKV, D, PAGE = 4, 2, 16, 4
Q = RNG.standard_normal((2, HQ, D)).astype(np.float32)
POOL = RNG.standard_normal((6, 2, PAGE, HKV, D)).astype(np.float32)
TABLE = np.array([[3, 0, 5], [1, 2, 4]], np.int32)
LENS = np.array([9, 6], np.int32)
K, V = (POOL[TABLE][:, :, i].reshape(2, 3 * PAGE, HKV, D) for i in (0, 1))
ARGS: tuple[Any, ...] = (Q, POOL, WORKSPACE, TABLE, LENS, 9)


def expected(**options: Any) -> tuple[np.ndarray, np.ndarray]:
    pairs = [
        reference.attention(Q[b : b + 1], K[b, :n], V[b, :n], **options) for b, n in enumerate(LENS)
    ]
    o, lse = (np.concatenate(x).astype(np.float32) for x in zip(*pairs, strict=True))
    return o, lse


def test_bmm1_scale_is_the_whole_scale() -> None:
    for scale in (1.0, 0.3):
        out = flashinfer.trtllm_batch_decode_with_kv_cache(*ARGS, scale, kv_layout="NHD")
        np.testing.assert_array_equal(out, expected(sm_scale=scale)[0])


def test_xqa_divides_by_the_root() -> None:
    out = flashinfer.xqa(Q, POOL[:, 0], POOL[:, 1], TABLE, LENS, q_scale=0.7)
    np.testing.assert_allclose(out, expected(sm_scale=0.7 / math.sqrt(D))[0], rtol=1e-6)


def test_xqa_scales_values_only_where_they_are_quantised() -> None:
    same = flashinfer.xqa(Q, POOL[:, 0], POOL[:, 1], TABLE, LENS, kv_scale=3.0)
    np.testing.assert_allclose(same, expected()[0], rtol=1e-6)
    quantised = [POOL[:, i].astype(ml_dtypes.float8_e4m3fn) for i in (0, 1)]
    plain = flashinfer.xqa(Q, *quantised, TABLE, LENS, q_scale=0.5, kv_scale=1.0)
    scaled = flashinfer.xqa(Q, *quantised, TABLE, LENS, q_scale=0.25, kv_scale=2.0)
    np.testing.assert_allclose(scaled, 2 * plain, rtol=1e-6)


def test_a_sliding_window_counts_the_own_key() -> None:
    wanted = expected(window_left=2, sm_scale=0.25)[0]
    got = flashinfer.xqa(Q, POOL[:, 0], POOL[:, 1], TABLE, LENS, sliding_win_size=3)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    got = flashinfer.trtllm_batch_decode_with_kv_cache(*ARGS, 0.25, window_left=2, kv_layout="NHD")
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_lse_bases() -> None:
    """Base 2, but for cuDNN's prefill."""
    o, lse = expected(sm_scale=0.25)
    got = flashinfer.trtllm_batch_decode_with_kv_cache(
        *ARGS, 0.25, kv_layout="NHD", return_lse=True
    )
    np.testing.assert_array_equal(got[1], lse)
    heads_first = POOL.swapaxes(2, 3)
    cudnn = {"block_tables": TABLE, "actual_seq_lens_kv": LENS, "max_sequence_kv": 9}
    args = Q, heads_first[:, 0], heads_first[:, 1], 0.25, WORKSPACE
    got = flashinfer.cudnn_batch_decode_with_kv_cache(*args, **cudnn, return_lse=True)
    np.testing.assert_array_equal(got[1], lse)
    cudnn |= {
        "max_token_per_sequence": 3,
        "actual_seq_lens_q": np.array([1, 1], np.int32),
        "batch_offsets_q": np.array([0, 1, 2]) * HQ * D,
        "causal": True,
        "return_lse": True,
    }
    prefill = flashinfer.cudnn_batch_prefill_with_kv_cache
    out, natural = prefill(*args, **cudnn)
    np.testing.assert_array_equal(out, o)
    assert natural.shape == (2, 3, HQ) and np.isneginf(natural[:, 1:]).all()
    np.testing.assert_allclose(natural[:, 0], lse * math.log(2), rtol=1e-6)
    given = np.zeros_like(natural)
    _, binary = prefill(*args, **cudnn, lse=given, lse_base="log2")
    assert binary is given and np.isneginf(binary[:, 1:]).all()
    np.testing.assert_allclose(binary[:, 0], lse, rtol=1e-6)
    with pytest.raises(ArgumentError, match="lse_base: got 'e'"):
        prefill(*args, **cudnn, lse_base="e")


def test_cudnn_prefill_always_returns_a_pair() -> None:
    named = {"max_token_per_sequence": 2, "max_sequence_kv": 9, "causal": False}
    k, v = K[0, :9], V[0, :9]
    lens = np.array([[[[2]]]], np.int32), np.array([[[[9]]]], np.int32)
    out, lse = flashinfer.cudnn_batch_prefill_with_kv_cache(
        Q, k, v, 0.25, WORKSPACE, **named, actual_seq_lens_q=lens[0], actual_seq_lens_kv=lens[1],
        return_lse=False,
    )  # fmt: skip
    assert lse is None
    wanted, _ = reference.attention(Q, k, v, sm_scale=0.25)
    np.testing.assert_array_equal(out, wanted.astype(np.float32))


def test_causal_within_the_new_tokens() -> None:
    q = RNG.standard_normal((4, HQ, D)).astype(np.float32)
    out = flashinfer.trtllm_batch_decode_with_kv_cache(
        q, *ARGS[1:], 0.25, kv_layout="NHD", q_len_per_req=2
    )
    for b, n in enumerate(LENS):
        wanted, _ = reference.attention(
            q[2 * b : 2 * b + 2], K[b, :n], V[b, :n], sm_scale=0.25, causal=True
        )
        np.testing.assert_array_equal(out[2 * b : 2 * b + 2], wanted.astype(np.float32))


def test_xqa_is_a_module_and_a_function() -> None:
    import importlib

    module = importlib.import_module("cupyattn.xqa")
    args = Q, POOL[:, 0], POOL[:, 1], TABLE, LENS
    np.testing.assert_array_equal(flashinfer.xqa(*args), module.xqa(*args))
    output = np.empty_like(Q)
    assert flashinfer.xqa(*args, output) is None
    np.testing.assert_array_equal(output, module.xqa(*args))


def test_names_import_as_in_flashinfer() -> None:
    from cupyattn.cudnn import cudnn_batch_decode_with_kv_cache as a
    from cupyattn.cudnn import cudnn_batch_prefill_with_kv_cache as b
    from cupyattn.decode import cudnn_batch_decode_with_kv_cache as c
    from cupyattn.decode import trtllm_batch_decode_with_kv_cache as d
    from cupyattn.decode import xqa_batch_decode_with_kv_cache as e
    from cupyattn.prefill import cudnn_batch_prefill_with_kv_cache as f
    from cupyattn.prefill import trtllm_batch_context_with_kv_cache as g

    for function in (a, b, c, d, e, f, g):
        assert getattr(flashinfer, function.__name__) is function


@pytest.mark.parametrize(("begin", "fits"), [([0, 2], True), ([0, 5], False), ([-1, 2], False)])
def test_pages_that_begin_beyond_the_table_are_refused(begin: list[int], fits: bool) -> None:
    """Offsets of pages count entries of the table, of which each has a page of keys."""
    pages = RNG.standard_normal((8, PAGE, HKV, D)).astype(np.float32)
    kv_lens, table = np.array([6, 8], np.int32), np.arange(6, dtype=np.int32)[None]
    options = Options(Names("q", "k", "v"), has_table_offsets=True)
    offsets = np.array(begin, np.int32)
    call = functools.partial(
        run, Arrays(Q, pages, pages, block_tables=table, kv_lens=kv_lens, kv_offsets=offsets)
    )
    if fits:
        rows = pages[2:4].reshape(-1, HKV, D)
        expected, _ = reference.attention(Q[1:], rows, rows, sm_scale=1.0)
        np.testing.assert_allclose(call(options)[1:], expected, atol=1e-5)
    else:
        with pytest.raises(ArgumentError, match=r"seq_lens: request . has . from -?[0-9]+ on"):
            call(options)
