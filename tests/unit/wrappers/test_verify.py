"""Masks over draft tokens and multi-item scoring, to a GPU that is not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import batch_calls, batches, fake_batch, item_cases, verify_cases
from helpers.batches import HKV, HQ, WORKSPACE, D
from helpers.calls import run_and_check
from helpers.fake_batch import Device, check
from helpers.fake_gpu import pointer

import cupyattn
from cupyattn.errors import ArgumentError, PlanError

WORDS = tuple(form for form in verify_cases.FORMS if not form.startswith("bool"))


def test_random_verifications_on_the_cpu() -> None:
    for seed in range(0, verify_cases.NUM_CASES, 3):
        run_and_check(batch_calls.planned(verify_cases.random_case(seed), np, WORKSPACE))


def test_random_items_on_the_cpu() -> None:
    for seed in range(0, item_cases.NUM_CASES, 5):
        run_and_check(batch_calls.planned(item_cases.random_case(seed), np, WORKSPACE))


def test_the_cases_cover_forms_classes_and_options() -> None:
    cases = [verify_cases.random_case(seed) for seed in range(verify_cases.NUM_CASES)]
    assert {case.tree for case in cases} == set(verify_cases.FORMS)
    rows = [case.qo_len[0] * case.group for case in cases]
    assert min(rows) <= 16 and max(rows) > 128 and any(16 < n <= 32 for n in rows)
    assert any(kv_len < case.qo_len[0] for case in cases for kv_len in case.kv_len)
    assert any(case.window_left >= 0 for case in cases) and any(case.split[0] for case in cases)
    assert {case.problem.kv_dtype for case in cases} >= {"bfloat16", "float8_e4m3fn"}
    items = [item_cases.random_case(seed) for seed in range(item_cases.NUM_CASES)]
    assert {case.wrapper for case in items} == {"paged", "ragged"}
    assert verify_cases.NUM_CASES == item_cases.NUM_CASES


@pytest.mark.parametrize("form", verify_cases.FORMS)
def test_masks_of_a_run(device: Device, form: str, only_cached_runs: Any) -> None:
    """Each run has a mask of its own; those in words are cached calls."""
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    rng = np.random.default_rng(3)
    for seed, q_len in enumerate((5, 5, 5) if form in WORDS else (5, 9, 33)):
        b = batches.make([q_len] * 3, [40, 2, 9], 4, seed=seed)
        w.plan(*b.table, HQ, HKV, D, 4, q_len_per_req=q_len)
        q, cache = device.put(b.q), device.put(b.one_tensor())
        for _ in range(2):
            rows = verify_cases.random_tree(rng, 3, q_len)
            mask = device.put(verify_cases.in_form(rows, form, rng))
            got = w.run(q, cache, mask=mask, return_lse=True)
            check(device, got, b.expected(verify_cases.whole_masks(rows, b.kv_len)))
        if form in WORDS and seed == 0:
            only_cached_runs()


def test_runs_with_a_mask_and_without_take_turns(device: Device) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    b = batches.make([3] * 4, [40, 2, 9, 0], 4)
    rows = verify_cases.random_tree(np.random.default_rng(0), 4, 3)
    mask = device.put(verify_cases.in_form(rows, "int32", np.random.default_rng(0)))
    q, cache = device.put(b.q), device.put(b.one_tensor())
    for _ in range(2):
        w.plan(*b.table, HQ, HKV, D, 4, q_len_per_req=3)
        for _ in range(2):
            check(device, w.run(q, cache, return_lse=True), b.expected(causal=True))
            got = w.run(q, cache, mask=mask, return_lse=True)
            check(device, got, b.expected(verify_cases.whole_masks(rows, b.kv_len)))


def test_a_mask_that_has_become_too_small_is_found(device: Device) -> None:
    """The shape of the mask passed once, for fewer rows of q."""
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    mask = device.put(np.full(8, -1, np.int32))
    for count, q_len in ((2, 4), (4, 2)):
        b = batches.make([q_len] * count, [9] * count, 4)
        w.plan(*b.table, HQ, HKV, D, 4, q_len_per_req=q_len)
        q, cache = device.put(b.q), device.put(b.one_tensor())
        masks = [np.ones((q_len, 9), bool)] * count
        for _ in range(2):
            check(device, w.run(q, cache, mask=mask, return_lse=True), b.expected(masks))
    b = batches.make([4] * 4, [9] * 4, 4)
    w.plan(*b.table, HQ, HKV, D, 4, q_len_per_req=4)
    with pytest.raises(ArgumentError, match=r"mask: int32 of shape \[8\]; wanted \[4, 4\]"):
        w.run(device.put(b.q), device.put(b.one_tensor()), mask=mask)


@pytest.mark.parametrize(
    ("dtype", "q_len", "shape"),
    [
        ("uint32", 33, (66,)),
        ("uint32", 33, (2, 33, 1)),
        ("int64", 65, (2, 65)),
        ("uint16", 33, (2, 33, 2)),
        ("uint8", 9, (18, 1)),
        ("bool", 4, (2, 4, 8)),
    ],
)
def test_masks_that_hold_too_few_bits(dtype: str, q_len: int, shape: tuple[int, ...]) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    b = batches.make([q_len] * 2, [70, 80], 4)
    w.plan(*b.table, HQ, HKV, D, 4, q_len_per_req=q_len)
    with pytest.raises(ArgumentError, match=r"mask: .*wanted"):
        w.run(b.q, b.one_tensor(), mask=np.zeros(shape, dtype))


def test_an_answer_may_not_meet_the_mask(device: Device) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    b = batches.make([3] * 2, [9, 9], 4)
    w.plan(*b.table, HQ, HKV, D, 4, q_len_per_req=3)
    q, cache, out = device.put(b.q), device.put(b.one_tensor()), device.put(b.q)
    w.run(q, cache, mask=device.put(np.full(6, -1, np.int32)), out=out)
    part = out.reshape(-1)[:12]
    mask = part.view("int32" if type(out).__module__.startswith("cupy") else torch_int32())
    for _ in range(2):
        with pytest.raises(ArgumentError, match="out: overlaps mask"):
            w.run(q, cache, mask=mask, out=out)


def torch_int32() -> Any:
    return pytest.importorskip("torch").int32


# --- graphs ---


def graph_wrapper(device: Device, num: int, pages: int) -> Any:
    buffers = [device.put(np.zeros(n, np.int32)) for n in (num + 1, pages, num)]
    return cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(device.workspace(), *buffers)


@pytest.mark.parametrize("form", ["bool3", "int32", "uint16"])
def test_a_captured_run_reads_the_mask_of_the_day(device: Device, form: str, gpu: Any) -> None:
    q_len = 5
    w = graph_wrapper(device, 3, 60)
    rng = np.random.default_rng(5)
    many = batches.make([q_len] * 3, [80, 80, 80], 4, spare_pages=0)
    cache, q, out = (device.put(np.zeros_like(x)) for x in (many.one_tensor(), many.q, many.q))
    rows = verify_cases.random_tree(rng, 3, q_len)
    mask = device.put(verify_cases.in_form(rows, form, rng))
    captured: list[Any] = []
    for step, kv_len in enumerate(([30, 9, 20], [0, 3, 1], [80, 5, 4])):
        b = batches.make([q_len] * 3, kv_len, 4, seed=step, spare_pages=0)
        w.plan(*b.table, HQ, HKV, D, 4, q_len_per_req=q_len)
        if not captured:
            w.run(q, cache, mask=mask, out=out)  # the first one schedules anew
            device.stream.finish()
            gpu.is_capturing = True
            w.run(q, cache, mask=mask, out=out)
            gpu.is_capturing = False
            captured = [job for _, job in device.stream.jobs]
            device.stream.jobs.clear()
        rows = verify_cases.random_tree(rng, 3, q_len)
        for x, values in (
            (cache, b.one_tensor()),
            (q, b.q),
            (mask, verify_cases.in_form(rows, form, rng)),
        ):
            fake_batch.memory(pointer(x), values.dtype, *values.shape)[...] = values
        device.stream.finish()
        for job in captured:
            job()
        wanted = b.expected(verify_cases.whole_masks(rows, b.kv_len))[0].astype(np.float16)
        np.testing.assert_array_equal(device.get(out), wanted)


def test_first_masks_are_refused_inside_a_capture(device: Device, gpu: Any) -> None:
    w = graph_wrapper(device, 2, 20)
    b = batches.make([3] * 2, [9, 8], 4)
    w.plan(*b.table, HQ, HKV, D, 4, q_len_per_req=3)
    q, cache = device.put(b.q), device.put(b.one_tensor())
    bits, bools = device.put(np.full(6, -1, np.int32)), device.put(np.ones((6, 3), bool))
    w.run(q, cache)
    gpu.is_capturing = True
    with pytest.raises(PlanError, match="the first run with a mask"):
        w.run(q, cache, mask=bits)
    gpu.is_capturing = False
    w.run(q, cache, mask=bits)
    gpu.is_capturing = True
    w.run(q, cache, mask=bits)
    with pytest.raises(PlanError, match="the first run with a mask of bools"):
        w.run(q, cache, mask=bools)
    gpu.is_capturing = False
    w.run(q, cache, mask=bools)
    gpu.is_capturing = True
    w.run(q, cache, mask=bools)


# --- multi-item scoring ---


def items_of(b: batches.Batch, seed: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    case = item_cases.random_case(0)
    given, masks = item_cases.random_items(
        item_cases.with_lengths(case, seed, tuple(b.qo_len), tuple(b.kv_len))
    )
    return dict(given), masks


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_items(device: Device, kind: str, where: str, only_cached_runs: Any) -> None:
    cls = cupyattn.BatchPrefillWithPagedKVCacheWrapper
    if kind == "ragged":
        cls = cupyattn.BatchPrefillWithRaggedKVCacheWrapper
    w = cls(device.workspace())
    for seed in range(3):
        b = batches.make([3, 0, 5, 9], [17, 4, 11, 30], 4, seed=seed)
        named, masks = items_of(b, seed)
        if where == "device":
            named = {n: device.put(x) if isinstance(x, np.ndarray) else x for n, x in named.items()}
        q, cache = device.put(b.q), (device.put(b.one_tensor()),)
        if kind == "paged":
            w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4, **named)
        else:
            w.plan(b.qo_indptr, b.kv_indptr, HQ, HKV, D, **named)
            cache = tuple(map(device.put, b.ragged()))
        for _ in range(2):
            check(device, w.run(q, *cache, return_lse=True), b.expected(masks))
        if not seed:
            only_cached_runs()


def test_items_of_a_captured_run_follow_the_plans(device: Device) -> None:
    buffers = {
        name: device.put(np.zeros(n, np.int32))
        for name, n in (
            ("qo_indptr_buf", 3),
            ("paged_kv_indptr_buf", 3),
            ("paged_kv_indices_buf", 30),
            ("paged_kv_last_page_len_buf", 2),
        )
    }
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(
        device.workspace(), use_cuda_graph=True, **buffers
    )
    many = batches.make([9, 9], [60, 60], 4, spare_pages=0)
    cache, q, out = (device.put(np.zeros_like(x)) for x in (many.one_tensor(), many.q, many.q))
    captured: list[Any] = []
    for step, (qo_len, kv_len) in enumerate((([9, 9], [40, 30]), ([3, 9], [3, 60]))):
        b = batches.make(qo_len, kv_len, 4, seed=step, spare_pages=0)
        named, masks = items_of(b, step)
        w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4, **named)
        if not captured:
            device.stream.finish()
            w.run(q, cache, out=out)
            captured = [job for _, job in device.stream.jobs]
            device.stream.jobs.clear()
        for x, values in ((cache, b.one_tensor()), (q, b.q)):
            fake_batch.memory(pointer(x), values.dtype, *values.shape)[...] = values
        device.stream.finish()
        for job in captured:
            job()
        wanted = b.expected(masks)[0].astype(np.float16)
        np.testing.assert_array_equal(device.get(out)[: len(b.q)], wanted)
    with pytest.raises(PlanError, match="custom_mask"):
        w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4)


@pytest.mark.parametrize(
    "given",
    [
        {"prefix_len_ptr": np.array([17], np.uint32)},
        # As its test says it: no axis of requests, and fewer places than their number says.
        {
            "prefix_len_ptr": np.array(17, np.uint32),
            "token_pos_in_items_len": np.array(100, np.uint32),
            "max_item_len_ptr": np.array(18, np.uint16),
        },
    ],
)
def test_flashinfers_example(given: dict[str, Any]) -> None:
    """Items of 16 and 18 tokens behind a prefix of 17: what its own test scores."""
    places = np.array([*range(17), *range(19), 0], np.uint16)
    b = batches.make([37], [54], 5)
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 5, token_pos_in_items_ptr=places, **given)
    mask = np.zeros((37, 54), bool)
    mask[:, :17] = True
    mask[:17, 17:34] = np.tri(17)
    mask[17:36, 34:53] = np.tri(19)
    mask[:, [17, 34, 53]] = False
    got = w.run(b.q, b.one_tensor(), return_lse=True)
    for x, wanted in zip(got, b.expected([mask]), strict=True):
        np.testing.assert_array_equal(x, wanted.astype(x.dtype))
