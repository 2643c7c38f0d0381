"""The batch wrappers on a GPU that is not there: plans reach it, checked and cached runs answer."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import batches, fake_batch
from helpers.batches import HKV, HQ, D
from helpers.fake_batch import Device, check
from helpers.fake_gpu import pointer
from helpers.patching import replace as replace_everywhere

import cupyattn
from cupyattn import array
from cupyattn.errors import ArgumentError, PlanError, WorkspaceError
from cupyattn.launch.attention import batch as launch_batch

LENGTHS = ([3, 0, 5, 1], [17, 4, 11, 0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["one", "pair"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_paged(
    device: Device, layout: str, form: str, page_size: int, only_cached_runs: Any
) -> None:
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(device.workspace(), layout)
    for seed in range(3):
        b = batches.make(*LENGTHS, page_size, seed=seed)
        w.plan(b.qo_indptr, *b.table, HQ, HKV, D, page_size, causal=True)
        q, cache = device.put(b.q), device.put(b.one_tensor(layout))
        if form == "pair":
            cache = tuple(device.put(batches.as_layout(x, layout)) for x in b.cache)
        for _ in range(2):
            check(device, w.run(q, cache, return_lse=True), b.expected(causal=True))
            out = device.put(np.zeros_like(b.q))
            assert w.run(q, cache, out=out) is out
            np.testing.assert_array_equal(
                device.get(out), b.expected(causal=True)[0].astype(np.float16)
            )
            if not seed:
                continue
            only_cached_runs()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged(device: Device, layout: str) -> None:
    w = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(device.workspace(), layout)
    for seed in range(2):
        b = batches.make(*LENGTHS, seed=seed)
        w.plan(b.qo_indptr, b.kv_indptr, HQ, HKV, D, causal=True)
        k, v = b.ragged()
        if layout == "HND":
            k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (k, v))
        for _ in range(2):
            got = w.run(device.put(b.q), device.put(k), device.put(v), return_lse=True)
            check(device, got, b.expected(causal=True))


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("where", ["host", "device", "ids on the device", "strided ids"])
def test_decode(device: Device, q_len: int, where: str) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    for seed, page_size in ((0, 4), (1, 4), (2, 1)):
        b = batches.make([q_len] * 3, [9, 0, 30], page_size, seed=seed)
        table = list(b.table)
        if where == "device":
            table = [device.put(x) for x in table]
        elif where == "ids on the device":
            table[1] = device.put(table[1])
        elif where == "strided ids":
            table[1] = device.put(np.repeat(table[1], 2))[::2]
        w.plan(*table, HQ, HKV, D, page_size, q_len_per_req=q_len)
        for _ in range(2):
            got = w.run(device.put(b.q), device.put(b.one_tensor()), return_lse=True)
            check(device, got, b.expected(causal=True))


def test_runs_of_other_rows_than_planned(device: Device) -> None:
    """Each number of rows is scheduled once for a plan, and leaves the plan as it is."""
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    for seed in range(2):
        one = batches.make([1] * 3, [9, 4, 30], 4, seed=seed)
        rows = {n: np.random.default_rng(n).standard_normal((3 * n, HQ, D)) for n in (1, 3, 2)}
        cache = device.put(one.one_tensor())
        w.plan(*one.table, HQ, HKV, D, 4)
        for _ in range(2):
            device.stream.copies.clear()
            for n, q in rows.items():
                indptr = batches.offsets([n] * 3)
                b = replace(one, q=q.astype(np.float16), qo_indptr=indptr)
                got = w.run(device.put(b.q), cache, q_len_per_req=n, return_lse=True)
                check(device, got, b.expected(causal=True))
            check(device, w.run(device.put(one.q), cache, return_lse=True), one.expected())
        assert not device.stream.copies
        # What was scheduled for the old workspace may need more than the new one has.
        w.reset_workspace_buffer(device.workspace())
        assert not w._current.by_q_len


@pytest.mark.parametrize("form", ["bool", "packed"])
def test_masks(device: Device, form: str) -> None:
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(device.workspace())
    b = batches.make(*LENGTHS, 4)
    q, cache = device.put(b.q), device.put(b.one_tensor())
    for seed in range(2):
        masks = b.masks(seed)
        flat = np.concatenate([m.ravel() for m in masks])
        given = {"custom_mask": device.put(flat)}
        if form == "packed":
            bits = batches.offsets([m.size for m in masks])
            packed, _ = cupyattn.reference.segment_packbits(flat, bits, "little")
            given = {"packed_custom_mask": device.put(packed)}
        w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4, **given)
        for _ in range(2):
            check(device, w.run(q, cache, return_lse=True), b.expected(masks))
    w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4)
    check(device, w.run(q, cache, return_lse=True), b.expected())


def test_scales_sinks_and_a_second_variant(device: Device) -> None:
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(device.workspace())
    b = batches.make(*LENGTHS, 4)
    sinks = np.array([1, -1, 0, 2], np.float32)
    by_head = {"k_scale": np.array([0.5, 2], np.float32), "v_scale": np.array([3, -1], np.float32)}
    q, cache = device.put(b.q), device.put(b.one_tensor())
    for _ in range(2):
        w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4)
        for _ in range(2):
            got = w.run(q, cache, sinks=device.put(sinks), k_scale=0.5, return_lse=True)
            check(device, got, b.expected(sinks=sinks, scale_k=0.5))
            arrays = {n: device.put(x) for n, x in by_head.items()}
            got = w.run(q, cache, return_lse=True, **arrays)
            wanted = b.expected(scale_k=by_head["k_scale"], scale_v=by_head["v_scale"])
            check(device, got, wanted)
            got = w.run(q, cache, return_lse=True, q_scale=-1.0)
            check(device, got, b.expected(scale_q=-1.0))


def test_rows_off_16_byte_boundaries(device: Device) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    b = batches.make([1, 1], [9, 30], 4)
    flat = device.put(np.zeros(b.q.size + 1, np.float16))
    shifted = flat[1:].reshape(b.q.shape)
    fake_batch.memory(pointer(shifted), np.dtype(np.float16), *b.q.shape)[...] = b.q
    cache = device.put(b.one_tensor())
    for _ in range(2):
        w.plan(*b.table, HQ, HKV, D, 4)
        for q in (shifted, device.put(b.q), shifted):
            check(device, w.run(q, cache, return_lse=True), b.expected())
    variants = {v.aligned for v in w._current.prepared}
    assert variants == {True, False}


def test_forward_changes_the_plan(device: Device) -> None:
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(device.workspace())
    b = batches.make(*LENGTHS, 4)
    q, cache = device.put(b.q), device.put(b.one_tensor())
    w.begin_forward(b.qo_indptr, *b.table, HQ, HKV, D, 4)
    check(device, w.forward_return_lse(q, cache), b.expected())
    for _ in range(2):
        got = w.forward_return_lse(q, cache, causal=True, logits_soft_cap=3.0)
        check(device, got, b.expected(causal=True, logits_soft_cap=3.0))
    w.end_forward()


def test_nothing_to_do(device: Device) -> None:
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(device.workspace(16))
    for lengths in (([], []), ([0, 0], [3, 0])):
        b = batches.make(*lengths, 4)
        w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4)
        out, lse = w.run(device.put(b.q), device.put(b.one_tensor()), return_lse=True)
        assert tuple(out.shape) == (0, HQ, D) and tuple(lse.shape) == (0, HQ)
    assert device.stream.launches == 0
    b = batches.make([2, 1], [0, 0], 4)
    w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4)
    got = w.run(device.put(b.q), device.put(b.one_tensor()), return_lse=True)
    check(device, got, b.expected())


# --- what a plan costs the device, and what it may not touch ---


def test_a_plan_is_one_copy(device: Device) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    b = batches.make([1] * 5, [40, 3, 0, 7, 200], 4)
    for _ in range(3):
        device.stream.copies.clear()
        w.plan(*b.table, HQ, HKV, D, 4)
        ((target, size, kind),) = device.stream.copies
        assert kind == 1 and target == w._words.address and size <= 4 * w._words.size
    before = w._words.address
    long = batches.make([1] * 400, [9] * 400, 4)
    w.plan(*long.table, HQ, HKV, D, 4)
    got = w.run(device.put(long.q), device.put(long.one_tensor()), return_lse=True)
    check(device, got, long.expected())
    assert w._words.address != before


def test_replanning_overwrites_no_copy_in_flight(device: Device) -> None:
    """Many plans and runs before the device does anything; each run answers for its own plan."""
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    rng = np.random.default_rng(0)
    waiting = []
    for step in range(60):
        kv_len = [int(n) for n in rng.integers(0, 40, 4)]
        b = batches.make([1] * 4, kv_len, 4, seed=step)
        w.plan(*b.table, HQ, HKV, D, 4)
        got = w.run(device.put(b.q), device.put(b.one_tensor()), return_lse=True)
        waiting.append((got, b))
    assert device.stream.waits >= 50  # the third plan waits for the first
    for got, b in waiting:
        check(device, got, b.expected())


def test_two_plans_may_be_in_flight(device: Device) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    b = batches.make([1] * 4, [9, 8, 7, 6], 4)
    for _ in range(2):
        w.plan(*b.table, HQ, HKV, D, 4)
    assert device.stream.waits == 0
    w.plan(*b.table, HQ, HKV, D, 4)
    assert device.stream.waits == 1


def test_a_bad_plan_leaves_the_last_one(device: Device) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    b = batches.make([1] * 4, [9, 8, 7, 6], 4)
    w.plan(*b.table, HQ, HKV, D, 4)
    device.stream.copies.clear()
    bad = b.indices.copy()
    bad[2] = -1
    with pytest.raises(ArgumentError, match="indices: entry 2 is page -1"):
        w.plan(b.indptr, bad, b.last_page_len, HQ, HKV, D, 4)
    with pytest.raises(ArgumentError, match="num_kv_heads"):
        w.plan(*b.table, HQ, 3, D, 4)
    assert not device.stream.copies
    got = w.run(device.put(b.q), device.put(b.one_tensor()), return_lse=True)
    check(device, got, b.expected())


# --- workspaces ---


def test_the_workspace_must_do(device: Device) -> None:
    b = batches.make([1], [100_000], 16, spare_pages=0)
    wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper
    w = wrapper(device.workspace(1600))
    float_bytes, int_bytes = w.workspace_size(*b.table, HQ, HKV, D, 16)
    assert float_bytes > 1600 and int_bytes > 4 * b.indptr[-1]
    with pytest.raises(WorkspaceError, match=rf"needs {float_bytes} bytes and it has 1600"):
        w.plan(*b.table, HQ, HKV, D, 16)
    with pytest.raises(PlanError, match=r"before plan\(\)"):
        w.run(device.put(b.q), device.put(b.one_tensor()))
    w.plan(*b.table, HQ, HKV, D, 16, disable_split_kv=True)
    w.reset_workspace_buffer(device.workspace(float_bytes), device.workspace(8))
    w.plan(*b.table, HQ, HKV, D, 16)
    with pytest.raises(WorkspaceError, match=f"needs {float_bytes} bytes"):
        w.reset_workspace_buffer(device.workspace(1600))
    with pytest.raises(WorkspaceError, match="16-byte boundary"):
        wrapper(device.workspace(1600)[8:])
    with pytest.raises(ArgumentError, match="float_workspace_buffer: is numpy's on cpu"):
        w.reset_workspace_buffer(np.zeros(64, np.uint8))


def test_workspace_sizes_of_the_cpu_are_those_of_the_gpu(device: Device) -> None:
    """Kernels of the fake GPU run as many blocks at a time as those of no GPU."""
    b = batches.make([1, 5, 40], [3000, 0, 900], 16)
    mask = np.ones(40 * 900 + 3000, bool)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (cupyattn.BatchPrefillWithPagedKVCacheWrapper, (b.qo_indptr, *b.table), {"causal": True}),
        (cupyattn.BatchDecodeWithPagedKVCacheWrapper, b.table, {"pos_encoding_mode": "ALIBI"}),
        (cupyattn.BatchDecodeWithPagedKVCacheWrapper, b.table, {"fixed_split_size": 3}),
        (cupyattn.BatchPrefillWithPagedKVCacheWrapper, (b.qo_indptr, *b.table), {"mask": mask}),
        (
            functools.partial(cupyattn.MultiLevelCascadeAttentionWrapper, 2),
            tuple([x, x] for x in (b.qo_indptr, *b.table)),
            {"logits_soft_cap": 3.0},
        ),
    ]
    for make, tables, given in calls:
        sizes = []
        for space, put in ((device.workspace(), device.put), (np.zeros(16, np.uint8), np.asarray)):
            options = {k: v for k, v in given.items() if k != "mask"}
            if "mask" in given:
                options["custom_mask"] = put(given["mask"])
            sizes.append(make(space).workspace_size(*tables, HQ, HKV, D, 16, **options))
        assert sizes[0] == sizes[1] and sizes[0][0] > 0


def test_debugging_reads_page_ids_on_the_device(device: Device, gpu: Any) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    b = batches.make([1] * 3, [9, 8, 7], 4)
    ids = b.indices.copy()
    ids[1] = -3
    w.plan(b.indptr, device.put(ids), b.last_page_len, HQ, HKV, D, 4)
    gpu.api.is_debugging = True
    with pytest.raises(ArgumentError, match="indices: entry 1 is page -3"):
        w.plan(b.indptr, device.put(ids), b.last_page_len, HQ, HKV, D, 4)


def test_fast_decode_plan_reads_nothing_from_the_device(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    b = batches.make([1] * 3, [9, 8, 7], 1)
    table = [device.put(x) for x in b.table]
    with monkeypatch.context() as patch:
        patch.setattr(array, "to_host", None)
        cupyattn.fast_decode_plan(
            w, *table, HQ, HKV, D, 1, "NONE", global_override_indptr_cpu=b.indptr
        )
    got = w.run(device.put(b.q), device.put(b.one_tensor()), return_lse=True)
    check(device, got, b.expected())


@pytest.mark.parametrize("kind", ["decode", "paged", "ragged"])
def test_tables_on_the_device_are_waited_for_once(
    device: Device, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = batches.make([2, 1], [17, 40], 4)
    fetched: list[int] = []
    real = array.to_host_together

    def together(views: Any) -> Any:
        fetched.append(len(views))
        return real(views)

    replace_everywhere(monkeypatch, real, together)
    replace_everywhere(monkeypatch, array.to_host, None)
    put = device.put
    if kind == "decode":
        w: Any = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
        w.plan(*map(put, b.table), HQ, HKV, D, 4)
    elif kind == "paged":
        w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(device.workspace())
        w.plan(put(b.qo_indptr), *map(put, b.table), HQ, HKV, D, 4, causal=True)
    else:
        w = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(device.workspace())
        w.plan(put(b.qo_indptr), put(b.kv_indptr), HQ, HKV, D, causal=True)
    assert fetched == [3 if kind == "paged" else 2]


@pytest.mark.parametrize("keys", [40, 41, 3000])
def test_equal_requests_are_planned_once(
    device: Device, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    real = launch_batch.plan_tiles

    def plan_tiles(*given: Any) -> Any:
        planned.append(keys)
        return real(*given)

    monkeypatch.setattr(launch_batch, "plan_tiles", plan_tiles)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    for seed, length in enumerate((keys, keys + 1, keys, keys + 2)):
        b = batches.make([1] * 3, [length] * 3, 4, seed=seed)
        w.plan(*b.table, HQ, HKV, D, 4)
        got = w.run(device.put(b.q), device.put(b.one_tensor()), return_lse=True)
        check(device, got, b.expected())
    assert len(planned) == 1 + (-(-keys // 16) != -(-(keys + 2) // 16))
    b = batches.make([1] * 3, [keys, keys, keys + 64], 4)
    w.plan(*b.table, HQ, HKV, D, 4)
    check(
        device,
        w.run(device.put(b.q), device.put(b.one_tensor()), return_lse=True),
        b.expected(),
    )
