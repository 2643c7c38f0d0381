"""Writes the tables and the chart of the documents from committed results, and the page of names.

    python -m benchmarks.documents

A document says in a comment which cases of which result folder it shows, and under which names:

    <!-- table rate=tflops peers=fa3,flashinfer
    2026-11-28-h200-prompts
    1x16k: one request of 16k tokens
    -->
    ... the table, written by this command ...
    <!-- end of table -->

A comment `<!-- errors FOLDER KEYS` of the same form, with a line for each way (`ours head: e4m3, by
head`), becomes a table of errors in percent over inputs, up to `<!-- end of errors -->`, from that
folder's errors.jsonl.

Each row comes from one process. `rate` is tflops or gbps. A name in `peers` stands for every
implementation that begins with it; the fastest correct one is shown. `against=CASE` adds our time
of that case over our time of this one. `forms=1` says by which of its forms a peer was fastest.
`cases=table` and `cases=chart` stand for the README's cases (readme.py), as far as the folder has
them. All of these may be left out.

A comment `<!-- chart FILE peers=...` of the same form is drawn into FILE, beside the document.
`<!-- dots FILE FOLDER -->` draws the shapes of a sweep (dots.py), and
`<!-- measured FOLDER -->` ... `<!-- end of measured -->` holds a line with the card, the day, the
commit and the versions of a folder. Measuring again means: change the folder's name in the
comments, then run this command.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from . import dots, names, readme

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_TITLES = {
    "fa3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "flashinfer_fa2": "FlashInfer fa2",
    "flashinfer_fa3": "FlashInfer fa3",
    "flashinfer_xqa": "FlashInfer XQA",
    "sdpa": "SDPA",
    "ours_apart": "cupyattn, one launch each",
    "ours_trtllm": "cupyattn, planned on the GPU",
    "ours_16bit": "cupyattn, 16 bits",
    "cudnn_fp8": "cuDNN",
    "sdpa_cudnn": "cuDNN",
    "flashmla": "FlashMLA",
}
# Forms of a peer's call that readers may choose, by variant; others are left unsaid.
_FORMS = {
    "dense": "dense",
    "dense_unsplit": "dense",
    "fwd": "varlen",
    "unsplit": "varlen",
}
_RATES = {"tflops": "TFLOP/s", "gbps": "GB/s"}
_TABLE = re.compile(r"(<!-- table(.*?)\n(.*?)-->\n).*?(<!-- end of table -->)", re.S)
_ERRORS = re.compile(r"(<!-- errors (\S+) (\d+)\n(.*?)-->\n).*?(<!-- end of errors -->)", re.S)
_MEASURED = re.compile(r"(<!-- measured (\S+) -->\n).*?(<!-- end of measured -->)", re.S)
_DOTS = re.compile(r"<!-- dots (\S+) (\S+) -->")
_CHART = re.compile(r"<!-- chart (\S+)(.*?)\n(.*?)-->", re.S)


class Row(NamedTuple):
    """One case: its name in the document, our fastest row, each peer's fastest correct one, and our
    time of the case it is held against, if any."""

    name: str
    ours: dict[str, Any]
    peers: dict[str, dict[str, Any]]
    against_us: float | None

    @property
    def speedup(self) -> float | None:
        """The fastest peer's time over ours; our own other ways are no peers."""
        times = [row["us"] for peer, row in self.peers.items() if not peer.startswith("ours")]
        return min(times) / self.ours["us"] if times else None


def documents() -> list[Path]:
    """The Markdown files of the project, without the notes among the results."""
    folders = (ROOT, ROOT / "kernels", ROOT / "benchmarks")
    result = [path for folder in folders for path in sorted(folder.glob("*.md"))]
    return [*result, *sorted((ROOT / "docs").rglob("*.md"))]


