"""Streams, graphs, threads, growing caches and far offsets: where a launch meets the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import cases, compare, gpu_cases, shared_wrapper
from helpers.calls import Answer
from helpers.poison import download, raw, upload
from helpers.share import some
from helpers.single_calls import Call

import cupyattn

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

# Cycles of a kernel that only waits: tens of milliseconds, far longer than the host needs.
_LONG = 100_000_000


def other_inputs(call: Call) -> dict[str, Any]:
    """Inputs of the same shapes with other values."""
    return cases.make_inputs(replace(call.case, seed=call.case.seed + 1000))


def expected(call: Call, inputs: dict[str, Any]) -> Answer:
    """What an ordinary call of the same kind answers for `inputs`, on arrays of its own."""
    plain = Call(call.case, cupy)
    plain.inputs = plain.inputs | {name: inputs[name] for name in "qkv"}
    overwrite(plain, copies(inputs, cupy))
    answers = plain.run()
    plain.check(*answers)
    return answers


def copies(inputs: dict[str, Any], xp: ModuleType) -> dict[str, Any]:
    return {name: upload(inputs[name], xp) for name in "qkv"}


def overwrite(call: Call, sources: dict[str, Any]) -> None:
    """Copy new values into the call's arrays, on the current stream of their framework."""
    for name, source in sources.items():
        raw(call.arrays[name])[...] = raw(source)


def assert_same(got: Answer, wanted: Answer, what: object) -> None:
    for a, b in zip(got, wanted, strict=True):
        compare.assert_bitwise_equal(a, b, what)


# --- streams ---


@pytest.mark.parametrize("name", gpu_cases.STEADY)
def test_torch_stream_orders_inputs_and_outputs(torch: Any, name: str) -> None:
    call = Call(gpu_cases.STEADY[name], torch)
    inputs = other_inputs(call)
    wanted, sources = expected(call, inputs), copies(inputs, torch)
    call.start()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_LONG)
        overwrite(call, sources)
        call.start()
        copy = raw(call.out.buffer).clone()
    stream.synchronize()
    assert_same(call.answers(), wanted, name)
    assert torch.equal(copy, raw(call.out.buffer))


@pytest.mark.parametrize("name", gpu_cases.STEADY)
def test_cupy_stream_orders_inputs_and_outputs(torch: Any, name: str) -> None:
    call = Call(gpu_cases.STEADY[name], cupy)
    inputs = other_inputs(call)
    wanted = expected(call, inputs)
    sources = copies(inputs, cupy)
    call.start()
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(_LONG)
        overwrite(call, sources)
        call.start()
        copy = raw(call.out.buffer).copy()
        stream.synchronize()
    assert_same(call.answers(), wanted, name)
    assert bool((copy == raw(call.out.buffer)).all())


@pytest.mark.parametrize("name", gpu_cases.SPLIT_STEADY)
def test_interleaved_streams_share_no_scratch(torch: Any, name: str) -> None:
    """Split launches on three streams at a time, many rounds before anybody waits."""
    calls = [Call(gpu_cases.STEADY[name], torch) for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in calls]
    wanted = expected(calls[0], calls[0].inputs)
    torch.cuda.synchronize()
    for _ in range(some(60)):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                call.start()
    torch.cuda.synchronize()
    for call in calls:
        assert_same(call.answers(), wanted, name)


def test_threads_do_not_disturb_each_other(torch: Any) -> None:
    """Each thread on a stream of its own, from its first call of the library on."""
    failures: list[str] = []

    def work(name: str) -> None:
        try:
            call = Call(gpu_cases.STEADY[name], torch)
            torch.cuda.synchronize()
            start.wait(timeout=60)
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    call.start()
                    torch.cuda.current_stream().synchronize()
                    assert_same(call.answers(), wanted[name], name)
        except BaseException as error:
            failures.append(f"{name}: {error!r}")

    names = ("decode", "append", "prefill", "decode")
    wanted = {}
    for name in names:
        call = Call(gpu_cases.STEADY[name], cupy)
        wanted[name] = expected(call, call.inputs)
    start = threading.Barrier(len(names))
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failures and not any(thread.is_alive() for thread in threads), failures


