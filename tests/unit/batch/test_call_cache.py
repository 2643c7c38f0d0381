"""Cached runs: what they launch, which are checked again, what good runs do not excuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import batches, fake_gpu
from helpers.batches import HKV, HQ, D
from helpers.fake_batch import Device, check
from helpers.fake_gpu import Gpu, count_functions, pointer, unpack

import cupyattn
from cupyattn.engine import run_batch as run
from cupyattn.errors import ArgumentError
from cupyattn.launch.attention import batch
from cupyattn.launch.driver import params

_BIND = batch.BatchLauncher.bind


@pytest.fixture
def launched(device: Device, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The struct that a call launches a kernel with; nothing is computed."""
    monkeypatch.setattr(batch.BatchLauncher, "bind", _BIND)

    def launched(call: Callable[[], Any]) -> dict[str, Any]:
        gpu.launches.clear()
        call()
        launch, *_ = gpu.launches  # a merge may follow
        return unpack(launch.params)

    return launched


def planned(device: Device, *kv_len: int, spare: int = 3) -> tuple[Any, batches.Batch, Any, Any]:
    """A wrapper with a plan of one row a request, its batch, and arrays for q and the cache."""
    b = batches.make([1] * len(kv_len), list(kv_len), 4, spare_pages=spare)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    w.plan(*b.table, HQ, HKV, D, 4)
    return w, b, device.put(b.q), device.put(b.one_tensor())


def test_the_struct_has_one_layout() -> None:
    assert params.RUN.size == params.ATTENTION.size


def test_cached_runs_launch_the_same(device: Device, launched: Any) -> None:
    w, b, q, cache = planned(device, 9, 30)
    out, lse = device.put(b.q), device.put(np.zeros((2, HQ), np.float32))
    for options in ({}, {"k_scale": 0.5, "v_scale": 2.0}, {"lse": lse, "return_lse": True}):
        # Checked; cached and bound to the plan; cached.
        first, *others = (
            launched(lambda o=options: w.run(q, cache, out=out, **o)) for _ in range(3)
        )
        assert others == [first, first]
        assert [first[n] for n in "qkvo"] == [
            *(pointer(q), pointer(cache), pointer(cache[:, 1]), pointer(out)),
        ]
    assert first["lse"] == pointer(lse)
    q2, cache2, out2 = device.put(b.q), device.put(b.one_tensor()), device.put(b.q)
    got = launched(lambda: w.run(q2, cache2, out=out2, lse=lse, return_lse=True))
    moved = {n for n in got if got[n] != first[n]}
    assert moved == set("qkvo") and got["q"] == pointer(q2) and got["o"] == pointer(out2)


def test_another_workspace_is_used_at_once(device: Device, launched: Any) -> None:
    b = batches.make([1], [100_000], 16)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    w.plan(*b.table, HQ, HKV, D, 16)
    q, cache = device.put(b.q), device.put(b.one_tensor())
    for _ in range(2):
        before = [launched(lambda: w.run(q, cache)) for _ in range(3)][-1]
        old, new = pointer(w._workspace.owner), device.workspace()
        w.reset_workspace_buffer(new)
        after = launched(lambda: w.run(q, cache))
        for name in ("partial_o", "partial_lse"):
            assert after[name] - pointer(new) == before[name] - old


def test_another_plan_is_used_at_once(device: Device, launched: Any) -> None:
    w, b, q, cache = planned(device, 9, 30)
    before = [launched(lambda: w.run(q, cache)) for _ in range(3)][-1]
    w.plan(*b.table, HQ, HKV, D, 4, sm_scale=0.5)
    assert launched(lambda: w.run(q, cache))["sm_scale"] == 0.5
    w.forward(q, cache, logits_soft_cap=2.0)
    assert launched(lambda: w.run(q, cache))["logits_soft_cap"] == 2.0
    w.plan(*b.table, HQ, HKV, D, 4)
    after = launched(lambda: w.run(q, cache))
    assert {n: after[n] for n in ("sm_scale", "logits_soft_cap")} == {
        n: before[n] for n in ("sm_scale", "logits_soft_cap")
    }


def test_signatures_take_turns(device: Device) -> None:
    """One tensor and a pair, answers given and made, numbers for scales: run after run."""
    w, b, q, cache = planned(device, 9, 30, 0)
    pair = tuple(device.put(x) for x in b.cache)
    out, lse = device.put(np.zeros_like(b.q)), device.put(np.zeros((3, HQ), np.float32))
    for _ in range(3):
        for kv in (cache, pair):
            for given in ({}, {"out": out}, {"out": out, "lse": lse}):
                check(device, w.run(q, kv, return_lse=True, **given), b.expected())
            for number in (0.5, 2.0, 2):
                got = w.run(q, kv, k_scale=number, return_lse=True)
                check(device, got, b.expected(scale_k=float(number)))


