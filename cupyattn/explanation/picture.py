"""The SMs of a card over time, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from .timeline import Bars, LaunchBlocks, deal

_INK, _GREY = "#222222", "#6b7280"
_COLOURS = "#3b82f6", "#f59e0b", "#10b981", "#a855f7", "#ef4444", "#64748b"
_MERGE_COLOUR = "#111827"
_LEFT, _TOP, _WIDTH = 70, 56, 1000
# Of one SM; all of them take so many pixels at least.
_ROW, _MIN_HEIGHT = 5, 400
# Neighbours are drawn as one bar where a launch has more blocks than this.
_MAX_BARS = 12000
_TICKS = 8


def draw(launches: Sequence[LaunchBlocks], num_sms: int, time: float | None, title: str) -> str:
    """The picture. time: what all is estimated to take; None: bars are as long as the card's rates
    make them."""
    if not launches:
        return _document(_WIDTH, 60, title, [_text(_LEFT, 40, "nothing is launched")])
    dealt = deal(launches, num_sms, time)
    row = max(_ROW, _MIN_HEIGHT / num_sms)
    height = num_sms * row
    scale = _WIDTH / dealt.end
    parts = [_rect(_LEFT, _TOP, _WIDTH, height, "#f3f4f6")]
    legend = _LEFT
    for index, bars in enumerate(dealt.bars):
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(_bars(bars, scale, row, colour))
        parts += [_rect(legend, 34, 12, 12, colour), _text(legend + 17, 44, bars.name)]
        legend += 40 + 7 * len(bars.name)
    if dealt.merge is not None:
        x = _LEFT + scale * dealt.merge
        parts += [
            _rect(x, _TOP, _LEFT + _WIDTH - x, height, _MERGE_COLOUR, 0.25),
            _rect(legend, 34, 12, 12, _MERGE_COLOUR, 0.25),
            _text(legend + 17, 44, "merge of partial results"),
        ]
    parts += _axes(dealt.end, scale, height, num_sms, time is not None)
    return _document(_LEFT + _WIDTH + 30, _TOP + height + 60, title, parts)


def _bars(bars: Bars, scale: float, row: float, colour: str) -> str:
    """One path: a rectangle for each block, with a gap at its end."""
    sm, at, begin, end = bars.sm, bars.at, bars.begin, bars.end
    if begin.size > _MAX_BARS:
        sm, at, begin, end = _joined(bars)
    gap = 0.0 if begin.size > _MAX_BARS // 4 else 0.6
    x = _LEFT + scale * begin
    width = np.maximum(scale * (end - begin) - gap, 0.3)
    y = _TOP + row * (sm + at)
    height = row * bars.share * 0.94
    numbers = zip(x.tolist(), y.tolist(), width.tolist(), strict=True)
    path = "".join(f"M{a:.1f} {b:.1f}h{w:.1f}v{height:.1f}h-{w:.1f}z" for a, b, w in numbers)
    return f'<path d="{path}" fill="{colour}"><title>{escape(bars.name)}</title></path>'


def _joined(bars: Bars) -> tuple[np.ndarray, ...]:
    """All blocks of one place as one bar, for they follow each other without a gap."""
    positions, index = np.unique(bars.sm + bars.at, return_inverse=True)
    begin, end = np.full(positions.size, np.inf), np.zeros(positions.size)
    np.minimum.at(begin, index, bars.begin)
    np.maximum.at(end, index, bars.end)
    sm = np.floor(positions + 1e-9)
    return sm, positions - sm, begin, end


def _axes(end: float, scale: float, height: float, num_sms: int, is_estimated: bool) -> list[str]:
    step = _step(end)
    below = _TOP + height
    parts = [
        f'<text x="{_LEFT - 8}" y="{_TOP + 10}" text-anchor="end" fill="{_GREY}">SM 0</text>',
        f'<text x="{_LEFT - 8}" y="{below:.1f}" text-anchor="end" fill="{_GREY}">'
        f"SM {num_sms - 1}</text>",
    ]
    for index in range(int(end / step) + 1):
        x = _LEFT + scale * index * step
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{below + 5:.1f}" '
            f'stroke="{_GREY}" stroke-width="0.4"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{below + 20:.1f}" text-anchor="middle" fill="{_GREY}">'
            f"{index * step:g}</text>"
        )
    what = (
        f"microseconds, {end:,.1f} estimated for all; bars are in proportion to key tiles"
        if is_estimated
        else f"microseconds by the card's rates, {end:,.1f} at least; nothing is estimated"
    )
    return [*parts, _text(_LEFT, below + 42, what)]


def _step(end: float) -> float:
    """A round distance of ticks."""
    minimum = end / _TICKS
    power = 10.0 ** np.floor(np.log10(minimum))
    return float(next(x * power for x in (1, 2, 5, 10) if x * power >= minimum))


def _rect(x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"'
        f' fill-opacity="{opacity:g}"/>'
    )


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{_INK}">{escape(words)}</text>'


def _document(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif" '
        'font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="22" font-size="14" fill="{_INK}">{escape(title)}</text>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
