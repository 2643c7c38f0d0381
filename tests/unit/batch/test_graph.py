"""Batch wrappers in graph mode: what a captured run reads, and what it keeps for good."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import batches, fake_batch
from helpers.batches import HKV, HQ, D
from helpers.fake_batch import Device
from helpers.fake_gpu import pointer

import cupyattn
from cupyattn.errors import ArgumentError, PlanError
from cupyattn.launch.attention import batch


def graph_wrapper(device: Device, num: int, pages: int, kind: str, **more: Any) -> Any:
    def ints(n: int) -> Any:
        return device.put(np.full(n, -7, np.int32))

    if kind == "decode":
        return cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            device.workspace(), ints(num + 1), ints(pages), ints(num)
        )
    return cupyattn.BatchPrefillWithPagedKVCacheWrapper(
        device.workspace(),
        use_cuda_graph=True,
        qo_indptr_buf=ints(num + 1),
        paged_kv_indptr_buf=ints(num + 1),
        paged_kv_indices_buf=ints(pages),
        paged_kv_last_page_len_buf=ints(num),
        **more,
    )


@pytest.mark.parametrize("ids", ["host", "device"])
@pytest.mark.parametrize("kind", ["decode", "prefill", "masked"])
def test_a_captured_run_follows_the_plans(device: Device, ids: str, kind: str) -> None:
    more = {}
    if kind == "masked":
        more["custom_mask_buf"] = device.put(np.zeros(1000, np.uint8))
        more["mask_indptr_buf"] = device.put(np.zeros(4, np.int32))
    w = graph_wrapper(device, 3, 60, kind, **more)
    sizes = [[4, 3, 5], [1, 2, 5], [0, 0, 0], [4, 4, 4]]
    if kind == "decode":
        sizes = [[1, 1, 1]] * 4
    lengths = [[30, 9, 20], [0, 0, 1], [200, 3, 4], [11, 12, 13]]
    pool = batches.make([1] * 3, [80, 80, 80], 4, spare_pages=0)
    cache = device.put(np.zeros_like(pool.one_tensor()))
    rows = max(map(sum, sizes))
    q, out = device.put(np.zeros((rows, HQ, D), np.float16)), None
    out = device.put(np.zeros((rows, HQ, D), np.float16))
    captured: list[Any] = []
    for step, (qo_len, kv_len) in enumerate(zip(sizes, lengths, strict=True)):
        b = batches.make(qo_len, kv_len, 4, seed=step, spare_pages=0)
        table = list(b.table)
        if ids == "device":
            table[1] = device.put(table[1])
        options: dict[str, Any] = {}
        wanted: dict[str, Any] = {"causal": True}
        if kind == "masked":
            masks = b.masks(step)
            wanted = {"masks": masks}
            flat = np.concatenate([m.ravel() for m in masks])
            options["custom_mask"] = device.put(flat)
        elif kind == "prefill":
            options["causal"] = True
        first = [] if kind == "decode" else [b.qo_indptr]
        w.plan(*first, *table, HQ, HKV, D, 4, **options)
        if not captured:
            before, device.stream.jobs = device.stream.jobs, type(device.stream.jobs)()
            w.run(q, cache, out=out)
            captured = [job for _, job in device.stream.jobs]
            device.stream.jobs = before
        whole = b.one_tensor()
        fake_batch.memory(pointer(cache), whole.dtype, *whole.shape)[...] = whole
        fake_batch.memory(pointer(q), b.q.dtype, *b.q.shape)[...] = b.q
        device.stream.finish()
        for job in captured:
            job()
        got = device.get(out)[: len(b.q)]
        np.testing.assert_array_equal(got, b.expected(**wanted)[0].astype(np.float16))
        views = w._buffers._views
        read = {n: fake_batch.memory(v.ptr, v.dtype.numpy, v.shape[0]) for n, v in views.items()}
        np.testing.assert_array_equal(read["kv_indptr"], b.indptr)
        np.testing.assert_array_equal(read["kv_last_page_len"], b.last_page_len)
        used = b.indptr[-1]
        np.testing.assert_array_equal(read["kv_indices"][:used], b.indices[:used])


def test_launches_know_the_rows_of_q_if_no_replay_has_more(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxes of Q end with the array that a captured run was given."""
    w, told = graph_wrapper(device, 2, 60, "prefill"), []
    bind = batch.BatchLauncher.bind

    def bound(*args: Any, num_rows: int) -> Any:
        told.append(num_rows)
        return bind(*args)

    monkeypatch.setattr(batch.BatchLauncher, "bind", bound)
    for qo_len in ([4, 5], [1, 3], [5, 4]):
        b = batches.make(qo_len, [20, 30], 4)
        w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4)
        w.run(device.put(b.q), device.put(b.one_tensor()))
    assert told == [9, 0, 9]


