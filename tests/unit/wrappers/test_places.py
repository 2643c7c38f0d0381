"""Wrappers without a workspace that are planned from tables on the host: they go to a GPU with the
first run whose arrays are there."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from helpers import batches
from helpers.batches import HKV, HQ, D
from helpers.fake_batch import Device
from helpers.wrong_calls import Entry, flat
from helpers.wrong_others import entries

import cupyattn
from cupyattn import array
from cupyattn.errors import ArgumentError, PlanError

SPACE = "make.float_workspace_buffer"
WRAPPERS = [e for e in entries() if SPACE in e.parameters() and len(e.steps) == 3]


def put(device: Device, x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return type(x)(put(device, part) for part in x)
    return device.put(x) if isinstance(x, np.ndarray) else x


def got(device: Device, x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return [y for part in x for y in got(device, part)]
    return [device.get(x)]


@pytest.mark.parametrize("entry", WRAPPERS, ids=[e.name for e in WRAPPERS])
def test_runs_of_every_wrapper(device: Device, own_workspaces: list[int], entry: Entry) -> None:
    base = {**entry.base, SPACE: None}
    if base.get("make.use_cuda_graph"):
        pytest.skip("buffers say where")
    (_, make), (_, plan), (_, run) = entry.steps

    def of(step: str) -> dict[str, Any]:
        return {n.split(".")[1]: x for n, x in base.items() if n.startswith(f"{step}.")}

    # The stand-in computes batches only, no single requests and no merges.
    computed = {"pod": slice(1, None)}.get(entry.name, slice(None))
    computed = slice(0) if "shared" in entry.name else computed
    on_host = make(**of("make"))
    plan(on_host, **of("plan"))
    wanted = flat(run(on_host, **of("run")))
    wrapper, tables = make(**of("make")), copy.deepcopy(of("plan"))
    plan(wrapper, **tables)
    for x in tables.values():
        if isinstance(x, np.ndarray) and x.dtype.kind in "iu":
            x[...] = -7  # the caller's, after plan()
    arrays = {name: put(device, x) for name, x in of("run").items()}
    for _ in range(3):
        answer = got(device, run(wrapper, **arrays))
        for a, b in zip(answer[computed], wanted[computed], strict=True):
            np.testing.assert_allclose(a.astype(float), b.astype(float), atol=4e-3)
    assert own_workspaces
    # It stays there.
    plan(wrapper, **of("plan"))
    again = got(device, run(wrapper, **arrays))
    for a, b in zip(again[computed], wanted[computed], strict=True):
        np.testing.assert_allclose(a.astype(float), b.astype(float), atol=4e-3)


def planned(**given: Any) -> tuple[Any, batches.Batch]:
    b = batches.make([1, 1, 1], [9, 3, 30], 4)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(None)
    w.plan(*b.table, HQ, HKV, D, 4, **given)
    return w, b


def test_runs_of_more_rows_than_planned(device: Device, own_workspaces: list[int]) -> None:
    w, b = planned()
    q, cache = device.put(np.repeat(b.q, 2, axis=0)), device.put(b.one_tensor())
    wanted = w.run(np.repeat(b.q, 2, axis=0), b.one_tensor(), q_len_per_req=2)
    found = device.get(w.run(q, cache, q_len_per_req=2))
    np.testing.assert_allclose(found.astype(float), wanted.astype(float), atol=2e-3)


def test_a_wrapper_stays_where_its_first_gpu_array_is(
    device: Device, own_workspaces: list[int]
) -> None:
    w, b = planned()
    for _ in range(2):
        w.run(b.q, b.one_tensor())  # on the CPU until then
    w.run(device.put(b.q), device.put(b.one_tensor()))
    with pytest.raises(ArgumentError, match="is on cpu but float_workspace_buffer is on cuda:0"):
        w.run(b.q, b.one_tensor())


@pytest.mark.parametrize("where", ["cpu", np.zeros(1 << 20, np.uint8)], ids=["name", "memory"])
def test_a_place_that_was_given_stays(
    device: Device, own_workspaces: list[int], where: Any
) -> None:
    b = batches.make([1, 1, 1], [9, 3, 30], 4)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(where)
    w.plan(*b.table, HQ, HKV, D, 4)
    with pytest.raises(ArgumentError, match="q: is on cuda:0 but float_workspace_buffer is on cpu"):
        w.run(device.put(b.q), device.put(b.one_tensor()))


@pytest.mark.parametrize("where", ["cuda", "cuda:0"])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_a_named_gpu_leaves_open_whose_memory_it_is(
    device: Device, own_workspaces: list[int], only_cached_runs: Any, where: str, is_ragged: bool
) -> None:
    b = batches.make([1, 1, 1], [9, 3, 30], 4)
    w: Any
    if is_ragged:
        w = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(where)
        w.plan(b.qo_indptr, b.qo_indptr, HQ, HKV, D)
        arrays = (b.q, b.q[:, :HKV], b.q[:, HKV : 2 * HKV])
    else:
        w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(where)
        w.plan(*b.table, HQ, HKV, D, 4)
        arrays = (b.q, b.one_tensor())
    arrays = [device.put(np.ascontiguousarray(x)) for x in arrays]
    first = device.get(w.run(*arrays))
    assert w._workspace.framework == array.view(arrays[0], "q").framework
    w.run(*arrays)
    only_cached_runs()
    np.testing.assert_array_equal(device.get(w.run(*arrays)), first)


def test_a_first_run_in_a_graph_stays_in_the_memory_that_is_there(
    device: Device, gpu: Any, own_workspaces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = batches.make([1, 1, 1], [9, 3, 30], 4)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper("cuda")
    w.plan(*b.table, HQ, HKV, D, 4)
    for events in ("acquire", "release"):  # between streams of two frameworks, which is one here
        monkeypatch.setattr(array, events, lambda *_: None)
    gpu.is_capturing = True
    w.run(device.put(b.q), device.put(b.one_tensor()))
    assert w._workspace.framework == "cupy"


def test_a_plan_that_the_gpu_refuses_leaves_the_wrapper_where_it_is(
    device: Device, gpu: Any, own_workspaces: list[int]
) -> None:
    w, b = planned()
    arrays = device.put(b.q), device.put(b.one_tensor())
    gpu.is_capturing = True
    with pytest.raises(PlanError, match="cannot be part of a CUDA graph"):
        w.run(*arrays)
    gpu.is_capturing = False
    w.run(b.q, b.one_tensor())
    w.run(*arrays)


def test_plans_of_another_thread_are_still_told_apart(
    device: Device, own_workspaces: list[int]
) -> None:
    w, b = planned()
    with ThreadPoolExecutor(1) as other:
        other.submit(w.plan, *b.table, HQ, HKV, D, 4).result()
        with pytest.raises(PlanError, match="another thread has planned"):
            w.run(device.put(b.q), device.put(b.one_tensor()))
        other.submit(w.run, device.put(b.q), device.put(b.one_tensor())).result()
    with pytest.raises(PlanError, match="another thread has planned"):
        w.run(device.put(b.q), device.put(b.one_tensor()))
