"""What the notebooks share: the GPU or its absence, inputs, timing, committed results, one style.

A notebook measures in a function that it gives to `measured`. With a GPU the function runs. Without
one the notebook shows what the function returned on the GPU of the committed run
(`measured/NAME.json`); `SAVE` says that a run replaces those files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

import cupyattn
from cupyattn.array import CPU, Device
from cupyattn.bench import machine
from cupyattn.bench.clock import Clock
from cupyattn.bench.inputs import Arrays, as_bits
from cupyattn.bench.timing import Timing, measure, random_order
from cupyattn.core.device import DeviceProps, device_props
from cupyattn.errors import CupyAttnError

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
SAVE = "CUPYATTN_NOTEBOOKS_SAVE"

OURS, FA3, FLASHINFER, CUDNN, OTHER = "#c8102e", "#1f5fa8", "#2e8b57", "#8a5fb0", "#8c8c8c"
COLORS = {
    "cupyattn": OURS,
    "FlashAttention-3": FA3,
    "flash-attn": FA3,
    "FlashInfer": FLASHINFER,
    "cuDNN": CUDNN,
    "SDPA": OTHER,
}
NAMES = {
    "ours": "cupyattn",
    "fa3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "sdpa_cudnn": "cuDNN",
}
BYTES = 2  # of a bfloat16


def _gpu() -> DeviceProps | None:
    try:
        return device_props(0)
    except CupyAttnError:
        return None


GPU = _gpu()
DEVICE = "cuda" if GPU else "cpu"
arrays = Arrays("cupy" if GPU else "numpy", Device("cuda", 0) if GPU else CPU, seed=0)


def begin() -> None:
    """Set the style of the figures, and say what this notebook runs on."""
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
    if GPU:
        print(f"{GPU.name}, {GPU.num_sms} SMs; cupyattn {cupyattn.__version__}")
    else:
        print(
            f"No GPU here; cupyattn {cupyattn.__version__}. Small calls run on the CPU;\n"
            "figures of speed show the committed run, and say which."
        )


def measured(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run()` returns on this GPU, or returned in the committed run if there is none here.

    Empty where there is neither. It must be plain JSON. The key "on" is added: the GPU, the date,
    the version and the commit.
    """
    path, data = HERE / "measured" / f"{name}.json", {}
    if not GPU and not path.exists():
        print(
            "Not measured: there is no GPU here and no committed run; `make notebooks` makes one."
        )
        return data
    if not GPU:
        data = json.loads(path.read_text("utf-8"))
        print(f"Committed run on {data['on']}")
        return data
    result = machine.header(0)
    on = f"{GPU.name}, {result['date'][:10]}, cupyattn {result['cupyattn']}"
    commit = os.environ.get("CUPYATTN_BENCH_COMMIT") or result["commit"]
    text = json.dumps({"on": on if commit == "unknown" else f"{on} ({commit[:7]})", **run()})
    data = json.loads(text)  # as another run will read it: keys are strings
    if os.environ.get(SAVE):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n", "utf-8")
    print(f"Measured on {data['on']}")
    return data


def clock() -> Clock:
    """The stopwatch of this GPU, its clocks settled."""
    built = Clock()
    built.preheat()
    return built


def times(
    calls: dict[str, Callable[[], Any]], watch: Clock | None = None, rounds: int = 8
) -> dict[str, float]:
    """Median µs of each call: cold L2, other code before it, events around it, random order."""
    for call in calls.values():
        call()  # compiles
    order = random_order(0)
    result = measure(list(calls.values()), watch or clock(), rounds, math.inf, order=order)
    return {name: _median(timing) for name, timing in zip(calls, result, strict=True)}


def _median(timing: Timing) -> float:
    if timing.error:
        raise RuntimeError(timing.error)
    return round(timing.percentile(50), 2)


def committed(folder: str, case: str) -> dict[str, dict[str, Any]]:
    """The fastest correct row of each library for a case of `benchmarks/results/FOLDER`."""
    data = json.loads((RESULTS / folder / "results.json").read_text("utf-8"))
    best: dict[str, dict[str, Any]] = {}
    for row in data["rows"]:
        name = NAMES.get(row["peer"], NAMES.get(row["peer"].partition("_")[0]))
        if row["case"] == case and row["status"] == "timed" and name:
            if row["peer"].startswith("ours_"):
                name = row["peer"]
            if name not in best or row["us"] < best[name]["us"]:
                best[name] = row
    return best


@dataclass(frozen=True)
class Paged:
    """A batch over a paged cache: q [rows, Hq, D], a pool of pages, and the three tables."""

    q: Any
    k: Any
    v: Any
    indptr: np.ndarray
    indices: Any
    last_page_len: np.ndarray
    page_size: int

    @property
    def tables(self) -> tuple[np.ndarray, Any, np.ndarray]:
        return self.indptr, self.indices, self.last_page_len

    @property
    def cache(self) -> tuple[Any, Any]:
        return self.k, self.v