def test_threads_on_their_own_default_streams() -> None:
    """One handle stands for all of these streams: launches of several threads run at once."""
    failures: list[str] = []

    def work(name: str) -> None:
        try:
            with cupy.cuda.Stream.ptds as stream:
                call = Call(gpu_cases.STEADY[name], cupy)
                stream.synchronize()
                start.wait(timeout=60)
                for _ in range(100):
                    for _ in range(5):
                        call.start()
                    stream.synchronize()
                    assert_same(call.answers(), wanted[name], name)
        except BaseException as error:
            failures.append(f"{name}: {error!r}")

    names = (*gpu_cases.SPLIT_STEADY, *gpu_cases.SPLIT_STEADY)
    wanted = {}
    for name in gpu_cases.SPLIT_STEADY:
        call = Call(gpu_cases.STEADY[name], cupy)
        wanted[name] = expected(call, call.inputs)
    start = threading.Barrier(len(names))
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failures and not any(thread.is_alive() for thread in threads), failures


# --- graphs ---


@pytest.mark.parametrize("name", gpu_cases.STEADY)
def test_torch_graph(torch: Any, name: str) -> None:
    call = Call(gpu_cases.STEADY[name], torch)
    call.start()
    torch.cuda.synchronize()
    eager = call.answers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.start()
    check_replays(torch, call, graph.replay, eager)


@pytest.mark.parametrize("name", gpu_cases.SPLIT_STEADY)
def test_torch_graph_of_many_layers(torch: Any, name: str) -> None:
    """Launches of one graph follow each other on one stream, with scratch each."""
    calls = [Call(gpu_cases.STEADY[name], torch) for _ in range(4)]
    for call in calls:
        call.start()
    torch.cuda.synchronize()
    wanted = calls[0].answers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call.start()
    for call in calls:
        raw(call.out.array)[...] = 0
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for call in calls:
        assert_same(call.answers(), wanted, name)


@pytest.mark.parametrize("name", gpu_cases.SPLIT_STEADY)
def test_torch_graph_replays_beside_eager_calls(torch: Any, name: str) -> None:
    """The graph may run on any stream, while others use the scratch of eager launches."""
    captured, eager = (Call(gpu_cases.STEADY[name], torch) for _ in range(2))
    eager.start()
    captured.start()
    torch.cuda.synchronize()
    wanted = eager.answers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.start()
    side = torch.cuda.Stream()
    for _ in range(some(50)):
        with torch.cuda.stream(side):
            graph.replay()
        eager.start()
    torch.cuda.synchronize()
    assert_same(captured.answers(), wanted, name)
    assert_same(eager.answers(), wanted, name)


@pytest.mark.parametrize("name", gpu_cases.STEADY)
def test_cupy_graph(torch: Any, name: str) -> None:
    call = Call(gpu_cases.STEADY[name], cupy)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        call.start()
        stream.synchronize()
        eager = call.answers()
        stream.begin_capture()
        call.start()
        graph = stream.end_capture()
    # What the capture borrowed from CuPy's pool must not be handed out again.
    strangers = [cupy.full(size, np.nan, np.float32) for size in (10**3, 10**4, 10**5, 10**6)] * 4

    def replay() -> None:
        graph.launch(stream)
        stream.synchronize()

    check_replays(torch, call, replay, eager)
    assert all(bool(cupy.isnan(x).all()) for x in strangers)


