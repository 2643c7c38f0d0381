"""What is asked of NCCL, of CUDA's handles and of torch, over stand-ins of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import fake_nccl
from helpers.fake_nccl import Array, ThreadChannel, installed, seem_processes

from cupyattn import ArgumentError, DeviceError, DistributedError, MissingPackageError
from cupyattn.distributed import Group, nccl, new_unique_id, simulated, starts, torch, windows
from cupyattn.distributed import library as transports
from cupyattn.distributed.ranks import Ranks


def _in_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    return simulated.run_ranks(size, work, lambda reason: None)


def _array(values: Any, dtype: Any = np.float32) -> Array:
    return np.array(values, dtype).view(Array)


@pytest.mark.parametrize("takes_tuples", [False, True])
def test_collectives_of_cupy_s_communicator(takes_tuples: bool) -> None:
    with installed(takes_tuples) as (_, _, calls):
        identity = new_unique_id()
        assert len(identity) == 128 and identity[0] == 254

        def work(rank: int) -> None:
            group = Group.from_unique_id(identity, rank, 3, device=rank, timeout=10)
            assert group.on_gpu and group.can_capture and group.hosts == (0, 0, 0)
            assert group.describe().startswith(f"rank {rank} of 3: NCCL 2.28.9 by CuPy, windows:")
            group.handshake({"heads": 32})
            out = _array(np.empty((3, 2)))
            group.all_to_all(out, _array([[10 * rank + i] * 2 for i in range(3)]), 0x77)
            assert out.tolist() == [[10 * i + rank] * 2 for i in range(3)]
            gathered = _array(np.empty(3))
            group.all_gather(gathered, _array([rank]))
            assert gathered.tolist() == [0, 1, 2]
            total = _array([0])
            group.reduce_scatter(total, _array([1, 2, 3]))
            assert total.tolist() == [3 * (rank + 1)]
            group.barrier()
            part = group.split(int(rank == 1))
            assert part.size == (1 if rank == 1 else 2)
            part.barrier()
            part.close()
            group.close()

        _in_threads(3, work)
        # Communicators are made in threads of their own, of which each is on its rank's device.
        made = sorted(x for x in calls if x.startswith("communicator"))
        assert made == [f"communicator on {rank}" for rank in (0, 0, 1, 1, 2, 2)]
        assert calls.count("send 1 2 on 119") == calls.count("recv 1 2 on 119") == 3
        assert "reduceScatter 7 0 on 81" in calls  # the current stream where none is named
        assert sum(x.startswith("destroy") for x in calls) == 6 and "abort 0" not in calls


def test_a_communicator_that_graphs_hold_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed() as (_, cupy, calls):
        monkeypatch.setattr(transports, "_KEPT", [])
        cupy.cuda.runtime.capturing = {0x77}
        identity = new_unique_id()

        def work(rank: int) -> None:
            for stream in (0x77, 0x78):
                group = Group.from_unique_id(identity, rank, 2, device=rank, timeout=10)
                group.barrier(stream)
                group.close()

        _in_threads(2, work)
        assert sum(x.startswith("destroy") for x in calls) == 2 and len(transports._KEPT) == 2


def test_an_error_that_nccl_notices_fails_the_group_within_moments() -> None:
    with installed() as (library, _, calls):
        identity = new_unique_id()

        def work(rank: int) -> None:
            group = Group.from_unique_id(identity, rank, 2, device=rank, timeout=10)
            group.barrier()
            library.error = "NCCL_ERROR_REMOTE_ERROR: remote process exited"
            start = time.monotonic()
            with pytest.raises(DeviceError, match=r"(process exited|aborted).*make a new one"):
                while time.monotonic() < start + 3:
                    group.check()
                    time.sleep(0.01)
            assert time.monotonic() - start < 2
            group.close()

        _in_threads(2, work)
        assert sorted(x for x in calls if "abort" in x) == ["abort 0", "abort 1"]
        assert not any("destroy" in x for x in calls)  # it would wait for the others


def test_a_call_that_nccl_refuses_is_a_device_error() -> None:
    with installed() as (_, _, calls):
        group = Group.from_unique_id(new_unique_id(), 0, 1, timeout=10)

        def refuse(*arguments: Any) -> None:
            raise fake_nccl.NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")

        group.transport._calls._comm.allGather = refuse  # type: ignore[attr-defined]
        with pytest.raises(DeviceError, match=r"NCCL 2\.28\.9 by CuPy failed: NCCL_ERROR_INVALID"):
            group.all_gather(_array([0]), _array([1]))
        assert "abort 0" in calls
        group.close()


def test_ranks_that_do_not_all_come_are_an_error() -> None:
    with installed():
        start = time.monotonic()
        with pytest.raises(DeviceError, match=r"communicator was not done within 0\.2 s; not all"):
            Group.from_unique_id(new_unique_id(), 0, 2, timeout=0.2)
        assert time.monotonic() - start < 2


def test_two_ranks_of_one_gpu_are_told_to_take_their_own() -> None:
    with installed():
        meeting = simulated.Meeting(2, None, [0, 0], 10)

        def work(rank: int) -> None:
            with pytest.raises(
                DistributedError, match=r"ranks 0 and 1 have the same GPU \(0000:02"
            ):
                starts.from_channel(ThreadChannel(meeting, rank), "MPI", 2, True, 10)

        _in_threads(2, work)


def test_a_channel_starts_nccl_by_an_id_of_rank_0() -> None:
    with installed():
        meeting = simulated.Meeting(2, None, [0, 0], 10)

        def work(rank: int) -> None:
            transport = starts.from_channel(ThreadChannel(meeting, rank), "MPI", rank, True, 10)
            group = Group(transport)
            assert "NCCL 2.28.9 by CuPy, started by MPI" in group.describe()
            group.barrier()
            group.close()

        _in_threads(2, work)


def _fake_nccl4py(calls: list[str], release: int) -> dict[str, Any]:
    class Communicator:
        def __init__(self, pointer: int = 0) -> None:
            if pointer:
                calls.append(f"of {pointer:#x}")

        @classmethod
        def init(cls, size: int, rank: int, identity: bytes) -> Communicator:
            return cls()

        def alltoall(self, given: Any, out: Any, *, stream: int) -> None:
            calls.append(f"alltoall on {stream}")
            out[...] = given

        def send(self, given: Any, peer: int, *, stream: int) -> None:
            calls.append(f"send {peer}")

        def recv(self, out: Any, peer: int, *, stream: int) -> None:
            calls.append(f"recv {peer}")

        def allgather(self, given: Any, out: Any, *, stream: int) -> None:
            calls.append(f"allgather on {stream}")
            out[...] = given

        def reduce_scatter(self, given: Any, out: Any, op: int, *, stream: int) -> None:
            calls.append(f"reduce_scatter {op}")
            out[...] = given

        def get_async_error(self) -> int:
            return 7

        def abort(self) -> None:
            calls.append("abort")

        def destroy(self) -> None:
            calls.append("destroy")

        def register_window(self, memory: Any, flags: int) -> Any:
            calls.append(f"window {memory.nbytes} {flags}")
            return SimpleNamespace(
                get_peer_device_pointer=lambda peer: memory.ctypes.data, close=lambda: None
            )

    class Group:
        def __enter__(self) -> None:
            calls.append("group")

        def __exit__(self, *error: object) -> None:
            calls.append("end")

    class Identity:
        as_bytes = bytes(128)

        @staticmethod
        def from_bytes(data: bytes) -> bytes:
            return data

    core = fake_nccl.module(
        "nccl.core",
        get_unique_id=Identity,
        UniqueId=Identity,
        SUM=0,
        group=Group,
        Communicator=Communicator,
        WindowFlag=SimpleNamespace(COLL_SYMMETRIC=1),
        RegisteredWindowHandle=SimpleNamespace(get_peer_device_pointer=None),
    )
    binding = fake_nccl.module("nccl.bindings.nccl", get_version=lambda: release)
    memory = fake_nccl.module(
        "nccl.core.interop.cupy", empty=lambda n, dtype: np.ones(n, dtype).view(Array)
    )
    return {
        "nccl": fake_nccl.module("nccl", core=core),
        "nccl.core": core,
        "nccl.bindings": fake_nccl.module("nccl.bindings", nccl=binding),
        "nccl.bindings.nccl": binding,
        "nccl.core.interop": fake_nccl.module("nccl.core.interop", cupy=memory),
        "nccl.core.interop.cupy": memory,
    }


def _no_library() -> None:
    raise MissingPackageError("NCCL cannot be loaded")


def test_windows_of_nccl4py_are_over_cupy_s_communicator() -> None:
    with installed() as (_, _, calls), pytest.MonkeyPatch.context() as patch:
        group = Group.from_unique_id(new_unique_id(), 0, 1, timeout=10)
        assert group.transport._calls.symmetric() is None  # type: ignore[attr-defined]
        for name, module in _fake_nccl4py(calls, 22902).items():
            patch.setitem(sys.modules, name, module)
        source = group.transport._calls.symmetric()  # type: ignore[attr-defined]
        source.offer(4096)
        own, peers = source.open([b""], 0)
        assert peers == [own] and "of 0x2b" in calls
        group.close()


@pytest.mark.parametrize("release", [22700, 22809, 22902])
def test_nccl4py_is_taken_where_cupy_finds_no_library(release: int) -> None:
    with installed() as (_, _, calls), pytest.MonkeyPatch.context() as patch:
        for name, module in _fake_nccl4py(calls, release).items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(nccl, "CupyNccl", _no_library)
        group = Group.from_unique_id(bytes(128), 0, 1, timeout=10)
        assert " by nccl4py" in group.describe()
        given = np.arange(4, dtype=np.float32).view(Array)
        group.all_to_all(np.empty_like(given), given, 5)
        group.reduce_scatter(np.empty_like(given), given, 5)
        wanted = ["alltoall on 5"] if release >= 22800 else ["group", "send 0", "recv 0", "end"]
        assert [x for x in calls if "allgather" not in x] == [*wanted, "reduce_scatter 0"]
        source = group.transport._calls.symmetric()  # type: ignore[attr-defined]
        if release < 22902:
            with pytest.raises(MissingPackageError, match=r"wanted 2\.29\.2 or newer"):
                source.offer(4096)
        else:
            source.offer(4096)
            own, peers = source.open([b""], 0)
            assert peers == [own] and "window 4096 1" in calls
        group.close()
        assert calls[-1] == "destroy"


class _Own(windows.IpcSource):
    """A source of a library's own, for what comes behind CUDA's handles."""

    name = "own windows"


class _Lying(_Own):
    """Opens another memory than the peer's."""

    def open(self, offers: Sequence[bytes], rank: int) -> tuple[int, list[int]]:
        own, peers = super().open(offers, rank)
        elsewhere = self._runtime.malloc(windows._PAGE)
        return own, [peer if peer == own else elsewhere for peer in peers]


