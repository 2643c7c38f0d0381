"""What lies in or beside the cache and is not its own: never removed, written, followed or run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import tiny_kernels
from helpers.tiny_kernels import build as tiny
from helpers.tiny_kernels import leftovers

from cupyattn import jit
from cupyattn.errors import CompileError
from cupyattn.jit import cache, store

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return tiny_kernels.sandbox(tmp_path, monkeypatch)


@pytest.fixture
def victim(place: Path) -> Iterator[Path]:
    """Somebody's folder with names of every kind, which no test may change."""
    folder = place / "victim"
    digest = 32 * "a"
    for name in ("my-project", f"{digest}-1-{8 * 'b'}", f"x.sm_80.{digest}", "work", ".git"):
        (folder / name).mkdir(parents=True)
        for file in ("thesis.txt", store.SOURCE, store.CUBIN, store.BUILD, store.LOG):
            (folder / name / file).write_text("precious")
    before = _snapshot(folder)
    yield folder
    assert _snapshot(folder) == before


def _snapshot(folder: Path) -> dict[str, object]:
    return {
        str(path): path.read_bytes() if path.is_file() else path.stat().st_mode
        for path in folder.rglob("*")
    }


def _evil(entry: Path) -> None:
    """Give the entry another cubin, with a build.json that vouches for it."""
    cubin = b"\x7fELF evil"
    facts = json.loads((entry / store.BUILD).read_text())
    source = (entry / store.SOURCE).read_text()
    facts |= store.Product(source, cubin, facts).build(facts["entry"])
    (entry / store.CUBIN).write_bytes(cubin)
    (entry / store.BUILD).write_text(json.dumps(facts))


def _quietly_built(scale: int = 3) -> jit.Build:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return tiny(scale)


def _cache_everything(place: Path) -> None:
    """Use every operation that writes or removes."""
    _quietly_built(3)
    with pytest.raises(CompileError):
        jit.build("broken", {}, "sm_80")
    for one in cache.cache_folders():
        with contextlib.suppress(OSError), one.opened() as opened:
            opened.sweep()
            opened.evict(0, keep="")
    _quietly_built(4)
    for one in cache.cache_folders():
        with contextlib.suppress(OSError):
            cache.clear(one)


def test_strangers_in_the_cache_stay(place: Path, victim: Path) -> None:
    """CUPYATTN_CACHE_DIR may be a home or a project folder."""
    shutil.copytree(victim, place / "cache")
    shutil.copytree(victim, place / "cache/.work")
    for folder in (store.WORK, store.FAILED):
        (place / "cache" / folder).mkdir(mode=0o700)
        shutil.copytree(victim / "my-project", place / "cache" / folder / "my-project")
    own = f"x.sm_80.{32 * 'a'}"
    shutil.rmtree(place / "cache" / own)
    before = _snapshot(place / "cache")
    _cache_everything(place)
    after = _snapshot(place / "cache")
    assert {path: after.get(path) for path in before} == before
    assert after.keys() == before.keys()


@pytest.mark.parametrize("name", [store.WORK, store.FAILED, ".work", ".failed"])
def test_no_link_is_followed_to_a_folder(place: Path, victim: Path, name: str) -> None:
    (place / "cache").mkdir()
    (place / "cache" / name).symlink_to(victim)
    _cache_everything(place)


def test_no_link_is_followed_in_place_of_an_entry(place: Path, victim: Path) -> None:
    built = tiny()
    good, entry = built.path.read_bytes(), built.path.parent
    entry.rename(victim.parent / "moved")
    _evil(victim.parent / "moved")
    entry.symlink_to(victim.parent / "moved")
    before = _snapshot(victim.parent / "moved")
    again = tiny()
    assert not again.info.cached and again.path.read_bytes() == good
    assert not entry.is_symlink()
    assert _snapshot(victim.parent / "moved") == before


