"""The cache of compiled kernels: races, kills, damage, read-only folders; errors; `load`."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
from helpers import tiny_kernels

from cupyattn import jit
from cupyattn.errors import CompileError
from cupyattn.jit import cache, compiler, module

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernels folder, an empty cache and an empty temporary folder, all below the result."""
    tiny_kernels.write(tmp_path / "kernels")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("CUPYATTN_KERNELS_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("CUPYATTN_NO_COMPILE", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("_swept", "_said"):
        monkeypatch.setattr(cache, name, set())
    monkeypatch.setattr(module, "_reported", set())
    monkeypatch.setattr(module, "_kernels", {})
    cache._private_folder.cache_clear()
    return tmp_path


def _tiny(scale: int = 3) -> jit.Build:
    return jit.build("tiny", {"kScale": scale}, "sm_80")


def _leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / ".work").iterdir())


def _child(code: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- one process ---


def test_miss_then_hit(place: Path) -> None:
    cold, warm = _tiny(), _tiny()
    assert (cold.info.cached, warm.info.cached) == (False, True)
    assert warm.path == cold.path and warm.symbol == "cupyattn_tiny"
    entry = cold.path.parent
    assert sorted(path.name for path in entry.iterdir()) == [
        "build.json",
        "kernel.cu",
        "kernel.cubin",
    ]
    assert entry.parent == place / "cache" and entry.name.startswith("tiny.sm_80.Scale3.")
    assert cold.path.read_bytes()[:4] == b"\x7fELF"
    assert "kScale = 3;" in (entry / "kernel.cu").read_text()
    assert _leftovers(place / "cache") == []


def test_build_json_tells_the_whole_story() -> None:
    built = _tiny()
    facts = json.loads((built.path.parent / "build.json").read_text())
    assert facts["config"] == {"kScale": 3}
    assert facts["options"] == list(compiler.options("sm_80"))
    assert facts["nvrtc"] == jit.nvrtc_version()
    assert "cupyattn/tiny/nested/add.cuh" in facts["sources"]
    assert facts["cubin_bytes"] == built.path.stat().st_size == built.info.cubin_bytes
    assert 0 < facts["compile_seconds"] < 60
    assert 10 * 2**20 < facts["process_peak_rss_bytes"] < 64 * 2**30
    assert facts["ptxas"]["registers"] == built.info.ptxas.registers > 0
    assert built.info.ptxas.warnings == ()


def test_entries_can_be_read_by_others(place: Path) -> None:
    old = os.umask(0o022)
    try:
        entry = _tiny().path.parent
    finally:
        os.umask(old)
    assert entry.stat().st_mode & 0o055 == 0o055
    assert (entry / "kernel.cubin").stat().st_mode & 0o044 == 0o044


@pytest.mark.parametrize("header", ["cupyattn/tiny/nested/add.cuh", "entry/tiny.cu"])
def test_changed_source_is_a_new_kernel(place: Path, header: str) -> None:
    before = _tiny()
    path = place / "kernels" / header
    text = path.read_text()
    path.write_text(text + "// changed\n")
    after = _tiny()
    assert not after.info.cached and after.path != before.path
    path.write_text(text)
    assert _tiny().path == before.path


def test_sources_changing_during_a_compile_poison_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, real = place / "kernels/cupyattn/tiny/nested/add.cuh", compiler.compile_cubin
    original = header.read_text()
    calls = []

    def edited_meanwhile(program: object, arch: str) -> compiler.Compiled:
        if not calls:
            header.write_text(original.replace("0.0f", "1.0f"))
        calls.append(program)
        return real(program, arch)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler, "compile_cubin", edited_meanwhile)
    edited = _tiny()
    header.write_text(original)
    clean = _tiny()
    assert len(calls) == 3 and not clean.info.cached
    assert clean.path.read_bytes() != edited.path.read_bytes()


