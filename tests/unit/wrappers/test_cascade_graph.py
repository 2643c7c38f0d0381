"""Plans of cascades on a GPU that copies and computes late: graphs, buffers, probes, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import batches, cascade_calls, fake_batch
from helpers.batch_cases import Problem
from helpers.batches import WORKSPACE
from helpers.cascade_calls import Case
from helpers.fake_batch import Device
from helpers.fake_gpu import pointer

import cupyattn
from cupyattn import array
from cupyattn.engine import own_workspace
from cupyattn.errors import ArgumentError, PlanError, UnsupportedError, WorkspaceError
from cupyattn.launch.attention.batch import BatchLauncher

BASE = Case(
    seed=1,
    problem=Problem("float16", "float16", (16, 16)),
    levels=(((5, 9), (37, 16)), ((1, 4, 0, 9), (20, 7, 5, 40))),
    page_size=4,
    num_kv_heads=2,
    group=2,
    kv_layout="NHD",
    causal=True,
    window_left=-1,
    has_sinks=False,
    has_scales=False,
    is_pair=False,
    ids_on_device=False,
    with_out=False,
)
BUFFERS = (
    "qo_indptr_buf_arr",
    "paged_kv_indptr_buf_arr",
    "paged_kv_indices_buf_arr",
    "paged_kv_last_page_len_buf_arr",
)


@pytest.fixture(autouse=True)
def kept_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchLauncher, "gains_by_levels", lambda *_: True)


class OnDevice:
    """A cascade with its arrays on the device; `ids` says where its page tables are."""

    def __init__(self, device: Device, case: Case, ids: str = "host") -> None:
        self.device, self.case = device, case
        self.call = cascade_calls.Call(case, np)
        self.arguments, self.options = self.call.plan_arguments()
        if ids != "host":
            kind = np.int64 if ids == "wide" else np.int32
            chosen = range(1 if ids == "mixed" else len(case.levels))
            for level in chosen:
                self.arguments[2][level] = device.put(self.arguments[2][level].astype(kind))
        self.q, self.cache = device.put(self.call.q), device.put(self.call.cache)

    def wrapper(self, **made: Any) -> Any:
        count = len(self.case.levels)
        workspace = self.device.workspace()
        return cupyattn.MultiLevelCascadeAttentionWrapper(count, workspace, "NHD", **made)

    def plan(self, wrapper: Any, **changes: Any) -> None:
        wrapper.plan(*self.arguments, **self.options | changes)

    def check(self, got: Any) -> None:
        (out, lse), _ = self.call.expected()
        np.testing.assert_allclose(self.device.get(got[0]), out, atol=2e-3)
        np.testing.assert_allclose(self.device.get(got[1]), lse, atol=1e-5)


def graph_buffers(device: Device, case: Case, pages: int = 60) -> dict[str, list[Any]]:
    sizes = [(len(rows) + 1, len(rows) + 1, pages, len(rows)) for rows, _ in case.levels]
    columns = zip(*sizes, strict=True)
    return {
        name: [device.put(np.full(n, -7, np.int32)) for n in column]
        for name, column in zip(BUFFERS, columns, strict=True)
    }


PLANS = (
    BASE.levels,
    (((5, 9), (0, 100)), ((1, 4, 0, 9), (20, 7, 5, 40))),
    (((0, 12), (50, 21)), ((0, 3, 9, 0), (3, 4, 50, 6))),
    (((6, 0), (0, 30)), ((2, 2, 1, 1), (5, 5, 5, 6))),
)


@pytest.mark.parametrize("ids", ["host", "device", "wide", "mixed"])
def test_runs_answer_for_the_plan_before_them(device: Device, ids: str) -> None:
    """Copies of later plans come before earlier runs have begun."""
    w, results = None, []
    for seed, levels in enumerate((*PLANS, *PLANS)):
        cascade = OnDevice(device, replace(BASE, seed=seed, levels=levels), ids)
        w = w or cascade.wrapper()
        cascade.plan(w)
        results.append((cascade, w.run(cascade.q, cascade.cache, return_lse=True)))
    for cascade, got in results:
        cascade.check(got)


@pytest.mark.parametrize("ids", ["host", "device", "wide", "mixed"])
def test_a_captured_run_follows_the_plans(device: Device, ids: str) -> None:
    """As the caller's buffers do, whatever side the tables come from."""
    buffers = graph_buffers(device, BASE)
    first = OnDevice(device, BASE, ids)
    w = first.wrapper(use_cuda_graph=True, **buffers)
    q = device.put(np.zeros_like(first.call.q))
    out, lse = device.put(np.zeros_like(first.call.q)), device.put(first.call.lse.array * 0)
    cache = device.put(np.zeros((64, *first.call.cache.shape[1:]), np.float16))
    captured: list[Any] = []
    for seed, levels in enumerate(PLANS):
        cascade = OnDevice(device, replace(BASE, seed=seed, levels=levels), ids)
        cascade.plan(w)
        if not captured:
            before, device.stream.jobs = device.stream.jobs, type(device.stream.jobs)()
            w.run(q, cache, out=out, lse=lse, return_lse=True)
            captured = [job for _, job in device.stream.jobs]
            device.stream.jobs = before
        for target, x in ((cache, cascade.call.cache), (q, cascade.call.q)):
            fake_batch.memory(pointer(target), x.dtype, *x.shape)[...] = x
        device.stream.finish()
        for job in captured:
            job()
        (wanted, wanted_lse), _ = cascade.call.expected()
        rows = len(wanted)
        np.testing.assert_allclose(device.get(out)[:rows], wanted, atol=2e-3)
        np.testing.assert_allclose(device.get(lse)[:rows], wanted_lse, atol=1e-5)
        check_buffers(device, buffers, cascade)


