"""Calls of XLA's on a GPU that is not there: what is launched again is what was launched."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cupy")

from helpers import fake_gpu
from helpers.patching import replace
from helpers.xla_frames import XlaCall

import cupyattn.integrations.jax as door
from cupyattn.array import memory
from cupyattn.core import recording
from cupyattn.engine import latent_rows as latent
from cupyattn.errors import ArgumentError
from cupyattn.integrations import xla_ffi
from cupyattn.launch.attention import find_items
from cupyattn.launch.driver import scratch

H, HK, D = 16, 8, 128
ATTENTION = {"is_causal": True}
LATENT = {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_seq_len": 64}
Make = Callable[..., Any]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_gpu.Gpu:
    made = fake_gpu.pretend(monkeypatch)
    fake_gpu.forget()
    monkeypatch.setattr(door, "_owner", lambda buffers: 0)
    monkeypatch.setattr(door, "as_stream", lambda pointer: contextlib.nullcontext())
    monkeypatch.setattr(door, "_sites", {})
    # Tensor maps are made by libcuda, which need not be here.
    monkeypatch.setattr(latent, "_boxes", lambda pages: None)
    return made


@pytest.fixture
def make(gpu: fake_gpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> Make:
    made = fake_gpu.maker("cupy", monkeypatch)
    replace(monkeypatch, memory.from_numpy, lambda a, like: made(*a.shape, dtype=a.dtype.name))
    return made


def _dense(make: Make) -> tuple[Any, ...]:
    arrays = {"query": make(1, 1, H, D), "key": make(1, 64, HK, D), "value": make(1, 64, HK, D)}
    return "dot_product_attention", arrays, [make(1, 1, H, D)], ATTENTION


def _split(make: Make) -> tuple[Any, ...]:
    arrays = {"query": make(1, 1, H, D), "key": make(1, 9000, HK, D), "value": make(1, 9000, HK, D)}
    return "dot_product_attention", arrays, [make(1, 1, H, D)], ATTENTION


def _batch(make: Make) -> tuple[Any, ...]:
    arrays = {"query": make(2, 3, H, D), "key": make(2, 64, HK, D), "value": make(2, 64, HK, D)}
    return "dot_product_attention", arrays, [make(2, 3, H, D)], ATTENTION


def _paged(make: Make) -> tuple[Any, ...]:
    arrays = {"query": make(4, 1, H, D), "key": make(64, 16, HK, D), "value": make(64, 16, HK, D)}
    arrays |= {"block_table": make(4, 8, dtype="int32"), "kv_lens": make(4, dtype="int32")}
    return "dot_product_attention", arrays, [make(4, 1, H, D)], ATTENTION


def _first(make: Make) -> tuple[Any, ...]:
    """The first query at the first key: fewer keys, seen by strides of more."""
    arrays = {"query": make(1, 3, H, D), "key": make(1, 64, HK, D), "value": make(1, 64, HK, D)}
    constants = ATTENTION | {"causal_alignment": "first"}
    return "dot_product_attention", arrays, [make(1, 3, H, D)], constants


def _single(make: Make) -> tuple[Any, ...]:
    arrays = {"q": make(9, H, D), "k": make(64, HK, D), "v": make(64, HK, D)}
    return "single_prefill_with_kv_cache", arrays, [make(9, H, D)], {"causal": True}


def _trtllm(make: Make) -> tuple[Any, ...]:
    arrays = {"query": make(4, H, D), "kv_cache.0": make(64, 16, HK, D)}
    arrays |= {"kv_cache.1": make(64, 16, HK, D), "block_tables": make(4, 8, dtype="int32")}
    arrays |= {"seq_lens": make(4, dtype="int32")}
    constants = {"max_seq_len": 128, "bmm1_scale": 0.1, "bmm2_scale": 1.0, "kv_layout": "NHD"}
    outputs = [make(4, H, D), make(4, H, dtype="float32")]
    return "trtllm_batch_decode_with_kv_cache", arrays, outputs, constants


def _append(make: Make) -> tuple[Any, ...]:
    index = {"batch_indices": 4, "positions": 4, "kv_indices": 32, "kv_indptr": 5}
    index |= {"kv_last_page_len": 4}
    arrays = {"append_key": make(4, HK, D), "append_value": make(4, HK, D)}
    arrays |= {name: make(count, dtype="int32") for name, count in index.items()}
    pages = [make(32, 16, HK, D) for _ in "kv"]
    arrays |= {f"paged_kv_cache.{at}": x for at, x in enumerate(pages)}
    return "append_paged_kv_cache", arrays, pages, {}


def _latent(make: Make) -> tuple[Any, ...]:
    arrays = {"query": make(4, 1, H, 576), "kv_cache": make(64, 16, 576)}
    arrays |= {"block_tables": make(4, 4, dtype="int32"), "seq_lens": make(4, dtype="int32")}
    outputs = [make(4, 1, H, 512), make(4, 1, H, dtype="float32")]
    return "trtllm_batch_decode_with_kv_cache_mla", arrays, outputs, LATENT


def _merge(make: Make) -> tuple[Any, ...]:
    arrays = {"v_a": make(4, H, D), "s_a": make(4, H, dtype="float32")}
    arrays |= {"v_b": make(4, H, D), "s_b": make(4, H, dtype="float32")}
    outputs = [make(4, H, D), make(4, H, dtype="float32")]
    return "merge_state", arrays, outputs, {"lse_base_on_e": False}


CALLS = {
    "dense": _dense, "split": _split, "batch": _batch, "paged": _paged, "append": _append,
    "first": _first, "single": _single, "trtllm": _trtllm, "latent": _latent, "merge": _merge,
}  # fmt: skip


def _launches(gpu: fake_gpu.Gpu, call: XlaCall) -> list[fake_gpu.Launched]:
    gpu.launches.clear()
    door._on_gpu(call.frame())
    return [*gpu.launches]


@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_call_launches_what_its_first_run_did(
    name: str, gpu: fake_gpu.Gpu, make: Make
) -> None:
    call = XlaCall(*CALLS[name](make), fake_gpu.STREAM)
    _, second, third, fourth = (_launches(gpu, call) for _ in range(4))
    (site,) = door._sites.values()
    assert site.launches._state is not None
    assert second and second == third == fourth
    assert all(launch.stream == fake_gpu.STREAM for launch in second)


@pytest.mark.parametrize("name", CALLS)
def test_other_memory_is_learnt(
    name: str, gpu: fake_gpu.Gpu, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some calls, of which two arrays may have moved equally far, none is made anew."""
    kept = [(CALLS[name](make), make(1 + 513 * at, 64)) for at in range(9)]
    calls = [XlaCall(*given, fake_gpu.STREAM) for given, _ in kept]
    for _ in range(3):
        for call in calls:
            _launches(gpu, call)
    monkeypatch.setattr(door._Site, "run", None)
    assert all(_launches(gpu, call) for call in calls)


