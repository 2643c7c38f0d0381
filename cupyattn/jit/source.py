"""From a kernel's name and Config to the text to compile, and the hash of all it includes."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..core import env
from ..core.dtypes import DType
from ..errors import CompileError

# Raise when the meaning of a cache entry changes in a way no other part of the key shows.
SCHEMA = 1
# Where a wheel has the CUDA sources, in the package (pyproject.toml).
_INSTALLED = "_kernels"

_TYPES_HEADER = "cupyattn/common/types.cuh"
_BUILTIN_TYPES = ("float", "bool")
_KERNEL_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_CONSTANT_NAME = re.compile(r"k[A-Z0-9]\w*\Z", re.ASCII)
_TYPE_NAME = re.compile(r"[A-Z]\w*\Z", re.ASCII)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[ \t]*(.*)$", re.MULTILINE)
_QUOTED = re.compile(r'"([^"]+)"')
_INT32 = range(-(2**31), 2**31)


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a type of a Config, as C++ that this library has written; never a caller's."""

    text: str = ""


Constant: TypeAlias = "int | bool | DType | Members"


class Config(Mapping[str, Constant]):
    """The compile-time constants of one kernel: `kCamelCase` ints and bools, `CamelCase` types.

    Immutable; compares and hashes by `text`, the C++ struct it becomes, so two configs are equal
    exactly if they compile to the same binary. Raises CompileError for a malformed name or value.
    """

    __slots__ = ("_values", "text")

    text: str

    def __init__(self, values: Mapping[str, Constant]) -> None:
        self._values = dict(sorted(values.items()))
        members = "".join(f"  {_member(key, value)}\n" for key, value in self._values.items())
        self.text = f"struct Config {{\n{members}}};\n"

    def __getitem__(self, key: str) -> Constant:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, Config) else NotImplemented

    def __repr__(self) -> str:
        return "Config(" + ", ".join(f"{k}={v!r}" for k, v in self._values.items()) + ")"

    def __reduce__(self) -> tuple[type[Config], tuple[dict[str, Constant]]]:
        return Config, (self._values,)

    @property
    def tag(self) -> str:
        """A short readable name for the cache folder; not unique, the hash beside it is."""
        parts = []
        for key, value in self._values.items():
            name = key[1:] if _CONSTANT_NAME.match(key) else key
            if isinstance(value, Members):
                parts += [name] if value.text else []
            elif isinstance(value, DType):
                parts.append(f"{name.removeprefix('DType')}-{value.name}")
            elif value is True:
                parts.append(name)
            elif value is not False:
                parts.append(f"{name}{value}")
        return "_".join(parts)[:96]

    def as_json(self) -> dict[str, int | bool | str]:
        return {key: _plain(value) for key, value in self._values.items()}


def _plain(value: Constant) -> int | bool | str:
    if isinstance(value, Members):
        return value.text
    return value.name if isinstance(value, DType) else value


def _member(key: str, value: object) -> str:
    if isinstance(value, Members) and _TYPE_NAME.match(key):
        return f"struct {key} {{\n{value.text}  }};" if value.text else f"struct {key} {{}};"
    if isinstance(value, DType):
        if _TYPE_NAME.match(key):
            scope = "" if value.cpp in _BUILTIN_TYPES else "cupyattn::"
            return f"using {key} = {scope}{value.cpp};"
        raise CompileError(f"config: the type {key!r} must be named in CamelCase")
    if not isinstance(value, int):
        kind = type(value).__name__
        raise CompileError(f"config: {key} is {value!r} ({kind}); wanted an int, bool or DType")
    if not _CONSTANT_NAME.match(key):
        raise CompileError(f"config: the constant {key!r} must be named in kCamelCase")
    if isinstance(value, bool):
        return f"static constexpr bool {key} = {'true' if value else 'false'};"
    if value not in _INT32:
        raise CompileError(f"config: {key} = {value} does not fit the kernel's 32-bit int")
    return f"static constexpr int {key} = {int(value)};"


