"""The cache of compiled kernels in one process: hits, damage, read-only folders, errors."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_kernels
from helpers.tiny_kernels import build as tiny
from helpers.tiny_kernels import leftovers

from cupyattn import jit
from cupyattn.errors import CompileError
from cupyattn.jit import cache, compiler, descriptors, store

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return tiny_kernels.sandbox(tmp_path, monkeypatch)


# --- one process ---


def test_miss_then_hit(place: Path) -> None:
    cold, warm = tiny(), tiny()
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
    assert leftovers(place / "cache") == []


def test_build_json_tells_the_whole_story() -> None:
    built = tiny()
    facts = json.loads((built.path.parent / "build.json").read_text())
    assert facts["config"] == {"kScale": 3}
    assert facts["options"] == list(compiler.options("sm_80"))
    assert facts["nvrtc"] == jit.nvrtc_version()
    assert "cupyattn/tiny/nested/add.cuh" in facts["sources"]
    assert facts["cubin_bytes"] == built.path.stat().st_size == built.info.cubin_bytes
    assert facts["compile_seconds"] > 0
    assert 10 * 2**20 < facts["process_peak_rss_bytes"] < 64 * 2**30
    assert facts["ptxas"]["registers"] == built.info.ptxas.registers > 0
    assert built.info.ptxas.warnings == ()


@pytest.mark.parametrize("header", ["cupyattn/tiny/nested/add.cuh", "entry/tiny.cu"])
def test_changed_source_is_a_new_kernel(place: Path, header: str) -> None:
    before = tiny()
    path = place / "kernels" / header
    text = path.read_text()
    path.write_text(text + "// changed\n")
    after = tiny()
    assert not after.info.cached and after.path != before.path
    path.write_text(text)
    assert tiny().path == before.path


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
    edited = tiny()
    header.write_text(original)
    clean = tiny()
    assert len(calls) == 3 and not clean.info.cached
    assert clean.path.read_bytes() != edited.path.read_bytes()


def _truncate(entry: Path) -> None:
    data = (entry / "kernel.cubin").read_bytes()
    (entry / "kernel.cubin").write_bytes(data[: len(data) // 2])


def _flip(entry: Path) -> None:
    data = bytearray((entry / "kernel.cubin").read_bytes())
    data[-1] ^= 1
    (entry / "kernel.cubin").write_bytes(data)


def _edit(folder: Path, **facts: object) -> None:
    path = folder / "build.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


DAMAGE = {
    "truncated cubin": _truncate,
    "flipped byte": _flip,
    "empty cubin": lambda entry: (entry / "kernel.cubin").write_bytes(b""),
    "no cubin": lambda entry: (entry / "kernel.cubin").unlink(),
    "no build.json": lambda entry: (entry / "build.json").unlink(),
    "half a build.json": lambda entry: (entry / "build.json").write_text('{"cubin_bytes": 12'),
    "foreign build.json": lambda entry: (entry / "build.json").write_text("[]"),
    "build.json without ptxas": lambda entry: _edit(entry, ptxas=None),
    "build.json of other types": lambda entry: _edit(entry, compile_seconds="1"),
    "ptxas of other types": lambda entry: _edit(entry, ptxas={"registers": 1}),
    "entry of another kernel": lambda entry: _edit(entry, **{"entry": "another"}),
    "binary build.json": lambda entry: (entry / "build.json").write_bytes(b"\xff\xfe\x00"),
    "empty folder": lambda entry: (shutil.rmtree(entry), entry.mkdir()),
    "a file": lambda entry: (shutil.rmtree(entry), entry.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_entry_is_compiled_again(place: Path, damage) -> None:
    built = tiny()
    good = built.path.read_bytes()
    damage(built.path.parent)
    again = tiny()
    assert not again.info.cached and again.path == built.path
    assert again.path.read_bytes() == good
    assert tiny().info.cached
    assert leftovers(place / "cache") == []


def test_a_warm_build_reads_every_file_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that many others include is read and searched for includes once."""
    real, entry_files = descriptors.read_file, []

    def read_file(name: str, parent: int, *, trusting: bool) -> bytes:
        entry_files.append(name)
        return real(name, parent, trusting=trusting)

    monkeypatch.setattr(descriptors, "read_file", read_file)
    names = [f"cupyattn/tiny/h{index}.cuh" for index in range(25)]
    for name in names:
        lines = "".join(f'#include "{other}"\n' for other in names if other < name)
        (place / "kernels" / name).write_text("#pragma once\n" + lines)
    entry = place / "kernels/entry/tiny.cu"
    entry.write_text("".join(f'#include "{name}"\n' for name in names) + entry.read_text())
    cold, read = tiny(), []
    monkeypatch.setattr(Path, "read_text", _noted(Path.read_text, read))
    entry_files.clear()
    assert tiny().info.cached
    assert len(read) == len(set(read))
    sources = {path for path in read if path.is_relative_to(place / "kernels")}
    assert {place / "kernels" / name for name in names} <= sources
    assert set(read) == sources and sorted(entry_files) == ["build.json", "kernel.cubin"]
    assert cold.path.exists()


