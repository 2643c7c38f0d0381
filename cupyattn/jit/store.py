"""One folder of compiled kernels: reads, writes and removes only what it made itself.

An entry is a folder `<name>.<arch>.<tag>.<digest>` with kernel.cu, kernel.cubin and build.json. It
is written under `.cupyattn-work/` and renamed into place, so an entry exists whole or not at all. A
lock per digest keeps two processes from compiling the same kernel; correctness never depends on it.

Names that do not match the patterns below are another program's, and are never touched. In an
entry's folder so are files of other names, of other users, and a kernel.cu that is not the one that
was written: they stay where they are, and the folder with them. An entry is used only if this user
or root owns it and nobody else may write it; a shared folder, which is an explicit choice, trusts
whoever can write it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from . import descriptors
from .build_info import BuildInfo

SOURCE, CUBIN, BUILD, LOG = "kernel.cu", "kernel.cubin", "build.json", "nvrtc.log"
WORK, FAILED = ".cupyattn-work", ".cupyattn-failed"

_FILES = (SOURCE, CUBIN, BUILD, LOG)
_ENTRY = re.compile(r"[a-z][a-z0-9_]*\.sm_[0-9]+a?(\.[\w.-]*)?\.([0-9a-f]{32})\Z", re.ASCII)
_TEMPORARY = re.compile(r"([0-9a-f]{32})-[0-9]+-[0-9a-f]{8}\Z")
_LOCK = re.compile(r"([0-9a-f]{32})\.lock\Z")
_ELF = b"\x7fELF"

# A compile takes seconds; a process that holds a lock for longer than this is taken to hang.
_LOCK_SECONDS, _MESSAGE_SECONDS, _POLL_SECONDS = 300.0, 5.0, 0.02
# The last use of an entry is only written down when that changes the order of eviction by days.
_USE_SECONDS = 86_400
_KEPT_FAILURES = 20

_log = logging.getLogger("cupyattn")


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled kernel: its folder, the facts about it, and the cubin that was checked."""

    folder: Path
    info: BuildInfo
    cubin: bytes

    @property
    def path(self) -> Path:
        return self.folder / CUBIN


class Usage(NamedTuple):
    """One entry as `list` and eviction see it; `last_used` is a time of the epoch in seconds."""

    name: str
    nbytes: int
    last_used: float


class Product(NamedTuple):
    """What a compile hands to the cache: the source, the cubin, and the facts for build.json."""

    source: str
    cubin: bytes
    facts: Mapping[str, Any]

    def build(self, name: str) -> dict[str, Any]:
        """What build.json says of the entry `name`."""
        written = {
            "cubin_bytes": len(self.cubin),
            "cubin_sha256": hashlib.sha256(self.cubin).hexdigest(),
            "source_sha256": hashlib.sha256(self.source.encode()).hexdigest(),
        }
        return {**self.facts, "entry": name, **written}