FROZEN: dict[str, dict[str, Any]] = {
    "num_qo_heads": {"num_qo_heads": 8},
    "num_kv_heads": {"num_kv_heads": 4},
    "head_dim_qk": {"head_dim": 32},
    "page_size": {"page_size": 8},
    "q_data_type": {"q_data_type": "bfloat16"},
    "kv_data_type": {"kv_data_type": "float8_e5m2"},
    "window_left": {"window_left": 5},
    "pos_encoding_mode": {"pos_encoding_mode": "ALIBI"},
    "fixed_split_size": {"fixed_split_size": 2},
    "disable_split_kv": {"disable_split_kv": True},
    "q_len_per_req": {"q_len_per_req": 2},
    "indptr: 2 requests": {"indptr": [0, 1, 2], "last_page_len": [1, 1]},
    "indices_buffer: holds 20": {"indptr": [0, 1, 2, 21]},
}


def test_masks_may_come_packed_first_and_as_bools_later(device: Device) -> None:
    b = batches.make([3, 2], [9, 8], 4)
    buffers = {
        "custom_mask_buf": device.put(np.zeros(40, np.uint8)),
        "mask_indptr_buf": device.put(np.zeros(3, np.int32)),
    }
    w = graph_wrapper(device, 2, 20, "prefill", **buffers)
    masks = b.masks()
    flat = np.concatenate([m.ravel() for m in masks])
    bits = batches.offsets([m.size for m in masks])
    packed, _ = cupyattn.reference.segment_packbits(flat, bits, "little")
    q, cache = device.put(b.q), device.put(b.one_tensor())
    addresses = set()
    for given in ({"packed_custom_mask": packed}, {"custom_mask": flat}):
        mask = {n: device.put(x) for n, x in given.items()}
        w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4, **mask)
        got = device.get(w.run(q, cache))
        np.testing.assert_array_equal(got, b.expected(masks)[0].astype(np.float16))
        addresses.add(w._words.address)
    assert len(addresses) == 1


@pytest.mark.parametrize("words", FROZEN)
def test_what_a_graph_keeps_is_named(device: Device, words: str) -> None:
    w = graph_wrapper(device, 3, 20, "decode")
    b = batches.make([1] * 3, [9, 8, 7], 4)
    names = ("indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim")
    good = dict(zip((*names, "page_size"), (*b.table, HQ, HKV, D, 4), strict=True))
    good["indices"] = np.zeros(30, np.int32)
    w.plan(**good)
    device.stream.copies.clear()
    changes = {
        name: np.array(x, np.int32) if isinstance(x, list) else x
        for name, x in FROZEN[words].items()
    }
    with pytest.raises((PlanError, ArgumentError), match=words):
        w.plan(**good | changes)
    assert not device.stream.copies
    w.plan(**good)


def test_rows_and_masks_are_frozen_too(device: Device) -> None:
    w = graph_wrapper(device, 2, 20, "prefill")
    b = batches.make([3, 2], [9, 8], 4)
    w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4)
    with pytest.raises(PlanError, match="6 query rows, but the first plan of this wrapper had 5"):
        w.plan(b.qo_indptr + np.array([0, 1, 1]), *b.table, HQ, HKV, D, 4)
    masks = np.ones(3 * 9 + 2 * 8, bool)
    with pytest.raises(PlanError, match="custom_mask: given"):
        w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4, custom_mask=device.put(masks))
    with pytest.raises(PlanError, match="causal"):
        w.forward(device.put(b.q), device.put(b.one_tensor()), causal=True)
    buffers = {
        "custom_mask_buf": device.put(np.zeros(4, np.uint8)),
        "mask_indptr_buf": device.put(np.zeros(3, np.int32)),
    }
    w = graph_wrapper(device, 2, 20, "prefill", **buffers)
    with pytest.raises(PlanError, match="custom_mask: none was given"):
        w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4)
    with pytest.raises(ArgumentError, match="custom_mask_buf: holds 4 bytes"):
        w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4, custom_mask=device.put(masks))


def test_plans_are_refused_inside_a_capture(device: Device, gpu: Any) -> None:
    w = graph_wrapper(device, 3, 20, "decode")
    b = batches.make([1] * 3, [9, 8, 7], 4)
    w.plan(*b.table, HQ, HKV, D, 4)
    gpu.is_capturing = True
    with pytest.raises(PlanError, match="CUDA graph"):
        w.plan(*b.table, HQ, HKV, D, 4)
    q, cache = device.put(b.q), device.put(b.one_tensor())
    w.run(q, cache)
    with pytest.raises(PlanError, match="before the capture"):
        w.run(q, cache, k_scale=device.put(np.ones(HKV, np.float32)))