def paged(
    lengths: Sequence[int],
    rows: int = 1,
    page_size: int = 16,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
) -> Paged:
    """Requests of these lengths in scattered pages, with `rows` query tokens each, in bfloat16."""
    counts = [-(-n // page_size) for n in lengths]
    last = [n - (count - 1) * page_size for n, count in zip(lengths, counts, strict=True)]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    pool = sum(counts), page_size, heads[1], head_dim
    return Paged(
        arrays.normal(rows * len(lengths), heads[0], head_dim),
        arrays.normal(*pool),
        arrays.normal(*pool),
        np.append(0, np.cumsum(counts)).astype(np.int32),
        arrays.int32(order),
        np.array(last, np.int32),
        page_size,
    )


def decode(batch: Paged, **options: Any) -> Callable[[], Any]:
    """A decode of the batch that is planned: what one layer of a model then calls."""
    heads, head_dim = (batch.q.shape[1], batch.k.shape[2]), batch.q.shape[2]
    wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(DEVICE)
    dtypes = {"q_data_type": "bfloat16", "kv_data_type": "bfloat16"}
    wrapper.plan(*batch.tables, *heads, head_dim, batch.page_size, **dtypes, **options)
    out = arrays.normal(*batch.q.shape)
    return lambda: wrapper.run(batch.q, batch.cache, out=out)


def put(x: np.ndarray) -> Any:
    """A NumPy array on the device that is here."""
    from cupyattn import array

    return array.from_numpy(x, array.view(arrays.int32(np.zeros(1, np.int32)), "device"))


def mask_bits(masks: np.ndarray) -> Any:
    """Masks of drafts, bool [requests, n, n] with n up to 32, as a word of bits for each row."""
    bits = (masks * 2 ** np.arange(masks.shape[2])).sum(2)
    return put(bits.astype(np.int32).reshape(-1))


def alone_and_with(count: int, length: int, **options: Any) -> Any:
    """The answer of one request of `length` keys in a batch of `count`: its inputs never change."""
    lengths = [length, *([512] * (count - 1))]
    batch = paged(lengths)
    own = -(-length // batch.page_size)
    generator = Arrays(arrays.framework, arrays.device, seed=1)
    same = generator.normal(own, *batch.k.shape[1:]), generator.normal(own, *batch.v.shape[1:])
    row = generator.normal(1, *batch.q.shape[1:])
    order = np.arange(int(batch.indptr[-1]), dtype=np.int32)
    batch = replace(batch, indices=arrays.int32(order))
    for whole, part in zip((batch.q, batch.k, batch.v), (row, *same), strict=True):
        as_bits(whole)[: len(part)] = as_bits(part)
    return decode(batch, **options)()[:1]


def host(x: Any) -> np.ndarray:
    """An array of any framework on any device as float32 on the host."""
    from cupyattn import array

    return array.to_host(array.view(x, "array")).astype(np.float32)


def decode_bytes(tokens: int, kv_heads: int = 8, head_dim: int = 128) -> int:
    """Bytes of the keys and values of so many tokens: what decode must read."""
    return 2 * tokens * kv_heads * head_dim * BYTES


def short(n: int) -> str:
    """1024 as 1k."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def log2_ticks(axis: Any, values: Sequence[int]) -> None:
    """A logarithmic x axis with a tick at each value."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(values), [short(value) for value in values])
    axis.minorticks_off()


def bars(axis: Any, groups: dict[str, dict[str, float]], form: str = "{:,.0f}") -> None:
    """Groups of bars with their values: {group: {library: value}}."""
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    width = 0.82 / len(names)
    for i, name in enumerate(names):
        places = [g + (i - (len(names) - 1) / 2) * width for g in range(len(groups))]
        result = [
            (place, values[name])
            for place, values in zip(places, groups.values(), strict=True)
            if name in values
        ]
        drawn = axis.bar(*zip(*result, strict=True), width * 0.92, label=name, color=_color(name))
        axis.bar_label(drawn, [form.format(height) for _, height in result], fontsize=7, padding=1)
    axis.set_xticks(range(len(groups)), list(groups))
    axis.grid(axis="x", visible=False)
    axis.legend(ncols=len(names), fontsize=8, loc="lower left", bbox_to_anchor=(0, 1.0))


def _color(name: str) -> str:
    fits = [color for label, color in COLORS.items() if name.startswith(label)]
    return fits[0] if fits else OTHER


def show() -> None:
    """Draw what is there, once."""
    plt.show()
