"""Ranges seen in both directions: against a dense mask, on the CPU and on a GPU not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import batches
from helpers.batches import D
from helpers.fake_batch import Device, check
from helpers.fake_gpu import Gpu
from helpers.range_calls import ahead, anywhere, images, masks

import cupyattn
from cupyattn.errors import ArgumentError, PlanError, UnsupportedError

CLASS = cupyattn.BatchPrefillWithCausalBidirectionalRangesWrapper
NO_SPACE = np.zeros(1 << 25, np.uint8)
QO_LEN, KV_LEN = [30, 1, 0, 7, 5], [30, 9, 4, 3, 40]
WINDOWS = [(-1, -1), (0, 3), (4, -1), (12, 3), (1, 6)]


def make(
    seed: int = 0, page_size: int = 4, group: int = 2, qo_len: list[int] = QO_LEN
) -> batches.Batch:
    return batches.make(qo_len, KV_LEN, page_size, seed=seed, heads=(2 * group, 2))


def wrapper(workspace: Any, layout: str = "NHD", **named: Any) -> Any:
    types = {"q_data_type": "float16", "kv_data_type": "float16"}
    return CLASS(workspace, layout, **types, head_dim_qk=D, head_dim_vo=D, **named)


def plan(w: Any, b: batches.Batch, **named: Any) -> None:
    w.plan(b.qo_indptr, *b.table, b.q.shape[1], 2, D, b.page_size, **named)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("make_ranges", [images, anywhere, ahead])
def test_on_the_cpu(make_ranges: Any, layout: str) -> None:
    rng = np.random.default_rng(0)
    w = wrapper(NO_SPACE, layout)
    forms = set()
    for seed in range(8):
        b = make(seed, (1, 4, 16)[seed % 3], (1, 2, 3)[seed % 3])
        cache = b.one_tensor(layout)
        plan(w, b, sm_scale=0.3)
        out = w.run(b.q, cache)
        wanted = b.expected(masks(b, np.full((len(b.q), 2), -1), -1, -1), sm_scale=0.3)
        np.testing.assert_array_equal(out, wanted[0].astype(np.float16))
        for windows in WINDOWS:
            ranges = make_ranges(b, rng)
            out, lse = w.run(b.q, cache, ranges, *windows, return_lse=True)
            wanted = b.expected(masks(b, ranges, *windows), sm_scale=0.3)
            np.testing.assert_array_equal(out, wanted[0].astype(np.float16))
            np.testing.assert_allclose(lse, wanted[1].astype(np.float32), rtol=1e-6)
            forms.add((w._current.mask.form, windows[0] in (-1, 12)))
    # Images that begin within a row's window take no bits.
    assert ("ranges", True) in forms
    assert make_ranges is not images or ("whole", True) not in forms
    assert make_ranges is not anywhere or ("whole", True) in forms


@pytest.mark.parametrize("where", ["host", "device"])
def test_on_the_gpu(device: Device, where: str, only_cached_runs: Any) -> None:
    rng = np.random.default_rng(1)
    put = device.put if where == "device" else np.asarray
    w = wrapper(device.workspace())
    for seed in range(3):
        b = make(seed)
        plan(w, b)
        q, cache = device.put(b.q), device.put(b.one_tensor())
        for make_ranges in (images, anywhere, ahead):
            for windows in WINDOWS[:3]:
                ranges = make_ranges(b, rng)
                for _ in range(2):
                    got = w.run(q, cache, put(ranges), *windows, return_lse=True)
                    check(device, got, b.expected(masks(b, ranges, *windows)))
    only_cached_runs()
    w.run(q, cache, put(ranges), *windows, return_lse=True)
    device.stream.finish()


def test_equal_ranges_are_not_planned_again(device: Device) -> None:
    b, rng = make(), np.random.default_rng(2)
    w = wrapper(device.workspace())
    plan(w, b)
    q, cache = device.put(b.q), device.put(b.one_tensor())
    ranges = images(b, rng)
    w.run(q, cache, ranges)
    before = w._current
    w.run(q, cache, ranges.astype(np.int64).copy(), -1, 0 - 1)
    assert w._current is before
    w.run(q, cache, ranges, 3)
    assert w._current is not before
    ranges[0] = 0, 7  # the caller's own array, which changes in place
    check(device, w.run(q, cache, ranges, 3, return_lse=True), b.expected(masks(b, ranges, 3, -1)))


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_row_ahead_of_all_keys_may_have_a_range(device: Device, last: int) -> None:
    b = batches.make([7], [3], 4)
    ranges = np.full((7, 2), -1, np.int32)
    ranges[0] = 0, last
    w = wrapper(device.workspace())
    plan(w, b)
    got = w.run(device.put(b.q), device.put(b.one_tensor()), ranges, return_lse=True)
    check(device, got, b.expected(masks(b, ranges, -1, -1)))
    assert w._current.mask.form == "ranges"


def test_ranges_of_images_keep_tiles_ahead_hidden() -> None:
    """Plans count the keys ahead of rows that a range may reach, and no others."""
    b = make()
    w = wrapper(NO_SPACE)
    for largest, most in ((2, 0), (4, 2), (9, 8)):
        plan(w, b, bidirectional_ranges=images(b, np.random.default_rng(5), largest))
        assert w._current.geometry.spec.window_right <= most
        assert (w._current.geometry.spec.window_left, w._current.mask.form) == (-1, "ranges")


def test_ranges_given_to_plan_are_not_read_by_runs(device: Device, gpu: Gpu) -> None:
    b, rng = make(), np.random.default_rng(3)
    w = wrapper(device.workspace())
    ranges = images(b, rng)
    named = {"causal_window_left": 6, "range_window_left": 4}
    plan(w, b, bidirectional_ranges=device.put(ranges), **named)
    q, cache = device.put(b.q), device.put(b.one_tensor())
    check(device, w.run(q, cache, return_lse=True), b.expected(masks(b, ranges, 6, 4)))
    gpu.is_capturing = True
    check(device, w.run(q, cache, return_lse=True), b.expected(masks(b, ranges, 6, 4)))
    with pytest.raises(PlanError, match=r"bidirectional_ranges on the GPU .*give the ranges to"):
        w.run(q, cache, device.put(ranges))


def test_graphs(device: Device) -> None:
    b, rng = make(), np.random.default_rng(4)
    buffers = {
        "qo_indptr_buf": device.put(np.zeros(6, np.int32)),
        "paged_kv_indptr_buf": device.put(np.zeros(6, np.int32)),
        "paged_kv_indices_buf": device.put(np.zeros(64, np.int32)),
        "paged_kv_last_page_len_buf": device.put(np.zeros(5, np.int32)),
    }
    w = wrapper(device.workspace(), use_cuda_graph=True, **buffers)
    q, cache = device.put(b.q), device.put(b.one_tensor())
    for _ in range(2):
        ranges = images(b, rng)
        plan(w, b, bidirectional_ranges=ranges)
        check(device, w.run(q, cache, return_lse=True), b.expected(masks(b, ranges, -1, -1)))
    with pytest.raises(PlanError, match="custom_mask: the first plan"):
        plan(w, b, bidirectional_ranges=anywhere(b, rng))
    with pytest.raises(PlanError, match="window_left: the first plan"):
        w.run(q, cache, ranges, 20)


def test_spellings() -> None:
    b = make()
    w = wrapper(NO_SPACE)
    w.begin_forward(b.qo_indptr, *b.table, 4, 2, D, 4, logits_soft_cap=2.0)
    ranges, cache = images(b, np.random.default_rng(6)), b.one_tensor()
    options: dict[str, Any] = {"logits_soft_cap": 2.0, "scale_k": 0.5, "scale_v": 2.0}
    wanted = b.expected(masks(b, ranges, 3, 2), **options)
    given = b.q, cache, ranges, 3, 2, None, 0.5, 2.0
    for run in (w.run_return_lse, w.forward_return_lse):
        out, lse = run(*given)
        np.testing.assert_array_equal(out, wanted[0].astype(np.float16))
        np.testing.assert_allclose(lse, wanted[1].astype(np.float32), rtol=1e-6)
    for run in (w.run, w.forward):
        np.testing.assert_array_equal(run(*given), wanted[0].astype(np.float16))
    out, lse = np.zeros_like(b.q), np.zeros(b.q.shape[:2], np.float32)
    assert w.run(*given, out=out, lse=lse) is out
    np.testing.assert_allclose(lse, wanted[1].astype(np.float32), rtol=1e-6)
    assert isinstance(w, cupyattn.BatchPrefillWithPagedKVCacheWrapper)
    assert len(w.workspace_size(b.qo_indptr, *b.table, 4, 2, D, 4)) == 2


@pytest.mark.parametrize(
    ("named", "match"),
    [
        ({"causal": True}, "causal: given, but the ranges say"),
        ({"custom_mask": np.ones(9, bool)}, "custom_mask: given"),
        ({"window_left": 4}, "window_left: given, .* causal_window_left"),
        ({"token_pos_in_items_len": 2}, "token_pos_in_items_len: given"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode: given"),
        ({"q_data_type": "bfloat16"}, "q_data_type: got 'bfloat16', but the wrapper was made for"),
        ({"head_dim_vo": 32}, "head_dim_vo: got 32, but the wrapper was made for 16"),
        ({"bidirectional_ranges": np.zeros((3, 2), np.int32)}, "bidirectional_ranges: dimension 0"),
        ({"bidirectional_ranges": np.zeros((43, 2), np.int8)}, "bidirectional_ranges: dtype is"),
        ({"causal_window_left": 1.5}, "causal_window_left: got 1.5"),
        ({"range_window_left": True}, "range_window_left: got True"),
    ],
)
def test_bad_plans(named: dict[str, Any], match: str) -> None:
    w, b = wrapper(NO_SPACE), make()
    plan(w, b, q_data_type="float16", head_dim_vo=D)
    before = w._current, w._asked
    with pytest.raises(ArgumentError, match=match):
        plan(w, b, **named)
    assert (w._current, w._asked) == before


def test_other_errors() -> None:
    with pytest.raises(UnsupportedError, match="pos_encoding_mode: got 'ROPE_LLAMA'"):
        wrapper(NO_SPACE, pos_encoding_mode="ROPE_LLAMA")
    w, b = wrapper(NO_SPACE), make()
    with pytest.raises(PlanError, match="plan"):
        w.run(b.q, b.one_tensor())
    plan(w, b)
    with pytest.raises(UnsupportedError, match="kv_cache_sf"):
        w.run(b.q, b.one_tensor(), kv_cache_sf=b.q)
    with pytest.raises(ArgumentError, match="bidirectional_ranges: dimension 1"):
        w.run(b.q, b.one_tensor(), np.zeros((43, 3), np.int32))
