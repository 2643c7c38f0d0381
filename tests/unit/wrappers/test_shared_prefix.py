"""Requests that share a prefix in arrays of its own, on CPU arrays and on a GPU that is late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import batches, fake_batch, shared_calls
from helpers.bad_input import Row, by_row, of, refuse, rows_of, step_before
from helpers.batches import HKV, HQ, WORKSPACE, D
from helpers.calls import run_and_check
from helpers.fake_batch import Device
from helpers.share import one_of

import cupyattn
from cupyattn import reference
from cupyattn.errors import PlanError, WorkspaceError
from cupyattn.launch.driver import scratch
from cupyattn.wrappers import shared_prefix

PAGE, SHARED = 4, 11
QO_LEN, KV_LEN = [3, 0, 2], [9, 4, 0]


@pytest.mark.parametrize("first", one_of(2, range(0, shared_calls.NUM_CASES, 60)))
def test_random_calls(first: int) -> None:
    for seed in range(first, first + 60):
        workspace = WORKSPACE
        run_and_check(shared_calls.Call(shared_calls.random_case(seed), np, workspace))


def prefix(seed: int = 0, length: int = SHARED) -> list[np.ndarray]:
    rng = np.random.default_rng((seed, 7))
    return list(rng.standard_normal((2, length, HKV, D)).astype(np.float16))


def expected(
    b: batches.Batch, shared: list[np.ndarray], causal: bool = False, **options: Any
) -> np.ndarray:
    """Of each request by itself: its rows see all of the prefix."""
    out = np.zeros(b.q.shape)
    for i, own in enumerate(b.keys):
        rows = slice(b.qo_indptr[i], b.qo_indptr[i + 1])
        states = [
            reference.attention(b.q[rows], *keys, causal=is_causal, **options)
            for keys, is_causal in ((shared, False), (own, causal))
        ]
        out[rows] = reference.merge_state(*states[0], *states[1])[0]
    return out


def prefill(workspace: Any = None) -> Any:
    workspace = WORKSPACE if workspace is None else workspace
    return cupyattn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace, "NHD")


# --- options of runs, which become those of later plans ---


def test_options_are_those_of_each_run() -> None:
    b, shared = batches.make(QO_LEN, KV_LEN, PAGE), prefix()
    w = prefill()
    for sm_scale, causal in ((None, True), (0.2, False), (None, False), (0.3, True)):
        w.begin_forward(b.qo_indptr, *b.table, HQ, HKV, D, PAGE)
        for _ in range(2):
            got = w.forward(b.q, *shared, b.one_tensor(), causal, sm_scale=sm_scale)
            wanted = expected(b, shared, causal, sm_scale=sm_scale)
            np.testing.assert_allclose(got.astype(np.float64), wanted, atol=3e-3)
        got = w.run(b.q, *shared, b.one_tensor())
        np.testing.assert_allclose(got.astype(np.float64), expected(b, shared), atol=3e-3)


def test_the_next_plan_expects_the_options_of_the_last_run() -> None:
    """So that the layers of a model are scheduled once, by begin_forward()."""
    b, shared = batches.make(QO_LEN, KV_LEN, PAGE, dtype="bfloat16"), prefix()
    arrays = [b.q, *(x.astype(b.q.dtype) for x in shared), b.one_tensor()]
    w = prefill()
    changes = []
    for _ in range(3):
        w.begin_forward(b.qo_indptr, *b.table, HQ, HKV, D, PAGE)
        plan = w._unique._current
        w.forward(*arrays, causal=True, sm_scale=0.3)
        changes.append(w._unique._current is not plan)
    assert changes == [True, False, False]


def test_dtypes_follow_the_arrays() -> None:
    for dtype in ("bfloat16", "float16"):
        b = batches.make([1, 1, 1], KV_LEN, PAGE, dtype=dtype)
        shared = [x.astype(b.q.dtype) for x in prefix()]
        w = cupyattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
        w.begin_forward(*b.table, HQ, HKV, D, PAGE)
        got = w.forward(b.q, *shared, unique_kv_data=b.one_tensor(), allow_fp16_qk_reduction=True)
        assert got.dtype == b.q.dtype
        np.testing.assert_allclose(got.astype(np.float64), expected(b, shared), atol=2e-2)


def test_a_plan_without_a_page_size_keeps_its_tables() -> None:
    """They may be overwritten before the run that schedules them."""
    for form in ("one", "pair"):
        for page_size in (1, 4):
            b, shared = batches.make(QO_LEN, KV_LEN, page_size), prefix()
            tables = [x.copy() for x in (b.qo_indptr, *b.table)]
            w = prefill()
            w.begin_forward(*tables, HQ, HKV, D)
            for x in tables:
                x[...] = -5
            cache: Any = b.one_tensor()
            if form == "pair":
                cache = tuple(x if page_size > 1 else x[:, 0] for x in b.cache)
            got = w.forward(b.q, *shared, cache, causal=True)
            wanted = expected(b, shared, True)
            np.testing.assert_allclose(got.astype(np.float64), wanted, atol=3e-3)


def test_a_workspace_may_be_replaced() -> None:
    b, shared = batches.make(QO_LEN, KV_LEN, PAGE), prefix()
    w = cupyattn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace_buffer=WORKSPACE)
    w.begin_forward(b.qo_indptr, *b.table, HQ, HKV, D, PAGE)
    w.reset_workspace_buffer(WORKSPACE, of("uint8", 64))
    got = w.forward(b.q, *shared, b.one_tensor())
    np.testing.assert_allclose(got.astype(np.float64), expected(b, shared), atol=3e-3)
    w.end_forward()


def test_padded_calls_plan_when_something_changes() -> None:
    """One wrapper a stream, for calls of any lengths and scales."""
    fake_batch.forget()
    rng = np.random.default_rng(0)
    plans = []
    for count, length, sm_scale in (
        (3, 5, None),
        (3, 5, None),
        (3, 6, None),
        (3, 6, 0.5),
        (2, 6, 0.5),
    ):
        q = rng.standard_normal((count, HQ, D)).astype(np.float16)
        own = rng.standard_normal((2, count, length, HKV, D)).astype(np.float16)
        shared = prefix()
        got = cupyattn.batch_decode_with_shared_prefix_padded_kv_cache(
            q, *shared, *own, sm_scale=sm_scale
        )
        for i in range(count):
            keys = [np.concatenate([shared[j], own[j, i]]) for j in range(2)]
            wanted, _ = reference.attention(q[i : i + 1], *keys, sm_scale=sm_scale)
            np.testing.assert_allclose(got[i : i + 1].astype(np.float64), wanted, atol=3e-3)
        (padded,) = shared_prefix._padded.values()
        plans.append(padded._wrapper._current)
    assert plans[0] is plans[1] and len({id(plan) for plan in plans}) == 4


def test_threads_plan_padded_calls_of_their_own_default_streams_apart(
    device: Device, stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One handle stands for all these streams, and a plan is overwritten in the order of one."""
    arrays = [device.put(of("half", *shape)) for shape in ((2, HQ, D), *[(3, HKV, D)] * 2)]
    arrays += [device.put(of("half", 2, 5, HKV, D)) for _ in range(2)]
    for count, sign in enumerate((object(), object(), object()), 1):
        monkeypatch.setattr(scratch, "identity", lambda stream, sign=sign: sign)
        for _ in range(2):
            cupyattn.batch_decode_with_shared_prefix_padded_kv_cache(*arrays)
        assert len(shared_prefix._padded) == count


