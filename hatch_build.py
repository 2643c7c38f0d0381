"""The CUDA sources as one file of the wheel.

One compressed archive of stored files is far smaller than compressed files, and is read where it is
installed without unpacking anything. Comments stay in the repository and in the source archive:
without them, and without indentation, lines keep their numbers and binaries are the same.
"""

from __future__ import annotations

import io
import lzma
import re
import zipfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ARCHIVE = "cupyattn/_kernels.zip.xz"
# Our sources have no other comments, and no such marks in strings (a test looks).
_COMMENT = re.compile(r"^[ \t]+|[ \t]*//.*$", re.MULTILINE)


class Kernels(BuildHookInterface):
    """Puts kernels/ into the wheel. An editable install reads the checkout's own folder."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        made = Path(self.directory) / "kernels.zip.xz"
        made.parent.mkdir(parents=True, exist_ok=True)
        pack(Path(self.root) / "kernels", made)
        build_data["force_include"][str(made)] = ARCHIVE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        (Path(self.directory) / "kernels.zip.xz").unlink(missing_ok=True)


def pack(kernels: Path, archive: Path) -> None:
    """Write the sources below `kernels` to `archive`; equal sources make equal bytes."""
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w", zipfile.ZIP_STORED) as packed:
        for path in sorted(kernels.rglob("*.cu*")):
            name = zipfile.ZipInfo(path.relative_to(kernels).as_posix())
            packed.writestr(name, without_comments(path.read_text("utf-8")))
    archive.write_bytes(lzma.compress(stored.getvalue()))


def without_comments(text: str) -> str:
    """The source without its comments and indentation, on the same lines."""
    return _COMMENT.sub("", text)