def _truncate(entry: Path) -> None:
    data = (entry / "kernel.cubin").read_bytes()
    (entry / "kernel.cubin").write_bytes(data[: len(data) // 2])


def _flip(entry: Path) -> None:
    data = bytearray((entry / "kernel.cubin").read_bytes())
    data[-1] ^= 1
    (entry / "kernel.cubin").write_bytes(data)


DAMAGE = {
    "truncated cubin": _truncate,
    "flipped byte": _flip,
    "empty cubin": lambda entry: (entry / "kernel.cubin").write_bytes(b""),
    "no cubin": lambda entry: (entry / "kernel.cubin").unlink(),
    "no build.json": lambda entry: (entry / "build.json").unlink(),
    "half a build.json": lambda entry: (entry / "build.json").write_text('{"cubin_bytes": 12'),
    "foreign build.json": lambda entry: (entry / "build.json").write_text("[]"),
    "binary build.json": lambda entry: (entry / "build.json").write_bytes(b"\xff\xfe\x00"),
    "empty folder": lambda entry: (shutil.rmtree(entry), entry.mkdir()),
    "a file": lambda entry: (shutil.rmtree(entry), entry.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_entry_is_compiled_again(place: Path, damage) -> None:
    built = _tiny()
    good = built.path.read_bytes()
    damage(built.path.parent)
    again = _tiny()
    assert not again.info.cached and again.path == built.path
    assert again.path.read_bytes() == good
    assert _tiny().info.cached
    assert _leftovers(place / "cache") == []


def test_warm_build_takes_less_than_10_ms(place: Path) -> None:
    # As many and as large sources as a real kernel has.
    for index in range(25):
        text = f"#pragma once\n// {'x' * 98}\n" + f"// {'y' * 97}\n" * 80
        (place / f"kernels/cupyattn/tiny/h{index}.cuh").write_text(text)
    entry = place / "kernels/entry/tiny.cu"
    lines = "".join(f'#include "cupyattn/tiny/h{index}.cuh"\n' for index in range(25))
    entry.write_text(lines + entry.read_text())
    _tiny()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        assert _tiny().info.cached
        times.append(time.perf_counter() - start)
    assert min(times) < 0.010


# --- errors and warnings of compiling ---


def test_refused_source_keeps_source_and_log(place: Path) -> None:
    with pytest.raises(CompileError, match='identifier "undeclared" is undefined') as caught:
        jit.build("broken", {}, "sm_86")
    message = str(caught.value)
    assert "kernel broken: NVRTC" in message and "for sm_86" in message
    assert "entry/broken.cu(1)" in message
    kept = next((place / "cache/.failed").iterdir())
    assert str(kept / "kernel.cu") in message
    assert "undeclared" in (kept / "kernel.cu").read_text()
    assert "undefined" in (kept / "nvrtc.log").read_text()
    assert cache.contents(place / "cache") == (0, 0)
    assert _leftovers(place / "cache") == []


def test_no_compile_makes_a_miss_an_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _tiny(scale=3)
    monkeypatch.setenv("CUPYATTN_NO_COMPILE", "1")
    assert _tiny(scale=3).info.cached
    with pytest.raises(CompileError) as caught:
        _tiny(scale=4)
    for part in (
        "kernel tiny",
        "kScale=4",
        "`cupyattn compile --arch sm_80`",
        str(place / "cache"),
    ):
        assert part in str(caught.value)


def test_spills_are_reported_once_and_recorded() -> None:
    with pytest.warns(RuntimeWarning, match=r"kernel spilling for sm_80 .* spills \d+ bytes"):
        cold = jit.build("spilling", {}, "sm_80")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warm = jit.build("spilling", {}, "sm_80")
    assert cold.info.ptxas.spills and warm.info.ptxas == cold.info.ptxas
    facts = json.loads((cold.path.parent / "build.json").read_text())
    assert facts["ptxas"]["spill_store_bytes"] > 0
    assert 0 < facts["ptxas"]["registers"] <= 64


def test_a_kernel_that_spills_not_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _tiny().info.ptxas.spills


# --- folders that cannot be written ---


def _refuse_writes_below(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so a read-only filesystem is played, not made."""
    real = cache._mkdir

    def mkdir(path: Path) -> None:
        if path.is_relative_to(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        real(path)

    monkeypatch.setattr(cache, "_mkdir", mkdir)


def test_unwritable_cache_falls_back_and_says_so_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "file").write_text("")
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(place / "file/cache"))
    fallback = place / f"tmp/cupyattn-{os.getuid()}"
    with pytest.warns(RuntimeWarning, match="CUPYATTN_CACHE_DIR") as said:
        cold = _tiny(scale=3)
        _tiny(scale=4)
    assert len(said) == 1 and str(fallback) in str(said[0].message)
    assert cold.path.is_relative_to(fallback)
    assert fallback.stat().st_mode & 0o777 == 0o700
    assert _tiny(scale=3).info.cached


def test_read_only_home_falls_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = place / "home"
    home.mkdir()
    monkeypatch.delenv("CUPYATTN_CACHE_DIR")
    monkeypatch.setenv("HOME", str(home))
    assert _tiny(scale=3).path.is_relative_to(home / ".cache/cupyattn")
    _refuse_writes_below(home, monkeypatch)
    assert _tiny(scale=3).info.cached
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        assert _tiny(scale=4).path.is_relative_to(place / "tmp")


def test_shipped_read_only_cache_serves_hits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, broken = _tiny(scale=3), _tiny(scale=5)
    _truncate(broken.path.parent)
    _refuse_writes_below(place / "cache", monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hit = _tiny(scale=3)
    assert hit.path == shipped.path and hit.info.cached
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        miss, repaired = _tiny(scale=4), _tiny(scale=5)
    for build in (miss, repaired):
        assert build.path.is_relative_to(place / "tmp") and not build.info.cached
    assert _tiny(scale=5).info.cached


def test_hits_need_no_temporary_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _tiny(scale=3)

    def none_usable() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_usable)
    assert _tiny(scale=3).info.cached
    _refuse_writes_below(place / "cache", monkeypatch)
    with pytest.raises(CompileError, match=r"no folder can be written: .*Read-only file system"):
        _tiny(scale=4)


def test_full_disk_falls_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cache._write

    def full(path: Path, data: bytes) -> None:
        if path.is_relative_to(place / "cache") and path.name == cache.CUBIN:
            real(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, data)

    monkeypatch.setattr(cache, "_write", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert _tiny().path.is_relative_to(place / "tmp")
    assert cache.contents(place / "cache") == (0, 0)
    assert _leftovers(place / "cache") == []


@pytest.mark.parametrize("plant", ["open", "link"])
def test_a_planted_fallback_folder_is_not_trusted(
    place: Path, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    planted = place / f"tmp/cupyattn-{os.getuid()}"
    if plant == "open":
        planted.mkdir()
        planted.chmod(0o777)
    else:
        (place / "elsewhere").mkdir()
        planted.symlink_to(place / "elsewhere")
    (place / "file").write_text("")
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(place / "file/cache"))
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        built = _tiny()
    assert not built.path.is_relative_to(planted)
    assert list(planted.iterdir()) == []
    assert _tiny().info.cached


def test_is_writable_creates_nothing(place: Path) -> None:
    assert cache.is_writable(place / "not/yet/there")
    assert not (place / "not").exists()
    (place / "file").write_text("")
    assert not cache.is_writable(place / "file/cache")


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


def test_16_processes_compile_once(place: Path) -> None:
    answers = _race(16)
    assert sorted(cached for cached, _ in answers) == ["False"] + 15 * ["True"]
    assert {path for _, path in answers} == {str(_tiny().path)}
    assert _tiny().info.cached
    assert _leftovers(place / "cache") == []


def test_without_file_locks_the_rename_decides(place: Path) -> None:
    answers = _race(4, NO_LOCKS)
    assert sorted(cached for cached, _ in answers).count("False") >= 1
    assert {path for _, path in answers} == {str(_tiny().path)}
    assert _tiny().info.cached
    assert [name for name in _leftovers(place / "cache") if not name.endswith(".lock")] == []


HALF_WRITTEN = """
import time
from cupyattn import jit
from cupyattn.jit import cache
real = cache._write
def write(path, data):
    if path.name == cache.CUBIN:
        real(path, data[:len(data) // 2])
        print("half", flush=True)
        time.sleep(60)
    real(path, data)
cache._write = write
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
    assert len(_leftovers(place / "cache")) == 2  # its folder and its lock
    assert cache.contents(place / "cache") == (0, 0)
    assert not _tiny().info.cached
    assert _tiny().info.cached
    assert _leftovers(place / "cache") == []


def test_another_kernel_sweeps_what_the_killed_left(place: Path) -> None:
    _kill(_half_writer())
    _tiny(scale=9)
    assert _leftovers(place / "cache") == []


def test_waiting_for_a_process_that_is_killed(place: Path) -> None:
    holder = _half_writer()
    answers: list[jit.Build] = []
    waiting = threading.Thread(target=lambda: answers.append(_tiny()))
    waiting.start()
    waiting.join(timeout=0.5)
    assert waiting.is_alive(), "it did not wait for the process that compiles the same kernel"
    assert len(_leftovers(place / "cache")) == 2, "it swept the work of a living process"
    _kill(holder)
    waiting.join(timeout=30)
    assert [built.info.cached for built in answers] == [False]
    assert _tiny().info.cached


# --- load ---


class _FakeKernel:
    """Stands in for the part of loading that needs a GPU."""

    made = 0

    def __init__(self, build: jit.Build, device_index: int) -> None:
        type(self).made += 1
        self.build, self.device_index = build, device_index


@pytest.fixture
def fake_kernel(monkeypatch: pytest.MonkeyPatch) -> type[_FakeKernel]:
    monkeypatch.setattr(module, "Kernel", _FakeKernel)
    monkeypatch.setattr(_FakeKernel, "made", 0)
    return _FakeKernel


def test_load_is_a_lookup_after_the_first_call(
    place: Path, fake_kernel: type[_FakeKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = jit.Config({"kScale": 3})
    first = jit.load("tiny", config, 0, "sm_80")
    monkeypatch.setenv("CUPYATTN_KERNELS_DIR", str(place / "gone"))
    assert jit.load("tiny", config, 0, "sm_80") is first
    assert jit.load("tiny", {"kScale": 3}, 0, "sm_80") is first
    assert fake_kernel.made == 1


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
