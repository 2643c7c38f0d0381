"""One style for the figures of the notebooks, and the forms that several of them draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OURS, FA3, FLASHINFER, CUDNN, OTHER = "#c8102e", "#1f5fa8", "#2e8b57", "#8a5fb0", "#8c8c8c"
COLORS = {
    "cupyattn": OURS,
    "FlashAttention-3": FA3,
    "flash-attn": FA3,
    "FlashInfer": FLASHINFER,
    "cuDNN": CUDNN,
    "SDPA": OTHER,
}


def set_style() -> None:
    """Set the style of all figures that follow."""
    import matplotlib as mpl

    mpl.rcParams.update(
        {
            "figure.figsize": (7.2, 3.4),
            "figure.constrained_layout.use": True,
            "font.size": 9.5,
            "axes.titlesize": 10.5,
            "axes.titlelocation": "left",
            "axes.titleweight": "bold",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#e6e6e6",
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "lines.markersize": 4.5,
            "figure.dpi": 144,  # of what is drawn as pixels
            "svg.fonttype": "none",
            "svg.hashsalt": "cupyattn",
        }
    )
    try:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", metadata={"Date": None})
    except ImportError:  # outside a notebook
        pass


def brief(n: int) -> str:
    """1024 as 1k."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def log2_ticks(axis: Any, values: Sequence[int]) -> None:
    """A logarithmic x axis with a tick at each value."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(values), [brief(value) for value in values])
    axis.minorticks_off()


def bars(axis: Any, groups: dict[str, dict[str, float]], form: str = "{:,.0f}") -> None:
    """Groups of bars with their values: {group: {library: value}}."""
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    width = 0.82 / len(names)
    for i, name in enumerate(names):
        shift = (i - (len(names) - 1) / 2) * width
        groups_of = [g for g, values in enumerate(groups.values()) if name in values]
        heights = [values[name] for values in groups.values() if name in values]
        centers = [g + shift for g in groups_of]
        drawn = axis.bar(centers, heights, width * 0.92, label=name, color=_color(name))
        axis.bar_label(drawn, [form.format(height) for height in heights], fontsize=7, padding=1)
    axis.set_xticks(range(len(groups)), list(groups))
    axis.grid(axis="x", visible=False)
    axis.legend(ncols=len(names), fontsize=8, loc="lower left", bbox_to_anchor=(0, 1.0))


def _color(name: str) -> str:
    fits = [color for label, color in COLORS.items() if name.startswith(label)]
    return fits[0] if fits else OTHER


def show() -> None:
    """Draw what is there, once."""
    from matplotlib import pyplot

    pyplot.show()
