"""Processes that work through a list of tasks, and end when this one does or is told to.

`concurrent.futures` waits for running tasks before it gives up; a kernel takes up to a minute.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import connection, resource_tracker
from typing import Any, NamedTuple

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """A signal told the process to end. `signum` is its number."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Done(NamedTuple):
    """A task and its result; without one, `failure` says how it or its process failed."""

    task: Any
    result: Any
    failure: str


def work(
    function: Callable[..., Any], tasks: Iterable[Any], jobs: int, seconds: float
) -> Generator[Done | None, None, None]:
    """`function(*task)` of all tasks, `jobs` at a time in processes of their own, as they finish.

    None each time that nothing has finished for `seconds`. Raises Stopped at Ctrl-C, SIGTERM and
    SIGHUP. No process is left, however this ends. For the main thread.
    """
    waiting = iter(tasks)
    workers: dict[connection.Connection, _Worker] = {}
    with _told_to_stop() as told, contextlib.ExitStack() as stack:

        def give_next(worker: _Worker | None = None) -> None:
            for task in waiting:
                if worker is None:
                    worker = _Worker(function)
                    stack.callback(worker.end)
                worker.give(task)
                workers[worker.connection] = worker
                return

        for _ in range(jobs):
            give_next()
        while workers:
            ready = connection.wait([told, *workers], seconds)
            if told in ready:
                raise Stopped(_read_signal(told))
            if not ready:
                yield None
            for one in ready:
                worker = workers.pop(one)  # type: ignore[call-overload]
                done = worker.receive()
                give_next(worker if worker.process.is_alive() else None)
                yield done


class _Worker:
    """A process and its task."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # NVRTC serialises inside a process, and a forked CUDA library is undefined: hence spawn.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        # Ctrl-C reaches all processes of a terminal. A child inherits what is blocked: it ends
        # when its parent does, and never looks like a task that failed. The tracker's own start
        # unblocks signals.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._task: Any = None

    def give(self, task: Any) -> None:
        self._task = task
        # A process that is dead already is noticed by `receive`.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(task)

    def receive(self) -> Done:
        try:
            result, failure = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            result, failure = None, f"its process ended with status {self.process.exitcode}"
        return Done(self._task, result, failure)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(pipe: connection.Connection, function: Callable[..., Any]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            pipe.send(_attempt(function, pipe.recv()))


def _attempt(function: Callable[..., Any], task: Any) -> tuple[Any, str]:
    try:
        return function(*task), ""
    except Exception as error:
        return None, repr(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def _told_to_stop() -> Iterator[int]:
    """A descriptor that can be read once a signal has come, which does nothing else meanwhile."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # What is ignored (`nohup`, a shell's background jobs) stays so.
    taken = [x for x in _SIGNALS if signal.getsignal(x) is not signal.SIG_IGN]
    before = [(x, signal.signal(x, lambda *_: None)) for x in taken]
    descriptor = signal.set_wakeup_fd(writer)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(descriptor)
        for x, handler in before:
            signal.signal(x, handler)
        os.close(reader)
        os.close(writer)


def _read_signal(reader: int) -> int:
    return os.read(reader, 1)[0]
