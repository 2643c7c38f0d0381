"""The groups of shapes in which peers have led: how each is drawn, and what is wanted in it.

Groups are schedules of the sweep like decode and prompts. `--groups` draws from them alone, in
turn, and adds a table of what is wanted and what was measured. Groups of `BY_NAME` are drawn only
where they are named: the others' draws are what they were before these were added.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..batch.case import BatchCase
from ..lists.draw import draw as draw_lists
from ..selections.draw import draw as draw_selections
from .models import MODELS, TENSOR_PARALLEL, Model

_MOST_ROWS = 16384  # of queries, in a batch of prompts
_CHECKED = 12
_LATENT = {"num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512}
_MOST_LATENT_KEYS = 1 << 19
_CLASSES = (0.5, 0.7, 0.85, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)  # of ratios

Requests = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Group:
    """One group.

    mean, least  the geometric mean of the best peer's time over ours that is wanted, and the least
                 of one shape. Where `is_share`, of our share of the rate of a copy; `least` is None
                 where nothing is said of single shapes
    percentile_5  the least of all but the worst twentieth, where something is said of these
    lists_peers  each implementation is listed with its time over ours and its error
    """

    about: str
    draw: Callable[[random.Random], BatchCase]
    mean: float
    least: float | None = None
    is_share: bool = False
    percentile_5: float | None = None
    lists_peers: bool = False


# --- draws ---


def _log_uniform(generator: random.Random, minimum: int, maximum: int) -> int:
    return round(minimum * (maximum / minimum) ** generator.random())


def _lengths(generator: random.Random, count: int, median: int, most: int) -> list[int]:
    """Equal lengths as often as log-normal ones."""
    if count == 1 or generator.random() < 0.5:
        return [median] * count
    drawn = (round(median * generator.lognormvariate(0.0, 0.7)) for _ in range(count))
    return [min(max(16, length), most) for length in drawn]


def _merged(requests: Iterable[tuple[int, int]]) -> Requests:
    merged: list[tuple[int, int, int]] = []
    for q_len, kv_len in requests:
        count = merged.pop()[0] if merged and merged[-1][1:] == (q_len, kv_len) else 0
        merged.append((count + 1, q_len, kv_len))
    return tuple(merged)


def _shard(generator: random.Random, most_heads: int) -> Model:
    """A plain model's shard of up to so many query heads."""
    plain = [x for x in MODELS if not (x.encoder or x.sinks or x.soft_cap) and x.windows == (-1,)]
    while True:
        shard = generator.choice(plain).shard(generator.choice(TENSOR_PARALLEL))
        if shard is not None and shard.num_qo_heads <= most_heads:
            return shard


def _heads(model: Model) -> dict[str, Any]:
    return {
        "num_qo_heads": model.num_qo_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim_qk": model.head_dim,
        "head_dim_vo": model.head_dim_vo or model.head_dim,
    }


def _case(op: str, api: str, requests: Requests, page_size: int, **more: Any) -> BatchCase:
    options = {"causal": True, "checked": _CHECKED, "has_nan": False} | more
    return BatchCase("drawn", op, api, requests, page_size, **options)