def check_buffers(device: Device, buffers: dict[str, list[Any]], cascade: OnDevice) -> None:
    rows = [batches.offsets(rows) for rows, _ in cascade.case.levels]
    indptr, ids, last = zip(*cascade.call.tables, strict=True)
    ids = tuple(x[:-2] for x in ids)  # two absurd ones follow
    for name, given in zip(BUFFERS, (rows, indptr, ids, last), strict=True):
        for buffer, x in zip(buffers[name], given, strict=True):
            np.testing.assert_array_equal(device.get(buffer)[: len(x)], x, err_msg=name)


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_lengths_of_one_token_pages_reach_the_buffers_from_the_device(
    device: Device, kind: str
) -> None:
    case = replace(BASE, page_size=1)
    cascade = OnDevice(device, case, "device")
    cascade.arguments[3] = [device.put(np.full(len(n), 1, kind)) for n, _ in case.levels]
    buffers = graph_buffers(device, case, 80)
    w = cascade.wrapper(use_cuda_graph=True, **buffers)
    cascade.plan(w)
    for buffer in buffers[BUFFERS[3]]:
        assert (device.get(buffer) == 1).all()
    cascade.check(w.run(cascade.q, cascade.cache, return_lse=True))


def test_buffers_are_filled_on_the_cpu_too() -> None:
    call = cascade_calls.Call(BASE, np)
    sizes = [(len(rows) + 1, len(rows) + 1, 60, len(rows)) for rows, _ in BASE.levels]
    buffers = {
        name: [np.full(n, -7, np.int32) for n in column]
        for name, column in zip(BUFFERS, zip(*sizes, strict=True), strict=True)
    }
    call.plan(WORKSPACE, use_cuda_graph=True, **buffers)
    call.check(*call.run())
    for name, given in zip(BUFFERS, call.plan_arguments()[0], strict=False):
        for buffer, x in zip(buffers[name], given, strict=True):
            used = len(x) - 2 * ("indices" in name)
            np.testing.assert_array_equal(buffer[:used], x[:used])


FROZEN: dict[str, dict[str, Any]] = {
    "window_left": {"window_left": 5},
    "causal": {"causal": False},
    "sm_scale": {"sm_scale": 0.5},
    "q_data_type": {"q_data_type": "bfloat16", "kv_data_type": "bfloat16"},
    "indptr: 3 requests, but the buffers": {
        "levels": (((5, 9), (37, 16)), ((1, 4, 9), (20, 7, 40)))
    },
    "paged_kv_indices_buf: holds 60 page ids and this plan has 75": {
        "levels": (((5, 9), (300, 0)), ((1, 4, 0, 9), (20, 7, 5, 40)))
    },
    "qo_indptr_arr: 15 query rows, but the first plan of this wrapper had 14": {
        "levels": (((5, 10), (37, 16)), ((1, 4, 0, 10), (20, 7, 5, 40)))
    },
}


@pytest.mark.parametrize("words", FROZEN)
def test_what_a_graph_keeps_is_named(device: Device, words: str) -> None:
    cascade = OnDevice(device, BASE)
    w = cascade.wrapper(use_cuda_graph=True, **graph_buffers(device, BASE))
    cascade.plan(w)
    device.stream.copies.clear()
    changes = dict(FROZEN[words])
    other = OnDevice(device, replace(BASE, levels=changes.pop("levels", BASE.levels)))
    with pytest.raises((PlanError, ArgumentError), match=words):
        other.plan(w, **changes)
    assert not device.stream.copies
    cascade.check(w.run(cascade.q, cascade.cache, return_lse=True))


