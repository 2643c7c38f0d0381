"""A small canvas for the drawings of the documents: boxes, words, lines and arrows, as SVG text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INK, GREY, FAINT, PAPER = "#222222", "#6b7280", "#e5e7eb", "#ffffff"
BLUE, GREEN, ORANGE, PURPLE, RED = "#bfdbfe", "#bbf7d0", "#fed7aa", "#ddd6fe", "#fecaca"
KINDS = BLUE, GREEN, ORANGE, PURPLE, RED
SIZE = 15


class Canvas:
    """A drawing `width` x `height` pixels large. `title` says what it shows, for screen readers."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="sans-serif" '
            f'font-size="{SIZE}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/>'
            "</marker></defs>",
            f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = FAINT, label: str = ""
    ) -> None:
        """A box from its upper left corner on, with a label in its middle."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" '
            f'fill="{fill}" stroke="{INK}" stroke-width="0.7"/>'
        )
        if label:
            self.text(x + width / 2, y + height / 2 + SIZE / 3, label, anchor="middle")

    def cells(
        self,
        x: float,
        y: float,
        labels: Iterable[object],
        fills: Iterable[str],
        width: float = 34,
        height: float = 28,
    ) -> None:
        """A row of boxes side by side."""
        for i, (label, fill) in enumerate(zip(labels, fills, strict=True)):
            self.box(x + i * width, y, width, height, fill, str(label))

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        color: str = INK,
        bold: bool = False,
        size: int = SIZE,
    ) -> None:
        """One line of words, whose baseline is at y."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}" '
            f'font-size="{size}"{weight}>{escape(words)}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, color: str = INK, dashed: bool = False
    ) -> None:
        """A straight line."""
        self._line(x1, y1, x2, y2, color, ' stroke-dasharray="4 3"' if dashed else "")

    def arrow(self, x1: float, y1: float, x2: float, y2: float, color: str = INK) -> None:
        """A line with a tip at its end."""
        self._line(x1, y1, x2, y2, color, ' marker-end="url(#tip)"')

    def _line(self, x1: float, y1: float, x2: float, y2: float, color: str, more: str) -> None:
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
            f'stroke-width="1.2"{more}/>'
        )

    def render(self) -> str:
        """The file's text."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"
