"""The drawings of the concept pages. Each function draws one file of docs/pictures."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from benchmarks import documents
from benchmarks import scale as scaling
from benchmarks.eight_bits import errors as eight_bits
from cupyattn.explanation.picture import draw
from cupyattn.explanation.timeline import LaunchBlocks
from cupyattn.schedule import tile_span
from cupyattn.schedule.batch import BatchRequests, Splitting, plan_batch
from cupyattn.schedule.masking import Masking
from cupyattn.schedule.tile_shape import TileShape

from .svg import BLUE, FAINT, GREEN, GREY, KINDS, ORANGE, PAPER, PURPLE, RED, Canvas

# The first foretells, and has filled squares for what it measured; others have hollow ones.
SEVERAL_GPUS = ("2026-11-28-h200-several-gpus",)
SEVERAL_GPUS_CASES = "decode_1x1M", "decode_8x128k", "mla_8x128k_h128", "prompt_1x128k"
SEVERAL_GPUS_COLORS = "#1d4ed8", "#15803d", "#b91c1c", "#7e22ce"


def states() -> str:
    """Attention over parts of the keys, and the merge of what they leave."""
    c = Canvas(600, 290, "Two states over different keys merge into one")
    c.text(20, 28, "keys 0 to 5", color=GREY)
    c.cells(20, 38, range(6), [BLUE] * 6)
    c.text(330, 28, "keys 6 to 11", color=GREY)
    c.cells(330, 38, range(6, 12), [GREEN] * 6)
    for x, fill, name in ((20, BLUE, "a"), (330, GREEN, "b")):
        c.arrow(x + 102, 70, x + 102, 98)
        c.box(x, 100, 204, 60, fill)
        c.text(x + 102, 125, f"v_{name} = softmax · V", anchor="middle")
        c.text(x + 102, 148, f"s_{name} = log₂ Σ 2^logit", anchor="middle")
    c.arrow(122, 160, 240, 208)
    c.arrow(432, 160, 330, 208)
    c.box(130, 210, 320, 62, ORANGE)
    c.text(290, 236, "v = (2^s_a · v_a + 2^s_b · v_b) / 2^s", anchor="middle")
    c.text(290, 260, "s = log₂(2^s_a + 2^s_b)", anchor="middle")
    c.text(462, 246, "merge_state", bold=True)
    return c.render()


def packed_rows() -> str:
    """Tokens and the query heads of one key head as the rows of one tile."""
    c = Canvas(600, 330, "Tokens times heads of a group become rows of a tile")
    c.text(20, 28, "q: 3 tokens × 8 query heads, 2 key heads", color=GREY)
    for token in range(3):
        c.text(20, 62 + 34 * token, f"token {token}")
        fills = [BLUE] * 4 + [GREEN] * 4
        c.cells(90, 44 + 34 * token, (f"h{i}" for i in range(8)), fills, width=38)
    c.text(20, 176, "rows of key head 0 (heads 0 to 3)", color=GREY)
    c.text(20, 250, "rows of key head 1 (heads 4 to 7)", color=GREY)
    for group, (y, fill) in enumerate(((186, BLUE), (260, GREEN))):
        names = [f"{t}.{4 * group + h}" for t in range(3) for h in range(4)]
        c.cells(20, y, names, [fill] * 12, width=44)
        c.text(556, y + 19, "tile")
    c.text(20, 316, "One tile reads its key head once, for all its rows.")
    return c.render()


def layouts() -> str:
    """Dense, ragged and paged keys of the same three requests."""
    c = Canvas(600, 420, "Dense, ragged and paged keys")
    lengths = 5, 2, 7
    c.text(20, 28, "dense", bold=True)
    c.text(90, 28, "padded to the longest request", color=GREY)
    for row, (length, fill) in enumerate(zip(lengths, KINDS, strict=False)):
        fills = [fill] * length + [PAPER] * (7 - length)
        c.cells(20, 38 + 28 * row, [""] * 7, fills, height=24)
    c.text(20, 150, "ragged", bold=True)
    c.text(90, 150, "one behind another; indptr = [0, 5, 7, 14]", color=GREY)
    fills = [fill for n, fill in zip(lengths, KINDS, strict=False) for _ in range(n)]
    c.cells(20, 160, [""] * 14, fills, height=24)
    for offset in (0, 5, 7, 14):
        c.line(20 + 34 * offset, 160, 20 + 34 * offset, 192)
        c.text(20 + 34 * offset, 208, str(offset), anchor="middle")
    c.text(20, 248, "paged", bold=True)
    c.text(90, 248, "a pool of pages of 3 tokens, in any order", color=GREY)
    pages = {
        1: (BLUE, 3),
        4: (BLUE, 2),
        3: (GREEN, 2),
        0: (ORANGE, 3),
        5: (ORANGE, 3),
        2: (ORANGE, 1),
    }
    for page in range(6):
        fill, filled = pages[page]
        x = 20 + 94 * page
        c.cells(x, 268, [""] * 3, [fill] * filled + [PAPER] * (3 - filled), width=28, height=24)
        c.text(x + 42, 308, f"page {page}", anchor="middle", color=GREY)
    rows = (
        ("kv_indices", "[1, 4,   3,   0, 5, 2]"),
        ("kv_indptr", "[0, 2, 3, 6]: where a request begins in it"),
        ("kv_last_page_len", "[2, 2, 1]: filled tokens of the last page"),
    )
    for i, (name, value) in enumerate(rows):
        c.text(20, 342 + 26 * i, name, bold=True)
        c.text(170, 342 + 26 * i, value)
    return c.render()


def masks() -> str:
    """Which keys a row sees: causal, with a window, and draft tokens that form a tree."""
    c = Canvas(600, 300, "Causal rows, a window, and a tree of drafts")
    kinds: list[tuple[str, str, Callable[[int, int], bool]]] = [
        ("causal=True", "4 rows end 7 keys", lambda i, k: k <= i + 3),
        ("window_left=2", "and causal", lambda i, k: i + 1 <= k <= i + 3),
        ("mask=, a tree", "drafts a, b, c, d", _sees_in_tree),
    ]
    for n, (name, what, sees) in enumerate(kinds):
        x = 20 + 196 * n
        c.text(x, 28, name, bold=True)
        c.text(x, 50, what, color=GREY)
        for row in range(4):
            fills = [BLUE if sees(row, key) else PAPER for key in range(7)]
            labels = [""] * 3 + list("abcd") if n == 2 and row == 0 else [""] * 7
            c.cells(x, 62 + 24 * row, labels, fills, width=24, height=24)
        c.text(x, 180, "keys →", color=GREY)
    c.text(20, 220, "The last row sees the last key: rows end their request.")
    c.text(20, 246, "The tree: b and c both follow a, and d follows c.")
    c.text(20, 272, "A key that a row does not see never touches that row.")
    return c.render()


def _sees_in_tree(row: int, key: int) -> bool:
    path = {0: (0,), 1: (0, 1), 2: (0, 2), 3: (0, 2, 3)}[row]
    return key < 3 or key - 3 in path


def plan_and_run() -> str:
    """One skewed batch on eight slots: a block a request, and what plan_batch makes of it."""
    lengths = np.array([96, 20, 14, 10, 8, 8, 6, 6, 4, 4])
    shape = TileShape(tile_q=16, tile_kv=16, num_slots=8, state_cost=0.1)
    count = len(lengths)
    requests = BatchRequests(
        np.ones(count, np.int64),
        lengths.astype(np.int64) * 16,
        np.arange(count),
        np.zeros(count, np.int64),
        uniform=1,
    )
    items = plan_batch(requests, 4, 1, shape, Masking(), Splitting()).items
    parts = [(int(item[0]), _key_tiles(item)) for item in items]
    c = Canvas(600, 410, "A block a request, and a planned work list, on eight slots")
    c.text(20, 28, "a block for each request", bold=True)
    longest = _gantt(c, 38, list(enumerate(lengths.tolist())), 8)
    c.text(20, 218, "plan(): long requests are split, all slots end together", bold=True)
    planned = _gantt(c, 228, parts, 8)
    c.text(20, 400, f"time of the longest slot: {longest:g} and {planned:g} key tiles", color=GREY)
    return c.render()


def _key_tiles(item: np.ndarray) -> int:
    """Key tiles of an item, those of its split."""
    kv_len, split, num_splits = int(item[3]), int(item[5]), max(1, int(item[6]))
    begin, end = tile_span(0, kv_len, 16, split, num_splits)
    return end - begin


def _gantt(c: Canvas, y: float, parts: list[tuple[int, float]], num_slots: int) -> float:
    """Bars of (request, time) given to whatever slot is free first; the end of the last."""
    free = [(0.0, slot) for slot in range(num_slots)]
    for request, time in parts:
        begin, slot = heapq.heappop(free)
        c.box(20 + 5.6 * begin, y + 18 * slot, 5.6 * time, 16, KINDS[request % len(KINDS)])
        if 5.6 * time > 20:
            label = str(request)
            c.text(
                20 + 5.6 * (begin + time / 2), y + 13 + 18 * slot, label, anchor="middle", size=12
            )
        heapq.heappush(free, (begin + time, slot))
    return round(max(end for end, _ in free), 1)


def planless() -> str:
    """What the host and the GPU do with a plan, and without one."""
    c = Canvas(600, 300, "With a plan the host reads lengths; without one the GPU does")
    for y, name in ((40, "plan() and run()"), (180, "without a plan")):
        c.text(20, y - 12, name, bold=True)
        for row, label in enumerate(("host", "GPU")):
            c.text(20, y + 24 + 44 * row, label, color=GREY)
            c.line(60, y + 40 + 44 * row, 580, y + 40 + 44 * row, FAINT)
    c.box(64, 44, 190, 30, BLUE, "plan: the work list")
    c.arrow(254, 74, 276, 90)
    for i in range(4):
        c.box(280 + 74 * i, 90, 68, 30, GREEN, "run")
    c.text(580, 68, "lengths on the host", anchor="end", color=GREY)
    for i in range(4):
        c.box(64 + 128 * i, 230, 40, 30, BLUE, "list")
        c.box(106 + 128 * i, 230, 80, 30, GREEN, "attend")
    c.text(580, 208, "lengths and tables on the GPU", anchor="end", color=GREY)
    c.text(20, 290, "Nothing waits for the host, so a CUDA graph captures the call as it is.")
    return c.render()


def cascade() -> str:
    """Three levels of keys, and the requests that share them."""
    c = Canvas(600, 340, "Levels of shared keys: each is read once for all rows below it")
    c.text(20, 28, "level 0: the system prompt, shared by all", color=GREY)
    c.box(20, 38, 560, 40, BLUE, "keys read once for 4 requests")
    c.text(20, 110, "level 1: documents, shared by some", color=GREY)
    c.box(20, 120, 276, 40, GREEN, "once for 2")
    c.box(304, 120, 276, 40, GREEN, "once for 2")
    c.text(20, 192, "level 2: each request's own keys", color=GREY)
    for i in range(4):
        x = 20 + 142 * i
        c.box(x, 202, 134, 40, ORANGE, f"request {i}")
        c.arrow(x + 67, 242, x + 67, 270)
        c.box(x, 272, 134, 32, PURPLE, "merge 3 states")
    c.text(20, 328, "A row sees its levels as one sequence of keys.")
    return c.render()


def latent() -> str:
    """One latent row serves all query heads, and is its own value."""
    c = Canvas(600, 300, "A latent key of 576 columns, whose first 512 are the value")
    c.text(20, 28, "the cache: one row a token, for all heads", color=GREY)
    c.box(20, 38, 430, 40, BLUE, "512 latent columns")
    c.box(450, 38, 90, 40, ORANGE, "64 rope")
    c.text(20, 112, "key: all 576", color=GREY)
    c.line(20, 86, 540, 86)
    c.text(20, 150, "queries of every head, multiplied by W_UK before", color=GREY)
    for i in range(3):
        c.box(20 + 10 * i, 160 + 10 * i, 430, 34, GREEN, "" if i < 2 else "heads × 576")
    c.arrow(470, 200, 530, 200)
    c.text(545, 205, "o")
    c.text(20, 246, "value: the first 512 columns of the same row", color=GREY)
    c.box(20, 256, 430, 30, BLUE, "o: heads × 512, multiplied by W_UV behind")
    return c.render()


def cuda_graphs() -> str:
    """Capture once; between replays plan() writes the graph's buffers in place."""
    c = Canvas(600, 270, "Capture once, then plan and replay")
    steps = (
        ("plan, run", "compiles", FAINT, 96),
        ("capture run", "all layers", ORANGE, 110),
        ("plan", "new lengths", BLUE, 90),
        ("replay", "", GREEN, 70),
        ("plan", "", BLUE, 60),
        ("replay", "", GREEN, 70),
    )
    x = 20.0
    c.text(20, 30, "time →", color=GREY)
    for name, note, fill, width in steps:
        c.box(x, 44, width, 36, fill, name)
        c.text(x, 100, note, color=GREY, size=12)
        x += width + 12
    c.text(20, 150, "buffers that the graph reads", color=GREY)
    for i, name in enumerate(("kv_indptr", "kv_indices", "last_page_len", "work list")):
        c.box(20 + 140 * i, 158, 132, 34, BLUE, name)
    c.arrow(283, 108, 283, 154)
    c.text(294, 150, "plan() writes in place", color=GREY)
    c.text(20, 226, "Addresses, heads, dtypes and options stay those of the capture.")
    c.text(20, 250, "Lengths, pages and masks change with each plan.")
    return c.render()