def _prompts(generator: random.Random) -> BatchCase:
    model = _shard(generator, 32)
    length = _log_uniform(generator, 128, 4096)
    count = min(generator.choice((1, 1, 1, 2, 4, 8, 16)), max(1, _MOST_ROWS // length))
    return _case("ragged", "ragged", ((count, length, length),), 0, **_heads(model))


def _varlen(generator: random.Random) -> BatchCase:
    model = _shard(generator, 64)
    median = _log_uniform(generator, 64, 4096)
    count = min(generator.choice((1, 1, 2, 4, 8, 16, 32)), max(1, _MOST_ROWS // median))
    lengths = _lengths(generator, count, median, 8192)
    return _case("varlen", "ragged", _merged((n, n) for n in lengths), 0, **_heads(model))


def _kvcache(generator: random.Random) -> BatchCase:
    """Verification of drafts, and parts of prompts, over pages."""
    model = _shard(generator, 64)
    if model.head_dim_vo not in (None, model.head_dim):
        model = Model("", 32, 8)
    if generator.random() < 0.6:
        q_len, count = generator.randint(2, 8), _log_uniform(generator, 1, 64)
    else:
        q_len, count = _log_uniform(generator, 16, 1024), generator.choice((1, 2, 3, 4, 8))
    median = _log_uniform(generator, 512, 16384)
    kv_lens = [q_len + n for n in _lengths(generator, count, median, 32768)]
    requests = _merged((q_len, n) for n in kv_lens)
    return _case("kvcache", "paged", requests, generator.choice((16, 64, 128)), **_heads(model))


def _latent_requests(generator: random.Random, q_len: int, most: int) -> Requests:
    median = _log_uniform(generator, 512, 16384)
    count = min(_log_uniform(generator, 4, most), max(1, _MOST_LATENT_KEYS // (median * q_len)))
    kv_lens = _lengths(generator, count, median, 32768)
    return _merged((q_len, max(q_len, n)) for n in kv_lens)


def _latent(generator: random.Random) -> BatchCase:
    heads, q_len = generator.choice((64, 128)), generator.choice((1, 1, 2, 3, 4))
    requests = _latent_requests(generator, q_len, 132)
    page_size = generator.choice((16, 64, 64))
    return _case("mla", "mla", requests, page_size, num_qo_heads=heads, **_LATENT)


def _flash_mla(generator: random.Random) -> BatchCase:
    heads, q_len = generator.choice((16, 32, 64, 128)), generator.choice((1, 1, 2))
    requests = _latent_requests(generator, q_len, 132)
    return _case("flash_mla", "mla", requests, 64, num_qo_heads=heads, **_LATENT)


# (heads, head dim, rows, keys): BERT, ViT, DINO, SigLIP, Qwen-VL, Whisper.
_ENCODERS = (
    (12, 64, (128, 256, 384, 512), None),
    (16, 64, (197, 256, 257, 577), None),
    (20, 64, (1500,), None),
    (20, 64, (4, 64, 224, 448), 1500),
    (16, 72, (256, 729, 1024), None),
    (16, 80, (257, 1024, 1370, 2500), None),
)


def _encoders(generator: random.Random) -> BatchCase:
    heads, head_dim, rows, keys = generator.choice(_ENCODERS)
    length = generator.choice(rows)
    count = min(_log_uniform(generator, 1, 64), max(1, 2 * _MOST_ROWS // (keys or length)))
    requests = ((count, length, keys or length),)
    dims = {"head_dim_qk": head_dim, "head_dim_vo": head_dim}
    heads_of = {"num_qo_heads": heads, "num_kv_heads": heads}
    return _case("ragged", "ragged", requests, 0, causal=False, **heads_of, **dims)


def _long_decode(generator: random.Random) -> BatchCase:
    """200 to 700 MB of keys and values: of many requests with one KV head, or of one request."""
    page_size, num_bytes = generator.choice((16, 64)), _log_uniform(generator, 200, 700) << 20
    if generator.random() < 0.5:
        heads, kv_heads = generator.choice((4, 5, 8, 16)), 1
        count = _log_uniform(generator, 16, 256)
    else:
        heads, kv_heads = generator.choice(((32, 8), (64, 8), (40, 8), (28, 4)))
        count = 1
    keys = num_bytes // (count * kv_heads * 512)
    heads_of = {"num_qo_heads": heads, "num_kv_heads": kv_heads}
    requests = ((count, 1, keys),)
    return _case("batch_decode", "decode", requests, page_size, causal=False, **heads_of)


_EIGHT_BITS = {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"}
_EIGHT_BIT_HEADS = ((32, 8), (64, 8), (32, 32), (40, 8), (28, 4), (16, 16), (16, 2), (8, 1))
_EIGHT_BIT_DIMS = (*((128, 128),) * 6, *((64, 64),) * 2, (256, 256), (192, 128))
_MOST_EIGHT_BIT_PAIRS = 4e9  # of query rows and keys, all heads: 3 ms of head dim 128


def _eight_bits(generator: random.Random) -> BatchCase:
    """Queries, keys and values of e4m3: prompts, appended parts, drafts and mixed lengths."""
    kind = generator.choice(("prompts", "prompts", "prompts", "append", "verify", "mixed"))
    heads, kv_heads = generator.choice(_EIGHT_BIT_HEADS)
    dim, dim_vo = generator.choice(_EIGHT_BIT_DIMS)
    if dim != dim_vo:
        kind = "prompts"  # models with such heads decode by latent attention
    page_size, causal = generator.choice((16, 64, 64, 128)), True
    if kind == "prompts":
        causal = generator.random() < 0.7
        length = _log_uniform(generator, 512, 32768)
        length = min(length, int((_MOST_EIGHT_BIT_PAIRS * (1 + causal) / heads) ** 0.5))
        count = min(generator.choice((1, 1, 2, 4, 16)), max(1, _MOST_ROWS // length))
        pairs, page_size = [(length, length)] * count, 0
    elif kind == "mixed":
        count, page_size = generator.choice((2, 4, 8, 16)), 0
        lengths = _lengths(generator, count, _log_uniform(generator, 512, 4096), 16384)
        pairs = [(n, n) for n in lengths]
    else:
        if kind == "append":
            q_len, count = _log_uniform(generator, 64, 2048), generator.choice((1, 2, 4, 8))
        else:
            q_len, count = generator.randint(2, 8), _log_uniform(generator, 1, 64)
        median = _log_uniform(generator, 1024, 32768)
        pairs = [(q_len, q_len + n) for n in _lengths(generator, count, median, 32768)]
    windowed = dim == 128 == dim_vo and causal and generator.random() < 0.15
    return _case(
        "fp8",
        "paged" if page_size else "ragged",
        _merged(pairs),
        page_size,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=dim,
        head_dim_vo=dim_vo,
        causal=causal,
        window_left=generator.choice((1023, 4095)) if windowed else -1,
        **_EIGHT_BITS,
    )


GROUPS: dict[str, Group] = {
    "prompts": Group("prompts of 128 to 4k of one length", _prompts, 1.08, 0.95),
    "varlen": Group("flash_attn_varlen_func", _varlen, 1.02, 0.92),
    "kvcache": Group("flash_attn_with_kvcache: drafts, appends", _kvcache, 1.05, 0.97),
    "latent": Group("latent attention of 64 and 128 heads", _latent, 1.02, 0.96),
    "flashmla": Group("flash_mla_with_kvcache", _flash_mla, 1.0, 0.95),
    "encoders": Group("encoders, cross attention of D 64 to 80", _encoders, 1.0, 0.92),
    "longdecode": Group("decode of one KV head or request", _long_decode, 0.88, is_share=True),
    "fp8": Group(
        "queries, keys and values of e4m3", _eight_bits, 1.15, percentile_5=0.97, lists_peers=True
    ),
    "sparse": Group("lists of keys, block-sparse prompts", draw_lists, 2.0, 1.0, lists_peers=True),
    "select": Group(
        "the greatest 2,048 scores of DeepSeek's index", draw_selections, 1.5, lists_peers=True
    ),
}
BY_NAME = ("fp8", "sparse", "select")


# The prompt whose code is weighed, and the most bytes of it that are wanted.
PROMPT_OF_1K = BatchCase("1k", "ragged", "ragged", ((1, 1024, 1024),), 0, causal=True)
MAX_CODE_BYTES = 60 << 10


# --- what is wanted ---


def judge(entries: Iterable[dict[str, Any]], copy_gbps: float) -> dict[str, Any]:
    """For each group: shapes, figures, the worst shape, what is wanted and whether it is met."""
    result = {}
    every = list(entries)
    for name, group in GROUPS.items():
        rated = [x for x in every if x["schedule"] == name and _figure(x, group, copy_gbps)]
        if rated:
            result[name] = _judged(group, rated, copy_gbps)
    return result


def _figure(entry: dict[str, Any], group: Group, copy_gbps: float) -> float | None:
    if not group.is_share:
        ratio: float | None = entry["ratio"]
        return ratio
    us = entry["ours_us"]
    return entry["bytes"] / us / 1e3 / copy_gbps if us else None


def _judged(group: Group, rated: list[dict[str, Any]], copy_gbps: float) -> dict[str, Any]:
    from .summary import figures

    by_case = {entry["case"]: _figure(entry, group, copy_gbps) or 0.0 for entry in rated}
    found = figures(by_case.values())
    worst = min(rated, key=lambda entry: by_case[entry["case"]])
    is_met = found["geometric_mean"] >= group.mean
    if group.percentile_5 is not None:
        is_met = is_met and found["percentile_5"] >= group.percentile_5
    if group.lists_peers:
        found["peers"] = _peers(rated)
        found["histogram"] = histogram(by_case.values())
    return found | {
        "worst": worst["case"],
        "worst_peer": "copy" if group.is_share else worst["best_peer"],
        "wanted_mean": group.mean,
        "wanted_least": group.least,
        "met": is_met and (group.least is None or found["least"] >= group.least),
    }


def histogram(ratios: Iterable[float]) -> dict[str, int]:
    """How many ratios are in each class, classes without one left out."""
    counts = dict.fromkeys(itertools.pairwise((0.0, *_CLASSES, math.inf)), 0)
    for ratio in ratios:
        place = next(place for place in counts if place[0] <= ratio < place[1])
        counts[place] += 1
    return {f"{low:.2f} to {high:.2f}": n for (low, high), n in counts.items() if n}


def _peers(rated: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """For each implementation: its shapes, its time over ours (geometric mean) and the median of
    its errors."""
    found: dict[str, list[dict[str, float]]] = {}
    for entry in rated:
        for name, row in entry["implementations"].items():
            found.setdefault(name, []).append(row | {"ratio": row["us"] / entry["ours_us"]})
    return {
        name: {
            "shapes": len(rows),
            "ratio": math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows)),
            "error": statistics.median(row["error"] for row in rows),
        }
        for name, rows in found.items()
    }


def lines_of(judged: dict[str, Any]) -> list[str]:
    """The table of the groups as text."""
    head = f"{'group':44}{'shapes':>7}{'mean':>8}{'5 %':>8}{'least':>8}   wanted"
    lines = [head]
    for name, found in judged.items():
        numbers = (found["geometric_mean"], found["percentile_5"], found["least"])
        wanted_least = GROUPS[name].percentile_5 or found["wanted_least"]
        least = "" if wanted_least is None else f", {wanted_least:.2f}"
        wanted = f"{found['wanted_mean']:.2f}{least}  {'met' if found['met'] else 'NOT MET'}"
        row = f"{GROUPS[name].about:44}{found['count']:7}"
        lines.append(row + "".join(f"{x:8.3f}" for x in numbers) + f"   {wanted}")
        lines.append(f"    worst: {found['worst']} ({found['worst_peer']})")
        lines += [
            f"    {peer:20}{x['shapes']:4} shapes{x['ratio']:8.3f}   error {x['error']:.2%}"
            for peer, x in found.get("peers", {}).items()
        ]
        if "histogram" in found:
            counts = (f"{name}: {count}" for name, count in found["histogram"].items())
            lines.append("    ratios: " + ", ".join(counts))
    return lines