def _opened(
    fails_on: int | None, own: Callable[[], windows.Source | None], facts: dict[str, Any]
) -> tuple[list[tuple[windows.Window | None, str]], list[str]]:
    """What two ranks get, and the runtime's calls; `fails_on`: the rank that can open no handle."""
    with installed() as (_, cupy, calls):
        meeting = simulated.Meeting(2, None, [0, 0], 10)
        failures = [] if fails_on is None else [fails_on]

        def fails_once() -> bool:
            is_failing = cupy.cuda.Device().id in failures
            failures[:] = [] if is_failing else failures
            return is_failing

        cupy.cuda.runtime.open_fails_on = fails_once

        def work(rank: int) -> tuple[windows.Window | None, str]:
            cupy.cuda.Device(rank).use()
            ranks = Ranks(ThreadChannel(meeting, rank), {"gpu": f"card {rank}"}, 10)
            ranks = seem_processes(ranks) if facts.get("processes", True) else ranks
            ranks.hosts = facts.get("hosts", [0, 0])
            found = windows.opened(ranks, own(), facts.get("nbytes", [1000, 1000])[rank])
            if found[0] is not None:
                assert not found[0].local.any() and found[0].peers[rank] == found[0].local.data.ptr
                meeting.meet(rank, "seen", None)
                meeting.leave(rank)
                found[0].close()
            ranks.stop()
            return found

        return _in_threads(2, work), calls


