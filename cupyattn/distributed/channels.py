"""How ranks hand each other bytes on the host: what a group starts from, and its handshakes.

A channel waits for peers in short steps and asks between them whether one has ended, so that no
rank waits for a dead one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..core.packages import needs
from ..errors import DeviceError

Check = Callable[[], None]
_STEP = 0.05  # seconds that one look for a peer may wait


class Channel(Protocol):
    """Bytes of all ranks to all ranks, on the host."""

    rank: int
    size: int

    def share(self, data: bytes, check: Check, seconds: float) -> list[bytes]:
        """What every rank has given. `check` raises where a peer has ended; DeviceError after
        `seconds`."""

    def part(self, members: Sequence[int]) -> Channel:
        """The channel of these ranks, of which this one is one. All ranks call it."""


class KeyStore(Protocol):
    """Keys and values that all ranks see, as torch's Store and JAX's coordinator have."""

    def put(self, key: str, data: bytes) -> None: ...

    def take(self, key: str) -> bytes | None:
        """The value; None if there is none yet, after some moments at most."""

    def drop(self, key: str) -> None: ...


class StoreChannel:
    """Every rank puts its bytes under its own key, and takes those of the others."""

    def __init__(self, store: KeyStore, rank: int, size: int, prefix: str) -> None:
        self.rank, self.size = rank, size
        self._store, self._prefix = store, prefix
        self._round = 0

    def share(self, data: bytes, check: Check, seconds: float) -> list[bytes]:
        self._round += 1
        self._store.put(self._key(self._round, self.rank), data)
        answers = [
            data if rank == self.rank else self._await(rank, check, seconds)
            for rank in range(self.size)
        ]
        # All have come to this round, so all have taken what was put in the one before.
        self._store.drop(self._key(self._round - 1, self.rank))
        return answers

    def part(self, members: Sequence[int]) -> Channel:
        prefix = f"{self._prefix}/{self._round}-{'-'.join(map(str, members))}"
        return StoreChannel(self._store, members.index(self.rank), len(members), prefix)

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"

    def _await(self, rank: int, check: Check, seconds: float) -> bytes:
        end = time.monotonic() + seconds
        while (data := self._store.take(self._key(self._round, rank))) is None:
            check()
            if time.monotonic() > end:
                raise DeviceError(f"rank {rank} did not come within {seconds:g} s")
        return data


class Folder:
    """A folder that all ranks see, new for this start of them."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, data: bytes) -> None:
        path = self._file(key)
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(data)
        part.replace(path)  # whole, or not there

    def take(self, key: str) -> bytes | None:
        try:
            return self._file(key).read_bytes()
        except FileNotFoundError:
            time.sleep(0.002)
            return None

    def drop(self, key: str) -> None:
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self._path / key.replace("/", "_")


class TorchStore:
    """A torch.distributed Store."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, data: bytes) -> None:
        self._ask(self._store.set, key, data)

    def take(self, key: str) -> bytes | None:
        if self._ask(self._store.check, [key]):
            return bytes(self._ask(self._store.get, key))
        time.sleep(0.002)
        return None

    def drop(self, key: str) -> None:
        try:
            self._store.delete_key(key)
        except (RuntimeError, NotImplementedError):
            pass  # some stores keep what they have

    def count(self, key: str) -> int:
        """How often this has been called for the key."""
        return int(self._ask(self._store.add, key, 1))

    def _ask(self, call: Callable[..., Any], key: Any, *values: Any) -> Any:
        try:
            return call(key, *values)
        except RuntimeError as error:  # the rank that keeps the store has ended
            raise DeviceError(f"torch.distributed's store does not answer ({error})") from error


class JaxStore:
    """The keys and values that jax.distributed's coordinator keeps."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, data: bytes) -> None:
        try:
            self._client.key_value_set_bytes(key, data)
        except Exception as error:
            raise DeviceError(f"jax.distributed's coordinator does not answer ({error})") from error

    def take(self, key: str) -> bytes | None:
        try:
            return bytes(self._client.blocking_key_value_get_bytes(key, int(1000 * _STEP)))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise DeviceError(f"jax.distributed's coordinator does not answer ({error})") from error

    def drop(self, key: str) -> None:
        try:
            self._client.key_value_delete(key)
        except Exception:
            pass  # there is no such key any more, or no coordinator


class MpiChannel:
    """An mpi4py communicator: lengths first, then the bytes, waited for in steps."""

    @needs("mpi4py")
    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def share(self, data: bytes, check: Check, seconds: float) -> list[bytes]:
        lengths = np.zeros(self.size, np.int64)
        own = np.array([len(data)], np.int64)
        self._wait(self._comm.Iallgather(own, lengths), check, seconds)
        out = bytearray(int(lengths.sum()))
        ends = np.cumsum(lengths)
        counts = (lengths.tolist(), (ends - lengths).tolist())
        byte = self._mpi.BYTE
        self._wait(self._comm.Iallgatherv([data, byte], [out, counts, byte]), check, seconds)
        starts = (ends - lengths).tolist()
        return [bytes(out[i:j]) for i, j in zip(starts, ends.tolist(), strict=True)]

    def part(self, members: Sequence[int]) -> Channel:
        return MpiChannel(self._comm.Split(members[0], self.rank))

    def _wait(self, request: Any, check: Check, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not request.Test():
            check()
            if time.monotonic() > end:
                raise DeviceError(f"a rank did not come within {seconds:g} s")
            time.sleep(0.0005)