def test_padded_calls_refuse_a_capture(device: Device, gpu: Any) -> None:
    gpu.is_capturing = True
    arrays = [device.put(of("half", *shape)) for shape in ((2, HQ, D), *[(3, HKV, D)] * 2)]
    arrays += [device.put(of("half", 2, 5, HKV, D)) for _ in range(2)]
    with pytest.raises(PlanError, match="cannot be part of a CUDA graph"):
        cupyattn.batch_decode_with_shared_prefix_padded_kv_cache(*arrays)


# --- bad input ---


made, planned, ran = (rows_of("prefill", step) for step in ("make", "plan", "run"))
decode_made, decode_planned, decode_ran = (rows_of("decode", s) for s in ("make", "plan", "run"))
padded = rows_of("padded", "run")

ROWS = [
    made("layout", "kv_layout: got 'HDN'", kv_layout="HDN"),
    made("no device", "float_workspace_buffer: got 'gpu'", float_workspace_buffer="gpu"),
    decode_made("strided", "not contiguous", WorkspaceError,
                float_workspace_buffer=of("uint8", 64)[::2]),
    planned("falling rows", "qo_indptr: falls from 3 to 2",
            qo_indptr=np.array([0, 3, 2, 5], np.int32)),
    planned("negative id", "paged_kv_indices: entry 0 is page -1",
            paged_kv_indices=np.array([-1, 1, 2, 3], np.int32)),
    planned("heads", "num_qo_heads, num_kv_heads: 5 query heads", num_qo_heads=5),
    planned("pages of nothing", "page_size: got 0", page_size=0),
    planned("no page size, no heads", "num_kv_heads: got 0", page_size=None, num_kv_heads=0),
    planned("no page size, a list", "qo_indptr: got list", page_size=None, qo_indptr=[0, 3, 3, 5]),
    decode_planned("dtype", "data_type: unknown dtype 'float15'", data_type="float15"),
    decode_planned("last page", "last_page_len: request 0 has 9 tokens",
                   unique_kv_last_page_len=np.array([9, 4, 0], np.int32)),
    ran("rows", "q: holds 4 rows; the plan has 5", q=of("half", 4, HQ, D)),
    ran("prefix heads first", "k_shared: dimension 1 | Its shape is that of kv_layout='HND'",
        k_shared=of("half", HKV, SHARED, D), v_shared=of("half", HKV, SHARED, D)),
    ran("KV heads of the prefix", "k_shared: dimension 1 | is 4; wanted 2",
        k_shared=of("half", SHARED, 4, D), v_shared=of("half", SHARED, 4, D)),
    ran("head dim of the prefix", "v_shared: dimension 2 | is 8",
        v_shared=of("half", SHARED, HKV, 8)),
    ran("fewer values", "v_shared: dimension 0 | is 10; wanted 11",
        v_shared=of("half", 10, HKV, D)),
    ran("strided prefix", "k_shared: the last dimension has stride 2",
        k_shared=of("half", SHARED, HKV, 2 * D)[..., ::2]),
    ran("a flat prefix", "k_shared: shape | 2 dimensions", k_shared=of("half", SHARED, HKV * D)),
    ran("prefix of another dtype", "dtype", k_shared=of("bfloat16", SHARED, HKV, D),
        v_shared=of("bfloat16", SHARED, HKV, D)),
    ran("no prefix", "k_shared: got NoneType", k_shared=None),
    ran("no cache", "unique_kv_cache: got NoneType", unique_kv_cache=None),
    ran("page size", "paged_kv_cache: dimension 1 | is 5; wanted 4",
        unique_kv_cache=of("half", 8, 2, 5, HKV, D)),
    ran("pages", "paged_kv_cache: holds 1 pages", unique_kv_cache=of("half", 1, 2, PAGE, HKV, D)),
    ran("cache dtype", "k, v: dtype bfloat16 with q of dtype float16",
        unique_kv_cache=of("bfloat16", 8, 2, PAGE, HKV, D)),
    ran("causal", "causal: got 'yes'", causal="yes"),
    ran("scale", "sm_scale: got nan", sm_scale=float("nan")),
    ran("q's dtype", "q: dtype uint8", q=of("uint8", 5, HQ, D)),
    decode_ran("rows", "q: holds 5 rows; the plan has 3", q=of("half", 5, HQ, D)),
    padded("layout", "kv_layout: got 'HDN'", kv_layout="HDN"),
    padded("requests", "k_unique: dimension 0 | is 4; wanted 3, the B of q",
           k_unique=of("half", 4, 5, HKV, D)),
    padded("lengths", "v_unique: dimension 1 | is 6; wanted 5", v_unique=of("half", 3, 6, HKV, D)),
    padded("heads", "k_unique: dimension 2 | num_kv_heads", k_unique=of("half", 3, 5, 4, D)),
    padded("query heads", "q, k: 5 query heads over 2", q=of("half", 3, 5, D)),
    padded("flat q", "q: shape | 2 dimensions", q=of("half", 3, HQ * D)),
    padded("dtypes", "v_unique: dtype is bfloat16 but k_shared is float16",
           v_unique=of("bfloat16", 3, 5, HKV, D)),
    padded("strided", "k_unique: the last dimension has stride 2",
           k_unique=of("half", 3, 5, HKV, 2 * D)[..., ::2]),
    padded("scale", "sm_scale: got inf", sm_scale=float("inf")),
    padded("q's dtype", "q: dtype uint8", q=of("uint8", 3, HQ, D)),
]  # fmt: skip


