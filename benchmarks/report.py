"""A result file as a table and as a bar chart: `python -m benchmarks.report DIR/results.json`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .peers import IMPLEMENTATIONS
from .timing import describe

TABLE_NAME = "table.txt"
CHART_NAME = "chart.png"
_COLORS = (
    "#d62728", "#ff9896", "#e377c2", "#f7b6d2", "#1f77b4", "#2ca02c", "#98df8a", "#bcbd22",
    "#9467bd", "#c5b0d5", "#8c564b", "#c49c94",
)  # fmt: skip
_PANELS = (  # op, title, what the bars are
    ("prefill", "Prefill, TFLOP/s", "tflops"),
    ("decode", "Decode and append, GB/s", "gbps"),
    ("batch_decode", "Decode of batches, GB/s", "gbps"),
    ("append", "Append to paged caches, TFLOP/s", "tflops"),
    ("verify", "Verification of draft tokens, GB/s", "gbps"),
    ("ragged", "Ragged prefill, TFLOP/s", "tflops"),
    ("cascade", "Cascades, GB/s", "gbps"),
    ("mixed", "Chunks beside decodes, TFLOP/s", "tflops"),
    ("merge", "Merging states, GB/s", "gbps"),
    ("host", "Host time of one call, µs (less is better)", "us"),
    ("host_batch", "Host time of one plan() or run(), µs (less is better)", "us"),
    ("host_merge", "Host time of one merge, µs (less is better)", "us"),
)


def write(source: Path, folder: Path) -> str:
    """Write table.txt and, where matplotlib is installed, chart.png into `folder`.

    Prints the table and returns it; a missing result file gives an empty one.
    """
    data: dict[str, Any] = json.loads(source.read_text()) if source.exists() else {}
    text = table(data)
    (folder / TABLE_NAME).write_text(text)
    print(text, flush=True)
    try:
        chart(data, folder / CHART_NAME)
    except Exception as error:  # a result without its picture is still a result
        print(f"no chart: {describe(error)}")
    return text


def table(data: dict[str, Any]) -> str:
    """The results as text: what was measured on, one line a row, one line a goal."""
    parts = [_preamble(data)]
    columns = (
        "case",
        "implementation",
        "µs",
        "p10",
        "p90",
        "TFLOP/s",
        "GB/s",
        "of floor",
        "error",
        "",
    )
    lines = [columns, *(_line(row) for row in data.get("rows", ()))]
    parts.append(align(lines))
    goals = [line for case in data.get("cases", {}).items() for line in _goals(*case)]
    if goals:
        parts.append(align([("case", "goal", "measured", "met"), *goals]))
    if ratios := _ratios(data):
        parts.append(align([("case", "implementation", "times as long as", ""), *ratios]))
    for lost in data.get("lost", ()):
        parts.append("lost: {case} {label} in {stage}: {reason}".format(**lost))
    return "\n\n".join(parts) + "\n"


def _preamble(data: dict[str, Any]) -> str:
    header = data.get("header", {})
    smi, ceilings = header.get("smi", {}), data.get("ceilings", {})
    facts = [
        f"{smi.get('name', '?')}, driver {smi.get('driver_version', '?')}",
        ", ".join(f"{name} {version}" for name, version in header.get("versions", {}).items()),
        f"commit {header.get('commit', '?')}, {header.get('date', '?')}",
    ]
    if ceilings:
        facts.append(
            f"ceilings: {ceilings['tflops']:.0f} TFLOP/s bf16, {ceilings['gbps']:.0f} GB/s copy"
        )
    probe = header.get("import_cupyattn") or {}
    if "median_ms" in probe:
        pulled = ", ".join(probe["pulled_in"]) or "none of cupy, torch, jax"
        facts.append(f"import cupyattn: {probe['median_ms']:.0f} ms, imports {pulled}")
    return "\n".join(facts)


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    name = f"{row['peer']}:{row['variant']}" if row["variant"] else row["peer"]
    if "us" not in row:
        return (row["case"], name, *[""] * 7, f"{row['status']}: {row.get('reason', '')}")
    remarks = [] if row["status"] == "timed" else [row["status"].upper()]
    if row.get("best_peer_over_ours"):
        remarks.append(f"{row['best_peer_over_ours']:.2f}x the best peer")
    if not row["repeatable"]:
        remarks.append("differs from run to run")
    if row.get("note"):
        remarks.append(row["note"])
    error = row["relative_error"]
    return (
        row["case"],
        name,
        *(f"{row[key]:.1f}" for key in ("us", "p10", "p90")),
        f"{row['tflops']:.0f}" if "tflops" in row else "",
        f"{row['gbps']:.0f}" if "gbps" in row else "",
        f"{row['of_floor']:.0%}" if "of_floor" in row else "",
        error if isinstance(error, str) else f"{error:.1e}",
        "; ".join(remarks),
    )


def _goals(name: str, case: dict[str, Any]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for goal in case.get("goals", ()):
        met = {True: "yes", False: "NO", None: "-"}[goal["met"]]
        if "host_us" in goal:
            wanted, unit = f"host time <= {goal['host_us']:g} µs", " µs"
        else:
            wanted, unit = f">= {goal['factor']:.2f}x {goal['peer']}", "x"
        measured = "-" if goal["ratio"] is None else f"{goal['ratio']:.2f}{unit}"
        lines.append((name, wanted, measured, met))
    return lines


def _ratios(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """Each correct row of a case that is held against another, over that row in the other."""
    us = {
        (row["case"], row["peer"], row["variant"]): row["us"]
        for row in data.get("rows", ())
        if row["status"] == "timed"
    }
    lines: list[tuple[str, ...]] = []
    for name, case in data.get("cases", {}).items():
        other = case.get("against")
        for (timed, peer, variant), value in us.items():
            if other and timed == name and (other, peer, variant) in us:
                ratio = value / us[other, peer, variant]
                lines.append((name, f"{peer}:{variant}", other, f"{ratio:.2f}"))
    return lines


def align(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; the first two and the last are flush left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = (0, 1, len(widths) - 1)

    def cell(i: int, text: str) -> str:
        return text.ljust(widths[i]) if i in left else text.rjust(widths[i])

    return "\n".join(
        "  ".join(cell(i, text) for i, text in enumerate(line)).rstrip() for line in lines
    )


def chart(data: dict[str, Any], path: Path) -> None:
    """A panel of bars for each op, with the fastest variant of each implementation.

    Raises ImportError without matplotlib; draws nothing if nothing was timed.
    """
    panels = [
        (title, key, bars, data.get("ceilings", {}).get(key))
        for op, title, key in _PANELS
        if (bars := _bars(data.get("rows", ()), op, key))
    ]
    if not panels:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widest = max(len(bars) for _, _, bars, _ in panels)
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(max(6.0, 1.1 * widest + 1.5), 3.6 * len(panels)), squeeze=False
    )
    for axis, (title, _, bars, ceiling) in zip(axes[:, 0], panels, strict=True):
        _draw(axis, title, bars, ceiling)
    figure.suptitle(data.get("header", {}).get("smi", {}).get("name", ""))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(rows: Sequence[dict[str, Any]], op: str, key: str) -> dict[str, dict[str, float]]:
    """case -> implementation -> value of its fastest correct variant."""
    fastest: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["op"] == op and row["status"] == "timed":
            known = fastest.setdefault(row["case"], {})
            if row["peer"] not in known or row["us"] < known[row["peer"]]["us"]:
                known[row["peer"]] = row
    return {
        case: {peer: row[key] for peer, row in by_peer.items()} for case, by_peer in fastest.items()
    }


def _draw(axis: Any, title: str, bars: dict[str, dict[str, float]], ceiling: float | None) -> None:
    width = 0.8 / len(IMPLEMENTATIONS)
    middle = (len(IMPLEMENTATIONS) - 1) / 2
    for i, (name, color) in enumerate(zip(IMPLEMENTATIONS, _COLORS, strict=False)):
        places = [
            n + (i - middle) * width for n, values in enumerate(bars.values()) if name in values
        ]
        heights = [values[name] for values in bars.values() if name in values]
        if heights:
            axis.bar(places, heights, width, label=name, color=color)
    if ceiling:
        axis.axhline(ceiling, color="gray", linewidth=0.8, linestyle="--", label="measured ceiling")
    axis.set_title(title, fontsize=10)
    axis.set_xticks(range(len(bars)), list(bars), rotation=30, ha="right", fontsize=8)
    axis.legend(fontsize=7, ncols=4)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table and the chart of an existing result file beside it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path)
    args = parser.parse_args(argv)
    write(args.results, args.results.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