def check_replays(torch: Any, call: Call, replay: Callable[[], None], eager: Answer) -> None:
    """Replays answer as the eager call did, again and again, and for new values of the inputs."""
    for _ in range(3):
        raw(call.out.array)[...] = 0
        torch.cuda.synchronize()
        replay()
        torch.cuda.synchronize()
        assert_same(call.answers(), eager, call.case)
    inputs = other_inputs(call)
    wanted = expected(call, inputs)
    overwrite(call, copies(inputs, torch if type(call.out.array).__module__ == "torch" else cupy))
    torch.cuda.synchronize()
    replay()
    torch.cuda.synchronize()
    assert_same(call.answers(), wanted, call.case)


# --- lengths and offsets ---


def test_a_decode_loop_over_growing_lengths() -> None:
    """One geometry, every length around tile and split edges, a NaN past each."""
    heads, kv_heads, dim, longest = 8, 2, 128, 9000
    rng = np.random.default_rng(0)
    bf16 = gpu_cases.PLAIN.out_dtype
    shapes = ((1, heads, dim), (longest, kv_heads, dim), (longest, kv_heads, dim))
    q, k, v = (rng.standard_normal(shape).astype(bf16) for shape in shapes)
    query, keys, values = (upload(x, cupy) for x in (q, k, v))
    empty = np.full(k.shape, np.nan, bf16)
    cache = {"k": (upload(empty, cupy), keys), "v": (upload(empty, cupy), values)}
    edges = {edge + d for edge in (64, 128, 1024, 2048, 4096, 8192) for d in (-1, 0, 1)}
    for kv_len in sorted({*range(0, 40), *edges, 3333, 5001, 8999}):
        for filled, source in cache.values():
            raw(filled)[:kv_len] = raw(source)[:kv_len]
        out, lse = cupyattn.single_decode_with_kv_cache(
            query[0], cache["k"][0][:kv_len], cache["v"][0][:kv_len], return_lse=True
        )
        case = replace(gpu_cases.PLAIN, qo_len=1, kv_len=kv_len, seed=kv_len)
        inputs = dict.fromkeys(("mask", "sinks", "scale_q", "scale_k", "scale_v"))
        inputs |= {"q": q, "k": k[:kv_len], "v": v[:kv_len]}
        ref, low = cases.reference(case, inputs), cases.low_precision(case, inputs)
        host = download(out)[None], download(lse)[None]
        compare.assert_close(*host, *ref, *low, what=case, p_dtype=bf16)