def fp8() -> str:
    """What is stored in an fp8 cache, and where its scale comes back."""
    c = Canvas(600, 190, "Keys are divided by k_scale before they are stored")
    for y, name, scale in ((30, "k", "k_scale"), (110, "v", "v_scale")):
        c.box(20, y, 80, 40, GREEN, f"{name}, 16 bits")
        c.arrow(100, y + 20, 206, y + 20)
        c.text(106, y + 12, f"/ {scale}", size=13)
        c.box(210, y, 110, 40, RED, f"{name} in the cache")
        c.arrow(320, y + 20, 426, y + 20)
        c.text(330, y + 12, f"× {scale}", size=13)
        c.box(430, y, 150, 40, BLUE, "the logits" if name == "k" else "the answer")
    c.text(210, 90, "8 bits: half the bytes to read", color=GREY, size=13)
    return c.render()


def sms() -> str:
    """What `cupyattn explain --plot` draws: chunks on some SMs, decodes on the others and after."""
    items = np.array([28, 25, 22, 19, 16, 13, 10, 7]).repeat(8).astype(float)
    chunks = LaunchBlocks("prefill_sm90 (persistent)", items, 1, max_blocks=14)
    keys = np.linspace(40, 8, 80)
    decodes = LaunchBlocks("decode_sm80 (decode)", keys, 2, is_beside=True, has_merge=True)
    return draw([chunks, decodes], 24, 124.0, "8 chunks and 20 decodes on a card of 24 SMs")


