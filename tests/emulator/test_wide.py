"""Latent attention, and head dims beyond 256, through the library's calls on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import compare, gpu_cases, mla_calls
from helpers.mla_calls import PROBLEMS, WAYS, WIDE, Case, portable, random_case, wide_case
from helpers.share import one_of

from cupyattn.core.dtypes import bfloat16, float8_e4m3fn
from cupyattn.launch.attention import plan_batch
from cupyattn.reference.latent_rows import pack_rows

from . import gpu, run, test_batch, test_cascade, test_planless

# One request of 16 rows, one without keys, one of few rows with many keys.
BASE = Case(
    seed=1,
    way="wrapper",
    problem=PROBLEMS[1],
    qo_len=(4, 1, 1),
    kv_len=(130, 0, 300),
    heads=4,
    page_size=16,
    is_split=True,
    is_padded=True,
    with_out=True,
)


def emulate(case: Case, **facts: Any) -> gpu.EmulatedGpu:
    """Run and check a call on the portable kernel."""
    if facts.setdefault("is_portable", True):
        case = portable(case)
    return run.emulate(lambda workspace: mla_calls.Call(case, np, workspace), **facts)


def answers(case: Case, **facts: Any) -> tuple[np.ndarray, np.ndarray | None]:
    with gpu.plugged_in(**{"is_portable": True, **facts}) as emulated:
        call = mla_calls.Call(case, np, emulated.empty((16 << 20,), np.dtype(np.uint8)))
        return call.run()


@pytest.mark.parametrize("is_second", one_of(2, [False, True]), ids=["first", "second"])
@pytest.mark.parametrize("way", WAYS)
def test_random_calls(way: str, is_second: bool) -> None:
    index = list(WAYS).index(way)
    seed = index + is_second * len(WAYS) * (index % 2 + 1)
    emulate(random_case(seed), seed=seed % 3, num_sms=4)


# Wrappers plan on the host, and lists of several tokens a request cannot be taken apart.
WHOLE = "wrapper", "metadata", "list of tokens"


@pytest.mark.parametrize("way", [way for way in WAYS if way not in WHOLE])
def test_random_calls_in_parts(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more requests than a block plans, of which there is one here."""
    monkeypatch.setattr(plan_batch, "max_requests", lambda device: 1)
    index, count = list(WAYS).index(way), 0
    for seed in range(index, index + 3 * len(WAYS), len(WAYS)):
        emulated = emulate(random_case(seed), seed=seed % 3, num_sms=4)
        count = max(count, [x.name for x in emulated.launches].count("plan_batch"))
    assert count > (2 if way == "flat list" else 4)


# These seeds are calls of the wrappers, and one over lists; then rows of 656 bytes in lists and in
# pages, and a scale of each token in both kernels.
@pytest.mark.parametrize("seed", [0, 1, 5, 7, 8, 9, 72, 66, 121])
def test_calls_on_hopper(seed: int) -> None:
    """Boxes of pages, gathered rows, splits, plans made on the GPU, and lists."""
    emulated = emulate(random_case(seed), seed=seed % 3, num_sms=4, is_portable=False)
    assert emulated.has_launched("wide_sm90") or emulated.has_launched("wide_decode_sm90")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2 * len(WAYS), 400, 20))
def test_many_random_calls(first: int) -> None:
    for seed in range(first, first + 20):
        emulate(random_case(seed), seed=seed % 3, num_sms=4 + seed % 30)


@pytest.mark.parametrize("heads", [5, 32, 128], ids=["16 rows", "32 rows", "64 rows"])
@pytest.mark.parametrize("split", [None, 2])
def test_tiles_and_splits(heads: int, split: int | None) -> None:
    """Requests of fewer than 16, of 32 and of more rows; keys that one block has, or several."""
    case = replace(BASE, qo_len=(1,), kv_len=(100,), heads=heads, split=split)
    names = [launch.name for launch in emulate(case).launches]
    merges = split is not None and heads > 16
    assert names == [*["wide_sm80"], *["merge_splits"] * merges] * 2