def kernels_dir() -> Path:
    """The folder of the CUDA sources: CUPYATTN_KERNELS_DIR, that of an installed package, or a
    checkout's.

    Raises CompileError if there is none.
    """
    package = Path(__file__).resolve().parents[1]
    chosen = env.KERNELS_DIR.get()
    folders = [Path(chosen).expanduser().absolute()] if chosen else []
    folders = folders or [package / _INSTALLED, package.parent / "kernels"]
    for folder in folders:
        if (folder / "entry").is_dir():
            return folder
    looked = " and ".join(map(str, folders))
    raise CompileError(
        f"kernels: no folder with an entry/ in it at {looked}; reinstall cupyattn, or point "
        f"{env.KERNELS_DIR.name} at the CUDA sources"
    )


@dataclass(frozen=True)
class Program:
    """One translation unit, ready to compile. `includes` maps paths below `root` to their text."""

    name: str
    config: Config
    root: Path
    includes: dict[str, str]

    @classmethod
    def read(cls, name: str, config: Config) -> Program:
        """Read kernels/entry/<name>.cu and all it includes.

        Raises CompileError if there is no such kernel, or an include is not a file below `root`.
        """
        root = kernels_dir()
        entry = f"entry/{name}.cu"
        if not _KERNEL_NAME.match(name) or not (root / entry).is_file():
            names = (path.name for path in (root / "entry").iterdir())
            have = ", ".join(sorted(x[:-3] for x in names if x.endswith(".cu"))) or "none"
            raise CompileError(f"kernel: no file {entry} in {root}; the kernels there are {have}")
        includes: dict[str, str] = {}
        _read_graph(root, _TYPES_HEADER, includes, "the generated Config")
        _read_graph(root, entry, includes, "the caller")
        return cls(name, config, root, includes)

    @property
    def symbol(self) -> str:
        return f"cupyattn_{self.name}"

    @property
    def entry_path(self) -> Path:
        return self.root / "entry" / f"{self.name}.cu"

    @property
    def text(self) -> str:
        """The whole source. Line numbers in messages are the entry file's."""
        return (
            f'#define CUPYATTN_CONFIG\n#include "{_TYPES_HEADER}"\n\n{self.config.text}\n'
            f"#line 1\n{self.includes[f'entry/{self.name}.cu']}"
        )

    def digest(self, options: tuple[str, ...], nvrtc: str, arch: str) -> str:
        """The cache key: 32 hex digits over everything that can change the binary."""
        parts = [str(SCHEMA), self.name, self.config.text, *options, nvrtc, arch]
        for path, text in sorted(self.includes.items()):
            parts += [path, text]
        # Lengths between the parts, so that no two lists of parts concatenate to the same bytes.
        encoded = [part.encode() for part in parts]
        framed = b"".join(b"%d:%b" % (len(part), part) for part in encoded)
        return hashlib.sha256(framed).hexdigest()[:32]


def _read_graph(root: Path, path: str, seen: dict[str, str], includer: str) -> None:
    if path in seen:
        return
    try:
        seen[path] = text = (root / path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CompileError(
            f"kernels: {path}, wanted by {includer}, cannot be read: {error}"
        ) from None
    for match in _INCLUDE.finditer(text):
        quoted = _QUOTED.match(match[1])
        include = quoted and _resolve(root, path, quoted[1], seen)
        where = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
        if not quoted:
            raise CompileError(
                f"kernels: {where} includes {match[1].strip()}; only quoted includes of files in "
                f"{root} are allowed, since no CUDA or system header is needed to run"
            )
        if not include:
            raise CompileError(
                f"kernels: {where} includes {match[1].strip()}, which is neither beside it nor "
                f"below {root}"
            )
        _read_graph(root, include, seen, where)


def _resolve(root: Path, includer: str, include: str, seen: Container[str]) -> str | None:
    """The path below `root` that `include` means inside the file `includer`, if there is one."""
    for folder in (posixpath.dirname(includer), ""):
        candidate = posixpath.normpath(posixpath.join(folder, include))
        inside = not candidate.startswith(("..", "/"))
        if candidate in seen or (inside and (root / candidate).is_file()):
            return candidate
    return None
