"""Cached calls of one request: which calls are cached, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.fake_gpu import Gpu, Launched, count_functions, pointer, unpack

import cupyattn
from cupyattn.engine import run_single as run
from cupyattn.errors import ArgumentError, CupyAttnError, UnsupportedError

prefill, decode = cupyattn.single_prefill_with_kv_cache, cupyattn.single_decode_with_kv_cache


def no_checks(*_: object) -> None:
    raise AssertionError("the call was not cached")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_calls_of_other_lengths_are_cached(
    gpu: Gpu, make: Callable, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (600, 2, 64) if layout == "NHD" else (2, 600, 64)
    q, k, v, out = make(40, 4, 64), make(*shape), make(*shape), make(40, 4, 64)

    def calls() -> list[Launched]:
        gpu.launches.clear()
        for rows, keys in ((40, 600), (7, 600), (1, 599), (3, 16), (1, 1), (40, 40)):
            cut = slice(keys) if layout == "NHD" else (slice(None), slice(keys))
            assert prefill(q[:rows], k[cut], v[cut], kv_layout=layout, out=(o := out[:rows])) is o
            decode(q[rows - 1], k[cut], v[cut], kv_layout=layout, out=out[0])
        return gpu.attentions()

    def facts(launch: Launched) -> tuple[Any, ...]:
        got = unpack(launch.params)
        return launch.kernel, launch.grid, {n: got[n] for n in got if not n.startswith("partial")}

    first = calls()
    assert sum(map(len, run._CALLS.values())) == 2
    monkeypatch.setattr(run, "RawOptions", no_checks)
    cached = calls()
    monkeypatch.undo()
    assert [facts(launch) for launch in cached] == [facts(launch) for launch in first]


def test_cached_calls_make_outputs(
    gpu: Gpu, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = make(5, 4, 64), make(9, 2, 64), make(9, 2, 32)
    prefill(q, k, v), decode(q[0], k, v)
    monkeypatch.setattr(run, "RawOptions", no_checks)
    for rows in (5, 2):
        out = prefill(q[:rows], k, v)
        assert tuple(out.shape) == (rows, 4, 32) and out.dtype == q.dtype
        assert unpack(gpu.launches[-1].params)["o"] == pointer(out)
    out = decode(q[0], k, v)
    assert type(out) is type(q) and tuple(out.shape) == (4, 32)


BAD: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "v: holds 8 tokens but k holds 9": lambda a: {"v": a["v"][:8]},
    "out: shape is": lambda a: {"out": a["out"][:3]},
    "out: overlaps q": lambda a: {"out": a["q"]},
    "out: overlaps k": lambda a: {"out": a["k"].reshape(-1)[:1024].reshape(4, 4, 64)},
    "out: overlaps v": lambda a: {"out": a["v"].reshape(-1)[128:].reshape(4, 4, 64)},
    "k: dimension 2": lambda a: {"k": a["k"][..., :32]},
    "multiple": lambda a: {"q": a["q"][:, :3], "out": a["out"][:, :3]},
    "q: got list": lambda a: {"q": [1.0]},
    "k: got list": lambda a: {"k": [1.0]},
    "window_left": lambda a: {"window_left": -2},
    "unknown dtype": lambda a: {"o_dtype": {}},
    "kv_layout: ": lambda a: {"kv_layout": ["HND"]},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_call_is_refused_after_good_ones(gpu: Gpu, make: Callable, message: str) -> None:
    good = {"q": make(4, 4, 64), "k": make(9, 2, 64), "v": make(9, 2, 64), "out": make(4, 4, 64)}
    for _ in range(2):
        prefill(**good)
    del gpu.launches[:]
    for _ in range(2):
        with pytest.raises(CupyAttnError, match=message):
            prefill(**good | BAD[message](good))
    assert not gpu.launches


def test_bools_are_no_numbers_whatever_was_called_before(gpu: Gpu, make: Callable) -> None:
    """The cache compares scalars as Python does, to which True is 1 and 1.0; so values that are
    equal mean the same, but for bools."""
    arrays = {"q": make(4, 4, 64), "k": make(9, 2, 64), "v": make(9, 2, 64)}
    for _ in range(2):
        prefill(**arrays, q_scale=1.0, window_left=1, causal=True)
        prefill(**arrays, causal=True)
    good = {"q_scale": 1.0, "window_left": 1, "causal": True}
    for name, value in (("q_scale", True), ("window_left", True), ("q_scale", np.True_)):
        with pytest.raises(ArgumentError, match=f"{name}: got"):
            prefill(**arrays, **good | {name: value})
    gpu.launches.clear()
    for change in ({"q_scale": 1}, {"window_left": 1.0}, {"causal": 1}, {"causal": np.True_}):
        for _ in range(2):
            prefill(**arrays, **good | change)
    assert len({launch.params for launch in gpu.attentions()}) <= 8 == len(gpu.attentions())
    # A flag as a number, then as itself, which stays in the cache.
    prefill(**arrays, causal=1.0)
    for _ in range(2):
        prefill(**arrays, causal=True)
    for value in ("True", 2, None, [True]):
        with pytest.raises(ArgumentError, match="causal: got"):
            prefill(**arrays, causal=value)
        with pytest.raises(ArgumentError, match="return_lse: got"):
            prefill(**arrays, return_lse=value)


def test_uncommon_calls_are_checked(
    gpu: Gpu, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, out = make(4, 4, 64), make(9, 2, 64), make(4, 4, 64)
    for _ in range(2):
        prefill(q, k, k, out=out)
    checked: list[object] = []
    real = run._check_call
    monkeypatch.setattr(run, "_check_call", lambda *a: checked.append(a) or real(*a))
    shifted = make(4 * 4 * 64 + 1)[1:].reshape(4, 4, 64)
    lse = make(4, 4, dtype="float32")
    for _ in range(2):
        prefill(q[:0], k, k, out=out[:0])
        prefill(q, k[:0], k[:0], out=out)
        prefill(shifted, k, k, out=out)
        prefill(q, k, k, out=shifted)
        prefill(q, k, k, out=make(4, 4, 64).swapaxes(0, 1))
        prefill(q, k, k, out=out, lse=lse)
        prefill(q, k, k, out=out, sinks=lse[0])
    # Those that are not aligned, or whose output has heads first, are found in the second round.
    assert len(checked) == 11
    aligned = [launch.kernel.config["kAligned"] for launch in gpu.attentions()[2:]]
    assert aligned == [True, False, False, True, True, True] * 2


def test_rows_that_meet_from_some_length_on_are_refused(gpu: Gpu, make: Callable) -> None:
    torch = pytest.importorskip("torch")
    q, k, out = make(4, 4, 64), make(9, 2, 64), make(4, 4, 64)
    if not isinstance(q, torch.Tensor):
        pytest.skip("torch only")
    for _ in range(2):
        prefill(q[:1], k, k, out=out.as_strided((1, 4, 64), (64, 64, 1)))
        with pytest.raises(ArgumentError, match=r"out: .* more than once"):
            prefill(q, k, k, out=out.as_strided((4, 4, 64), (64, 64, 1)))


def test_grad_is_refused_by_the_mode_of_the_day(gpu: Gpu, make: Callable) -> None:
    torch = pytest.importorskip("torch")
    q, k = make(4, 4, 64), make(9, 2, 64)
    if not isinstance(q, torch.Tensor):
        pytest.skip("torch only")
    prefill(q, k, k)
    q.requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            prefill(q, k, k)
        with pytest.raises(ArgumentError, match="q: requires grad"):
            prefill(q, k, k)
    with pytest.raises(ArgumentError, match="k: is a lazily negated view"):
        prefill(q.detach(), torch._neg_view(k), k)


def test_freed_memory_is_refused(gpu: Gpu, make: Callable) -> None:
    q, k = make(4, 4, 64), make(9, 2, 64)
    for _ in range(2):
        prefill(q, k, k)
    if hasattr(k, "untyped_storage"):
        k.untyped_storage().resize_(0)
    else:
        cupy = pytest.importorskip("cupy")
        freed = type("Freed", (cupy.cuda.UnownedMemory,), {"ptr": 0})
        memory = freed(k.data.ptr, k.nbytes, k, device_id=0)
        k = cupy.ndarray(k.shape, k.dtype, cupy.cuda.MemoryPointer(memory, 0))
    with pytest.raises(ArgumentError, match=r"k: .* freed"):
        prefill(q, k, k)


def test_lengths_beyond_int32_are_refused(gpu: Gpu, make: Callable) -> None:
    torch = pytest.importorskip("torch")
    q, k = make(1, 4, 64), make(1, 2, 64)
    if not isinstance(q, torch.Tensor):
        pytest.skip("torch only")

    def call(rows: int, keys: int) -> None:
        cache = k.expand(keys, 2, 64)
        prefill(q.expand(rows, 4, 64), cache, cache)

    for _ in range(2):
        call(4, 9)
        for rows, keys in ((4, 2**31), (2**30, 9)):
            with pytest.raises(UnsupportedError, match="rows of one KV head"):
                call(rows, keys)


# --- what it costs ---


def test_a_call_runs_few_functions(gpu: Gpu, make: Callable) -> None:
    """The checks run three times as many, and each does more than its call costs."""
    q, k, out = make(4, 64), make(2048, 2, 64), make(4, 64)
    rows, answer = make(4, 4, 64), make(4, 4, 64)

    def decode_split() -> None:
        decode(q, k, k, out=out)

    def prefill_whole() -> None:
        prefill(rows, k[:16], k[:16], causal=True, out=answer)

    for call, most in ((decode_split, 16), (prefill_whole, 16)):
        assert count_functions(call) > 2 * most
        assert count_functions(call) <= most
    splits = [unpack(launch.params)["num_splits"] for launch in gpu.attentions()]
    assert splits[0] == splits[1] > 1 and splits[2:] == [1, 1]


# --- a cache that is made anew for each step, one token longer ---


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("head_dim, value_dim", [(64, 64), (128, 64)])
def test_a_cache_of_heads_first_that_grows_is_cached(
    gpu: Gpu,
    make: Callable,
    head_dim: int,
    value_dim: int,
    has_sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not hasattr(make(1), "is_contiguous"):
        pytest.skip("torch only")
    q = make(4, head_dim)

    def step(length: int) -> dict[str, Any]:
        k, v = make(2, length, head_dim), make(2, length, value_dim)
        sinks = make(4, dtype="float32") if has_sinks else None
        out = decode(q, k, v, kv_layout="HND", sinks=sinks)
        assert tuple(out.shape) == (4, value_dim)
        got = unpack(gpu.attentions()[-1].params)
        assert got["k"] == pointer(k) and got["v"] == pointer(v) and got["o"] == pointer(out)
        assert got["sinks"] == (pointer(sinks) if has_sinks else 0)
        return {name: got[name] for name in got if "stride" in name or name == "kv_len"}

    lengths, checked = (100, 101, 102, 102, 101, 2000, 16, 1), []
    for length in lengths:
        run._GROWING.clear()
        checked.append(step(length))
    assert [x["kv_len"] for x in checked] == list(lengths)
    monkeypatch.setattr(run, "RawOptions", no_checks)
    assert [step(length) for length in lengths] == checked


def test_growing_caches_are_refused_as_others_are(gpu: Gpu, make: Callable) -> None:
    if not hasattr(make(1), "is_contiguous"):
        pytest.skip("torch only")
    q, out = make(4, 64), make(4, 64)
    for length in (9, 10, 10, 11):
        decode(q, make(2, length, 64), make(2, length, 64), kv_layout="HND", out=out)
    gpu.launches.clear()
    bad = {
        "v: dimension 1 .* wanted 11, the kv_len": (make(2, 11, 64), make(2, 12, 64)),
        "k: dimension 2": (make(2, 11, 32), make(2, 11, 64)),
        "v: dimension 0": (make(2, 11, 64), make(1, 11, 64)),
        "4 query heads over 3 KV heads": (make(3, 11, 64), make(3, 11, 64)),
    }
    for message, (k, v) in bad.items():
        with pytest.raises(CupyAttnError, match=message):
            decode(q, k, v, kv_layout="HND", out=out)
    k = make(2, 11, 64)
    sinks = make(4, dtype="float32")
    for _ in range(3):
        decode(q, k, k, kv_layout="HND", out=out, sinks=sinks)
    gpu.launches.clear()
    for wrong in (sinks[:3], make(4), sinks[None]):
        with pytest.raises(ArgumentError, match="sinks: "):
            decode(q, k, k, kv_layout="HND", out=out, sinks=wrong)
    with pytest.raises(ArgumentError, match="out: overlaps k"):
        decode(q, k, make(2, 11, 64), kv_layout="HND", out=k.reshape(-1)[128:384].reshape(4, 64))
    assert not gpu.launches

    class Strange:
        is_contiguous = 3

    for wrong in (Strange(), k.to_sparse()):
        with pytest.raises(CupyAttnError, match="k: "):
            decode(q, wrong, k, kv_layout="HND", out=out)
    assert not gpu.launches
    one = make(1, 11, 64)  # other numbers of heads are calls of their own
    for _ in range(2):
        decode(q, one, one, kv_layout="HND", out=out)
        decode(q, k, k, kv_layout="HND", out=out)
    assert [unpack(x.params)["num_kv_heads"] for x in gpu.attentions()] == [1, 2, 1, 2]


def test_geometries_of_one_problem_share_its_plans(
    gpu: Gpu, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, made = make(4, 64), []
    launcher = run.AttentionLauncher
    monkeypatch.setattr(run, "AttentionLauncher", lambda *x: made.append(x) or launcher(*x))
    for length in (9, 10, 11):
        room = make(length, 4, 64)
        decode(q, room[:, :2], room[:, 2:])
        decode(q, make(length, 2, 64), make(length, 2, 64))
    assert len(made) == 1
