"""Makes the notebooks from their scripts: `python -m benchmarks.notebooks [--execute] [NAME ...]`.

The scripts are the source, in the percent format (`# %%` begins a cell, `# %% [markdown]` a text).
Without `--execute` outputs are kept where the code of a notebook did not change. With it each
notebook runs in a kernel of its own, in this folder. `--rows NAME FOLDER` keeps what the
notebooks show of a run beside other libraries: `lab.peers(NAME)`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupyattn.bench.lab.runs import KEPT

HERE = Path(__file__).resolve().parent
# What the rows of results call a library, and what figures do. Others are not shown.
LIBRARIES = {
    "ours": "cupyattn",
    "ours_apart": "cupyattn, apart",
    "fa3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "flashmla": "FlashMLA",
    "sdpa_cudnn": "cuDNN",
}
MOST_BYTES = 300_000
_TEXT = "# %% [markdown]"


_KEPT = "us", "tflops", "gbps"


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


def execute(built: Any, timeout: int = 300, place: Path = HERE) -> Any:
    """The notebook with new outputs, run in a folder. Raises CellExecutionError as a cell does."""
    from nbclient import NotebookClient

    folder = {"metadata": {"path": str(place)}}
    client = NotebookClient(built, timeout=timeout, kernel_name="python3", resources=folder)
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


def kept_rows(data: dict[str, Any]) -> dict[str, Any]:
    """What `lab.peers` returns of a run's results.json: each library's fastest right row."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for row in data["rows"]:
        library = LIBRARIES.get(row["peer"], LIBRARIES.get(row["peer"].partition("_")[0]))
        if row["peer"].startswith("ours_"):
            library = LIBRARIES.get(row["peer"])
        if row["status"] != "timed" or not library:
            continue
        best = rows.setdefault(row["case"], {})
        if library not in best or row["us"] < best[library]["us"]:
            best[library] = {key: round(row[key], 1) for key in _KEPT if key in row}
    header = data["header"]
    on = f"{header['device']['name']}, {header['date'][:10]}, commit {header['commit'][:8]}"
    ceilings = {key: round(data["ceilings"][key], 1) for key in ("tflops", "gbps")}
    return {"on": on, "ceilings": ceilings, "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Make, and if asked execute, the notebooks named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.notebooks", description=__doc__)
    parser.add_argument("--execute", action="store_true", help="run them too")
    parser.add_argument("--out", type=Path, default=HERE, help="folder (default: beside scripts)")
    parser.add_argument("names", nargs="*", help="beginnings of names; default: all")
    told = "NAME", "FOLDER"
    parser.add_argument("--rows", nargs=2, metavar=told, help="keep rows of a result folder")
    args = parser.parse_args(argv)
    if args.rows:
        name, folder = args.rows
        data = json.loads((Path(folder) / "results.json").read_text("utf-8"))
        (KEPT / f"rows_{name}.json").write_text(json.dumps(kept_rows(data)) + "\n", "utf-8")
        return 0
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