def test_windows_by_cuda_s_handles_are_tried_zeroed_and_closed_before_they_are_freed() -> None:
    found, calls = _opened(None, lambda: None, {})
    assert [why for _, why in found] == ["CUDA IPC", "CUDA IPC"]
    assert all(window is not None and window.nbytes == 1000 for window, _ in found)
    opened = ["open on 0", "open on 1"]  # in threads of their own
    assert sorted(calls) == ["close", "close", "free", "free", *opened]
    assert calls.index("free") > 3  # both have closed the other's


def test_where_one_rank_can_open_no_handle_all_take_the_next_source() -> None:
    found, _ = _opened(1, _Own, {})
    assert [why for _, why in found] == ["own windows", "own windows"]
    found, calls = _opened(1, lambda: None, {})
    why = "none (CUDA IPC: on rank 1: RuntimeError: invalid device context)"
    assert found == [(None, why), (None, why)]
    assert calls.count("free") == 2


def test_a_window_that_a_word_does_not_reach_is_none() -> None:
    found, _ = _opened(0, _Lying, {})
    assert found[0][0] is None and found[1][0] is None
    assert "own windows: on rank 0: what ranks [1] wrote did not arrive" in found[0][1]


def test_there_are_no_windows_between_hosts_or_threads() -> None:
    assert _opened(None, _Own, {"hosts": [0, 1]})[0][0] == (None, "none between hosts")
    threads = _opened(None, _Own, {"processes": False})[0][0]
    assert threads == (None, "none between ranks of one process")


