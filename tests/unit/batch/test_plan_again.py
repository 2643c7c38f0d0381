"""Plans from tables on a GPU that is not there: later ones skip checks that earlier ones passed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import batches
from helpers.batches import HKV, HQ, D
from helpers.fake_batch import Device, check, memory
from helpers.fake_gpu import pointer
from helpers.patching import replace

import cupyattn
from cupyattn.engine import requests
from cupyattn.errors import ArgumentError, CupyAttnError, PlanError, UnsupportedError

KINDS = ("decode", "paged", "ragged")


def wrapper_of(device: Device, kind: str) -> Any:
    classes = {
        "decode": cupyattn.BatchDecodeWithPagedKVCacheWrapper,
        "paged": cupyattn.BatchPrefillWithPagedKVCacheWrapper,
        "ragged": cupyattn.BatchPrefillWithRaggedKVCacheWrapper,
    }
    return classes[kind](device.workspace())


def batch_of(kind: str, seed: int, page_size: int = 4) -> batches.Batch:
    """Another number of requests, rows and pages for each seed."""
    rng = np.random.default_rng(seed)
    count = 3 + seed % 3
    rows = [1] * count if kind == "decode" else rng.integers(1, 5, count).tolist()
    return batches.make(rows, rng.integers(5, 60, count).tolist(), page_size, seed=seed)


def tables_of(kind: str, b: batches.Batch) -> list[np.ndarray]:
    if kind == "ragged":
        return [b.qo_indptr, b.kv_indptr]
    return [*b.table] if kind == "decode" else [b.qo_indptr, *b.table]


def plan(w: Any, kind: str, tables: list[Any], page_size: int = 4, **options: Any) -> None:
    sizes = (HQ, HKV, D) if kind == "ragged" else (HQ, HKV, D, page_size)
    if kind != "decode":
        options = {"causal": True, **options}
    w.plan(*tables, *sizes, **options)


def run(device: Device, w: Any, kind: str, b: batches.Batch) -> None:
    """Run the plan, and check the answer."""
    arrays = map(device.put, b.ragged()) if kind == "ragged" else (device.put(b.one_tensor()),)
    check(device, w.run(device.put(b.q), *arrays, return_lse=True), b.expected(causal=True))


def only_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on plans have to be like earlier ones."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a checked plan where a known one was expected")

    for reader in (requests.read_paged, requests.read_ragged):
        replace(monkeypatch, reader, refuse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_other_tables(
    device: Device, kind: str, page_size: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(4):
        # The ids of pages stay 32 bits wide: others are copied, so they are checked.
        b, w = batch_of(kind, seed, page_size), wrapper_of(device, kind)
        given = [x if x is b.table[1] else x.astype(dtype) for x in tables_of(kind, b)]
        tables = [device.put(x) for x in given]
        plan(w, kind, tables, page_size)
        run(device, w, kind, b)
        if not seed:
            only_again(monkeypatch)
    assert all(made == (kind == "decode") for made in device.stream.readings)


def test_a_plan_follows_what_its_tables_hold(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same arrays, written anew between plans of one wrapper."""
    w = wrapper_of(device, "decode")
    b = batch_of("decode", 0)
    tables = [device.put(x) for x in b.table]
    plan(w, "decode", tables)
    only_again(monkeypatch)
    for last in (1, 3, 2):
        device.stream.finish()
        b.table[2][...] = last
        memory(pointer(tables[2]), b.table[2].dtype, len(b.table[2]))[...] = last
        plan(w, "decode", tables)
        pages = np.diff(b.table[0])
        assert w._current.batch.requests.kv_len.tolist() == ((pages - 1) * 4 + last).tolist()


BAD: dict[str, tuple[int, Callable[[np.ndarray], Any]]] = {
    "offsets fall": (0, lambda x: np.array([*x[:-1], -1])),
    "offsets begin below 0": (0, lambda x: x - 1),
    "pages that are not listed": (1, lambda x: x[:2]),
    "an empty last page": (2, lambda x: 0 * x),
    "a last page too full": (2, lambda x: 0 * x + 5),
    "a length too many": (2, lambda x: np.append(x, 1)),
    "a request too many": (0, lambda x: np.append(x, x[-1])),
}


def spoilt_tables(kind: str, tables: Sequence[Any], name: str) -> list[Any]:
    """Tables of which one is wrong, as BAD has it."""
    place, spoil = BAD[name]
    place += kind == "paged"
    spoilt = list(tables)
    spoilt[place] = spoil(spoilt[place]).astype(np.int32)
    return spoilt


