"""A picture of a sweep: every drawn shape is a dot, at the fastest peer's time over cupyattn's."""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from typing import Any

_LEFT, _WIDTH, _ROW, _TOP = 190, 480, 30, 56
_SLOWEST, _FASTEST = 0.6, 2.0  # ratios at both ends of the axis, which is logarithmic
_TITLES = {
    "prompts": "prompts of one length",
    "varlen": "prompts by offsets",
    "kvcache": "drafts and appends",
    "latent": "latent attention",
    "flashmla": "FlashMLA's calls",
    "encoders": "encoders",
    "longdecode": "long decodes",
    "m3 decode": "MiniMax-M3, decode",
    "m3 verify": "MiniMax-M3, drafts",
    "m3 prompt": "MiniMax-M3, prompts",
    "nsa decode": "NSA, decode",
    "nsa prompt": "NSA, prompts",
    "qsa decode": "QSA, decode",
    "qsa verify": "QSA, drafts",
    "qsa prompt": "QSA, prompts",
    "dsa decode": "DSA, decode",
    "dsa verify": "DSA, drafts",
    "dsa prompt": "DSA, prompts",
    "v4 decode": "DeepSeek-V4, decode",
    "v4 verify": "DeepSeek-V4, drafts",
    "v4 prompt": "DeepSeek-V4, prompts",
    "blocks": "block-sparse prompts",
}


def picture(results: Path, folder: str) -> str:
    """The sweep of a result folder as SVG, a row for each of its groups."""
    about, groups = _read(results / folder)
    bottom = _TOP + _ROW * len(groups)
    size = f'width="{_LEFT + _WIDTH + 90}" height="{bottom + 58}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect {size} fill="white"/>',
        _text(
            10, 20, "Drawn shapes: the fastest peer's time over cupyattn's", 'font-weight="bold"'
        ),
        _text(
            10, 38, "Right of 1 cupyattn is faster. The bar is the geometric mean.", 'fill="#555"'
        ),
    ]
    for ratio in (0.6, 0.8, 1.0, 1.25, 1.5, 2.0):
        color = "#d9541e" if ratio == 1.0 else "#dddddd"
        x = _place(ratio)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}" stroke="{color}"/>')
        parts.append(_text(x, bottom + 16, f"{ratio:g}", 'text-anchor="middle" fill="#555"'))
    for row, (name, ratios) in enumerate(groups.items()):
        middle = _TOP + _ROW * row + _ROW // 2
        title = _TITLES.get(name, name)
        parts.append(_text(_LEFT - 10, middle + 4, title, 'text-anchor="end"'))
        for ratio in ratios:
            color = "#1f77b4" if ratio >= 1 else "#d9541e"
            dot = f'cx="{_place(ratio)}" cy="{middle}" r="4" fill="{color}" fill-opacity="0.55"'
            parts.append(f"<circle {dot}/>")
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        x = _place(mean)
        ends = f'y1="{middle - 10}" y2="{middle + 10}"'
        parts.append(f'<line x1="{x}" x2="{x}" {ends} stroke="#222222" stroke-width="2"/>')
        parts.append(_text(_LEFT + _WIDTH + 12, middle + 4, f"{mean:.2f}×"))
    parts.append(_text(10, bottom + 44, about, 'fill="#555"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _read(folder: Path) -> tuple[str, dict[str, list[float]]]:
    """What a sweep ran on, and the ratios of its groups: of sweep.json, or of the rows.json that a
    sweep of lists of keys keeps."""
    groups: dict[str, list[float]] = {}
    rows = folder / "rows.json"
    if rows.is_file():
        data: dict[str, Any] = json.loads(rows.read_text("utf-8"))
        for row in sorted(data["rows"], key=lambda row: list(_TITLES).index(row["kind"])):
            times = [us for peer, us in row["us"].items() if peer != "ours"]
            if times:
                groups.setdefault(row["kind"], []).append(min(times) / row["us"]["ours"])
        card, day, commit = data["card"], folder.name[:10], data["commit"]
    else:
        data = json.loads((folder / "sweep.json").read_text("utf-8"))
        for shape in data["shapes"]:
            groups.setdefault(shape["schedule"], []).append(shape["ratio"])
        header = data["header"]
        card, day, commit = header["device"]["name"], header["date"][:10], header["commit"]
    return f"{card}, {day}, commit {commit[:8]}, seed {data['seed']}", groups


def _place(ratio: float) -> int:
    """Where a ratio is on the axis; those beyond its ends are at the ends."""
    inside = min(max(ratio, _SLOWEST), _FASTEST)
    share = math.log(inside / _SLOWEST) / math.log(_FASTEST / _SLOWEST)
    return _LEFT + round(_WIDTH * share)


def _text(x: int, y: int, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{" " + more if more else ""}>{escape(text)}</text>'
