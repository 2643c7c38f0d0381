"""Writes the drawings, generated pages, tables and charts that are not as they should be.

python -m docs.tools
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import documents

from . import address, llms, mistakes, overloads, support
from .pictures import PICTURES

DOCS = Path(__file__).resolve().parents[1]
README = DOCS.parent / "README.md"
_GPUS = re.compile(r"(<!-- gpus -->\n).*?(<!-- end of gpus -->)", re.S)


def rendered() -> Iterator[tuple[Path, str]]:
    """Every file that a command makes, as it should be."""
    for path, text in documents.rendered():
        is_readme = path == README
        yield path, _GPUS.sub(rf"\g<1>{support.gpus()}\2", text) if is_readme else text
    yield DOCS / "support.md", support.page()
    yield DOCS / "troubleshooting.md", mistakes.page()
    yield DOCS / "home" / "llms.txt", llms.page()
    yield from address.rendered()
    yield overloads.PAGE, overloads.page()
    for name, draw in PICTURES.items():
        yield DOCS / "pictures" / f"{name}.svg", draw()


def main() -> int:
    """Write what differs, and name it."""
    for path, text in list(rendered()):
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(path.relative_to(DOCS.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