@pytest.mark.large(gib=20)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("far", ["token", "head"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("qo_len", [1, 40])
def test_offsets_beyond_32_bits(layout: str, far: str, kv_dtype: str, qo_len: int) -> None:
    """q, k, v and out spread so far that the last element is 2^31 elements and more away."""
    plain = replace(gpu_cases.PLAIN, kv_dtype=kv_dtype, kv_layout=layout, causal=True)
    case = replace(plain, qo_len=qo_len, kv_len=45)
    inputs = cases.make_inputs(case)
    axis = int((layout == "HND") == (far == "token"))
    q_axis = int(qo_len == 1 or far == "head")
    k, v = (spread(inputs[name], axis) for name in "kv")
    q, out = (spread(x, q_axis) for x in (inputs["q"], np.zeros_like(inputs["q"])))
    _, lse = cupyattn.single_prefill_with_kv_cache(
        q, k, v, causal=True, kv_layout=layout, out=out, return_lse=True
    )
    ref, low = cases.reference(case, inputs), cases.low_precision(case, inputs)
    got = cupy.ascontiguousarray(raw(out)).get().view(case.out_dtype)
    compare.assert_close(got, lse.get(), *ref, *low, what=case, p_dtype=case.out_dtype)


def spread(x: np.ndarray, axis: int) -> Any:
    """x on the device, with 2^31 elements and more from the first to the last along `axis`."""
    other = 1 - axis
    step = (1 << 31) // (x.shape[axis] - 1) + x.shape[other] * x.shape[2] + 15
    step = step // 16 * 16
    size = step * (x.shape[axis] - 1) + x.shape[other] * x.shape[2]
    assert size > 1 << 31
    # As plain integers: CuPy refuses to make arrays of fp8, though it views memory as such.
    memory = cupy.empty(size, f"int{8 * x.itemsize}")
    strides = [x.shape[2] * x.itemsize, x.shape[2] * x.itemsize, x.itemsize]
    strides[axis] = step * x.itemsize
    view = cupy.lib.stride_tricks.as_strided(memory, x.shape, strides)
    view[...] = raw(upload(x, cupy))
    return view.view(x.dtype)


@pytest.mark.large(gib=4)
def test_more_row_tiles_than_a_grid_is_high() -> None:
    """Rows that repeat, so that their answers do too."""
    period, dim = 1000, 8
    case = replace(gpu_cases.PLAIN, qo_len=period, kv_len=20, num_kv_heads=1, group=1)
    case = replace(case, head_dim_qk=dim, head_dim_vo=dim)
    inputs = cases.make_inputs(case)
    count = 65_536 * 128 // period + 1
    q = cupy.tile(raw(upload(inputs["q"], cupy)), (count, 1, 1)).view(case.out_dtype)
    k, v = (upload(inputs[name], cupy) for name in "kv")
    out = download(cupyattn.single_prefill_with_kv_cache(q, k, v)).reshape(count, period, 1, dim)
    ref, low = cases.reference(case, inputs), cases.low_precision(case, inputs)
    compare.assert_close(out[0], None, *ref, *low, what=case)
    bits = out.view(np.uint16)
    assert (bits == bits[0]).all(), "answers differ from one repetition to the next"


@pytest.mark.large(gib=4)
def test_a_mask_of_more_bits_than_32_bits_count() -> None:
    """All but a few keys of the last rows are hidden, behind more than 2^31 bits."""
    qo_len, kv_len, dim = 4100, 2**19 + 7, 64
    rng = np.random.default_rng(0)
    bf16 = gpu_cases.PLAIN.out_dtype
    shapes = [(n, 1, dim) for n in (qo_len, kv_len, kv_len)]
    q, k, v = (rng.standard_normal(shape, np.float32).astype(bf16) for shape in shapes)
    keys = np.sort(rng.choice(kv_len, 200, replace=False))
    rows = [0, qo_len - 2, qo_len - 1]
    packed = np.zeros(-(-qo_len * kv_len // 8), np.uint8)
    for row in rows:
        bits = row * kv_len + keys
        np.bitwise_or.at(packed, bits // 8, (1 << bits % 8).astype(np.uint8))
    out, lse = cupyattn.single_prefill_with_kv_cache(
        *(cupy.asarray(x.view(np.uint16)).view(bf16) for x in (q, k, v)),
        packed_custom_mask=cupy.asarray(packed),
        return_lse=True,
    )
    case = replace(gpu_cases.PLAIN, qo_len=3, kv_len=200, head_dim_qk=dim, head_dim_vo=dim)
    inputs = dict.fromkeys(("mask", "sinks", "scale_q", "scale_k", "scale_v"))
    inputs |= {"q": q[rows], "k": k[keys], "v": v[keys]}
    ref, low = cases.reference(case, inputs), cases.low_precision(case, inputs)
    got = download(out)[rows], download(lse)[rows]
    compare.assert_close(*got, *ref, *low, what="rows behind a long mask")
    hidden = np.delete(np.arange(qo_len), rows)
    assert (download(out)[hidden] == 0).all() and np.isneginf(download(lse)[hidden]).all()


def test_threads_that_share_a_wrapper() -> None:
    """Each thread plans and runs; a run is right, or refused because another thread has planned."""
    q, pages = (upload(x, cupy) for x in shared_wrapper.pool())
    wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper("cuda")
    answers = shared_wrapper.plan_and_run(wrapper, q, pages)
    assert any(answers)
    for index, outs in enumerate(answers):
        assert isinstance(outs, list), outs
        for out in outs:
            wanted = shared_wrapper.wanted(index)
            np.testing.assert_allclose(download(out), wanted, rtol=2e-3, atol=2e-3)
