"""Writes the tables and the chart of the documents from committed results, and the page of names.

    python -m benchmarks.documents

A document says in a comment which cases of which result folder it shows, and under which names:

    <!-- table rate=tflops peers=fa3,flashinfer
    2026-11-24-h200-fa3
    1x16k: one request of 16k tokens
    -->
    ... the table, written by this command ...
    <!-- end of table -->

A comment `<!-- errors FOLDER KEYS` of the same form, with a line for each way (`ours head: e4m3, by
head`), becomes a table of errors in percent over inputs, up to `<!-- end of errors -->`, from that
folder's errors.jsonl.

Each row comes from one process. `rate` is tflops or gbps. A name in `peers` stands for every
implementation that begins with it; the fastest correct one is shown. `against=CASE` adds our time
of that case over our time of this one. All three may be left out. A comment `<!-- chart FILE
peers=...` of the same form is drawn into FILE, beside the document. Measuring again means: change
the folder's name in the comments, then run this command.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from . import names

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
}
_RATES = {"tflops": "TFLOP/s", "gbps": "GB/s"}
_TABLE = re.compile(r"(<!-- table(.*?)\n(.*?)-->\n).*?(<!-- end of table -->)", re.S)
_ERRORS = re.compile(r"(<!-- errors (\S+) (\d+)\n(.*?)-->\n).*?(<!-- end of errors -->)", re.S)
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
        yield (
            path,
            _ERRORS.sub(lambda found: found[1] + errors(*found.group(2, 3, 4)) + found[5], made),
        )
        for name, options, body in _CHART.findall(text):
            yield path.parent / name, chart(options, body)
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
    for row in _rows(body, peers, against):
        cells = [row.name, _us(row.ours)]
        cells += [f"{row.ours[rate]:,.0f}"] if rate else []
        cells += [_us(row.peers[peer]) if peer in row.peers else "–" for peer in peers]
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


def chart(options: str, body: str) -> str:
    """Bars of the peers' times over ours, as SVG."""
    peers = _options(options)["peers"].split(",")
    rows = list(_rows(body, peers))
    left, unit, bar, gap = 250, 200, 13, 12
    height = 64 + len(rows) * (len(peers) * bar + gap)
    longest = max(peer["us"] / row.ours["us"] for row in rows for peer in row.peers.values())
    width = left + int(unit * longest) + 60
    colors = dict(zip(peers, ("#1f77b4", "#98b8d8", "#bbbbbb"), strict=False))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-weight="bold">Time, cupyattn = 1 (longer is slower)</text>',
    ]
    for i, (peer, color) in enumerate(colors.items()):
        parts.append(f'<rect x="{10 + 140 * i}" y="31" width="11" height="11" fill="{color}"/>')
        parts.append(f'<text x="{26 + 140 * i}" y="41">{_TITLES[peer]}</text>')
    y = 54
    for row in rows:
        middle = y + len(peers) * bar / 2 + 4
        parts.append(
            f'<text x="{left - 8}" y="{middle:g}" text-anchor="end">{escape(row.name)}</text>'
        )
        for peer, timed in row.peers.items():
            ratio = timed["us"] / row.ours["us"]
            top = y + peers.index(peer) * bar
            size = f'width="{unit * ratio:.0f}" height="{bar - 2}"'
            parts.append(f'<rect x="{left}" y="{top}" {size} fill="{colors[peer]}"/>')
            x = left + unit * ratio + 4
            parts.append(f'<text x="{x:.0f}" y="{top + bar - 3}" font-size="10">{ratio:.2f}</text>')
        y += len(peers) * bar + gap
    one = left + unit
    parts.append(
        f'<line x1="{one}" x2="{one}" y1="48" y2="{y}" stroke="#d62728" stroke-width="2"/>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _options(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split())


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
