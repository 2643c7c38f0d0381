"""Makes the notebooks from their scripts: `python -m benchmarks.notebooks [--execute] [NAME ...]`.

The scripts are the source, in the percent format (`# %%` begins a cell, `# %% [markdown]` a text).
Without `--execute` outputs are kept where the code of a notebook did not change. With it each
notebook runs in a kernel of its own, in its own folder.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MOST_BYTES = 300_000
_TEXT = "# %% [markdown]"


def scripts() -> list[Path]:
    """The sources of the notebooks, in order."""
    return sorted(HERE.glob("[0-9]*.py"))


def cells(source: str) -> list[tuple[str, str]]:
    """("markdown" or "code", text) of each cell of a script."""
    result: list[tuple[str, list[str]]] = []
    for line in source.splitlines():
        if line.startswith("# %%"):
            result.append(("markdown" if line.startswith(_TEXT) else "code", []))
        elif result:
            result[-1][1].append(line)
    built = []
    for kind, lines in result:
        if kind == "markdown":
            lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
        built.append((kind, "\n".join(lines).strip("\n")))
    return built


def notebook(script: Path) -> Any:
    """The notebook of a script, with the outputs that it has already, if its code is the same."""
    import nbformat

    built = nbformat.v4.new_notebook()
    built.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    built.metadata["language_info"] = {"name": "python"}
    new = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    for kind, text in cells(script.read_text("utf-8")):
        cell = new[kind](text)
        cell["id"] = hashlib.sha256(f"{len(built.cells)} {text}".encode()).hexdigest()[:8]
        built.cells.append(cell)
    target = script.with_suffix(".ipynb")
    if target.exists():
        _keep_outputs(nbformat.read(target, as_version=4), built)
    return built


def _keep_outputs(old: Any, new: Any) -> None:
    before, after = ([cell for cell in one.cells if cell.cell_type == "code"] for one in (old, new))
    if [cell.source for cell in before] == [cell.source for cell in after]:
        for have, wanted in zip(before, after, strict=True):
            wanted.outputs, wanted.execution_count = have.outputs, have.execution_count


def execute(built: Any, timeout: int = 300) -> Any:
    """The notebook with new outputs. Raises CellExecutionError where a cell does."""
    from nbclient import NotebookClient

    place = {"metadata": {"path": str(HERE)}}
    client = NotebookClient(built, timeout=timeout, kernel_name="python3", resources=place)
    roots = str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")
    client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, roots))})
    for cell in built.cells:
        cell.metadata.clear()  # times of execution, which differ from run to run
    return built


def write(built: Any, target: Path) -> None:
    """Write a notebook. Raises ValueError if it is too large to be looked at in a browser."""
    import nbformat

    text = nbformat.writes(built) + "\n"
    if len(text.encode()) > MOST_BYTES:
        raise ValueError(f"{target.name}: {len(text.encode())} bytes; wanted {MOST_BYTES} at most")
    target.write_text(text, "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Make, and if asked execute, the notebooks named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.notebooks", description=__doc__)
    parser.add_argument("--execute", action="store_true", help="run them too")
    parser.add_argument("--out", type=Path, default=HERE, help="folder (default: beside scripts)")
    parser.add_argument("names", nargs="*", help="beginnings of names; default: all")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for script in scripts():
        if args.names and not script.name.startswith(tuple(args.names)):
            continue
        start, built = time.perf_counter(), notebook(script)
        if args.execute:
            execute(built)
        target = args.out / script.with_suffix(".ipynb").name
        write(built, target)
        size, seconds = target.stat().st_size, time.perf_counter() - start
        print(f"{target.name:32} {size / 1000:6.0f} kB {seconds:6.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
