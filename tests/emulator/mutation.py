"""One mistake to sow in the kernels, and the marker that says in which line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_MARKER = re.compile(r"\s*// mutate: ([a-z0-9-]+)$")


@dataclass(frozen=True)
class Mutation:
    """In the line that `// mutate: slug` marks, `old` becomes `new`.

    `old` begins in that line, there exactly once, and may run on to the next lines; white space in
    it stands for any. `catcher` is a name of test_mutations.CATCHERS.
    """

    slug: str
    old: str
    new: str
    catcher: str

    def apply(self, files: list[KernelFile]) -> tuple[str, str]:
        """The path of the file that changes, and its new text."""
        (file, line), *others = [(x, x.marked[self.slug]) for x in files if self.slug in x.marked]
        assert not others, f"{self.slug} marks lines of several files"
        text, start = "".join(file.lines), sum(map(len, file.lines[:line]))
        end = start + len(file.lines[line])
        pattern = re.compile(r"\s+".join(map(re.escape, self.old.split())))
        hits = [hit for hit in pattern.finditer(text, start) if hit.start() < end]
        assert len(hits) == 1, f"{self.slug}: {self.old!r} is {len(hits)} times in its line"
        return file.path, text[: hits[0].start()] + self.new + text[hits[0].end() :]


@dataclass(frozen=True)
class KernelFile:
    """A kernel source without its markers; `marked` gives the index of each marker's line."""

    path: str
    lines: list[str]
    marked: dict[str, int]

    @classmethod
    def read(cls, root: Path, path: Path) -> KernelFile:
        """A marker ends the line that it marks, or stands alone on a line above it."""
        lines: list[str] = []
        marked: dict[str, int] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            marker = _MARKER.search(line)
            if marker:
                assert marker[1] not in marked, f"{path}: {marker[1]} marks two lines"
                marked[marker[1]] = len(lines)
                line = line[: marker.start()]
            if line or not marker:
                lines.append(line + "\n")
        return cls(str(path.relative_to(root)), lines, marked)


def kernel_files(root: Path) -> list[KernelFile]:
    return [KernelFile.read(root, path) for path in sorted(root.rglob("*.cu*"))]