def test_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of chips with 99 KB, of fewer rows and keys."""
    monkeypatch.setattr(gpu, "MAX_SHARED", 99 * 1024)
    for heads, problem in ((5, PROBLEMS[1]), (40, PROBLEMS[1]), (40, PROBLEMS[3])):
        emulate(replace(BASE, qo_len=(1,), kv_len=(100,), heads=heads, problem=problem))


def test_the_order_of_threads_changes_no_bit() -> None:
    for case in (
        BASE,
        replace(BASE, split=2, heads=16),
        replace(BASE, way="list", qo_len=(1,) * 3),
    ):
        first, *others = (answers(case, seed=seed, num_sms=8) for seed in range(3))
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert a is not None and b is not None
                compare.assert_bitwise_equal(a, b, case)


@pytest.mark.parametrize("is_portable", [True, False], ids=["portable", "hopper"])
def test_batches_do_not_change_a_request(is_portable: bool) -> None:
    """With splits of one size a request's bits are the same alone and among others."""
    many = replace(BASE, qo_len=(2, 2, 2), kv_len=(90, 33, 200), split=2, heads=8, with_out=False)
    facts = {"num_sms": 4, "is_portable": is_portable}
    together = answers(many, **facts)
    with gpu.plugged_in(**facts) as emulated:
        call = mla_calls.Call(many, np, emulated.empty((16 << 20,), np.dtype(np.uint8)))
        wrapper, at = call.wrapper, call.kv_indptr
        rows, ids, n = call.q[2:4], call.ids[at[1] : at[2]], at[2] - at[1]
        parts = [np.ascontiguousarray(x) for x in (rows[..., :512], rows[..., 512:])]
        offsets = (np.array([0, 2], np.int32), np.array([0, n], np.int32), ids)
        wrapper.plan(
            *offsets, np.array([33], np.int32), 8, 512, 64, 16, True, many.sm_scale, "float16",
            "float16", fixed_split_size=2,
        )  # fmt: skip
        alone = wrapper.run(query=parts, kv_cache=call.device_cache, return_lse=True)
    for a, b in zip(together, alone, strict=True):
        assert a is not None
        compare.assert_bitwise_equal(a[2:4], np.asarray(b), "alone")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hidden_values_do_not_contaminate(value: float) -> None:
    check_hidden_value(value, is_portable=True)


def check_hidden_value(value: float, **facts: Any) -> None:
    """Causality hides the last keys from all rows but the last, whatever they hold."""
    case = replace(BASE, qo_len=(5,), kv_len=(90,), page_size=64)
    with gpu.plugged_in(**facts) as emulated:
        workspace = emulated.empty((16 << 20,), np.dtype(np.uint8))
        wanted = mla_calls.Call(case, np, workspace)
        out, _ = wanted.run()
        call = mla_calls.Call(case, np, workspace)
        page, slot = call.ids[89 // 64], 89 % 64
        call.owned["cache[0]"].array[page, slot, 7] = value
        spoiled, _ = call.run()
    compare.assert_bitwise_equal(out[:4], spoiled[:4], "rows that do not see the key")
    assert not np.isfinite(spoiled[4].astype(np.float32)).all()
    if np.isinf(value):
        return
    assert np.isnan(spoiled[4].astype(np.float32)).all()


@pytest.mark.parametrize("first", one_of(2, [0, 40]))
@pytest.mark.parametrize("index", range(len(WIDE)))
def test_wide_heads(index: int, first: int) -> None:
    seed = index + first
    run.batch(wide_case(index, seed), seed=seed % 3).check()


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(WIDE)))
def test_many_wide_heads(index: int) -> None:
    for seed in range(100, 120):
        run.batch(wide_case(index, seed), seed=seed % 3, num_sms=8 + seed).check()