def several_gpus() -> str:
    """Speed over one GPU's, as `benchmarks.scale` says it, and as it was measured."""
    found, *others = ([*scaling.points(_several_gpus(name))] for name in SEVERAL_GPUS)
    left, top, step = 60, 40, 44  # a step is a factor of two
    last = len(scaling.SIZES) - 1
    c = Canvas(640, top + last * step + 60, "Speed over one GPU, on 1 to 512 GPUs")

    def at(world: float, speedup: float) -> tuple[float, float]:
        return left + step * math.log2(world), top + step * (last - math.log2(speedup))

    for power, size in enumerate(scaling.SIZES):
        x, y = at(size, size)
        c.line(left, y, left + last * step, y, FAINT)
        c.text(left - 8, y + 5, f"{size}×", anchor="end", size=12)
        c.text(left + power * step, top + last * step + 20, str(size), anchor="middle", size=12)
        c.line(x, top, x, top + last * step, FAINT)
    c.line(*at(1, 1), *at(scaling.SIZES[-1], scaling.SIZES[-1]), GREY, dashed=True)
    c.text(left + last * step / 2, top + last * step + 44, "GPUs", anchor="middle")
    names = []
    for case, color in zip(SEVERAL_GPUS_CASES, SEVERAL_GPUS_COLORS, strict=True):
        points = [point for point in found if point.case == case]
        for one, two in itertools.pairwise(points):
            c.line(*at(one.world, one.speedup), *at(two.world, two.speedup), color)
        for of_run, fill in ((found, color), *((x, PAPER) for x in others)):
            for world, speedup in _measured_speedups(of_run, case):
                x, y = at(world, speedup)
                c.box(x - 4, y - 4, 8, 8, fill)
        names.append((at(points[-1].world, points[-1].speedup)[1], case, color))
    lowest = 0.0
    for y, case, color in sorted(names):  # ends that meet have their names below each other
        lowest = max(y + 5, lowest + 16)
        c.text(left + last * step + 10, lowest, case.replace("_", " "), color=color, size=13)
    return c.render()