def good(function: str, step: str) -> dict[str, Any]:
    """The arguments of a step that succeeds."""
    b = batches.make(QO_LEN if function == "prefill" else [1, 1, 1], KV_LEN, PAGE)
    k, v = prefix()
    if function == "padded":
        q = of("half", 3, HQ, D)
        own = {name: of("half", 3, 5, HKV, D) for name in ("k_unique", "v_unique")}
        return {"q": q, "k_shared": k, "v_shared": v, **own}
    if step == "make":
        return {"float_workspace_buffer": WORKSPACE}
    if step == "run":
        return {"q": b.q, "k_shared": k, "v_shared": v, "unique_kv_cache": b.one_tensor()}
    sizes = {"num_qo_heads": HQ, "num_kv_heads": HKV, "head_dim": D, "page_size": PAGE}
    table = dict(zip(("indptr", "indices", "last_page_len"), b.table, strict=True))
    if function == "decode":
        return {f"unique_kv_{name}": x for name, x in table.items()} | sizes
    return {f"paged_kv_{n}": x for n, x in table.items()} | sizes | {"qo_indptr": b.qo_indptr}


CLASSES: dict[str, Any] = {
    "prefill": cupyattn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    "decode": cupyattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
}


@by_row(ROWS)
def test_bad_input(row: Row) -> None:
    call = cupyattn.batch_decode_with_shared_prefix_padded_kv_cache
    if row.call != "padded":
        call = step_before(row, CLASSES[row.call], good)
    refuse(row, call, good(row.call, row.step))
    call(**good(row.call, row.step))


def test_good_calls_are_good() -> None:
    for name, cls in CLASSES.items():
        wrapper = cls(**good(name, "make"))
        with pytest.raises(PlanError, match="before plan"):
            wrapper.forward(**good(name, "run"))
        wrapper.begin_forward(**good(name, "plan"))
        assert np.isfinite(wrapper.forward(**good(name, "run"))).all()
