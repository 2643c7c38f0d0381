"""Channels of bytes on the host, over stand-ins of MPI, torch's store and JAX's coordinator."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import fake_nccl
from helpers.fake_nccl import Array, ThreadChannel, installed

from cupyattn import ArgumentError, DeviceError, DistributedError, MissingPackageError
from cupyattn.distributed import Group, channels, simulated, starts
from cupyattn.distributed.ranks import Ranks


def _in_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    return simulated.run_ranks(size, work, lambda reason: None)


def _alive() -> None:
    pass


class _Request:
    """What a call that does not wait returns; done the second time that it is looked at."""

    def __init__(self, end: Callable[[], None] | None) -> None:
        self._end, self._looks = end, 0

    def Test(self) -> bool:
        self._looks += 1
        if self._end is None or self._looks < 2:
            return False
        self._end()
        return True


class _Comm:
    """An MPI communicator among threads."""

    def __init__(self, meeting: simulated.Meeting, rank: int, comes: bool = True) -> None:
        self._meeting, self._rank, self._comes = meeting, rank, comes

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._meeting.size

    def Dup(self) -> _Comm:
        return self

    def Split(self, color: int, key: int) -> _Comm:
        wanted = self._everyone("split", (color, simulated.Meeting(1, None, [0], 10)))
        members = [rank for rank, (other, _) in enumerate(wanted) if other == color]
        meeting = simulated.Meeting(len(members), None, [0] * len(members), 10)
        made = self._everyone("made", meeting)
        return _Comm(made[members[0]], members.index(self._rank))

    def Iallgather(self, given: np.ndarray, out: np.ndarray) -> _Request:
        def end() -> None:
            out[...] = np.concatenate(self._everyone("Iallgather", given.copy()))

        return _Request(end if self._comes else None)

    def Iallgatherv(self, given: list[Any], out: list[Any]) -> _Request:
        data, kind = given
        place, (counts, starts), out_kind = out
        assert kind == out_kind == "byte" and len(data) == counts[self._rank]

        def end() -> None:
            for start, part in zip(starts, self._everyone("Iallgatherv", data), strict=True):
                place[start : start + len(part)] = part

        return _Request(end)

    def _everyone(self, name: str, value: Any) -> list[Any]:
        found = self._meeting.meet(self._rank, name, value)
        self._meeting.leave(self._rank)
        return found


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> simulated.Meeting:
    module = fake_nccl.module("mpi4py", MPI=SimpleNamespace(BYTE="byte"))
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    return simulated.Meeting(3, None, [0] * 3, 10)


def test_mpi_shares_bytes_of_any_lengths(mpi: simulated.Meeting) -> None:
    def work(rank: int) -> list[bytes]:
        channel = channels.MpiChannel(_Comm(mpi, rank))
        return channel.share(b"x" * (2 * rank), _alive, 10)

    assert _in_threads(3, work) == [[b"", b"xx", b"xxxx"]] * 3


def test_a_group_of_mpi_s_ranks_on_the_cpu(mpi: simulated.Meeting) -> None:
    def work(rank: int) -> None:
        group = Group.from_mpi(_Comm(mpi, rank), on_gpu=False, timeout=10)
        assert group.describe().startswith(f"rank {rank} of 3: MPI")
        out = np.empty(3, np.float32)
        group.all_to_all(out, np.arange(3, dtype=np.float32) + 10 * rank)
        assert out.tolist() == [rank, 10 + rank, 20 + rank]
        part = group.split(rank // 2)
        assert part.share_bytes(bytes([rank])) == ([b"\0", b"\1"] if rank < 2 else [b"\2"])
        part.close()
        group.barrier()
        group.close()

    _in_threads(3, work)


def test_mpi_is_not_waited_for_where_a_rank_has_ended(mpi: simulated.Meeting) -> None:
    channel = channels.MpiChannel(_Comm(mpi, 0, comes=False))

    def ended() -> None:
        raise DeviceError("rank 1 (process 7) ended")

    with pytest.raises(DeviceError, match="rank 1"):
        channel.share(b"", ended, 10)
    with pytest.raises(DeviceError, match=r"a rank did not come within 0\.05 s"):
        channel.share(b"", _alive, 0.05)


def test_cupyx_s_backend_carries_a_group() -> None:
    calls: list[str] = []

    class Backend:
        def __init__(self, rank: int) -> None:
            self.rank, self._n_devices = rank, 1
            self._comm = SimpleNamespace(abort=lambda: calls.append("abort"))

        def all_to_all(self, given: Any, out: Any, stream: Any) -> None:
            assert given.shape == out.shape == (1, 8)
            calls.append(f"all_to_all on {stream.ptr}")
            out[...] = given

        def all_gather(self, given: Any, out: Any, count: int, stream: Any) -> None:
            assert count == given.size
            ctypes.memmove(out.ctypes.data, given.ctypes.data, given.nbytes)

        def reduce_scatter(self, given: Any, out: Any, count: int, op: str, stream: Any) -> None:
            calls.append(f"reduce_scatter {count} {op}")
            out[...] = given

    with installed():
        group = Group.from_cupyx(Backend(0), timeout=10)
        assert "NCCL by cupyx.distributed" in group.describe()
        given = np.arange(2, dtype=np.float32).view(Array)
        group.all_to_all(np.empty_like(given), given, 5)
        group.reduce_scatter(np.empty_like(given), given, 5)
        group.fail("enough")
        group.close()
    assert calls == ["all_to_all on 5", "reduce_scatter 2 sum", "abort"]


def test_a_launcher_of_torchrun_s_kind_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def init_process_group(size: int, rank: int, *, host: str, port: int) -> Any:
        started.append((size, rank, host, port))
        return SimpleNamespace(
            rank=rank,
            _n_devices=size,
            all_to_all=None,
            stop=lambda: None,
            all_gather=lambda given, out, count, stream: ctypes.memmove(
                out.ctypes.data, given.ctypes.data, given.nbytes
            ),
        )

    distributed = fake_nccl.module("cupyx.distributed", init_process_group=init_process_group)
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
    for name, value in {**environment, "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    for name in ("torch", "jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(starts.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "cupyx", fake_nccl.module("cupyx", distributed=distributed))
    monkeypatch.setitem(sys.modules, "cupyx.distributed", distributed)
    with installed() as (_, cupy, _):
        group = Group.from_environment(timeout=10)
        assert cupy.cuda.Device().id == 3  # of this thread
        cupy.cuda.Device(0).use()
        group.close()
        assert started == [(1, 0, "here", 29500)]
        monkeypatch.setenv("LOCAL_RANK", "first")
        with pytest.raises(ArgumentError, match="LOCAL_RANK: got 'first' in the environment"):
            Group.from_environment(timeout=10)
        monkeypatch.setattr(starts, "has_gpu", lambda: False)
        with pytest.raises(MissingPackageError, match="neither torch nor a GPU here"):
            Group.from_environment(timeout=10)


def test_a_store_keeps_no_more_than_the_last_rounds(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        channel = channels.StoreChannel(channels.Folder(tmp_path), rank, 2, "keys")
        for number in range(20):
            data = b"%d %d" % (rank, number)
            shared = channel.share(data, _alive, 10)
            assert shared == [b"0 %d" % number, b"1 %d" % number]

    _in_threads(2, work)
    assert len([*tmp_path.iterdir()]) <= 4


def test_jax_s_coordinator_that_has_ended_is_a_device_error() -> None:
    class Client:
        def __init__(self, words: str) -> None:
            self.words = words

        def key_value_set_bytes(self, key: str, data: bytes) -> None:
            raise RuntimeError(self.words)

        def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
            raise RuntimeError(self.words)

        key_value_delete = key_value_set_bytes

    assert channels.JaxStore(Client("DEADLINE_EXCEEDED: timed out")).take("key") is None
    gone = channels.JaxStore(Client("UNAVAILABLE: failed to connect"))
    for call in (lambda: gone.take("key"), lambda: gone.put("key", b"")):
        with pytest.raises(DeviceError, match=r"coordinator does not answer \(UNAVAILABLE"):
            call()
    gone.drop("key")  # nobody needs it any more


def test_torch_s_store_that_has_ended_is_a_device_error() -> None:
    def gone(*arguments: Any) -> Any:
        raise RuntimeError("Connection reset by peer")

    store = channels.TorchStore(SimpleNamespace(set=gone, check=gone, get=gone, delete_key=gone))
    for call in (lambda: store.take("key"), lambda: store.put("key", b"")):
        with pytest.raises(DeviceError, match=r"store does not answer \(Connection reset"):
            call()
    store.drop("key")


def test_ranks_of_different_versions_or_libraries_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meeting = simulated.Meeting(2, None, [0, 0], 10)

    def work(rank: int) -> None:
        library = "MPI with GPUs" if rank else "MPI"
        with pytest.raises(DistributedError) as caught:
            Ranks(ThreadChannel(meeting, rank), {"library": library}, 10)
        assert str(caught.value) == (
            "rank 1 has library MPI with GPUs, rank 0 has library MPI; start all 2 ranks alike"
        )

    _in_threads(2, work)


def test_a_failed_group_fails_at_once_ever_after() -> None:
    groups = Group.simulated(2, timeout=0.1)
    with pytest.raises(DeviceError):
        groups[0].barrier()
    start = time.monotonic()
    for call in (groups[0].barrier, groups[0].check, lambda: groups[0].share_bytes(b"")):
        with pytest.raises(DeviceError, match="rank 1 did not come within"):
            call()
    assert time.monotonic() - start < 0.05