def test_longer_requests_than_the_graph_has_room_for(device: Device) -> None:
    """Rows of many requests that one has later: more tiles of the large kind, or of any."""
    many = replace(BASE, levels=(((1,) * 40, (3,) * 40), ((1,) * 40, (5,) * 40)), group=8)
    cascade = OnDevice(device, many)
    w = cascade.wrapper(use_cuda_graph=True, **graph_buffers(device, many, 400))
    cascade.plan(w)
    later = OnDevice(device, replace(many, levels=(((40, *(0,) * 39), (30,) * 40), many.levels[1])))
    try:
        later.plan(w)
    except PlanError as error:
        assert "the captured graph has room for" in str(error)
        cascade.check(w.run(cascade.q, cascade.cache, return_lse=True))
    else:
        later.check(w.run(later.q, later.cache, return_lse=True))


def test_a_capture_is_refused_before_anything_is_read(
    device: Device, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cascade = OnDevice(device, BASE, "mixed")
    w = cascade.wrapper()
    cascade.plan(w)
    gpu.is_capturing = True
    monkeypatch.setattr(array, "to_host", lambda v: pytest.fail("read inside a capture"))
    cascade.arguments[0] = [device.put(x) for x in cascade.arguments[0]]
    with pytest.raises(PlanError, match="CUDA graph"):
        cascade.plan(w)


def test_ids_on_another_device_are_refused(device: Device) -> None:
    cascade = OnDevice(device, BASE, "mixed")
    w = cupyattn.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    words = r"paged_kv_indices_arr\[0\]: is on cuda:0 but float_workspace_buffer is on cpu"
    with pytest.raises(ArgumentError, match=words):
        cascade.plan(w)


def test_a_refused_plan_leaves_the_last_one(device: Device) -> None:
    cascade = OnDevice(device, BASE)
    w = cascade.wrapper()
    cascade.plan(w)
    bad = OnDevice(device, replace(BASE, seed=5))
    bad.arguments[2][1] = bad.arguments[2][1].copy()
    bad.arguments[2][1][0] = -3
    with pytest.raises(ArgumentError, match=r"paged_kv_indices_arr\[1\]: entry 0 is page -3"):
        bad.plan(w)
    with pytest.raises(UnsupportedError, match="request 0 has 1 rows and 0 keys"):
        levels = (BASE.levels[0], ((1, 4, 0, 9), (0, 7, 5, 40)))
        OnDevice(device, replace(BASE, levels=levels)).plan(w, window_left=4)
    cascade.check(w.run(cascade.q, cascade.cache, return_lse=True))


@pytest.mark.parametrize("is_graph", [False, True])
def test_probes_tell_what_a_plan_takes(device: Device, is_graph: bool) -> None:
    long = replace(BASE, levels=(((5, 9), (400, 160)), ((1, 4, 0, 9), (20, 7, 5, 40))))
    cascade = OnDevice(device, long)
    made = {"use_cuda_graph": True, **graph_buffers(device, long, 200)} if is_graph else {}
    w = cascade.wrapper(**made)
    device.stream.copies.clear()
    need, words = w.workspace_size(*cascade.arguments, **cascade.options)
    assert need > 0 and words > 0 and w._current is None and not device.stream.copies
    exact = device.make(need, dtype="uint8")
    w = cupyattn.MultiLevelCascadeAttentionWrapper(2, exact, "NHD", **made)
    cascade.plan(w)
    cascade.check(w.run(cascade.q, cascade.cache, return_lse=True))
    small = device.make(need - 16, dtype="uint8")
    with pytest.raises(WorkspaceError, match=f"needs {need} bytes and it has {need - 16}"):
        w.reset_workspace_buffer(small, [])


@pytest.mark.parametrize("is_graph", [False, True])
def test_a_smaller_workspace_takes_fewer_splits(device: Device, is_graph: bool) -> None:
    long = replace(BASE, levels=(((5, 9), (4000, 1600)), ((1, 4, 0, 9), (20, 7, 5, 40))))
    cascade = OnDevice(device, long)
    made = {"use_cuda_graph": True, **graph_buffers(device, long, 2000)} if is_graph else {}

    def of(num_bytes: int) -> Any:
        workspace = device.make(num_bytes, dtype="uint8")
        return cupyattn.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD", **made)

    most, _ = of(16).workspace_size(*cascade.arguments, **cascade.options)
    least, _ = of(16).workspace_size(*cascade.arguments, **cascade.options, disable_split_kv=True)
    assert least < most
    taken = []
    for num_bytes in (most, most - 16, least, least - 16, 16):
        w = of(num_bytes)
        if is_graph and num_bytes < least:
            with pytest.raises(WorkspaceError, match=f"needs {least} bytes"):
                cascade.plan(w)
            continue
        for _ in range(2):
            cascade.plan(w)
            cascade.check(w.run(cascade.q, cascade.cache, return_lse=True))
        (prepared,) = w._current.prepared.values()
        taken.append((w._current.batch.levels is not None, prepared.schedule.workspace_bytes))
    shares, sizes = zip(*taken, strict=True)
    assert shares == (True,) * 3 + (False,) * (0 if is_graph else 2)
    assert sizes[0] == most > sizes[1] >= sizes[2] == least >= sizes[-1]
    if is_graph:
        assert sizes[1] > least
        with pytest.raises(PlanError, match="disable_split_kv: they differ"):
            cascade.plan(w := of(most))
            cascade.plan(w, disable_split_kv=True)


@pytest.mark.parametrize("levels", [(((), ()),) * 2, (((0,), (30,)), ((0, 0), (5, 0)))])
def test_no_rows(device: Device, levels: Any) -> None:
    cascade = OnDevice(device, replace(BASE, levels=levels))
    w = cascade.wrapper()
    cascade.plan(w)
    out, lse = w.run(cascade.q, cascade.cache, return_lse=True)
    assert tuple(out.shape) == (0, 4, 16) and tuple(lse.shape) == (0, 4)
    assert not device.stream.launches


def test_the_gate_weighs_what_it_can(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels that nothing else can say are not weighed; rows without keys are."""
    asked: list[int] = []
    monkeypatch.setattr(
        BatchLauncher, "gains_by_levels", lambda self, x, flat: asked.append(len(flat.qo_len))
    )
    for changes, count in (
        ({}, 0),  # causality would reach into shared keys, and a part ends within a page
        ({"levels": (((5, 9), (36, 16)), ((1, 4, 0, 9), (20, 7, 5, 40)))}, 4),
        ({"levels": (((6, 8), (36, 16)), ((1, 4, 0, 9), (20, 7, 5, 40)))}, 0),
        ({"levels": (((5, 9), (0, 0)), ((1, 4, 0, 9), (0, 0, 0, 0))), "causal": False}, 4),
    ):
        asked.clear()
        cascade = OnDevice(device, replace(BASE, **changes))
        w = cascade.wrapper()
        cascade.plan(w)
        assert asked == ([count] if count else [])
        cascade.check(w.run(cascade.q, cascade.cache, return_lse=True))


# --- BatchAttention ---


def mixed_arguments(kv_len: int = 100) -> list[Any]:
    counts = [-(-n // 4) for n in (kv_len, 9)]
    indptr = batches.offsets(counts)
    tables = [np.array([0, 30, 31]), indptr, np.arange(sum(counts)), np.array([kv_len, 9])]
    return [*(x.astype(np.int32) for x in tables), 4, 2, 16, 16, 4]


TYPES = {"q_data_type": "float16", "kv_data_type": "float16"}


def test_a_fresh_batch_attention_can_be_asked_for_its_workspace(
    device: Device, own_workspaces: list[int]
) -> None:
    w = cupyattn.BatchAttention()
    need, words = w.workspace_size(*mixed_arguments(3000), **TYPES)
    assert need > 0 and words > 0 and w._current is None
    assert not w.is_cuda_graph_enabled
    w.end_forward()
    with pytest.raises(PlanError, match="before plan"):
        w.run(device.put(np.zeros((31, 4, 16), np.float16)), None)


def test_the_workspace_of_batch_attention_grows(
    device: Device, own_workspaces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_workspace, "_FIRST_BYTES", 64)
    w = cupyattn.BatchAttention()
    sizes = []
    for kv_len in (10, 3000, 12_000, 9):
        w.plan(*mixed_arguments(kv_len), **TYPES)
        assert w._current is not None
        sizes.append(w._workspace.shape[0])
        needs = [x.schedule.workspace_bytes for x in w._current.prepared.values()]
        assert max(needs) <= sizes[-1]
    assert own_workspaces == [64] and sizes == sorted(sizes) and sizes[1] > 64
    assert [x.shape[0] for x in w._outgrown] == sorted({64, *sizes})[:-1]