@pytest.mark.parametrize("file", [store.CUBIN, store.BUILD])
def test_no_link_is_followed_to_a_file(place: Path, file: str) -> None:
    built = tiny()
    good, path = built.path.read_bytes(), built.path.parent / file
    path.rename(place / "elsewhere")
    path.symlink_to(place / "elsewhere")
    again = tiny()
    assert not again.info.cached and again.path.read_bytes() == good
    assert (place / "elsewhere").is_file()


def test_links_for_failures_and_locks_lead_nowhere(place: Path, victim: Path) -> None:
    name = tiny().path.parent.name
    (place / "cache" / store.WORK / f"{name.rpartition('.')[2]}.lock").symlink_to(place / "made")
    shutil.rmtree(place / "cache" / name)
    with pytest.raises(CompileError):
        jit.build("broken", {}, "sm_80")
    failed = next((place / "cache" / store.FAILED).iterdir())
    shutil.rmtree(failed)
    failed.symlink_to(victim / "my-project")
    with pytest.raises(CompileError):
        jit.build("broken", {}, "sm_80")
    assert not failed.is_symlink()
    _quietly_built()
    assert not (place / "made").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_lock_that_is_no_file_stops_nobody(place: Path, kind: str) -> None:
    built = tiny()
    lock = place / "cache" / store.WORK / f"{built.path.parent.name.rpartition('.')[2]}.lock"
    shutil.rmtree(built.path.parent)
    os.mkfifo(lock) if kind == "pipe" else lock.mkdir()
    assert not _quietly_built().info.cached


# --- owners and modes ---