def _anew(gpu: fake_gpu.Gpu, call: XlaCall) -> list[fake_gpu.Launched]:
    """What a call of full checks launches."""
    inputs, outputs = ([door._as_cupy(x, 0) for x in xs]
                       for xs in (call.frame().inputs(), call.frame().outputs()))  # fmt: skip
    gpu.launches.clear()
    door.this_thread.launch_buffer.clear()
    door._prepare(call.frame().text(), inputs, outputs)()
    return [*gpu.launches]


# But "split", whose scratch memory is the first one's.
@pytest.mark.parametrize("name", [name for name in CALLS if name != "split"])
def test_what_was_learnt_is_what_a_call_launches(name: str, gpu: fake_gpu.Gpu, make: Make) -> None:
    calls = [XlaCall(*CALLS[name](make), fake_gpu.STREAM) for _ in range(6)]
    for call in calls[:3]:
        _launches(gpu, call)
    for call in calls:
        assert _launches(gpu, call) == _anew(gpu, call)


def test_memory_that_stayed_may_move_later(gpu: fake_gpu.Gpu, make: Make) -> None:
    """What has not moved yet is not known to: the call is made anew, and known then."""
    name, arrays, outputs, constants = _paged(make)

    def of(**other: Any) -> XlaCall:
        return XlaCall(name, arrays | other, outputs, constants, fake_gpu.STREAM)

    calls = [of(), *(of(query=make(4, 1, H, D)) for _ in range(3))]
    calls += [of(key=make(64, 16, HK, D)) for _ in range(2)]
    same = make(64, 16, HK, D)
    calls += [of(key=same, value=same), of(block_table=make(4, 8, dtype="int32"))]
    for _ in range(3):
        for call in calls:
            assert _launches(gpu, call) == _anew(gpu, call)