def test_signatures_take_turns_in_the_cache(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that differ in what is given, and plans of other lengths."""
    w, b, q, cache = planned(device, 9, 30)
    other, _, q3, cache3 = planned(device, 9, 30, 5)
    pair, out = tuple(device.put(x) for x in b.cache), device.put(b.q)

    def turns() -> None:
        for given in ({}, {"out": out}):
            w.run(q, cache, **given)
            w.run(q, pair, **given)
        other.run(q3, cache3)

    for _ in range(2):
        turns()
    monkeypatch.setattr(run, "_run_checked", None)
    turns()


BAD: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "q: holds 1 rows": lambda a: {"q": a["q"][:1]},
    "paged_kv_cache: holds 3 pages": lambda a: {"paged_kv_cache": a["paged_kv_cache"][:3]},
    "paged_kv_cache.*dimension": lambda a: {"paged_kv_cache": a["paged_kv_cache"][..., :8]},
    "out: shape is": lambda a: {"out": a["out"][:1]},
    "out: overlaps q": lambda a: {"out": a["q"]},
    "out: overlaps paged_kv_cache": lambda a: {
        "out": a["paged_kv_cache"].reshape(-1)[-2 * HQ * D :].reshape(2, HQ, D)
    },
    "out: overlaps lse": lambda a: {
        "lse": a["out"].reshape(-1)[: 4 * HQ].view(a["lse"].dtype).reshape(2, HQ)
    },
    "lse: overlaps sinks": lambda a: {"sinks": a["lse"][1]},
    "lse: shape is": lambda a: {"lse": a["lse"][:1]},
    "sinks: ": lambda a: {"sinks": a["sinks"][:1]},
    "k_scale": lambda a: {"k_scale": float("nan")},
    "v_scale: got True": lambda a: {"v_scale": True},
    "q: got list": lambda a: {"q": [1.0]},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_run_is_refused_after_good_ones(device: Device, message: str) -> None:
    w, _, q, cache = planned(device, 9, 3, spare=0)
    good: dict[str, Any] = {
        "q": q,
        "paged_kv_cache": cache,
        "out": device.put(np.zeros((2, HQ, D), np.float16)),
        "lse": device.put(np.zeros((2, HQ), np.float32)),
        "sinks": device.put(np.zeros(HQ, np.float32)),
    }
    for _ in range(3):
        w.run(**good, return_lse=True)
        w.run(**good, return_lse=True, v_scale=1.0)
    count = device.stream.launches
    for _ in range(2):
        with pytest.raises(ArgumentError, match=message):
            w.run(**(good | BAD[message](good)), return_lse=True)
    assert device.stream.launches == count


@pytest.mark.parametrize("index", [0, 1])
def test_an_answer_in_one_of_a_pair_is_refused(device: Device, index: int) -> None:
    w, b, q, _ = planned(device, 9, 3)
    pair, out = [device.put(x) for x in b.cache], device.put(np.zeros_like(b.q))
    inside = pair[index].reshape(-1)[-2 * HQ * D :].reshape(2, HQ, D)
    for _ in range(3):
        w.run(q, pair, out=out)
    with pytest.raises(ArgumentError, match=rf"out: overlaps paged_kv_cache\[{index}\]"):
        w.run(q, pair, out=inside)


def test_runs_with_a_workspace_of_another_framework_are_checked(
    device: Device, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan is in order on another stream, which is then waited for."""
    w, b, q, cache = planned(device, 9, 30)
    other = "cupy" if type(q).__module__ == "torch" else "torch"
    foreign = cupyattn.BatchDecodeWithPagedKVCacheWrapper(
        fake_gpu.maker(other, monkeypatch)(1 << 20, dtype="uint8")
    )
    foreign.plan(*b.table, HQ, HKV, D, 4)
    waits: list[Any] = []
    monkeypatch.setattr(run.array, "acquire", lambda *a: waits.append(a))
    monkeypatch.setattr(run.array, "release", lambda *a: None)
    for _ in range(3):
        w.run(q, cache)
    waits.clear()
    for _ in range(3):
        foreign.run(q, cache)
    assert len(waits) == 3


def test_tensors_that_are_changed_in_place(
    device: Device, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    w, b, q, cache = planned(device, 9, 30)
    if not isinstance(q, torch.Tensor):
        pytest.skip("torch only")
    outs = [device.put(np.zeros_like(b.q)) for _ in range(5)]
    for out in outs:
        w.run(q, cache, out=out)
    outs[0].resize_(1, HQ, D)
    outs[1].as_strided_((2, HQ, D), (0, D, 1))
    outs[2].data = outs[2].to(torch.bfloat16)
    outs[3].untyped_storage().resize_(0)
    outs[4].requires_grad_()
    reasons = ("shape is", "more than once", "dtype is bfloat16", "freed", "grad")
    count = device.stream.launches
    for out, reason in zip(outs, reasons, strict=True):
        with pytest.raises(ArgumentError, match=f"out: .*{reason}"):
            w.run(q, cache, out=out)
    assert device.stream.launches == count


def test_what_is_kept_keeps_no_array_alive(device: Device) -> None:
    import gc
    import weakref

    w, b, *_ = planned(device, 9, 30)
    q, cache, out = device.put(b.q), device.put(b.one_tensor()), device.put(b.q)
    for _ in range(3):
        w.run(q, cache, out=out)
    gone = [weakref.ref(x) for x in (q, cache, out)]
    device.stream.finish()
    device.stream.kept.clear()
    del q, cache, out
    gc.collect()
    assert [x() for x in gone] == [None] * 3


def test_a_run_runs_few_functions(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks run many times as many, the first cached run of a plan a few more."""
    w, b, q, cache = planned(device, 9, 30)
    out = device.put(b.q)
    pair = cache[:, 0], cache[:, 1]
    calls: list[Callable[[], Any]] = [
        lambda: w.run(q, cache, out=out),
        lambda: w.run(q, pair, out=out),
        lambda: w.run(q, cache, out=out, k_scale=0.5),
    ]
    for call in calls:
        assert count_functions(call) > 30
        assert count_functions(call) <= 18
        with monkeypatch.context() as patch:
            patch.setattr(run, "_bind_cached", None)
            patch.setattr(run, "_run_checked", None)
            assert count_functions(call) <= 8