def test_hidden_wide_values() -> None:
    """A window hides the first key from all rows, causality the last from all but one."""
    problem = WIDE[0]
    case = replace(test_batch.BASE, problem=problem, num_kv_heads=1, group=2, qo_len=(1, 3))
    case = replace(case, kv_len=(90, 120), window_left=70, sm_scale=0.05)
    spoil = [(1, "v", (119, 0, 300), np.nan), (1, "v", (0, 0), np.inf)]
    run.batch(case, spoil).check()


def test_wide_levels() -> None:
    """States of a cascade, which a launch of its own merges."""
    problem = replace(test_cascade.BASE.problem, dims=(512, 512))
    levels = ((9, 3), (100, 64)), ((1, 3, 5, 3), (20, 7, 5, 40))
    case = replace(test_cascade.BASE, problem=problem, levels=levels, num_kv_heads=1)
    assert test_cascade.run_case(case, is_portable=True) == ["wide_sm80", "merge_levels"] * 2


def test_wide_heads_without_a_plan() -> None:
    problem = replace(test_planless.BASE.problem, dims=(512, 512))
    case = replace(test_planless.BASE, problem=problem, kv_len=(200, 0, 33))
    names = [launch.name for launch in test_planless.run(case, is_portable=True).launches]
    assert names == ["plan_batch", "wide_sm80"] * 2


def test_one_wide_request() -> None:
    dims = {"head_dim_qk": 512, "head_dim_vo": 512, "num_kv_heads": 1, "group": 3}
    for qo_len, causal in ((1, False), (30, True)):
        case = replace(gpu_cases.PLAIN, qo_len=qo_len, kv_len=90, causal=causal, **dims)  # type: ignore[arg-type]
        for is_portable in (True, False):
            answer = run.single(case, is_portable=is_portable)
            answer.check()
            assert answer.launches[0].name == ("wide_sm80" if is_portable else "wide_sm90")


def test_one_wide_request_that_is_rotated() -> None:
    """Its angles are those of the reference; a key of another position would be far off."""
    dims = {"head_dim_qk": 512, "head_dim_vo": 512, "num_kv_heads": 1, "group": 3}
    for qo_len in (1, 30):
        case = replace(gpu_cases.PLAIN, qo_len=qo_len, kv_len=90, causal=True, **dims)  # type: ignore[arg-type]
        answer = run.single(replace(case, pos_encoding_mode="ROPE_LLAMA"))
        answer.check()
        assert answer.launches[0].name == "wide_sm80"


def test_a_wrapper_for_graphs() -> None:
    """Its work list has room for batches that need more: what is spare does nothing."""
    with gpu.plugged_in(num_sms=8, is_portable=True) as emulated:
        workspace = emulated.empty((32 << 20,), np.dtype(np.uint8))
        from cupyattn import mla

        buffers = [np.zeros(n, np.int32) for n in (4, 4, 64, 3)]
        wrapper = mla.BatchMLAPagedAttentionWrapper(workspace, True, *buffers)
        for lengths in ((300, 1, 90), (5, 0, 7)):
            case = replace(BASE, qo_len=(1, 1, 1), kv_len=lengths, is_split=False)
            call = mla_calls.Call(case, np, workspace)
            wrapper.plan(
                call.qo_indptr, call.kv_indptr, call.ids[: call.kv_indptr[-1]],
                np.array(lengths, np.int32), 4, 512, 64, 16, True, case.sm_scale, "float16",
            )  # fmt: skip
            np.testing.assert_array_equal(buffers[3], lengths)
            got = wrapper.run(query=call.device_q, kv_cache=call.device_cache, return_lse=True)
            call.check(*map(np.asarray, got))


