"""Who the ranks are, on which hosts, and a thread that notices when one ends."""

from __future__ import annotations

import atexit
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_EVERY = 0.1  # seconds between two looks at what does not wake the thread by itself


def own_facts() -> dict[str, Any]:
    """What the other ranks must know of this process: its host, and how to watch it."""
    return {
        "host": f"{socket.gethostname()} {_read('/proc/sys/kernel/random/boot_id')}",
        "namespace": _link("/proc/self/ns/pid"),
        "process": os.getpid(),
        "started": started(os.getpid()),
    }


def started(process: int) -> str:
    """When a process began, in the kernel's ticks; empty if it has ended, or if /proc is missing.

    A number of a process may be given again, so this says whether it is still the same one.
    """
    fields = _read(f"/proc/{process}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


# Threads that run, and what asks each to end.
_threads: dict[threading.Thread, Callable[[], None]] = {}


def started_thread(
    work: Callable[[], None], name: str, stop: Callable[[], None] = lambda: None
) -> threading.Thread:
    """A thread that does not hold a program up, but that its end waits some moments for.

    Python ends daemon threads where they are, and the C++ of a library does not survive that
    ("terminate called without an active exception").
    """

    def run() -> None:
        try:
            work()
        finally:
            _threads.pop(threading.current_thread(), None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads[thread] = stop
    thread.start()
    return thread


@atexit.register
def _wait_for_threads() -> None:
    running = list(_threads.items())
    for _, stop in running:
        stop()
    end = time.monotonic() + 2.0
    for thread, _ in running:
        thread.join(max(0.0, end - time.monotonic()))


class Note:
    """A reason that a rank leaves for the others of its host: a file that comes to be.

    Libraries tell nobody when a rank raises and its process lives on.
    """

    def __init__(self, token: str) -> None:
        folder = Path("/dev/shm")
        self._path = (folder if folder.is_dir() else Path("/tmp")) / f"cupyattn-{token}"
        self._is_ours = False

    def leave(self, reason: str) -> None:
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError:
            return  # another rank has left one, or nothing can be written here
        with os.fdopen(descriptor, "w") as file:
            file.write(reason)
        self._is_ours = True

    def read(self) -> str | None:
        try:
            return self._path.read_text() or None
        except OSError:
            return None

    def remove(self) -> None:
        """This rank's own, when the others have had time to read it."""
        if self._is_ours:
            time.sleep(3 * _EVERY)
            self._path.unlink(missing_ok=True)


class Watch:
    """Calls `tell` with a sentence, once, when a process ends or when `ask` returns one.

    processes   by rank, of this host: its number, and when it began
    ask         looked at ten times a second
    """

    def __init__(
        self,
        processes: Mapping[int, tuple[int, str]],
        ask: Callable[[], str | None],
        tell: Callable[[str], None],
    ) -> None:
        self._processes = dict(processes)
        self._ask, self._tell = ask, tell
        self._stopped = threading.Event()
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # by what is polled
        for rank, (process, _) in self._processes.items():
            if (descriptor := _descriptor(process)) is not None:
                self._ranks[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)
        self._thread = started_thread(self._run, "cupyattn-ranks", self._stopped.set)

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                ended = [self._ranks[found] for found, _ in self._poll.poll(1000 * _EVERY)]
                if not self._ranks:
                    self._stopped.wait(_EVERY)
                reason = self._said(ended) or self._ask()
                if reason and not self._stopped.is_set():
                    self._tell(reason)
                    return
        finally:
            for descriptor in self._ranks:
                os.close(descriptor)

    def _said(self, ended: list[int]) -> str | None:
        """/proc says whether a process that has no descriptor is still the same."""
        for rank, (process, since) in self._processes.items():
            is_other = since and started(process) != since
            if rank in ended or is_other:
                return f"rank {rank} (process {process}) ended"
        return None


def _descriptor(process: int) -> int | None:
    """What becomes readable when the process ends; None where this system has no such thing."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