def rendered() -> Iterator[tuple[Path, str]]:
    """Every document with its tables, every chart and the page of names, as they should be."""
    for path in documents():
        text = path.read_text("utf-8")
        made = _TABLE.sub(lambda found: found[1] + table(found[2], found[3]) + found[4], text)
        made = _ERRORS.sub(lambda found: found[1] + errors(*found.group(2, 3, 4)) + found[5], made)
        yield path, _MEASURED.sub(lambda found: found[1] + measured(found[2]) + found[3], made)
        for name, options, body in _CHART.findall(text):
            yield path.parent / name, chart(options, body)
        for name, folder in _DOTS.findall(text):
            yield path.parent / name, dots.picture(RESULTS, folder)
    yield ROOT / "docs" / "flashinfer-names.md", names.page()


def table(options: str, body: str) -> str:
    """A Markdown table of the cases in `body`."""
    given = _options(options)
    peers = given["peers"].split(",") if "peers" in given else []
    rate, against = given.get("rate", ""), given.get("against", "")
    head = ["case", "cupyattn µs", *([_RATES[rate]] if rate else [])]
    head += [*(_TITLES[peer] for peer in peers), *(["speedup"] if peers else [])]
    head += [f"`{against}`'s time over this"] if against else []
    lines = [head, ["---"] * len(head)]
    for row in _rows(_listed(given, body), peers, against):
        cells = [row.name, _us(row.ours)]
        cells += [f"{row.ours[rate]:,.0f}"] if rate else []
        for peer in peers:
            timed = row.peers.get(peer)
            cells.append("–" if timed is None else _us(timed) + _form(timed, "forms" in given))
        if peers:
            cells.append("–" if row.speedup is None else f"{row.speedup:.2f}×")
        if row.against_us is not None:
            cells.append(f"{row.against_us / row.ours['us']:.2f}")
        lines.append(cells)
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def errors(folder: str, keys: str, body: str) -> str:
    """A Markdown table of errors in percent: a row for each way in `body`, a column for each kind
    of inputs that the folder has for so many keys."""
    lines = (RESULTS / folder / "errors.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["what"] == "errors"]
    columns = [row for row in rows if row["n"] == int(keys)]
    table = [["stored as", *(row["inputs"] for row in columns)], ["---"] * (1 + len(columns))]
    for line in body.strip().splitlines():
        way, _, name = line.partition(":")
        table.append([name.strip(), *(f"{row[way]:.2f}" for row in columns)])
    return "".join("| " + " | ".join(cells) + " |\n" for cells in table)


def measured(folder: str) -> str:
    """A sentence: on what, when and at which commit the rows of a folder were measured."""
    data = json.loads((RESULTS / folder / "results.json").read_text("utf-8"))
    return f"Measured on {_where(data['header'], {row['peer'] for row in data['rows']})}.\n"


def _where(header: dict[str, Any], peers: set[str]) -> str:
    versions, torch = header["versions"], header["versions"]["torch"].partition("+")[0]
    used = [f"torch {torch}", f"NVRTC {header['nvrtc']}"]
    if any(peer.startswith("flashinfer") for peer in peers):
        used.append(f"FlashInfer {versions['flashinfer-python']}")
    return (
        f"one {header['device']['name']}, {header['date'][:10]}, at commit "
        f"{header['commit'][:8]} ({', '.join(used)})"
    )


_LEFT, _UNIT, _BAR, _GAP = 300, 210, 13, 12
_OURS_COLOR, _PEER_COLORS = "#d9541e", ("#1f77b4", "#7aa6cf", "#8a8a8a")


def chart(options: str, body: str) -> str:
    """Bars of our time, which is 1, and of the peers' over it, as SVG, with what it was run on."""
    given = _options(options)
    peers = given["peers"].split(",")
    rows = list(_rows(_listed(given, body), peers))
    longest = max(peer["us"] / row.ours["us"] for row in rows for peer in row.peers.values())
    width = _LEFT + int(_UNIT * max(longest, 1)) + 60
    colors = dict(zip(peers, _PEER_COLORS, strict=False))
    parts = [_text(10, 20, "Time, cupyattn = 1 (longer is slower)", 'font-weight="bold"')]
    for i, (name, color) in enumerate([("cupyattn", _OURS_COLOR), *colors.items()]):
        parts.append(f'<rect x="{10 + 130 * i}" y="31" width="11" height="11" fill="{color}"/>')
        parts.append(_text(26 + 130 * i, 41, _TITLES.get(name, name)))
    y = 54
    for row in rows:
        bars = [(_OURS_COLOR, 1.0)]
        bars += [(colors[peer], timed["us"] / row.ours["us"]) for peer, timed in row.peers.items()]
        middle = y + len(bars) * _BAR // 2 + 4
        parts.append(_text(_LEFT - 8, middle, row.name, 'text-anchor="end"'))
        for i, (color, ratio) in enumerate(bars):
            top, long = y + i * _BAR, round(_UNIT * ratio)
            size = f'width="{long}" height="{_BAR - 2}"'
            parts.append(f'<rect x="{_LEFT}" y="{top}" {size} fill="{color}"/>')
            label = f"{row.ours['us']:,.0f} µs" if i == 0 else f"{ratio:.2f}"
            parts.append(_text(_LEFT + long + 4, top + _BAR - 3, label, 'font-size="10"'))
        y += len(bars) * _BAR + _GAP
    folder = body.strip().splitlines()[0].strip()
    header = json.loads((RESULTS / folder / "results.json").read_text("utf-8"))["header"]
    card, day, commit = header["device"]["name"], header["date"][:10], header["commit"][:8]
    parts.append(_text(10, y + 14, f"{card}, {day}, commit {commit}", 'fill="#555"'))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 24}"'
        ' font-family="sans-serif" font-size="12">'
    )
    back = f'<rect width="{width}" height="{y + 24}" fill="white"/>'
    return "\n".join([head, back, *parts, "</svg>"]) + "\n"