def _several_gpus(name: str) -> scaling.Figures:
    """The figures of a result."""
    rows = json.loads((documents.RESULTS / name / "results.json").read_text("utf-8"))["rows"]
    return scaling.Figures.of(rows)


def _measured_speedups(points: Iterable[scaling.Point], case: str) -> Iterator[tuple[int, float]]:
    """Numbers of GPUs and speed over one of the same run."""
    own = [x for x in points if x.case == case and x.measured is not None]
    alone = next((x.measured for x in own if x.world == 1), None)
    for point in own:
        if alone is not None and point.measured is not None:
            yield point.world, alone / point.measured


def eight_bits_errors() -> str:
    """Errors of attention in 8 bits, by inputs and by how these are stored."""
    found = eight_bits.read()
    n = str(eight_bits.LENGTHS[-1])
    names = ("normal", "outliers", "channels", "sink", "recent", "mean")
    ways = ("kernel", "e4m3", BLUE), ("rotated", "e4m3, rotated", GREEN), ("int8", "int8", ORANGE)
    ways = (*ways, ("int8_all", "int8: blocks, smoothed, rotated", PURPLE))
    left, top, height, step = 50, 60, 200, 98
    most = 10.0
    c = Canvas(left + step * len(names) + 20, top + height + 50, "Errors of attention in 8 bits")
    for percent in range(0, int(most) + 1, 2):
        y = top + height * (1 - percent / most)
        c.line(left, y, left + step * len(names), y, FAINT)
        c.text(left - 8, y + 5, f"{percent} %", anchor="end", size=12)
    for i, name in enumerate(names):
        for j, (way, _, fill) in enumerate(ways):
            size = height * 100 * found[name][way][n] / most
            c.box(left + step * i + 8 + 20 * j, top + height - size, 20, size, fill)
        c.text(left + step * i + 48, top + height + 22, name, anchor="middle")
    x = left
    for _, words, fill in ways:
        c.box(x, 20, 16, 16, fill)
        c.text(x + 22, 33, words, size=13)
        x += 56 + 7 * len(words)
    return c.render()


