"""The cases of the GPU suite, listed so that every kernel they need can be compiled beforehand.

Each new combination of compile-time options costs a compile, so most random cases draw theirs from
a fixed set of classes and vary only what a kernel learns at run time; `FREE` cases vary everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from . import cases
from .batch_cases import Problem
from .cases import Case, pick

NUM_CLASSED, NUM_FREE, NUM_DECODE, NUM_SPLIT = 900, 150, 120, 60


def apply(problem: Problem, case: Case) -> Case:
    """The case with this problem's compile-time facts, and its own lengths and other options."""
    rng = np.random.default_rng((case.seed, 3))
    kinds = [kind if kind != "unaligned" else "packed" for kind in case.strides]
    if not problem.is_aligned:
        kinds[case.seed % 4] = "unaligned"
    masked, bare = ("bool", "packed"), ("none",)
    scales = ("none", "float", "per_head") if problem.prescale_logits else ("none", "float")
    scale_q = "per_head" if problem.prescale_logits else pick(rng, scales)
    case = replace(
        case,
        dtype=problem.dtype,
        kv_dtype=problem.kv_dtype,
        o_dtype=problem.o_dtype,
        head_dim_qk=problem.dims[0],
        head_dim_vo=problem.dims[1],
        pos_encoding_mode=problem.pos_encoding_mode,
        logits_soft_cap=pick(rng, (30.0, 2.5) if problem.is_capped else (None, 0.0)),
        mask_kind=pick(rng, masked if problem.is_masked else bare),
        scale_q=scale_q,
        scale_k=pick(rng, scales),
        strides=tuple(kinds),
    )
    return cases.bounded(case, rng)


def _classes() -> list[Problem]:
    """Five head dims with every cache dtype; each option alone on three dims; some combinations."""
    half, bf16, e4m3, e5m2 = "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"
    dims = ((64, 64), (128, 128), (256, 256), (192, 128), (96, 96))
    found = [Problem(bf16, kv, d) for d in dims for kv in (bf16, e4m3)]
    found += [Problem(half, kv, d) for d in dims[:2] for kv in (half, e5m2)]
    options: tuple[dict[str, Any], ...] = (
        {"pos_encoding_mode": "ROPE_LLAMA"},
        {"pos_encoding_mode": "ALIBI"},
        {"is_capped": True},
        {"is_masked": True},
        {"prescale_logits": True},
        {"is_aligned": False},
    )
    found += [Problem(bf16, bf16, d, **o) for d in dims[:3] for o in options]
    found += [Problem(half, e4m3, (128, 128), **o) for o in options]
    found += [Problem(half, half, (80, 80), **o) for o in options]
    pairs = [a | b for a, b in itertools.combinations(options, 2) if not a.keys() & b.keys()]
    found += [Problem(half, half, (64, 64), **pair) for pair in pairs[::2]]
    found += [Problem(bf16, e4m3, (128, 128), **pair) for pair in pairs[1::2]]
    outputs = ((bf16, "float32"), (half, bf16), (bf16, half))
    found += [Problem(d, d, (128, 128), o_dtype=o) for d, o in outputs]
    return found


CLASSES = _classes()


def classed(seed: int) -> Case:
    return apply(CLASSES[seed % len(CLASSES)], cases.random_case(10_000 + seed))


def free(seed: int) -> Case:
    return cases.random_case(seed)


def _one_row(case: Case) -> Case:
    """A case that `single_decode_with_kv_cache` can be asked: no mask, scales that are numbers."""
    scales = {n: "none" if getattr(case, n) == "none" else "float" for n in _SCALES}
    return replace(case, qo_len=1, mask_kind="none", o_dtype=None, **scales)


_SCALES = ("scale_q", "scale_k", "scale_v")
_DECODE_CLASSES = [c for c in CLASSES if not (c.is_masked or c.prescale_logits or c.o_dtype)]


def decode(seed: int) -> Case:
    case = apply(_DECODE_CLASSES[seed % len(_DECODE_CLASSES)], cases.random_case(20_000 + seed))
    rng = np.random.default_rng((seed, 4))
    return _one_row(replace(case, kv_len=int(rng.integers(0, 1200))))


def split(seed: int) -> Case:
    """Few rows and many keys: what a GPU splits."""
    rng = np.random.default_rng((seed, 5))
    case = apply(CLASSES[seed % len(CLASSES)], cases.random_case(30_000 + seed))
    small = replace(case, num_kv_heads=int(rng.integers(1, 3)), group=pick(rng, (1, 4, 8)))
    window = pick(rng, (-1, -1, 100, 3000))
    return replace(
        small,
        qo_len=pick(rng, (1, 1, 2, 5, 16)),
        kv_len=int(rng.integers(2000, 6000)),
        window_left=window,
    )


PLAIN = Case(
    seed=1, qo_len=200, kv_len=333, num_kv_heads=2, group=4, head_dim_qk=128, head_dim_vo=128,
    dtype="bfloat16", kv_dtype="bfloat16",
)  # fmt: skip