def refused(call: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises(CupyAttnError) as caught:
        call()
    return caught.type, str(caught.value)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("kind", ["decode", "paged"])
def test_errors_are_those_of_tables_on_the_host(device: Device, kind: str, name: str) -> None:
    """They come before and after a good plan, which stays as it was."""
    w, b = wrapper_of(device, kind), batch_of(kind, 1)
    tables = tables_of(kind, b)
    spoilt = spoilt_tables(kind, tables, name)
    wanted = refused(lambda: plan(wrapper_of(device, kind), kind, spoilt))
    on_gpu = [device.put(x) for x in spoilt]
    assert refused(lambda: plan(w, kind, on_gpu)) == wanted
    plan(w, kind, [device.put(x) for x in tables])
    assert refused(lambda: plan(w, kind, on_gpu)) == wanted
    run(device, w, kind, b)


def test_too_many_keys(device: Device) -> None:
    w = wrapper_of(device, "decode")
    b = batch_of("decode", 0)
    plan(w, "decode", [device.put(x) for x in b.table])
    indptr = b.table[0].astype(np.int64)
    for x, kind in ((2**31, UnsupportedError), (2**29, ArgumentError)):
        tables = [device.put(y) for y in (indptr, *b.table[1:])]
        tables[0] = device.put(np.where(indptr == indptr[-1], x, indptr))
        with pytest.raises(kind):
            plan(w, "decode", tables)


def test_other_arguments_are_checked(device: Device) -> None:
    for kind in KINDS:
        w, b = wrapper_of(device, kind), batch_of(kind, 2)
        tables = [device.put(x) for x in tables_of(kind, b)]
        plan(w, kind, tables)
        plan(w, kind, tables, sm_scale=0.5)
        assert w._current.geometry.spec.sm_scale == 0.5
        with pytest.raises(ArgumentError, match="window_left"):
            plan(w, kind, tables, window_left=-7)
        with pytest.raises(ArgumentError, match="disable_split_kv"):
            plan(w, kind, tables, disable_split_kv="no")
        plan(w, kind, tables)
        run(device, w, kind, b)


def test_tables_of_another_form(device: Device) -> None:
    """Strided ones and ones on the host are read as ever."""
    w, b = wrapper_of(device, "decode"), batch_of("decode", 1)
    tables = [device.put(x) for x in b.table]
    plan(w, "decode", tables)
    for place in range(3):
        for other in (b.table[place], device.put(np.repeat(b.table[place], 2))[::2]):
            mixed = [*tables]
            mixed[place] = other
            plan(w, "decode", mixed)
            run(device, w, "decode", b)


def test_not_while_a_graph_is_captured(device: Device, gpu: Any) -> None:
    w, b = wrapper_of(device, "decode"), batch_of("decode", 1)
    tables = [device.put(x) for x in b.table]
    for _ in range(2):
        gpu.is_capturing = True
        with pytest.raises(PlanError, match="call it before the capture"):
            plan(w, "decode", tables)
        gpu.is_capturing = False
        plan(w, "decode", tables)
        run(device, w, "decode", b)


def test_workspace_sizes(device: Device) -> None:
    for kind in KINDS:
        w, b = wrapper_of(device, kind), batch_of(kind, 2)
        tables = tables_of(kind, b)
        sizes = (HQ, HKV, D) if kind == "ragged" else (HQ, HKV, D, 4)
        # Page ids on the host take room of the wrapper's own.
        if kind != "ragged":
            tables[-2] = device.put(tables[-2])
        wanted = w.workspace_size(*tables, *sizes)
        on_gpu = [device.put(x) if type(x) is np.ndarray else x for x in tables]
        plan(w, kind, on_gpu)
        assert w.workspace_size(*on_gpu, *sizes) == wanted


def test_a_failing_plan_leaves_the_list_of_the_one_before(device: Device) -> None:
    w, b = wrapper_of(device, "decode"), batch_of("decode", 1)
    plan(w, "decode", [device.put(x) for x in b.table])
    other = batch_of("decode", 4)
    tables = [device.put(x) for x in other.table]
    with pytest.raises(ArgumentError, match="indices: shape"):
        plan(w, "decode", [tables[0], device.put(other.table[1][:2]), tables[2]])
    run(device, w, "decode", b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("has_ids_on_device", [False, True])
def test_other_tables_on_the_host(
    device: Device,
    kind: str,
    page_size: int,
    dtype: str,
    has_ids_on_device: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later plans of a wrapper are made again, whatever their lengths are; each runs its own."""
    w = wrapper_of(device, kind)
    for seed in range(4):
        b = batch_of(kind, seed, page_size)
        tables: list[Any] = [x.astype(dtype) for x in tables_of(kind, b)]
        if kind != "ragged" and has_ids_on_device:
            tables[-2] = device.put(b.table[1])
        plan(w, kind, tables, page_size)
        run(device, w, kind, b)
        if not seed:
            only_again(monkeypatch)
    assert not device.stream.readings


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("kind", ["decode", "paged"])
def test_errors_of_later_plans_are_those_of_the_first(device: Device, kind: str, name: str) -> None:
    w, b = wrapper_of(device, kind), batch_of(kind, 1)
    tables = tables_of(kind, b)
    spoilt = spoilt_tables(kind, tables, name)
    wanted = refused(lambda: plan(wrapper_of(device, kind), kind, spoilt))
    for _ in range(2):
        plan(w, kind, tables)
        assert refused(lambda: plan(w, kind, spoilt)) == wanted
        run(device, w, kind, b)


@pytest.mark.parametrize("kind", KINDS)
def test_rare_tables_on_the_host_are_planned_as_ever(device: Device, kind: str) -> None:
    """Requests without pages, or without rows, between plans of others."""
    w, b = wrapper_of(device, kind), batch_of(kind, 1)
    for rows, keys in (([1, 1, 1], [7, 0, 9]), ([2, 0, 3], [9, 12, 5])):
        if kind == "decode" and 0 in rows:
            continue
        plan(w, kind, tables_of(kind, b))
        rare = batches.make(rows, keys, 4, seed=3)
        plan(w, kind, tables_of(kind, rare))
        run(device, w, kind, rare)


def test_other_arguments_beside_tables_on_the_host(device: Device) -> None:
    for kind in KINDS:
        w, b = wrapper_of(device, kind), batch_of(kind, 2)
        tables = tables_of(kind, b)
        for scale in (0.5, 0.25, 0.25):
            plan(w, kind, tables, sm_scale=scale)
            assert w._current.geometry.spec.sm_scale == scale
        with pytest.raises(ArgumentError, match="window_left"):
            plan(w, kind, tables, window_left=True, sm_scale=0.25)
        plan(w, kind, tables)
        run(device, w, kind, b)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("has_ids_on_device", [False, True])
def test_an_idle_gpu_makes_the_list_of_tables_on_the_host(
    device: Device, gpu: Any, page_size: int, dtype: str, has_ids_on_device: bool
) -> None:
    """It reads them in pinned memory. While it works on something else the host makes the list,
    which is the same one."""
    w, lists = wrapper_of(device, "decode"), []
    for seed in (0, 1, 1, 2, 2, 3):
        gpu.api.is_idle = lambda stream: seed % 2 == 1  # noqa: B023 (called at once)
        b = batch_of("decode", seed, page_size)
        tables: list[Any] = [x.astype(dtype) for x in b.table]
        if has_ids_on_device:
            tables[1] = device.put(b.table[1])
        plan(w, "decode", tables, page_size)
        run(device, w, "decode", b)
        prepared = w._current.prepared[w._current.geometry.default_variant]
        lists.append((prepared.schedule.parts, prepared.schedule.workspace_bytes))
    assert device.stream.readings == [True] * 3
    gpu.api.is_idle = lambda stream: False
    for seed, made in zip((1, 3), (lists[1], lists[5]), strict=True):
        b = batch_of("decode", seed, page_size)
        plan(w, "decode", [*b.table], page_size)
        schedule = w._current.prepared[w._current.geometry.default_variant].schedule
        assert (schedule.parts, schedule.workspace_bytes) == made


def test_an_idle_gpu_may_be_asked_while_runs_of_earlier_plans_wait(
    device: Device, gpu: Any
) -> None:
    """Each plan's list and page table stay where they are until its runs are over."""
    gpu.api.is_idle = lambda stream: True
    w, answers = wrapper_of(device, "decode"), []
    for seed in range(4):
        b = batch_of("decode", seed)
        plan(w, "decode", [*b.table])
        pages = device.put(b.one_tensor())
        answers.append((w.run(device.put(b.q), pages, return_lse=True), b.expected(causal=True)))
    for got, wanted in answers:
        check(device, got, wanted)


def test_the_host_remembers_lists_of_equal_lengths(device: Device, gpu: Any) -> None:
    gpu.api.is_idle = lambda stream: True
    w = wrapper_of(device, "decode")
    for keys in (9, 9, 10, 40):
        b = batches.make([1] * 5, [keys] * 5, 4, seed=keys)
        plan(w, "decode", [*b.table])
        run(device, w, "decode", b)
    assert not device.stream.readings
