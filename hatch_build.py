"""The CUDA sources as one file of the wheel, and a wheel's files compressed once more.

One compressed file is far smaller than compressed files, and is read where it is installed without
unpacking anything. Comments stay in the repository and in the source archive: without them, and
without indentation, lines keep their numbers and binaries are the same.

`python hatch_build.py WHEEL ...` deflates wheels again, by zopfli, which is what `make wheel` does.
"""

from __future__ import annotations

import bz2
import json
import re
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ARCHIVE = "cupyattn/_kernels.json.bz2"
# Our sources have no other comments, and no such marks in strings (a test looks).
_COMMENT = re.compile(r"^[ \t]+|[ \t]*//.*$", re.MULTILINE)


class Kernels(BuildHookInterface):
    """Puts kernels/ into the wheel. An editable install reads the checkout's own folder."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        made = self._made()
        made.parent.mkdir(parents=True, exist_ok=True)
        pack(Path(self.root) / "kernels", made)
        build_data["force_include"][str(made)] = ARCHIVE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._made().unlink(missing_ok=True)

    def _made(self) -> Path:
        return Path(self.directory) / "kernels.json.bz2"


def pack(kernels: Path, archive: Path) -> None:
    """Write the sources below `kernels` to `archive`, {path: text}; equal sources, equal bytes."""
    sources = {
        path.relative_to(kernels).as_posix(): without_comments(path.read_text("utf-8"))
        for path in sorted(kernels.rglob("*.cu*"))
    }
    archive.write_bytes(bz2.compress(json.dumps(sources, separators=(",", ":")).encode()))


def without_comments(text: str) -> str:
    """The source without its comments and indentation, on the same lines."""
    return _COMMENT.sub("", text)


def repack(wheel: Path) -> None:
    """Replace a wheel by one with the same files, deflated as well as zopfli can.

    zipfile takes no data that is compressed already, so the records of the format stand here.
    """
    from zopfli import zlib

    with zipfile.ZipFile(wheel) as archive:
        files = [(info, archive.read(info)) for info in archive.infolist()]
    body, directory = b"", b""
    for info, data in files:
        packed = zlib.compress(data, numiterations=5)[2:-4]  # without zlib's header and checksum
        method, packed = (8, packed) if len(packed) < len(data) else (0, data)
        name = info.filename.encode()
        year, month, day, hour, minute, second = info.date_time
        time, date = hour << 11 | minute << 5 | second // 2, (year - 1980) << 9 | month << 5 | day
        sizes = info.CRC, len(packed), len(data)
        record = struct.pack("<5H3I2H", 20, 0x800, method, time, date, *sizes, len(name), 0)
        where = struct.pack("<3H2I", 0, 0, 0, info.external_attr, len(body))
        directory += b"PK\1\2" + struct.pack("<H", 3 << 8 | 20) + record + where + name
        body += b"PK\3\4" + record + name + packed
    ends = len(files), len(files), len(directory), len(body)
    wheel.write_bytes(body + directory + b"PK\5\6" + struct.pack("<4H2IH", 0, 0, *ends, 0))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        repack(Path(name))
        print(f"{name}: {Path(name).stat().st_size:,} bytes")