_ALONE: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "float16": {"dtype": "float16", "kv_dtype": "float16"},
    "causal": {"causal": True},
    "window": {"window_left": 70},
    "causal window": {"causal": True, "window_left": 33},
    "right window": {"window_right": 40},
    "window to both sides": {"window_left": 70, "window_right": 20},
    "window of one": {"causal": True, "window_left": 0},
    "bool mask": {"mask_kind": "bool"},
    "packed mask": {"mask_kind": "packed", "mask_pattern": "tiles"},
    "sparse mask": {"mask_kind": "packed", "mask_pattern": "sparse"},
    "masked window": {"mask_kind": "bool", "window_left": 50, "causal": True},
    "masked right window": {"mask_kind": "bool", "window_right": 9},
    "soft cap": {"logits_soft_cap": 30.0},
    "small soft cap": {"logits_soft_cap": 0.5},
    "large soft cap": {"logits_soft_cap": 100.0, "kv_len": 900},
    "soft cap of low logits": {"logits_soft_cap": 30.0, "logit_shift": -20.0, "kv_len": 900},
    "soft cap of high logits": {"logits_soft_cap": 30.0, "logit_shift": 20.0, "kv_len": 900},
    "soft cap of outliers": {"logits_soft_cap": 30.0, "outliers": 5.0, "kv_len": 900},
    "sm_scale": {"sm_scale": 0.3},
    "negative sm_scale": {"sm_scale": -0.1},
    "zero sm_scale": {"sm_scale": 0.0},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA", "causal": True},
    "scaled rope": {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 8.0, "rope_theta": 5e5},
    "alibi": {"pos_encoding_mode": "ALIBI", "causal": True},
    "sinks": {"has_sinks": True},
    "scale_q": {"scale_q": "per_head"},
    "scale_k": {"scale_k": "per_head"},
    "scale_v": {"scale_v": "per_head"},
    "numbers for scales": {"scale_q": "float", "scale_k": "float", "scale_v": "float"},
    "e4m3 cache": {"kv_dtype": "float8_e4m3fn"},
    "e5m2 cache": {"kv_dtype": "float8_e5m2"},
    "e4m3 cache, rope": {"kv_dtype": "float8_e4m3fn", "pos_encoding_mode": "ROPE_LLAMA"},
    "float32 output": {"o_dtype": "float32"},
    "e4m3 output": {"o_dtype": "float8_e4m3fn", "scale_v": "float"},
    "HND": {"kv_layout": "HND"},
    "unaligned": {"strides": ("unaligned",) * 4},
    "padded": {"strides": ("padded",) * 4},
    "swapped": {"strides": ("swapped",) * 4},
    "no lse": {"return_lse": False},
    "group of 1": {"group": 1},
    "group of 7": {"group": 7, "num_kv_heads": 1},
    "fewer keys than rows": {"kv_len": 3, "causal": True},
    "no keys": {"kv_len": 0, "causal": True},
    "no rows": {"qo_len": 0},
    **{f"dim {d}": {"head_dim_qk": d, "head_dim_vo": d} for d in (8, 24, 64, 72, 96, 200, 256)},
    "dims 192, 128": {"head_dim_qk": 192, "head_dim_vo": 128},
    "dims 16, 256": {"head_dim_qk": 16, "head_dim_vo": 256},
    "dims 256, 8": {"head_dim_qk": 256, "head_dim_vo": 8},
}
_SHAPES = {"prefill": {}, "append": {"qo_len": 9}, "one row": {"qo_len": 1}}

ALONE = {
    f"{name}, {shape}": replace(PLAIN, **{**lengths, **changes})
    for name, changes in _ALONE.items()
    for shape, lengths in _SHAPES.items()
}

# Called over and over by the tests of streams, graphs and threads.
_LONG_DECODE = {"qo_len": 1, "kv_len": 8192, "num_kv_heads": 2, "group": 4}
STEADY = {
    "prefill": replace(PLAIN, causal=True),
    "decode": replace(PLAIN, **_LONG_DECODE, seed=2),
    "append": replace(PLAIN, **_LONG_DECODE | {"qo_len": 3}, seed=3, causal=True),
    "rope": replace(PLAIN, pos_encoding_mode="ROPE_LLAMA", seed=6),
    "masked": replace(PLAIN, qo_len=40, kv_len=500, seed=4, mask_kind="packed"),
    "fp8 decode": replace(PLAIN, **_LONG_DECODE, seed=5, kv_dtype="float8_e4m3fn"),
}
SPLIT_STEADY = ("decode", "append", "fp8 decode")


def all_cases() -> Iterator[tuple[Case, bool]]:
    """(case, is_decode): every call of the suite that needs a kernel of its own."""
    for make, count in ((classed, NUM_CLASSED), (free, NUM_FREE), (split, NUM_SPLIT)):
        yield from ((make(seed), False) for seed in range(count))
    yield from ((decode(seed), True) for seed in range(NUM_DECODE))
    yield from ((case, False) for case in (*ALONE.values(), *STEADY.values()))