class Store:
    """An open folder of kernels. Made by `opened`."""

    def __init__(self, path: Path, descriptor: int, *, shared: bool) -> None:
        self.path, self._root, self._shared = path, descriptor, shared
        self._folder_mode, self._file_mode = (0o777, 0o666) if shared else (0o700, 0o600)

    # --- entries ---

    def read(self, name: str) -> Entry | None:
        """The entry `name` if it is there and is the one that was written."""
        try:
            return self.check(name)
        except (OSError, ValueError):
            return None

    def check(self, name: str) -> Entry:
        """The entry `name`. Raises OSError or ValueError with what is wrong with it."""
        with self._opened(name) as opened:
            build = self._read_build(opened)
            cubin = descriptors.read_file(CUBIN, opened, trusting=self._shared)
            info = BuildInfo.from_json(build, cached=True)
            if build.get("entry") != name:
                raise ValueError(f"{BUILD} is of another entry")
            sha256 = hashlib.sha256(cubin).hexdigest()
            if not cubin.startswith(_ELF) or sha256 != build.get("cubin_sha256"):
                raise ValueError(f"{CUBIN} is not the file that was written")
            self._note_use(opened)
        return Entry(self.path / name, info, cubin)

    def _read_build(self, opened: int) -> Any:
        """What build.json says. Raises OSError or ValueError."""
        data = descriptors.read_file(BUILD, opened, trusting=self._shared)
        try:
            return json.loads(data)
        except RecursionError:
            raise ValueError(f"{BUILD} nests too deeply") from None

    def write(self, name: str, product: Product) -> Entry:
        """Write the entry beside its final place and rename it there, unless one came first."""
        digest, build = _digest(name), product.build(name)
        # build.json goes last: it vouches for the files before it.
        files = {
            SOURCE: product.source.encode(),
            CUBIN: product.cubin,
            BUILD: (json.dumps(build, indent=1) + "\n").encode(),
        }
        with self._subfolder(WORK) as work:
            temporary = _temporary_name(digest)
            try:
                os.mkdir(temporary, self._folder_mode, dir_fd=work)
                with descriptors.folder(temporary, work) as opened:
                    for file, data in files.items():
                        descriptors.write_file(file, opened, data, self._file_mode)
                winner = self._rename(temporary, name, work)
            finally:
                descriptors.remove(temporary, work, _FILES)
        info = BuildInfo.from_json(build, cached=False)
        return winner or Entry(self.path / name, info, product.cubin)

    def _rename(self, temporary: str, name: str, work: int) -> Entry | None:
        try:
            os.rename(temporary, name, src_dir_fd=work, dst_dir_fd=self._root)
        except OSError:
            winner = self.read(name)
            if winner is not None:
                return winner
            # A damaged entry is in the way. Moving it aside is atomic too.
            self._remove(name, work)
            try:
                os.rename(temporary, name, src_dir_fd=work, dst_dir_fd=self._root)
            except OSError:
                self._fill(temporary, name, work)
        return None

    def _fill(self, temporary: str, name: str, work: int) -> None:
        """Move the files of an entry into its folder, which others' files keep."""
        with self._owned(name) as opened, descriptors.folder(temporary, work) as descriptor:
            if os.fstat(opened).st_uid != os.getuid():
                raise descriptors.Untrusted("it belongs to another user")
            if not self._shared:
                os.fchmod(opened, self._folder_mode)
            # build.json goes last here too, and kernel.cu is for reading only.
            files = [x for x in (SOURCE, CUBIN, BUILD) if not descriptors.exists(x, opened)]
            if CUBIN not in files or BUILD not in files:
                raise FileExistsError(errno.EEXIST, f"{name} holds files of another user")
            for file in files:
                os.rename(file, file, src_dir_fd=descriptor, dst_dir_fd=opened)

    def usage(self) -> list[Usage]:
        """Every entry, the least recently used first."""
        usages = []
        for name in os.listdir(self._root):
            if not _ENTRY.match(name):
                continue
            with contextlib.suppress(OSError), self._owned(name) as opened:
                own, others = self._files(opened, name)
                if own or not others:
                    files = [os.lstat(file, dir_fd=opened) for file in own]
                    used = max((file.st_mtime for file in files), default=0.0)
                    usages.append(Usage(name, sum(file.st_size for file in files), used))
        return sorted(usages, key=lambda entry: entry.last_used)

    def evict(self, limit: int, keep: str) -> None:
        """Remove the least recently used entries, but not `keep`, until `limit` bytes are left."""
        entries = self.usage()
        excess = sum(entry.nbytes for entry in entries) - limit
        if excess > 0:
            victims = iter(entry for entry in entries if entry.name != keep)
            while excess > 0 and (victim := next(victims, None)):
                excess -= self.remove(victim)

    def remove(self, entry: Usage) -> int:
        """Remove an entry; the bytes that this freed."""
        with self._subfolder(WORK) as work:
            return entry.nbytes if self._remove(entry.name, work) else 0

    def clear(self) -> tuple[int, int]:
        """Remove all entries, kept failures and leftovers; how many entries, and their bytes."""
        sizes = [size for size in map(self.remove, self.usage()) if size]
        self.sweep()
        with self._subfolder(FAILED) as failed:
            _remove_all(failed, [name for name in os.listdir(failed) if _ENTRY.match(name)])
        for name in (WORK, FAILED):
            # A process that compiles now keeps the folder filled.
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=self._root)
        return len(sizes), sum(sizes)

    def _remove(self, name: str, work: int) -> bool:
        """Remove an entry, but for what is not of this cache, in its folder; whether it was there.

        One that holds nothing else is moved aside first, so that nobody finds half of it.
        """
        with contextlib.suppress(OSError), self._owned(name) as opened:
            own, others = self._files(opened, name)
            if others:
                for file in own:
                    os.unlink(file, dir_fd=opened)
                return bool(own)
        aside = _temporary_name(_digest(name))
        try:
            os.rename(name, aside, src_dir_fd=self._root, dst_dir_fd=work)
        except FileNotFoundError:
            return False
        descriptors.remove(aside, work, _FILES)
        # What somebody has put there meanwhile goes back with its folder.
        with contextlib.suppress(OSError):
            os.rename(aside, name, src_dir_fd=work, dst_dir_fd=self._root)
        return True

    def _files(self, opened: int, name: str) -> tuple[list[str], list[str]]:
        """The files of an entry's folder that this cache wrote, build.json first, and the others.

        Those of a damaged entry count as written, a kernel.cu without any of the others does not.
        """
        names = os.listdir(opened)
        own = [file for file in (BUILD, CUBIN, SOURCE, LOG) if file in names]
        own = [file for file in own if self._is_own(os.lstat(file, dir_fd=opened))]
        if SOURCE in own and not self._is_source_own(opened, name, own):
            own.remove(SOURCE)
        return own, [file for file in names if file not in own]

    def _is_own(self, status: os.stat_result) -> bool:
        is_file = stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)
        return is_file and (self._shared or status.st_uid == os.getuid())

    def _is_source_own(self, opened: int, name: str, own: list[str]) -> bool:
        """Whether kernel.cu is what build.json vouches for, as far as it does."""
        if own == [SOURCE]:
            return False
        try:
            build = self._read_build(opened)
            if not isinstance(build, dict) or build.get("entry") != name:
                return True
            source = descriptors.read_file(SOURCE, opened, trusting=True)
        except (OSError, ValueError):
            return True
        digest = hashlib.sha256(source).hexdigest()
        return bool(build.get("source_sha256", digest) == digest)

    def _note_use(self, entry: int) -> None:
        with contextlib.suppress(OSError):
            if time.time() - os.stat(BUILD, dir_fd=entry).st_mtime > _USE_SECONDS:
                os.utime(BUILD, dir_fd=entry)

    # --- files beside the kernels ---

    def read_beside(self, folder: str, name: str) -> bytes:
        """The file `name` of the folder `folder`. Raises OSError, of which Untrusted is one."""
        with self._opened(folder) as opened:
            return descriptors.read_file(name, opened, trusting=self._shared)

    def write_beside(self, folder: str, name: str, data: bytes) -> None:
        """Write that file in place of what has its name, whole or not at all. Raises OSError."""
        with self._subfolder(folder) as opened:
            temporary = f".{name}-{os.getpid()}-{os.urandom(4).hex()}"
            try:
                descriptors.write_file(temporary, opened, data, self._file_mode)
                os.rename(temporary, name, src_dir_fd=opened, dst_dir_fd=opened)
            finally:
                descriptors.remove(temporary, opened, ())

    # --- failed compiles ---

    def keep_failure(self, name: str, source: str, log: str) -> Path:
        """Keep the source and log of a failed compile for reading; the source's path."""
        with self._subfolder(FAILED) as failed:
            kept = [other for other in os.listdir(failed) if _ENTRY.match(other)]
            kept.sort(key=lambda other: os.lstat(other, dir_fd=failed).st_mtime)
            _remove_all(failed, [name, *kept[: -_KEPT_FAILURES + 1]])
            # It is there where somebody keeps files of his own in it.
            descriptors.make_folder(name, failed, self._folder_mode)
            with descriptors.folder(name, failed) as opened:
                for file, text in ((LOG, log), (SOURCE, source)):
                    descriptors.write_file(file, opened, text.encode(), self._file_mode)
        return self.path / FAILED / name / SOURCE

    # --- work in progress ---

    def sweep(self) -> None:
        """Remove what killed processes left: all work on a digest whose lock nobody holds."""
        with self._subfolder(WORK) as work:
            names = os.listdir(work)
            matches = [_TEMPORARY.match(name) or _LOCK.match(name) for name in names]
            for digest in {match[1] for match in matches if match}:
                with self.lock(digest, wait=0) as held:
                    if held:
                        left = [m[0] for m in matches if m and m[1] == digest]
                        _remove_all(work, [name for name in left if _TEMPORARY.match(name)])

    @contextlib.contextmanager
    def lock(self, digest: str, *, wait: float | None = None) -> Iterator[bool]:
        """Hold the lock of `digest`, waited for `wait` seconds; yields whether it is held.

        The operating system frees the lock of a process that died. On a filesystem without locks it
        is not held: then two processes may compile the same kernel, and the rename decides.
        """
        name = f"{digest}.lock"
        with self._subfolder(WORK) as work:
            descriptor = self._acquire(name, work, _LOCK_SECONDS if wait is None else wait)
            try:
                yield descriptor is not None
            finally:
                if descriptor is not None:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=work)
                    os.close(descriptor)

    def _acquire(self, name: str, work: int, wait: float) -> int | None:
        import fcntl

        start, said = time.monotonic(), False
        while True:
            descriptor = descriptors.open_file(name, work, os.O_RDWR | os.O_CREAT, self._file_mode)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A holder that removed the file leaves this process with a lock nobody looks at.
                if os.path.samestat(os.fstat(descriptor), os.lstat(name, dir_fd=work)):
                    return descriptor
            except FileNotFoundError:
                pass
            except BlockingIOError:
                waited = time.monotonic() - start
                if waited > wait:
                    os.close(descriptor)
                    self._say_given_up(name, wait)
                    return None
                if waited > _MESSAGE_SECONDS and not said:
                    said = True
                    _log.warning("waiting for another process that holds %s", self._lock_path(name))
                time.sleep(_POLL_SECONDS)
            except OSError:  # no locks on this filesystem
                os.close(descriptor)
                return None
            os.close(descriptor)

    def _say_given_up(self, name: str, wait: float) -> None:
        if wait:
            _log.warning(
                "%s was held for %.0f s; the kernel is compiled here too",
                self._lock_path(name),
                wait,
            )

    def _lock_path(self, name: str) -> Path:
        return self.path / WORK / name

    @contextlib.contextmanager
    def _subfolder(self, name: str) -> Iterator[int]:
        descriptors.make_folder(name, self._root, self._folder_mode)
        with self._opened(name) as opened:
            yield opened

    def _owned(self, name: str) -> contextlib.AbstractContextManager[int]:
        return descriptors.folder(name, self._root, trusting=self._shared)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        with self._owned(name) as opened:
            if not self._shared:
                descriptors.check_private(os.fstat(opened))
            yield opened


@contextlib.contextmanager
def opened(path: Path, *, shared: bool, private: bool, create: bool = False) -> Iterator[Store]:
    """The folder `path`, made if `create`. A `private` one is neither a link nor open to others.

    Raises OSError, of which Untrusted is one kind.
    """
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o777 if shared else 0o700)
    with descriptors.folder(str(path), follow=not private, trusting=shared) as root:
        if private:
            descriptors.check_private(os.fstat(root))
        yield Store(path, root, shared=shared)


def _digest(name: str) -> str:
    return name.rpartition(".")[2]


def _temporary_name(digest: str) -> str:
    return f"{digest}-{os.getpid()}-{os.urandom(4).hex()}"


def _remove_all(folder: int, names: list[str]) -> None:
    for name in names:
        descriptors.remove(name, folder, _FILES)