def eight_bits_flush() -> str:
    """Errors over the number of keys, by how often sums leave the tensor cores."""
    found = eight_bits.read()["mean"]
    ways = ("never_flushed", "at the end alone"), ("flush_8", "every 8 tiles")
    ways = (*ways, ("kernel", "every 4 tiles"), ("flush_1", "every tile"))
    left, top, step, decade = 60, 50, 170, 90
    c = Canvas(660, top + 3 * decade + 60, "Errors of sums of 14 bits over the number of keys")

    def at(index: int, error: float) -> tuple[float, float]:
        return left + step * index, top + decade * (2 - math.log10(100 * error))

    for power in range(-1, 3):
        y = top + decade * (2 - power)
        c.line(left, y, left + 2 * step, y, FAINT)
        c.text(left - 8, y + 5, f"{10.0**power:g} %", anchor="end", size=12)
    for index, n in enumerate(eight_bits.LENGTHS):
        c.text(
            left + step * index, top + 3 * decade + 22, f"{n // 1024}k", anchor="middle", size=12
        )
    c.text(left + step, top + 3 * decade + 44, "keys", anchor="middle")
    c.text(left, 28, "values with a mean of two deviations; O goes to float32 ...", color=GREY)
    for (way, words), color in zip(ways, SEVERAL_GPUS_COLORS, strict=True):
        points = [at(i, found[way][str(n)]) for i, n in enumerate(eight_bits.LENGTHS)]
        for one, two in itertools.pairwise(points):
            c.line(*one, *two, color)
        c.text(points[-1][0] + 10, points[-1][1] + 5, words, color=color)
    return c.render()


