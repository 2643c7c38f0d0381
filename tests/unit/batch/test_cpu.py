"""The batch wrappers on CPU arrays: every wrapper, layout and option against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import batches
from helpers.batches import HKV, HQ, WORKSPACE, D, as_layout

import cupyattn
from cupyattn import array
from cupyattn.array import as_numpy, view
from cupyattn.errors import PlanError, WorkspaceError

LENGTHS = {
    "mixed": ([3, 1, 5], [7, 4, 11]),
    "an empty request": ([2, 3, 1], [9, 0, 4]),
    "no rows in one": ([2, 0, 1], [9, 3, 4]),
    "all empty": ([2, 1], [0, 0]),
    "no requests": ([], []),
    "fewer keys than rows": ([5, 2], [2, 1]),
}


def make(framework: str, a: np.ndarray) -> Any:
    if framework == "torch":
        torch = pytest.importorskip("torch")
        return array.from_numpy(a.copy(), view(torch.zeros(1), "like"))
    if framework == "jax":
        return pytest.importorskip("jax").numpy.asarray(a)
    return a.copy()


def values(x: Any) -> np.ndarray:
    return as_numpy(view(x, "x")).astype(np.float64)


def decode_wrapper(**options: Any) -> cupyattn.BatchDecodeWithPagedKVCacheWrapper:
    return cupyattn.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, **options)


def paged_wrapper(**options: Any) -> cupyattn.BatchPrefillWithPagedKVCacheWrapper:
    return cupyattn.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, **options)


def ragged_wrapper(**options: Any) -> cupyattn.BatchPrefillWithRaggedKVCacheWrapper:
    return cupyattn.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, **options)


def check(got: Any, wanted: tuple[np.ndarray, np.ndarray]) -> None:
    o, lse = got
    np.testing.assert_array_equal(values(o), wanted[0].astype(np.float16).astype(np.float64))
    np.testing.assert_allclose(values(lse), wanted[1].astype(np.float32), rtol=1e-6)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["one", "pair"])
def test_paged_prefill(lengths: Any, page_size: int, layout: str, form: str) -> None:
    b = batches.make(*lengths, page_size)
    w = paged_wrapper(kv_layout=layout)
    w.plan(b.qo_indptr, *b.table, HQ, HKV, D, page_size, causal=True)
    cache = b.one_tensor(layout) if form == "one" else tuple(as_layout(x, layout) for x in b.cache)
    check(w.run(b.q, cache, return_lse=True), b.expected(causal=True))
    check(w.run_return_lse(b.q, cache), b.expected(causal=True))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged_prefill(lengths: Any, layout: str) -> None:
    b = batches.make(*lengths)
    w = ragged_wrapper(kv_layout=layout)
    w.plan(b.qo_indptr, b.kv_indptr, HQ, HKV, D, causal=True)
    k, v = b.ragged()
    k, v = k.reshape(-1, HKV, D), v.reshape(-1, HKV, D)
    if layout == "HND":
        k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (k, v))
    check(w.run(b.q, k, v, return_lse=True), b.expected(causal=True))


@pytest.mark.parametrize("kv_len", [[7, 4, 11], [5, 0, 1], [0, 0], []], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_decode(kv_len: list[int], page_size: int, layout: str, q_len: int) -> None:
    b = batches.make([q_len] * len(kv_len), kv_len, page_size)
    w = decode_wrapper(kv_layout=layout)
    w.plan(*b.table, HQ, HKV, D, page_size, q_len_per_req=q_len)
    pair = [as_layout(x, layout) for x in b.cache]
    check(w.run(b.q, b.one_tensor(layout), return_lse=True), b.expected(causal=True))
    check(w.run(b.q, tuple(pair), return_lse=True), b.expected(causal=True))
    check(w.run(b.q, pair, return_lse=True, q_len_per_req=q_len), b.expected(causal=True))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_one_token_need_no_axis(layout: str) -> None:
    b = batches.make([1, 1], [5, 9], 1)
    w = decode_wrapper(kv_layout=layout)
    w.plan(*b.table, HQ, HKV, D, 1)
    pair = tuple(x[:, 0] for x in b.cache)
    check(w.run(b.q, pair, return_lse=True), b.expected())
    check(w.run(b.q, np.stack(pair, axis=1), return_lse=True), b.expected())


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": True}, {}),
    "window": ({"causal": True, "window_left": 2}, {}),
    "soft cap": ({"logits_soft_cap": 1.5}, {}),
    "sm_scale": ({"sm_scale": 0.7}, {}),
    "rope": ({"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 5e5}, {}),
    "alibi": ({"pos_encoding_mode": "ALIBI", "causal": True}, {}),
    "sinks": ({}, {"sinks": np.array([0.5, -1, 2, 0], np.float32)}),
    "scales by head": (
        {},
        {
            "scale_q": np.array([1, 2, 0.5, -1], np.float32),
            "scale_k": np.array([0.5, 2], np.float32),
            "scale_v": np.array([3, -1], np.float32),
        },
    ),
    "scales": ({}, {"scale_q": 2.0, "scale_k": 0.25, "scale_v": -0.5}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_reach_the_reference(name: str) -> None:
    planned, of_run = OPTIONS[name]
    b = batches.make([3, 1, 4], [7, 0, 11], 4)
    wanted = b.expected(**planned, **of_run)
    given = {f"{n[-1]}_scale" if n.startswith("scale") else n: x for n, x in of_run.items()}
    w = paged_wrapper()
    w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4, **planned)
    o, lse = w.run(b.q, b.one_tensor(), return_lse=True, **given)
    np.testing.assert_allclose(values(o), wanted[0], rtol=2e-3, atol=1e-3)
    np.testing.assert_allclose(values(lse), wanted[1], rtol=1e-6)
    w = ragged_wrapper()
    w.plan(b.qo_indptr, b.kv_indptr, HQ, HKV, D, **planned)
    again = w.run(b.q, *b.ragged(), return_lse=True, **given)
    np.testing.assert_array_equal(values(again[0]), values(o))
    if "causal" in planned or "sm_scale" in planned or of_run:
        b = batches.make([1, 1, 1], [7, 0, 11], 4)
        w = decode_wrapper()
        w.plan(*b.table, HQ, HKV, D, 4, **{n: x for n, x in planned.items() if n != "causal"})
        o, lse = w.run(b.q, b.one_tensor(), return_lse=True, **given)
        wanted = b.expected(**planned, **of_run)
        np.testing.assert_allclose(values(o), wanted[0], rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("form", ["bool", "packed"])
def test_masks(form: str) -> None:
    b = batches.make([3, 1, 4], [7, 0, 11], 4)
    masks = b.masks()
    flat = np.concatenate([m.ravel() for m in masks])
    given: dict[str, Any] = {"custom_mask": flat}
    if form == "packed":
        bits = batches.offsets([m.size for m in masks])
        packed, _ = cupyattn.segment_packbits(flat, bits, bitorder="little")
        given = {"packed_custom_mask": packed, "custom_mask": ~flat}
    w, r = paged_wrapper(), ragged_wrapper()
    wanted = b.expected(masks, window_left=6)
    for causal in (False, True):
        options = {"causal": causal, "window_left": 6}
        w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4, **given, **options)
        check(w.run(b.q, b.one_tensor(), return_lse=True), wanted)
        r.plan(b.qo_indptr, b.kv_indptr, HQ, HKV, D, **given, **options)
        check(r.run(b.q, *b.ragged(), return_lse=True), wanted)
    w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4, causal=True)
    check(w.run(b.q, b.one_tensor(), return_lse=True), b.expected(causal=True))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks(framework: str) -> None:
    b = batches.make([2, 1], [7, 5], 4)
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(
        make("torch" if framework == "torch" else "numpy", WORKSPACE)
    )
    table = [make(framework, x) for x in (b.qo_indptr, *b.table)]
    w.plan(*table, HQ, HKV, D, 4, causal=True)
    q, cache = make(framework, b.q), make(framework, b.one_tensor())
    got = w.run(q, cache, return_lse=True)
    assert type(got[0]) is type(got[1]) is type(q)
    check(got, b.expected(causal=True))
    check(w.run(b.q, b.one_tensor(), return_lse=True), b.expected(causal=True))


@pytest.mark.parametrize("place", ["none", "name", "torch.device", "a JAX array", "replaced"])
def test_a_workspace_of_the_wrappers_own(place: str) -> None:
    b = batches.make([2, 1], [7, 30_000], 4)
    given = {
        "none": lambda: None,
        "name": lambda: "cpu",
        "torch.device": lambda: pytest.importorskip("torch").device("cpu"),
        "a JAX array": lambda: make("jax", np.zeros(16, np.uint8)),
        "replaced": lambda: None,
    }[place]()
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(given)
    assert w.workspace_size(b.qo_indptr, *b.table, HQ, HKV, D, 4)[0] > 0
    w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4)
    if place == "replaced":
        w.reset_workspace_buffer(np.zeros(1 << 20, np.uint8))
    check(w.run(b.q, b.one_tensor(), return_lse=True), b.expected())


def test_int64_tables_and_slices_of_larger_tables() -> None:
    b = batches.make([1, 1, 1], [7, 5, 9], 4)
    w = decode_wrapper()
    w.plan(*(x.astype(np.int64) for x in b.table), HQ, HKV, D, 4)
    check(w.run(b.q, b.one_tensor(), return_lse=True), b.expected())
    w.plan(b.indptr[1:], b.indices, b.last_page_len[1:], HQ, HKV, D, 4)
    o, lse = w.run(b.q[1:], b.one_tensor(), return_lse=True)
    wanted = b.expected()
    check((o, lse), (wanted[0][1:], wanted[1][1:]))


def test_workspaces_are_refused_that_a_gpu_would_find_too_small() -> None:
    b = batches.make([1], [20000], 16)
    w = decode_wrapper()
    need, _ = w.workspace_size(*b.table, HQ, HKV, D, 16)
    assert 0 < need < 1 << 20
    small = cupyattn.BatchDecodeWithPagedKVCacheWrapper(np.zeros(need - 16, np.uint8))
    with pytest.raises(
        WorkspaceError, match=f"this plan needs {need} bytes and it has {need - 16}"
    ):
        small.plan(*b.table, HQ, HKV, D, 16)
    with pytest.raises(PlanError, match=r"before plan\(\)"):
        small.run(b.q, b.one_tensor())
    small.plan(*b.table, HQ, HKV, D, 16, disable_split_kv=True)
    check(small.run(b.q, b.one_tensor(), return_lse=True), b.expected())
    w.plan(*b.table, HQ, HKV, D, 16)
    with pytest.raises(WorkspaceError, match=f"the current plan needs {need} bytes"):
        w.reset_workspace_buffer(np.zeros(need - 16, np.uint8))
    w.reset_workspace_buffer(np.zeros(need, np.uint8))
    check(w.run(b.q, b.one_tensor(), return_lse=True), b.expected())
    # float32, which no GPU takes, is sized as what a GPU takes.
    assert w.workspace_size(*b.table, HQ, HKV, D, 16, q_data_type="float32")[0] == need


def test_a_run_of_another_kind_does_without_splits_where_there_is_no_room() -> None:
    b = batches.make([3], [20000], 16)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(np.zeros(16, np.uint8))
    w._workspace = array.view(WORKSPACE, "workspace")
    w.plan(*b.table, HQ, HKV, D, 16, q_len_per_req=3)
    w._workspace = array.view(np.zeros(16, np.uint8), "workspace")
    mask = np.ones((1, 3, 3), bool)
    check(w.run(b.q, b.one_tensor(), mask=mask, return_lse=True), b.expected())


def test_splits_that_the_caller_sizes_are_not_made_fewer() -> None:
    b = batches.make([1], [20000], 16)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(np.zeros(1600, np.uint8))
    with pytest.raises(WorkspaceError, match="this plan needs"):
        w.plan(*b.table, HQ, HKV, D, 16, fixed_split_size=64)


def test_out_and_lse_are_written_and_returned() -> None:
    b = batches.make([2, 1], [7, 5], 4)
    w = paged_wrapper()
    w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4, o_data_type="float32", q_data_type="float16")
    out, lse = np.full(b.q.shape, 7, np.float32), np.full(b.q.shape[:2], 7, np.float32)
    got = w.run(b.q, b.one_tensor(), out=out, lse=lse, return_lse=True)
    assert got[0] is out and got[1] is lse
    np.testing.assert_allclose(out, b.expected()[0], rtol=1e-6, atol=1e-7)
    assert w.run(b.q, b.one_tensor(), out=out) is out


def test_dtypes_and_dims_of_k_and_v() -> None:
    b = batches.make([2, 1], [7, 5], 4, dtype="bfloat16", kv_dtype="float8_e4m3fn", dims=(16, 8))
    w = paged_wrapper()
    given = {"q_data_type": "bfloat16", "kv_data_type": "float8_e4m3fn", "head_dim_vo": 8}
    w.plan(b.qo_indptr, *b.table, HQ, HKV, 16, 4, **given)
    o = w.run(b.q, b.cache, k_scale=0.5, v_scale=2.0)
    assert o.shape == (3, HQ, 8) and o.dtype == b.q.dtype
    wanted = b.expected(scale_k=0.5, scale_v=2.0)[0]
    np.testing.assert_array_equal(values(o), wanted.astype(b.q.dtype).astype(np.float64))


def test_strides_of_k_and_v_may_differ() -> None:
    b = batches.make([1, 1], [7, 5], 4)
    wide = np.zeros((*b.cache[1].shape[:2], HKV + 1, D), np.float16)
    wide[:, :, 1:] = b.cache[1]
    w = decode_wrapper()
    w.plan(*b.table, HQ, HKV, D, 4)
    check(w.run(b.q, (b.cache[0], wide[:, :, 1:]), return_lse=True), b.expected())


def test_a_plan_serves_many_runs_and_keeps_nothing_of_its_arguments() -> None:
    b, other = batches.make([1, 1], [7, 5], 4), batches.make([1, 1], [7, 5], 4, seed=9)
    table = [x.copy() for x in b.table]
    w = decode_wrapper()
    w.plan(*table, HQ, HKV, D, 4)
    for x in table:
        x[...] = 99
    for _ in range(2):
        check(w.run(b.q, b.one_tensor(), return_lse=True), b.expected())
    w.plan(*other.table, HQ, HKV, D, 4)
    check(w.run(other.q, other.one_tensor(), return_lse=True), other.expected())


def test_splits_change_nothing_on_the_cpu() -> None:
    b = batches.make([1, 1], [7, 5], 4)
    for split in ({"fixed_split_size": 1}, {"disable_split_kv": True}, {"fixed_split_size": -1}):
        w = decode_wrapper()
        w.plan(*b.table, HQ, HKV, D, 4, **split)
        check(w.run(b.q, b.one_tensor(), return_lse=True), b.expected())


def test_workspace_size_names_itself() -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(None)
    for args, named in (((), {}), ((1,), {}), ((), {"nonsense": 1})):
        with pytest.raises(TypeError, match=r"^workspace_size\(\) takes the arguments of plan"):
            w.workspace_size(*args, **named)