def test_launches_that_addresses_do_not_explain_are_kept_by_addresses() -> None:
    from cupyattn.integrations.xla_launches import Launches

    def made(*words: int) -> recording.Recording:
        found = recording.Recording()
        found.launches.append(("kernel", b"".join(x.to_bytes(8, "little") for x in words)))
        return found

    launches = Launches()
    for ticket in range(5):
        launches.learn((4096 * ticket,), made(4096 * ticket + 16, ticket * ticket))
    assert launches.is_hopeless
    launches = Launches()
    for ticket in range(9):
        launches.learn((4096 * ticket, 7), made(4096 * ticket + 16, 5))
    state = launches._state
    assert not launches.is_hopeless and state is not None and state.moved == {0}
    assert state.launches[0].rules == {0: (16, (0,))}


@pytest.mark.parametrize("says_shapes", [False, True])
def test_other_shapes_on_the_same_memory_are_another_call(
    says_shapes: bool, gpu: fake_gpu.Gpu, make: Make
) -> None:
    name, arrays, outputs, constants = _dense(make)
    call = XlaCall(name, arrays, outputs, constants, fake_gpu.STREAM, says_shapes=says_shapes)
    short = arrays | {part: arrays[part][:, :32] for part in ("key", "value")}
    other = XlaCall(name, short, outputs, constants, fake_gpu.STREAM, says_shapes=says_shapes)
    for _ in range(4):
        assert _launches(gpu, call) != _launches(gpu, other)


def test_other_streams_are_other_calls(gpu: fake_gpu.Gpu, make: Make) -> None:
    given = _dense(make)
    for stream in (fake_gpu.STREAM, fake_gpu.STREAM + 8):
        call = XlaCall(*given, stream)
        door._on_gpu(call.frame())
    assert len(door._sites) == 2