def test_windows_of_different_sizes_are_refused_on_all_ranks() -> None:
    with pytest.raises(DistributedError, match=r"rank . is in window of (1|2)000 bytes, and"):
        _opened(None, lambda: None, {"nbytes": [1000, 2000]})


def test_torch_s_collectives_run_on_the_stream_that_is_named() -> None:
    calls: list[Any] = []

    class _On:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            calls.append(self.stream)

        def __exit__(self, *error: object) -> None:
            calls.append("back")

    cuda = SimpleNamespace(
        current_device=lambda: 1,
        is_available=lambda: True,
        stream=_On,
        default_stream=lambda device: ("default", device),
        ExternalStream=lambda pointer, device: (pointer, device),
    )
    distributed = fake_nccl.module(
        "torch.distributed",
        get_rank=lambda group: 0,
        get_world_size=lambda group: 2,
        get_backend_config=lambda group: "cuda:nccl",
        all_to_all_single=lambda out, given, group: calls.append(("all_to_all", group)),
        reduce_scatter_tensor=lambda out, given, group: calls.append(("reduce_scatter", group)),
    )
    module = fake_nccl.module(
        "torch",
        __version__="2.11",
        cuda=cuda,
        distributed=distributed,
        device=lambda kind, index: (kind, index),
        utils=SimpleNamespace(dlpack=SimpleNamespace(from_dlpack=lambda capsule: capsule)),
    )

    class _Given:
        def __dlpack__(self, *, stream: int) -> str:
            assert stream == -1  # no order between streams is asked for: a graph would refuse it
            return "tensor"

    aborted: list[Any] = []
    group = SimpleNamespace(
        _get_backend=lambda device: SimpleNamespace(abort=lambda: aborted.append(device))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", module)
        patch.setitem(sys.modules, "torch.distributed", distributed)
        torch._stream.cache_clear()
        made = torch.TorchCalls(group, SimpleNamespace(check=lambda: None, seconds=1))  # type: ignore[arg-type]
        assert made.library == "NCCL by torch 2.11" and made.can_capture
        made.all_to_all(_Given(), _Given(), 0x99)
        made.reduce_scatter(_Given(), _Given(), 0)
        made.abort()
        torch._stream.cache_clear()
    assert calls == [
        *((0x99, 1), ("all_to_all", group), "back"),
        *(("default", 1), ("reduce_scatter", group), "back"),
    ]
    assert aborted == [("cuda", 1)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Group.from_unique_id(bytes(128), 2, 2), "rank: got 2 of 2 ranks; wanted 0 to 1"),
        (lambda: Group.from_unique_id(bytes(128), -1, 2), "rank: got -1 of 2 ranks"),
        (lambda: Group.from_unique_id(bytes(128), 0, 0), "size: got 0; wanted the number of ranks"),
        (lambda: Group.from_unique_id(b"id", 0, 1), "unique_id: got 2 bytes; wanted 128"),
        (
            lambda: Group.from_unique_id(bytes(128), 0, 1, device=9),
            "device: got index 9, and this machine has 4 GPU(s)",
        ),
        (lambda: Group.from_folder("/tmp/none", 1, 1), "rank: got 1 of 1 ranks"),
        (lambda: Group.from_cupyx(object()), "comm: got object; wanted what cupyx.distributed"),
        (lambda: Group.from_mpi(object()), "comm: got object; wanted a communicator of mpi4py"),
        (lambda: Group.from_torch(), "process_group: torch.distributed has none yet"),
        (lambda: Group.from_jax(), "from_jax: jax.distributed has not been started"),
        (lambda: Group.from_environment(), "start the program with torchrun or mpirun"),
    ],
)
def test_wrong_starts_say_what_is_wanted(call: Any, message: str) -> None:
    for package, words in (("torch", "torch"), ("jax", "jax")):
        if words in message.split(":")[0]:
            pytest.importorskip(package)
    with installed(), pytest.MonkeyPatch.context() as patch:
        for name in ("MASTER_ADDR", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
            patch.delenv(name, raising=False)
        with pytest.raises(ArgumentError) as caught:
            call()
    assert message in str(caught.value)


def test_without_the_library_the_message_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_load_library", lambda: None)
    cuda = fake_nccl.module("cupy.cuda", nccl=SimpleNamespace(available=False))
    monkeypatch.setattr(nccl, "cupy_module", lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", fake_nccl.module("cupy", cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nccl", None)
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(MissingPackageError, match="install nvidia-nccl-cu13 or nvidia-nccl-cu12"):
        new_unique_id()
