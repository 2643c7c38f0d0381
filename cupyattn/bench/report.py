"""A run of `cupyattn bench` as a table, a JSON file and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cases import CASES
from .timing import describe

JSON_NAME, PICTURE_NAME = "bench.json", "bench.png"
_COLUMNS = ("case", "what", "µs", "p10–p90", "rate", "error", "its time / ours", "")
_COLORS = {"cupyattn": "#d62728", "flash-attn": "#1f77b4", "FlashInfer": "#2ca02c"}
_OTHER_COLOR = "#7f7f7f"


def heading(data: dict[str, Any]) -> str:
    """What the run was measured on."""
    device, smi = data.get("device", {}), data.get("smi", {})
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    commit = "" if data["commit"] == "unknown" else f" ({data['commit'][:12]})"
    return (
        f"{device.get('name', 'unknown GPU')}, driver {smi.get('driver_version', 'unknown')}, "
        f"copy {data['copy_gbps']:,.0f} GB/s\n"
        f"cupyattn {data['cupyattn']}{commit}, {versions}\n"
        "Each output was checked against float64; then each call was timed with a cold L2, in "
        "random order."
    )


def table(rows: Sequence[dict[str, Any]], with_head: bool = True) -> str:
    """The rows as text, in columns of a fixed width so that cases can be printed one by one."""
    head = [_COLUMNS] if with_head else []
    return "\n".join(_aligned(line) for line in (*head, *(_line(row, rows[0]) for row in rows)))


def _line(row: dict[str, Any], first: dict[str, Any]) -> tuple[str, ...]:
    what = f"{row['name']} {row['variant']}".strip()
    case = row["case"] if row is first else ""
    if "us" not in row:
        return (case, what, *[""] * 5, f"{row['status']}: {row['note']}")
    note = row["note"] if row["status"] == "timed" else f"WRONG {row['note']}".strip()
    error = row["error"]
    return (
        case,
        what,
        f"{row['us']:,.1f}",
        f"{row['p10']:,.1f}–{row['p90']:,.1f}",
        f"{row['rate']:,.0f} {row['unit']}",
        error if isinstance(error, str) else f"{error:.1e}",
        f"{row['speedup']:.2f}" if "speedup" in row else "",
        note,
    )


def _aligned(line: Sequence[str]) -> str:
    widths = (16, 22, 9, 17, 13, 8, 15)
    cells = [
        text.ljust(width) if i < 2 else text.rjust(width)
        for i, (text, width) in enumerate(zip(line, widths, strict=False))
    ]
    return "  ".join([*cells, line[-1]]).rstrip()


class Record:
    """A run as it comes: each case is printed, and the JSON file is whole after each.

    data    what the file has beside the rows
    blocks  the rows of each case, ours first
    """

    def __init__(self, folder: Path, data: dict[str, Any]) -> None:
        self.data, self._folder = data, folder
        self.blocks: dict[str, list[dict[str, Any]]] = {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for block in self.blocks.values() for row in block]

    def add(self, block: list[dict[str, Any]]) -> None:
        """Print and keep the rows of one case. They replace what it had, unless ours failed."""
        case = block[0]["case"]
        is_first = not self.blocks or case == next(iter(self.blocks))
        print(table(block, with_head=is_first), flush=True)
        before = self.blocks.get(case, []) if block[0]["status"] == "failed" else []
        self.blocks[case] = before + block
        self.save()

    def save(self) -> str:
        """Write the JSON file; a line about it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / JSON_NAME
        target.write_text(json.dumps({**self.data, "rows": self.rows}, indent=1) + "\n", "utf-8")
        return f"{target}: every figure, to paste into an issue"

    def draw(self) -> str:
        """Draw the picture where matplotlib is installed; a line about it."""
        target = self._folder / PICTURE_NAME
        try:
            draw({**self.data, "rows": self.rows}, target)
            return f"{target}: the picture"
        except ImportError:
            return "no picture: matplotlib is not installed (pip install matplotlib)"
        except Exception as error:  # a result without its picture is still a result
            return f"no picture: {describe(error)}"


def draw(data: dict[str, Any], path: Path) -> None:
    """A panel for each case, a bar for each correct output: µs, less is better.

    Raises ImportError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[str, list[dict[str, Any]]] = {}
    for row in data["rows"]:
        if row["status"] == "timed":
            panels.setdefault(row["case"], []).append(row)
    heights = [len(rows) + 1 for rows in panels.values()] or [1]
    figure = Figure(figsize=(8, 0.6 + 0.32 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axis, (name, rows) in zip(axes, panels.items(), strict=False):
        _panel(axis, name, rows)
    name, date = data["device"].get("name", "GPU"), data["date"][:10]
    title = f"{name}, cupyattn {data['cupyattn']}, {date}: µs a call, less is better"
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


def _panel(axis: Any, name: str, rows: list[dict[str, Any]]) -> None:
    about = {case.name: case.about for case in CASES}
    labels = [f"{row['name']} {row['variant']}".strip() for row in rows]
    colors = [_COLORS.get(row["name"], _OTHER_COLOR) for row in rows]
    bars = axis.barh(labels, [row["us"] for row in rows], color=colors, height=0.7)
    texts = [f" {row['us']:,.0f} µs, {row['rate']:,.0f} {row['unit']}" for row in rows]
    axis.bar_label(bars, texts, fontsize=8)
    axis.set_title(about.get(name, name), fontsize=9, loc="left")
    axis.set_xlim(0, 1.35 * max(row["us"] for row in rows))
    axis.set_xticks([])
    axis.invert_yaxis()
    axis.tick_params(labelsize=8, length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
