"""Draws of batches for timing tiles: pure functions of a seed and a number.

Batches are short, where the choice of tiles matters, and their problems few, so that the kernels
of all candidates can be compiled ahead: a seed draws `PROBLEMS` of them for all its batches.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from .case import TileCase

_MAX_FLOPS = 2.5e11  # of a batch: some 0.4 ms
_MAX_KV_BYTES = 1 << 29
_HEADS = ((32, 8), (32, 32), (16, 16), (64, 8), (8, 1), (16, 2), (28, 4), (12, 12), (40, 8), (5, 5))
_SHAPES = {
    "prompt": 2,
    "short": 2,
    "encoder": 1,
    "cross": 1,
    "append": 2,
    "decode": 5,
    "verify": 3,
    "mixed": 4,
}
_RAGGED_SHAPES = "prompt", "short", "encoder", "cross"
# Each row of these sees all keys.
_WHOLE_SHAPES = "encoder", "cross"


class Problem(NamedTuple):
    """What a kernel is compiled for, and how often a seed draws it."""

    api: str
    dims: tuple[int, int]
    weight: float = 1.0
    page_size: int = 16
    kv_dtype: str = "bfloat16"
    soft_cap: float = 0.0
    pos_encoding_mode: str = "NONE"
    has_mask: bool = False


PROBLEMS = (
    Problem("ragged", (128, 128), 8),
    Problem("ragged", (64, 64), 5),
    Problem("ragged", (96, 96), 2),
    Problem("ragged", (72, 72), 2),
    Problem("ragged", (80, 80), 2),
    Problem("ragged", (88, 88)),
    Problem("ragged", (104, 104)),
    Problem("ragged", (112, 112), 2),
    Problem("ragged", (120, 120)),
    Problem("ragged", (136, 136)),
    Problem("ragged", (144, 144)),
    Problem("ragged", (160, 160)),
    Problem("ragged", (192, 128), 3),
    Problem("ragged", (192, 192)),
    Problem("ragged", (256, 128)),
    Problem("ragged", (256, 256), 2),
    Problem("ragged", (128, 128), 2, soft_cap=30.0),
    Problem("ragged", (64, 64), 1, soft_cap=30.0),
    Problem("ragged", (128, 128), 2, pos_encoding_mode="ROPE_LLAMA"),
    Problem("ragged", (64, 64), 1, pos_encoding_mode="ROPE_LLAMA"),
    Problem("ragged", (128, 128), 2, pos_encoding_mode="ALIBI"),
    Problem("ragged", (128, 128), 2, has_mask=True),
    Problem("paged", (128, 128), 10),
    Problem("paged", (64, 64), 5),
    Problem("paged", (96, 96)),
    Problem("paged", (256, 256), 3),
    Problem("paged", (128, 128), 3, page_size=1),
    Problem("paged", (64, 64), 1, page_size=1),
    Problem("paged", (128, 128), 3, soft_cap=30.0),
    Problem("paged", (128, 128), 5, kv_dtype="float8_e4m3fn"),
    Problem("paged", (64, 64), 1, kv_dtype="float8_e4m3fn"),
    Problem("paged", (256, 256), 1, kv_dtype="float8_e4m3fn"),
    Problem("paged", (128, 128), 2, pos_encoding_mode="ROPE_LLAMA"),
    Problem("paged", (128, 128), 2, pos_encoding_mode="ALIBI"),
    Problem("paged", (128, 128), 2, has_mask=True),
)


def draw_cases(seed: int, count: int) -> list[TileCase]:
    """The first `count` batches of a seed. A longer draw begins with a shorter one."""
    return [draw_case(seed, number) for number in range(count)]


def draw_case(seed: int, number: int) -> TileCase:
    """One batch of one of the problems."""
    generator = random.Random(f"tiles {seed}/{number}")
    weights = [problem.weight for problem in PROBLEMS]
    problem = generator.choices(PROBLEMS, weights)[0]
    is_ragged = problem.api == "ragged"
    shapes = [x for x in _SHAPES if (x in _RAGGED_SHAPES if is_ragged else x not in _WHOLE_SHAPES)]
    shape = generator.choices(shapes, [_SHAPES[x] for x in shapes])[0]
    q_heads, kv_heads = generator.choice(_HEADS)
    requests = _SHAPE_DRAWS[shape](generator)
    head_dim_qk, head_dim_vo = problem.dims
    causal = shape not in _RAGGED_SHAPES or generator.random() < 0.7
    case = TileCase(
        f"t{seed}_{number:04d}_{shape}",
        problem.api,
        tuple((1, rows, keys) for rows, keys in requests),
        problem.page_size if problem.api == "paged" else 0,
        q_heads,
        kv_heads,
        head_dim_qk,
        head_dim_vo,
        causal and not problem.has_mask and shape not in _WHOLE_SHAPES,
        pos_encoding_mode=problem.pos_encoding_mode,
        logits_soft_cap=problem.soft_cap,
        kv_dtype=problem.kv_dtype,
        has_mask=problem.has_mask,
    )
    return _fit(case)


Lengths = list[tuple[int, int]]


def _prompt(generator: random.Random) -> Lengths:
    count = _log_uniform(generator, 1, 64)
    return [(n, n) for n in _lengths(generator, count, _log_uniform(generator, 24, 8192))]


def _short(generator: random.Random) -> Lengths:
    """Short prompts, which are all as long as padded ones are, or nearly."""
    count, rows = _log_uniform(generator, 4, 128), _log_uniform(generator, 24, 1024)
    minimum = generator.choice((rows, rows, rows - rows // 8))
    return [(n, n) for n in (generator.randint(minimum, rows) for _ in range(count))]


def _encoder(generator: random.Random) -> Lengths:
    """Pictures and texts of a few hundred tokens, all as long."""
    count, rows = _log_uniform(generator, 2, 96), _log_uniform(generator, 96, 1024)
    return [(rows, rows)] * count


def _cross(generator: random.Random) -> Lengths:
    """Rows of one sequence over the keys of another."""
    count, rows = _log_uniform(generator, 1, 24), _log_uniform(generator, 64, 4096)
    return [(rows, _log_uniform(generator, 64, 2048))] * count


def _append(generator: random.Random) -> Lengths:
    count = _log_uniform(generator, 1, 16)
    cached = _lengths(generator, count, _log_uniform(generator, 64, 16384))
    rows = [_log_uniform(generator, 16, 2048) for _ in cached]
    return [(n, n + keys) for n, keys in zip(rows, cached, strict=True)]


def _decode(generator: random.Random) -> Lengths:
    count = _log_uniform(generator, 1, 256)
    return [(1, n) for n in _lengths(generator, count, _log_uniform(generator, 64, 32768))]


def _verify(generator: random.Random) -> Lengths:
    rows, count = generator.randint(2, 12), _log_uniform(generator, 1, 128)
    keys = _lengths(generator, count, _log_uniform(generator, 64, 16384))
    return [(rows, max(rows, n)) for n in keys]


def _mixed(generator: random.Random) -> Lengths:
    chunk = generator.choice((128, 256, 512, 1024, 2048))
    chunks = [(chunk, chunk * generator.randint(1, 6)) for _ in range(generator.choice((1, 1, 2)))]
    return chunks + _decode(generator)[:128]


_SHAPE_DRAWS = {
    "prompt": _prompt,
    "short": _short,
    "encoder": _encoder,
    "cross": _cross,
    "append": _append,
    "decode": _decode,
    "verify": _verify,
    "mixed": _mixed,
}


def _log_uniform(generator: random.Random, minimum: int, maximum: int) -> int:
    return round(minimum * (maximum / minimum) ** generator.random())


def _lengths(generator: random.Random, count: int, median: int) -> list[int]:
    """Equal lengths, or log-normal ones around the median."""
    if generator.random() < 0.4:
        return [median] * count
    sigma = generator.uniform(0.2, 1.0)
    return [max(1, round(median * generator.lognormvariate(0.0, sigma))) for _ in range(count)]


def _fit(case: TileCase) -> TileCase:
    """The batch with as many of its requests as time and memory allow, at least the first."""
    row_bytes = case.num_kv_heads * (case.head_dim_qk + case.head_dim_vo) * 2
    kept: list[tuple[int, int, int]] = []
    flops, num_bytes = 0.0, 0.0
    for _, q_len, kv_len in case.requests:
        flops, num_bytes = flops + case.flops(q_len, kv_len), num_bytes + kv_len * row_bytes
        if kept and (flops > _MAX_FLOPS or num_bytes > _MAX_KV_BYTES):
            break
        kept.append((1, q_len, kv_len))
    return replace(case, requests=tuple(kept))