def test_what_is_stored_is_private(place: Path) -> None:
    old = os.umask(0)
    try:
        entry = tiny().path.parent
        with pytest.raises(CompileError):
            jit.build("broken", {}, "sm_80")
    finally:
        os.umask(old)
    for path in [place / "cache", *(place / "cache").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    assert entry.exists()


def test_a_shared_cache_follows_the_umask(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYATTN_CACHE_SHARED", "1")
    old = os.umask(0o022)
    try:
        entry = tiny().path.parent
    finally:
        os.umask(old)
    assert entry.stat().st_mode & 0o777 == 0o755
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in entry.iterdir())
    entry.chmod(0o777)
    assert tiny().info.cached


@pytest.mark.parametrize("part", ["", store.CUBIN, store.BUILD])
def test_what_others_may_write_is_compiled_again(place: Path, part: str) -> None:
    built = tiny()
    good = built.path.read_bytes()
    _evil(built.path.parent)
    (built.path.parent / part).chmod(0o777)
    again = tiny()
    assert not again.info.cached and again.path.read_bytes() == good
    assert tiny().info.cached


@needs_root
@pytest.mark.parametrize("part", ["", store.CUBIN, store.BUILD])
def test_what_others_own_is_not_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    built = tiny()
    _evil(built.path.parent)
    os.chown(built.path.parent / part, NOBODY, NOBODY)
    with monkeypatch.context() as patched:
        patched.setenv("CUPYATTN_CACHE_SHARED", "1")
        assert tiny().info.cached, "a shared cache trusts whoever can write it"
    assert not _quietly_built().info.cached


@needs_root
def test_a_folder_of_another_user_is_not_used(place: Path) -> None:
    (place / "cache").mkdir(mode=0o777)
    os.chown(place / "cache", NOBODY, NOBODY)
    with pytest.warns(RuntimeWarning, match=r"belongs to user 65534.*CUPYATTN_CACHE_SHARED=1"):
        built = tiny()
    assert built.path.is_relative_to(place / "tmp") and list((place / "cache").iterdir()) == []
    assert _quietly_built().info.cached


def test_a_fallback_planted_after_the_look_is_not_used(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is free when it is chosen, and taken when it is opened."""
    planted = place / "tmp/cupyattn-0"
    monkeypatch.setattr(cache, "temporary_folder", lambda: planted)
    (place / "file").write_text("")
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(place / "file/cache"))
    planted.mkdir()
    planted.chmod(0o777)
    with pytest.warns(RuntimeWarning), pytest.raises(CompileError, match="other users may write"):
        tiny()
    assert list(planted.iterdir()) == []


def test_the_bytes_that_were_checked_are_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing the file after the check changes nothing, and no path stands for two kernels."""
    paths = []

    def read(cubin: bytes) -> bytes:
        with jit.module._as_file(cubin) as path:
            paths.append(path)
            return Path(path).read_bytes()

    built, cubin = jit.module._build("tiny", jit.Config({"kScale": 3}), "sm_80")
    _evil(built.path.parent)
    assert read(cubin) == cubin != built.path.read_bytes()
    assert [read(bytes([index])) for index in range(40)] == [bytes([i]) for i in range(40)]
    assert len(set(paths)) == len(paths)


# --- what others put into the folder of a kernel ---


def _guests(entry: Path) -> dict[str, object]:
    """Others' files in an entry's folder, among them a kernel.cu; what they are."""
    (entry / "notes.txt").write_text("precious")
    (entry / "more").mkdir()
    (entry / "more" / store.CUBIN).write_text("precious")
    (entry / store.SOURCE).write_text("// mine")
    return _guests_of(entry)


def _guests_of(entry: Path) -> dict[str, object]:
    own = (store.CUBIN, store.BUILD)
    return {
        name: x
        for name, x in _snapshot(entry).items()
        if Path(name).parent != entry or Path(name).name not in own
    }


@pytest.mark.parametrize("how", ["evicted", "cleared", "replaced", "nested", "open to all"])
def test_what_others_put_beside_a_kernel_stays(place: Path, how: str) -> None:
    built = tiny()
    good, entry = built.path.read_bytes(), built.path.parent
    guests = _guests(entry)
    one = cache.cache_folders()[0]
    (usage,) = cache.entries(one)
    assert usage.nbytes == sum((entry / x).stat().st_size for x in (store.CUBIN, store.BUILD))
    if how == "evicted":
        with one.opened() as opened:
            opened.evict(0, keep="")
    elif how == "cleared":
        assert cache.clear(one) == (1, usage.nbytes)
    elif how == "replaced":
        (entry / store.CUBIN).write_bytes(b"")
    elif how == "nested":
        (entry / store.BUILD).write_text("[" * 100_000)
    else:
        entry.chmod(0o777)
    if how in ("evicted", "cleared"):
        assert _guests_of(entry) == guests and not (entry / store.CUBIN).exists()
        assert cache.entries(one) == []
    for is_first in (True, False):
        again = tiny()
        assert again.info.cached is not is_first and again.path == built.path
        assert again.path.read_bytes() == good
    if how == "nested":  # a damaged entry does not say which kernel.cu it had
        guests.pop(str(entry / store.SOURCE))
    found = _guests_of(entry)
    assert {name: found.get(name) for name in guests} == guests
    assert leftovers(place / "cache") == []


def test_a_build_json_of_any_depth_is_a_damaged_entry(place: Path) -> None:
    entry = tiny().path.parent
    (entry / store.BUILD).write_text("[" * 100_000)
    one = cache.cache_folders()[0]
    ((name, what),) = cache.verify(one)
    assert name == entry.name and "nests too deeply" in what
    assert not tiny().info.cached and tiny().info.cached


@needs_root
def test_a_file_of_another_user_in_the_way_is_left(place: Path) -> None:
    built = tiny()
    os.chown(built.path, NOBODY, NOBODY)
    again = _quietly_built()
    assert not again.info.cached and again.path.is_relative_to(place / "tmp")
    assert built.path.stat().st_uid == NOBODY
    assert [path.name for path in built.path.parent.iterdir()] == [store.CUBIN]
    assert cache.clear(cache.cache_folders()[0]) == (0, 0) and built.path.exists()


def test_a_guest_in_the_folder_of_a_failure_stays(place: Path) -> None:
    for _ in range(2):
        with pytest.raises(CompileError):
            jit.build("broken", {}, "sm_80")
        (failed,) = (place / "cache" / store.FAILED).iterdir()
        assert (failed / store.SOURCE).exists()
        (failed / "notes.txt").write_text("precious")
    cache.clear(cache.cache_folders()[0])
    assert [path.name for path in failed.iterdir()] == ["notes.txt"]


# --- limits ---


def test_the_least_recently_used_go_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {scale: tiny(scale).path.parent for scale in (1, 2, 3, 4)}
    for age, scale in enumerate((2, 1, 4, 3)):
        for file in entries[scale].iterdir():
            os.utime(file, (0, 1e9 - 2e6 * age))
    tiny(3)  # the oldest is used again
    with cache.cache_folders()[0].opened() as opened:
        names = [entry.name for entry in opened.usage()]
        assert names == [entries[scale].name for scale in (4, 1, 2, 3)]
        sizes = {entry.name: entry.nbytes for entry in opened.usage()}
        opened.evict(sum(sizes.values()) - 1, keep=entries[4].name)
    assert [scale for scale in entries if entries[scale].exists()] == [2, 3, 4]
    monkeypatch.setattr(cache, "_MIB", 1)
    monkeypatch.setenv("CUPYATTN_CACHE_LIMIT_MIB", "1")
    last = tiny(5).path
    assert [path.parent for path in (place / "cache").glob("*/kernel.cubin")] == [last.parent]
    assert leftovers(place / "cache") == []


@pytest.mark.parametrize("value", ["", " "])
def test_a_limit_that_is_empty_is_the_default(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUPYATTN_CACHE_LIMIT_MIB", value)
    assert cache._limit() == 4096 << 20 and not tiny().info.cached


@pytest.mark.parametrize("value", ["-1", "many", "1e3"])
def test_a_limit_is_a_number(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUPYATTN_CACHE_LIMIT_MIB", value)
    with pytest.raises(CompileError, match="CUPYATTN_CACHE_LIMIT_MIB"):
        tiny()


def test_failures_are_few(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_KEPT_FAILURES", 3)
    for index in range(5):
        with pytest.raises(CompileError):
            jit.build("broken", {"kScale": index}, "sm_80")
    kept = {path.name.split(".")[2] for path in (place / "cache" / store.FAILED).iterdir()}
    assert kept == {"Scale2", "Scale3", "Scale4"}


def test_a_lock_that_hangs_is_waited_for_with_a_word_and_an_end(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = tiny()
    lock = place / "cache" / store.WORK / f"{built.path.parent.name.rpartition('.')[2]}.lock"
    shutil.rmtree(built.path.parent)
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.3)
    monkeypatch.setattr(store, "_MESSAGE_SECONDS", 0.1)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not tiny().info.cached
    said = [record.getMessage() for record in caplog.records if str(lock) in record.getMessage()]
    assert len(said) == 2 and "waiting" in said[0] and "compiled here too" in said[1]


# --- list, verify, clear ---


def test_verify_and_clear(place: Path) -> None:
    good, bad = tiny(1).path.parent, tiny(2).path.parent
    _evil(bad)
    (bad / store.CUBIN).write_bytes(b"\x7fELF")
    one = cache.cache_folders()[0]
    assert {name for name, _ in cache.verify(one)} == {bad.name}
    count, nbytes = cache.contents(one)
    assert (count, nbytes) == cache.clear(one) and count == 2 and nbytes > 0
    assert not good.exists() and list((place / "cache").iterdir()) == []
    assert cache.clear(one) == (0, 0)


# --- places ---


@pytest.mark.parametrize("value", ["relative/folder", "~nobody-of-that-name/x", "."])
def test_a_cache_folder_is_an_absolute_path(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", value)
    with pytest.raises(CompileError, match=r"CUPYATTN_CACHE_DIR: got .* wanted an absolute path"):
        tiny()


def test_where_kernels_are_by_default(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", " ")
    monkeypatch.setenv("HOME", str(place / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.folders()[0] == place / "home/.cache/cupyattn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "xdg"))
    assert cache.folders()[0] == place / "xdg/cupyattn"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "")
    assert cache.folders()[0] != Path("/.cache/cupyattn")


# --- a user without rights ---

USE = """
import warnings
warnings.simplefilter("ignore")
from cupyattn import jit
built = jit.build("tiny", {"kScale": 3}, "sm_80")
print(built.info.cached, built.path)
"""


def _without_rights(place: Path, code: str, **environment: str) -> str:
    """What the code prints where a file's mode counts, as it does not for root."""
    command = [sys.executable, "-c", code]
    if os.getuid() == 0:
        setpriv = shutil.which("setpriv") or pytest.skip("root cannot give its rights up here")
        command = [setpriv, "--bounding-set=-all", "--inh-caps=-all", *command]
    # As users have it: the suite itself says where CuPy's folder is.
    inherited = {name: x for name, x in os.environ.items() if name != "CUPY_CACHE_DIR"}
    ran = subprocess.run(
        command,
        env={**inherited, "HOME": str(place / "home"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _give_away(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)


@pytest.fixture
def read_only_home(place: Path) -> Iterator[Path]:
    home = place / "home"
    home.mkdir()
    home.chmod(0o555)
    yield home
    home.chmod(0o755)


@pytest.mark.parametrize("home", ["home", "home/gone"])
def test_a_home_that_cannot_be_written(place: Path, read_only_home: Path, home: str) -> None:
    """CuPy makes a folder in it while it is imported, and the cache would like to."""
    for expected in ("False", "True"):
        cached, path = _without_rights(
            place, USE, CUPYATTN_CACHE_DIR="", HOME=str(read_only_home.parent / home)
        ).split()
        assert cached == expected and Path(path).is_relative_to(place / "tmp")


def test_info_answers_in_a_home_that_cannot_be_written(place: Path, read_only_home: Path) -> None:
    code = "from cupyattn.cli import main; main(['info'])"
    told = _without_rights(place, code, CUPYATTN_CACHE_DIR="")
    assert f"{read_only_home}/.cache/cupyattn (read-only)" in told
    assert f"{place}/tmp/cupyattn-{os.getuid()} (writable)" in told
    assert "CuPy         1" in told


def test_a_machine_without_a_writable_folder_is_told_of_cupy(
    place: Path, read_only_home: Path
) -> None:
    code = """
import tempfile
def gettempdir():
    raise FileNotFoundError("no temporary folder")
tempfile.gettempdir = gettempdir
from cupyattn.cli import main
main(["info"])
"""
    told = _without_rights(place, code, CUPYATTN_CACHE_DIR="")
    assert "CuPy         cannot be imported" in told and "set CUPY_CACHE_DIR" in told


@needs_root
def test_a_shipped_cache_of_another_user(
    place: Path, read_only_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is made by one user, and runs as whoever the cluster says."""
    shared = {"CUPYATTN_CACHE_SHARED": "1", "CUPYATTN_NO_COMPILE": "1"}
    monkeypatch.setenv("CUPYATTN_CACHE_SHARED", "1")
    old = os.umask(0o022)
    try:
        tiny(3)
    finally:
        os.umask(old)
    _give_away(place / "cache")
    cached, path = _without_rights(place, USE, **shared).split()
    assert cached == "True" and Path(path).is_relative_to(place / "cache")


@needs_root
def test_a_private_cache_of_another_user_is_named(place: Path, read_only_home: Path) -> None:
    tiny(3)
    _give_away(place / "cache")
    code = f"try:\n{''.join('  ' + line for line in USE.splitlines(keepends=True))}\n"
    code += "except Exception as error: print(error)"
    assert "Permission denied" in _without_rights(place, code, CUPYATTN_NO_COMPILE="1")