def test_launches_of_a_call_are_not_parted_by_another_threads(
    gpu: fake_gpu.Gpu, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share scratch memory: a plan that one launch writes is read by the next one."""
    monkeypatch.setattr(find_items, "prepare", lambda *_: None)
    calls = [XlaCall(*_paged(make), fake_gpu.STREAM) for _ in range(4)]
    for call in calls:
        assert len(_launches(gpu, call)) == 2
    order = []

    def launch(*_: Any) -> None:
        order.append(threading.get_ident())
        time.sleep(2e-3)  # as the driver does, without the GIL

    for name in ("launch_kernel", "launch_early", "launch_clusters"):
        monkeypatch.setattr(gpu.api, name, launch)

    def run(call: XlaCall) -> None:
        for _ in range(5):
            door._on_gpu(call.frame())

    threads = [threading.Thread(target=run, args=(call,)) for call in calls[:3]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order) == 30 and order[::2] == order[1::2]


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_gets_what_a_call_launches(
    name: str, gpu: fake_gpu.Gpu, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA records on a stream of its own: nothing that is kept may come from there."""
    asked: list[int] = []

    @contextlib.contextmanager
    def recorded(stream: int, device_index: int, output: int) -> Any:
        asked.append(stream)
        yield

    monkeypatch.setattr(door, "recorded", recorded)
    given = CALLS[name](make)
    call, other = (XlaCall(*given, fake_gpu.STREAM + 8 * at) for at in range(2))
    gpu.launches.clear()
    door._on_gpu_or_recorded(call.frame())
    launched = [x.kernel for x in gpu.launches]
    assert launched and len(door._sites) == 1 and not asked
    gpu.launches.clear()
    monkeypatch.setattr(gpu, "is_capturing", True)
    door._on_gpu_or_recorded(other.frame())
    assert [x.kernel for x in gpu.launches] == launched and asked == [fake_gpu.STREAM + 8]
    assert len(door._sites) == 1


def test_memory_of_a_graph_is_kept_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes
    from types import SimpleNamespace

    from cupyattn.integrations import xla_graphs

    if not sys.platform.startswith("linux"):
        pytest.skip("semaphores are those of Linux")
    c, log = ctypes.CDLL(None), []
    current: list[Any] = [lambda size: SimpleNamespace(size=size)]

    @contextlib.contextmanager
    def using_allocator(function: Any) -> Any:
        current.append(function)
        yield
        current.pop()

    def capture_info(stream: int, status: int, number: int, graph: int, *rest: None) -> int:
        ctypes.c_void_p.from_address(graph).value = 4242
        return 0

    def create(made: int, semaphore: int, destroy: Any, count: int, flags: int) -> int:
        log.append(semaphore)
        return 0

    cuda = SimpleNamespace(get_allocator=lambda: current[-1], using_allocator=using_allocator)
    driver = SimpleNamespace(
        exchange_mode=lambda mode: 0,
        capture_info=capture_info,
        create=create,
        retain=lambda *given: 0,
        init=c.sem_init,
        try_wait=c.sem_trywait,
    )
    driver.post = "sem_post"
    monkeypatch.setattr(xla_graphs, "cupy_module", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(xla_graphs, "_driver", lambda: driver)
    monkeypatch.setattr(xla_graphs, "_held", [])
    for size in (1, 2, 3):
        with xla_graphs.recorded(77, 0, 4096):
            current[-1](size)
    with xla_graphs.recorded(77, 0, 4096):
        pass  # allocates nothing, and holds nothing

    def held() -> list[int]:
        return [owner.memory.size for _, owners in xla_graphs._held for owner in owners]

    assert held() == [1, 2, 3] and len(log) == 3 and len(current) == 1
    c.sem_post(ctypes.c_void_p(log[1]))
    with xla_graphs.recorded(77, 0, 4096):
        current[-1](4)
    assert held() == [1, 3, 4]
    # Calls that write the same memory share theirs, of the same size and place.
    found = []
    for device, output, size in ((0, 4096, 4), (0, 8192, 4), (1, 4096, 4), (0, 4096, 5)):
        with xla_graphs.recorded(77, device, output):
            found.append([current[-1](size), current[-1](size)])
    kept = xla_graphs._held[2][1][0].memory
    assert found[0][0] is kept and found[0][1] is not kept
    assert all(x is not kept for pair in found[1:] for x in pair)
    # A driver that refuses has what it would have counted kept for good.
    driver.create = lambda *given: 1
    with xla_graphs.recorded(77, 0, 4096):
        current[-1](9)
    assert held()[-1] == 9


@pytest.mark.parametrize("may_be_recorded", [False, True])
def test_xla_is_told_whether_it_may_record(may_be_recorded: bool) -> None:
    import ctypes

    made = xla_ffi.handler(lambda frame: None, may_be_recorded=may_be_recorded)
    metadata = xla_ffi._Metadata()
    extension = xla_ffi._MetadataExtension(metadata=ctypes.pointer(metadata))
    extension.base.type = xla_ffi._METADATA
    frame = xla_ffi._CallFrame(struct_size=ctypes.sizeof(xla_ffi._CallFrame))
    begin = ctypes.cast(ctypes.pointer(extension), ctypes.POINTER(xla_ffi._Extension))
    frame.extension_start = begin
    assert made(ctypes.addressof(frame)) is None
    assert metadata.traits == may_be_recorded


def test_a_call_that_copies_is_made_anew(gpu: fake_gpu.Gpu, make: Make) -> None:
    """The LSE of attention is brought to XLA's array by a copy, which no launch repeats."""
    name, arrays, outputs, constants = _paged(make)
    lse = make(4, 1, H, dtype="float32")
    call = XlaCall(name, arrays, [*outputs, lse], constants, fake_gpu.STREAM)
    with contextlib.suppress(Exception):  # the copy itself needs a GPU
        for _ in range(3):
            door._on_gpu(call.frame())
    (site,) = door._sites.values()
    assert site.launches._state is None


def test_a_refused_call_is_refused_again(gpu: fake_gpu.Gpu, make: Make) -> None:
    name, arrays, outputs, constants = _dense(make)
    arrays["value"] = make(1, 32, HK, D)
    call = XlaCall(name, arrays, outputs, constants, fake_gpu.STREAM)
    for _ in range(4):
        with pytest.raises(ArgumentError, match=r"^value: "):
            door._on_gpu(call.frame())
    assert not gpu.launches


def test_a_stream_is_asked_of_xla(gpu: fake_gpu.Gpu, make: Make) -> None:
    call = XlaCall(*_dense(make), 1234)
    assert call.frame().stream() == 1234


def test_a_frame_is_read_as_it_was_written(make: Make) -> None:
    name, arrays, outputs, constants = _paged(make)
    call = XlaCall(name, arrays, outputs, constants, 0)
    frame = call.frame()
    wanted = [(fake_gpu.pointer(x), x.shape) for x in arrays.values()]
    assert [(x.ptr, x.shape) for x in frame.inputs()] == wanted
    assert [x.dtype for x in frame.inputs()] == ["bfloat16"] * 3 + ["int32"] * 2
    assert [x.shape for x in frame.outputs()] == [outputs[0].shape]


def test_threads_keep_their_state() -> None:
    """Python forgets threads that it did not start after each callback, unless held back."""
    import ctypes

    pthread = ctypes.CDLL(None)
    if not hasattr(pthread, "pthread_create"):
        pytest.skip("there are no POSIX threads")
    found: list[int] = []

    def look(_: Any) -> None:
        found.append(xla_ffi._thread.address)

    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    twice = kind(look)
    body = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    inner = ctypes.cast(twice, ctypes.CFUNCTYPE(None, ctypes.c_void_p))

    def run(argument: Any) -> int:
        inner(argument)
        inner(argument)
        return 0

    thread, kept = ctypes.c_void_p(), body(run)
    assert pthread.pthread_create(ctypes.byref(thread), None, kept, None) == 0
    assert pthread.pthread_join(thread, None) == 0
    assert found[0] == found[1] != xla_ffi._thread.address


def test_a_recording_is_spoiled_by_its_own_thread_only() -> None:
    with recording.Recording() as made:
        recording.add_launch("a", b"1")
        other = threading.Thread(target=lambda: (recording.spoil(), recording.add_launch("b", b"")))
        other.start()
        other.join()
        with recording.Recording() as second:
            recording.keep("memory")
    assert made.is_whole and made.launches == [("a", b"1")] and made.kept == ["memory"]
    assert not second.is_whole and not second.launches
    with recording.Recording() as made:
        recording.add_launch("a", b"1")
        recording.spoil()
    assert not made.is_whole
    with recording.Recording() as made:
        pass
    assert not made.is_whole and recording.current is None


def test_scratch_memory_of_a_recording_is_kept(gpu: fake_gpu.Gpu, make: Make) -> None:
    call = XlaCall(*_paged(make), fake_gpu.STREAM)
    for _ in range(2):
        door._on_gpu(call.frame())
    (site,) = door._sites.values()
    assert site.launches._state is not None
    made = site.launches._state.recording
    owners = [kept[2] for kept in scratch._kept.workspaces.values()]
    assert owners and all(any(x is owner for x in made.kept) for owner in owners)