def lists() -> str:
    """Blocks of a request's keys, their scores, and what a token's list of them names."""
    c = Canvas(560, 388, "An index scores blocks, a list names the best, attention reads these")
    width, first, chosen = 64, 84, (1, 3, 6)
    c.text(20, 30, "index", bold=True)
    c.text(first, 30, "the best score of each block of 8 keys", color=GREY)
    fills = [ORANGE if i in chosen else PAPER for i in range(7)]
    c.cells(first, 40, ("0.4", "2.1", "-0.3", "1.7", "0.2", "0.9", "1.1"), fills, width=width)
    c.text(20, 102, "list", bold=True)
    c.text(first, 102, "ascending blocks of the request; -1 is none", color=GREY)
    c.cells(first, 112, ("1", "3", "6", "-1"), [ORANGE] * 3 + [FAINT], width=width)
    c.text(20, 208, "keys", bold=True)
    for block in range(7):
        for i in range(8):
            is_seen = 8 * block + i < 53
            fill = (BLUE if block in chosen else PAPER) if is_seen else FAINT
            c.box(first + (block + i / 8) * width, 188, width / 8, 30, fill)
        c.text(first + (block + 0.5) * width, 236, str(block), anchor="middle", color=GREY)
    for entry, block in enumerate(chosen):
        c.arrow(first + (entry + 0.5) * width, 141, first + (block + 0.5) * width, 186)
    c.text(first, 258, "a token that sees 53 keys: block 6 gives it the first 5", color=GREY)
    c.text(20, 312, "pages", bold=True)
    read = ((9, (PAPER, BLUE)), (2, (PAPER, BLUE)), (5, (PAPER, PAPER)), (7, (BLUE,)))
    for at, (page, halves) in enumerate(read):
        x = first + 2 * at * width
        c.cells(x, 292, [""] * len(halves), halves, width=width)
        middle = x + len(halves) * width / 2
        c.text(middle, 338, f"page {page}", anchor="middle", color=GREY)
    c.text(first, 368, "of 16 keys: what no list names is not read", color=GREY)
    return c.render()


PICTURES: dict[str, Callable[[], str]] = {
    "lists": lists,
    "states": states,
    "packed_rows": packed_rows,
    "layouts": layouts,
    "masks": masks,
    "plan_and_run": plan_and_run,
    "planless": planless,
    "cascade": cascade,
    "latent": latent,
    "cuda_graphs": cuda_graphs,
    "fp8": fp8,
    "eight_bits_errors": eight_bits_errors,
    "eight_bits_flush": eight_bits_flush,
    "sms": sms,
    "several_gpus": several_gpus,
}