def _text(x: int, y: int, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{" " + more if more else ""}>{escape(text)}</text>'


def _form(row: dict[str, Any], is_asked: bool) -> str:
    """How a peer was called, where rows of prompts let it choose."""
    has_forms = row["op"] in ("prefill", "ragged") and row["peer"] == "fa3"
    if not is_asked or not has_forms:
        return ""
    # Prompts outside of batches are one dense call.
    return ", dense" if row["op"] == "prefill" else f", {_FORMS[row['variant']]}"


def _options(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split())


def _listed(given: dict[str, str], body: str) -> str:
    """The cases of a comment, with those that `cases=` stands for."""
    if "cases" not in given:
        return body
    meant = {"table": readme.CASES, "chart": readme.CHART}[given["cases"]]
    data = json.loads((RESULTS / body.strip() / "results.json").read_text("utf-8"))
    there = [f"{case}: {name}" for case, name in meant.items() if case in data["cases"]]
    return "\n".join([body.strip(), *there])


def _rows(body: str, peers: list[str], against: str = "") -> Iterator[Row]:
    timed: list[dict[str, Any]] = []
    for line in body.strip().splitlines():
        case, colon, name = line.partition(":")
        if not colon:
            data = json.loads((RESULTS / line.strip() / "results.json").read_text())
            timed = [row for row in data["rows"] if row["status"] == "timed"]
            continue
        mine = [row for row in timed if row["peer"] == "ours"]
        ours, other = _fastest(mine, case, "ours"), _fastest(mine, against, "ours")
        if ours is None or (against and other is None):
            raise SystemExit(f"{case}: cupyattn has no correct row in the folder named above it")
        result = {peer: row for peer in peers if (row := _fastest(timed, case, peer))}
        yield Row(name.strip(), ours, result, other["us"] if other else None)


def _fastest(rows: list[dict[str, Any]], case: str, peer: str) -> dict[str, Any] | None:
    meant = [row for row in rows if row["case"] == case and row["peer"].startswith(peer)]
    return min(meant, key=lambda row: row["us"], default=None)


def _us(row: dict[str, Any]) -> str:
    return f"{row['us']:,.0f}" if row["us"] >= 100 else f"{row['us']:.1f}"


def main() -> int:
    """Write every table and chart that differs from its results, and name it."""
    for path, text in list(rendered()):
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