def test_rows_with_scales() -> None:
    """FlashMLA's rows of 656 bytes: pages, and lists with keys that are none."""
    from cupyattn import flash_mla

    rng = np.random.default_rng(3)
    cache = pack_rows(rng.standard_normal((6, 16, 1, 576)).astype(np.float32))
    cache[[0, 3]] = 0xFF  # nobody's
    table = np.array([[4, 1, 2], [5, 0, 0]], np.int32)
    lens = np.array([39, 0], np.int32)
    lists = rng.choice(np.r_[16:48, 64:96, -1], (2, 2, 90)).astype(np.int32)
    q = rng.standard_normal((2, 2, 20, 576)).astype(bfloat16.numpy)
    of_lists = {"block_table": None, "cache_seqlens": None, "indices": lists}
    # 40 rows of a request, then 20 and 16 of a token with a list.
    calls: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("wide_sm90", 20, {"block_table": table, "cache_seqlens": lens, "causal": True}),
        ("wide_sm90", 20, of_lists),
        ("wide_decode_sm90", 16, of_lists),
    )
    queries = q
    for kernel, num_heads, call in calls:
        q = queries[:, :, :num_heads]
        arguments = {"head_dim_v": 512, "is_fp8_kvcache": True} | call
        expected = flash_mla.flash_mla_with_kvcache(q, cache, **arguments)
        with gpu.plugged_in(num_sms=3) as emulated:
            got = flash_mla.flash_mla_with_kvcache(q, cache, **arguments)
            assert emulated.has_launched(kernel)
        for one, other in zip(got, expected, strict=True):
            one, other = (np.asarray(x, np.float32) for x in (one, other))
            np.testing.assert_allclose(one, other, atol=0.02, rtol=0.01)


def test_scales_of_tokens() -> None:
    """NaN where nobody owns a token, and a scale of the rope part."""
    from cupyattn import mla

    rng = np.random.default_rng(4)
    cache = rng.standard_normal((5, 8, 576)).astype(float8_e4m3fn.numpy)
    scales = np.exp2(rng.uniform(-5, 1, (5, 8))).astype(np.float32)
    scales[0] = np.nan
    q = rng.standard_normal((3, 9, 576)).astype(np.float16)

    def answer(workspace: Any) -> Any:
        wrapper = mla.BatchMLAPagedAttentionWrapper(workspace)
        table = np.array([3, 1, 4, 2], np.int32)
        lengths = np.array([20, 3], np.int32)
        wrapper.plan(
            np.array([0, 2, 3], np.int32), np.array([0, 3, 4], np.int32), table, lengths,
            9, 512, 64, 8, True, 0.07, "float16", "float8_e4m3fn",
        )  # fmt: skip
        return wrapper.run(
            query=q, kv_cache=cache, ckv_scale_arr=scales, kpe_scale=0.7, return_lse=True
        )

    expected = answer(None)
    with gpu.plugged_in(num_sms=3) as emulated:
        got = answer(emulated.empty((8 << 20,), np.dtype(np.uint8)))
        assert emulated.has_launched("wide_decode_sm90")
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(
            one.astype(np.float32), other.astype(np.float32), atol=0.01, rtol=0.005
        )


@pytest.mark.parametrize("kernel", ["wide_decode_sm90", "wide_sm80"])
def test_few_splits_are_merged_by_blocks_or_all_by_a_launch(kernel: str) -> None:
    """A long request beside short ones has more splits than a block of wide_decode_sm90 merges."""
    many = [kernel, "merge_splits"][: 1 + (kernel == "wide_decode_sm90")]
    for kv_len, names in (((300, 200, 100), [kernel]), ((1900, 100, 70), many)):
        case = replace(BASE, qo_len=(1, 1, 1), kv_len=kv_len, heads=8, page_size=16, is_split=False)
        with gpu.plugged_in(num_sms=40, is_portable=kernel == "wide_sm80") as emulated:
            workspace = emulated.empty((16 << 20,), np.dtype(np.uint8))
            call = mla_calls.Call(case, np, workspace)
            call.check(*call.run())
        assert [launch.name for launch in emulated.launches] == names