def _noted(read: Callable[..., Any], paths: list[Path]) -> Callable[..., Any]:
    def noted(path: Path, *args: Any, **kwargs: Any) -> Any:
        paths.append(path)
        return read(path, *args, **kwargs)

    return noted


# --- errors and warnings of compiling ---


def test_refused_source_keeps_source_and_log(place: Path) -> None:
    with pytest.raises(CompileError, match='identifier "undeclared" is undefined') as caught:
        jit.build("broken", {}, "sm_86")
    message = str(caught.value)
    assert "kernel broken: NVRTC" in message and "for sm_86" in message
    assert "entry/broken.cu(1)" in message
    kept = next((place / "cache" / store.FAILED).iterdir())
    assert str(kept / "kernel.cu") in message
    assert "undeclared" in (kept / "kernel.cu").read_text()
    assert "undefined" in (kept / "nvrtc.log").read_text()
    assert cache.contents(cache.CacheFolder(place / "cache")) == (0, 0)
    assert leftovers(place / "cache") == []


def test_no_compile_makes_a_miss_an_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(scale=3)
    monkeypatch.setenv("CUPYATTN_NO_COMPILE", "1")
    assert tiny(scale=3).info.cached
    with pytest.raises(CompileError) as caught:
        tiny(scale=4)
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
        assert not tiny().info.ptxas.spills


# --- folders that cannot be written ---


def _refuse_writes_below(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so a read-only filesystem is played, not made."""
    real = store.Store

    class ReadOnly(real):
        @contextlib.contextmanager
        def _subfolder(self, name: str) -> Iterator[int]:
            if self.path.is_relative_to(folder):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            with super()._subfolder(name) as opened:
                yield opened

    monkeypatch.setattr(store, "Store", ReadOnly)


def test_unwritable_cache_falls_back_and_says_so_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "file").write_text("")
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(place / "file/cache"))
    fallback = place / f"tmp/cupyattn-{os.getuid()}"
    with pytest.warns(RuntimeWarning, match="CUPYATTN_CACHE_DIR") as said:
        cold = tiny(scale=3)
        tiny(scale=4)
    assert len(said) == 1 and str(fallback) in str(said[0].message)
    assert cold.path.is_relative_to(fallback)
    assert fallback.stat().st_mode & 0o777 == 0o700
    assert tiny(scale=3).info.cached


def test_read_only_home_falls_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = place / "home"
    home.mkdir()
    monkeypatch.delenv("CUPYATTN_CACHE_DIR")
    monkeypatch.setenv("HOME", str(home))
    assert tiny(scale=3).path.is_relative_to(home / ".cache/cupyattn")
    _refuse_writes_below(home, monkeypatch)
    assert tiny(scale=3).info.cached
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        assert tiny(scale=4).path.is_relative_to(place / "tmp")


def test_shipped_read_only_cache_serves_hits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, broken = tiny(scale=3), tiny(scale=5)
    _truncate(broken.path.parent)
    _refuse_writes_below(place / "cache", monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hit = tiny(scale=3)
    assert hit.path == shipped.path and hit.info.cached
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        miss, repaired = tiny(scale=4), tiny(scale=5)
    for build in (miss, repaired):
        assert build.path.is_relative_to(place / "tmp") and not build.info.cached
    assert tiny(scale=5).info.cached


def test_hits_need_no_temporary_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(scale=3)

    def none_usable() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_usable)
    assert tiny(scale=3).info.cached
    _refuse_writes_below(place / "cache", monkeypatch)
    with pytest.raises(CompileError, match=r"no folder can be written: .*Read-only file system"):
        tiny(scale=4)


def test_full_disk_falls_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, times = descriptors.write_file, []

    def full(name: str, parent: int, data: bytes, mode: int) -> None:
        if name == store.CUBIN and not times:
            times.append(name)
            real(name, parent, data[: len(data) // 2], mode)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(name, parent, data, mode)

    monkeypatch.setattr(descriptors, "write_file", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert tiny().path.is_relative_to(place / "tmp")
    assert cache.contents(cache.CacheFolder(place / "cache")) == (0, 0)
    assert leftovers(place / "cache") == []


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
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        built = tiny()
    assert not built.path.is_relative_to(planted)
    assert list(planted.iterdir()) == []
    assert tiny().info.cached
