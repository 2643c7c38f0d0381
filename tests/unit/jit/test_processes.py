"""The cache of compiled kernels under many processes and kills; loading, once a kernel is built."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import tiny_kernels
from helpers.tiny_kernels import build as tiny
from helpers.tiny_kernels import leftovers

from cupyattn import jit
from cupyattn.errors import CompileError
from cupyattn.jit import cache, module

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return tiny_kernels.sandbox(tmp_path, monkeypatch)


def _child(code: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- many processes ---

RACE = """
import sys
from cupyattn import jit
jit.nvrtc_version()
{prepare}
print("ready", flush=True)
sys.stdin.readline()
built = jit.build("tiny", {{"kScale": 3}}, "sm_80")
print(built.info.cached, built.path)
"""
NO_LOCKS = """
import errno, fcntl
def flock(descriptor, operation):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = flock
"""


def _race(count: int, prepare: str = "") -> list[list[str]]:
    """What `count` processes print, each told to go once all are ready."""
    children = [_child(RACE.format(prepare=prepare)) for _ in range(count)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    finished = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0] * count, finished
    return [out.split() for out, _ in finished]


def test_8_processes_compile_once(place: Path) -> None:
    answers = _race(8)
    assert sorted(cached for cached, _ in answers) == ["False"] + 7 * ["True"]
    assert {path for _, path in answers} == {str(tiny().path)}
    assert tiny().info.cached
    assert leftovers(place / "cache") == []


def test_without_file_locks_the_rename_decides(place: Path) -> None:
    answers = _race(4, NO_LOCKS)
    assert sorted(cached for cached, _ in answers).count("False") >= 1
    assert {path for _, path in answers} == {str(tiny().path)}
    assert tiny().info.cached
    assert [name for name in leftovers(place / "cache") if not name.endswith(".lock")] == []


HALF_WRITTEN = """
import time
from cupyattn import jit
from cupyattn.jit import descriptors, store
real = descriptors.write_file
def write(name, parent, data, mode):
    if name == store.CUBIN:
        real(name, parent, data[:len(data) // 2], mode)
        print("half", flush=True)
        time.sleep(60)
    real(name, parent, data, mode)
descriptors.write_file = write
jit.build("tiny", {"kScale": 3}, "sm_80")
"""


def _half_writer() -> subprocess.Popen:
    child = _child(HALF_WRITTEN)
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    return child


def _kill(child: subprocess.Popen) -> None:
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL


def test_killed_in_the_middle_of_a_write(place: Path) -> None:
    _kill(_half_writer())
    assert len(leftovers(place / "cache")) == 2  # its folder and its lock
    assert cache.contents(cache.CacheFolder(place / "cache")) == (0, 0)
    assert not tiny().info.cached
    assert tiny().info.cached
    assert leftovers(place / "cache") == []


def test_another_kernel_sweeps_what_the_killed_left(place: Path) -> None:
    _kill(_half_writer())
    tiny(scale=9)
    assert leftovers(place / "cache") == []


def test_waiting_for_a_process_that_is_killed(place: Path) -> None:
    holder = _half_writer()
    answers: list[jit.Build] = []
    waiting = threading.Thread(target=lambda: answers.append(tiny()))
    waiting.start()
    waiting.join(timeout=0.5)
    assert waiting.is_alive(), "it did not wait for the process that compiles the same kernel"
    assert len(leftovers(place / "cache")) == 2, "it swept the work of a living process"
    _kill(holder)
    waiting.join(timeout=30)
    assert [built.info.cached for built in answers] == [False]
    assert tiny().info.cached


# --- load ---


class _FakeKernel:
    """Stands in for the part of loading that needs a GPU."""

    made = 0

    def __init__(self, build: jit.Build, cubin: bytes, device_index: int) -> None:
        type(self).made += 1
        self.build, self.device_index = build, device_index


@pytest.fixture
def fake_kernel(monkeypatch: pytest.MonkeyPatch) -> type[_FakeKernel]:
    monkeypatch.setattr(module, "Kernel", _FakeKernel)
    monkeypatch.setattr(_FakeKernel, "made", 0)
    return _FakeKernel


def test_load_is_a_lookup_after_the_first_call(
    place: Path,
    fake_kernel: type[_FakeKernel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "cupyattn")
    config = jit.Config({"kScale": 3})
    first = jit.load("tiny", config, 0, "sm_80")
    assert caplog.messages[-1] == f"cupyattn: kernel tiny loaded on device 0: {config!r}"
    caplog.clear()
    monkeypatch.setenv("CUPYATTN_KERNELS_DIR", str(place / "gone"))
    assert jit.load("tiny", config, 0, "sm_80") is first
    assert jit.load("tiny", {"kScale": 3}, 0, "sm_80") is first
    assert fake_kernel.made == 1 and not caplog.messages


def test_load_keeps_configs_devices_and_archs_apart(fake_kernel: type[_FakeKernel]) -> None:
    kernels = {
        id(jit.load("tiny", {"kScale": scale}, index, arch))
        for scale in (1, 2)
        for index in (0, 1)
        for arch in ("sm_80", "sm_90a")
    }
    assert len(kernels) == fake_kernel.made == 8


def test_threads_load_one_kernel(fake_kernel: type[_FakeKernel]) -> None:
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(jit.load("tiny", {"kScale": 3}, 0, "sm_80")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == fake_kernel.made == 1


def test_load_remembers_no_failure(place: Path, fake_kernel: type[_FakeKernel]) -> None:
    with pytest.raises(CompileError):
        jit.load("broken", {}, 0, "sm_80")
    entry = place / "kernels/entry/broken.cu"
    entry.write_text(entry.read_text().replace("undeclared", "1"))
    assert jit.load("broken", {}, 0, "sm_80") is not None
