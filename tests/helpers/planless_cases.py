"""Seeded random calls of the entry points that take no plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cases import pick
from .verify_cases import FORMS

NUM_CASES = 1600
ENTRIES = (
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
    "xqa",
    "cudnn_batch_decode_with_kv_cache",
    "cudnn_batch_prefill_with_kv_cache",
)
_BF16, _HALF, _E4M3, _E5M2 = "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
_KV_LENS = (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 200, 300, 513)
_QO_LENS = (0, 1, 1, 2, 3, 8, 17, 40, 70)
_MAX_MULTIPLIES = 6_000_000


@dataclass(frozen=True)
class Problem:
    """What a kernel is compiled for. has_array_scales: scales of the logits are in memory."""

    dtype: str
    kv_dtype: str
    dims: tuple[int, int]
    has_array_scales: bool = False
    is_aligned: bool = True


PROBLEMS = (
    Problem(_BF16, _BF16, (128, 128)),
    Problem(_HALF, _HALF, (64, 64)),
    Problem(_BF16, _E4M3, (128, 128)),
    Problem(_HALF, _E5M2, (64, 64)),
    Problem(_HALF, _HALF, (64, 64), has_array_scales=True),
    Problem(_BF16, _E4M3, (128, 128), has_array_scales=True),
    Problem(_BF16, _BF16, (64, 64), is_aligned=False),
    Problem(_HALF, _HALF, (192, 128)),
)


@dataclass(frozen=True)
class Case:
    """One call. page_size is 0 for ragged keys, which only cuDNN's prefill takes.

    form        how rows of q are said: "uniform", "steps" (cumulative), "lens" (and offsets)
    units       of offsets: "elements" or "tokens"
    index_axes  axes of an extent of 1 behind the lengths
    spare_rows  rows of q that no request has, behind the others (with offsets)
    v_scale     "number", "array" or "none"
    cache       "one" tensor of both, a "pair", or "same" for keys that are values too
    has_value_pages  values are in other pages of the pool than their keys
    tree        the form of a mask over the rows of each request (verify_cases.py); "": none
    """

    seed: int
    entry: str
    problem: Problem
    qo_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    page_size: int
    num_kv_heads: int
    group: int
    form: str
    kv_layout: str = "NHD"
    causal: bool = True
    window_left: int = -1
    has_sinks: bool = False
    v_scale: str = "none"
    cache: str = "pair"
    units: str = "elements"
    index_dtype: str = "int32"
    index_axes: int = 0
    spare_rows: int = 0
    is_padded: bool = False
    with_out: bool = True
    with_lse: bool = True
    has_workspace: bool = True
    tree: str = ""
    has_value_pages: bool = False

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def has_array_logit_scale(self) -> bool:
        """xqa's scale of fp8 values is also one of keys."""
        is_fp8 = "float8" in self.problem.kv_dtype
        is_shared = self.entry == "xqa" and is_fp8 and self.v_scale == "array"
        return self.problem.has_array_scales or is_shared


def random_case(seed: int) -> Case:
    """The same case for the same seed."""
    rng = np.random.default_rng((seed, 91))
    problem = PROBLEMS[seed % len(PROBLEMS)]
    entry = ENTRIES[int(rng.integers(len(ENTRIES)))]
    is_decode = "decode" in entry or entry == "xqa"
    if problem.dims[0] != problem.dims[1]:
        entry, is_decode = ENTRIES[5], False
    is_cudnn = entry.startswith("cudnn")
    count = pick(rng, (1, 1, 2, 3, 4, 5, 7, 12, 20)) if seed % 50 else 0
    form = "lens" if entry == ENTRIES[5] else "uniform"
    if entry == ENTRIES[1] or (is_decode and not is_cudnn and rng.random() < 0.3):
        form = "steps"
    if form == "uniform":
        q_len = 1 if is_cudnn else pick(rng, (1, 1, 1, 2, 4, 7))
        qo_len = [q_len] * count
    else:
        qo_len = [pick(rng, _QO_LENS) for _ in range(count)]
    kv_len = [pick(rng, _KV_LENS) for _ in range(count)]
    if count and rng.random() < 0.25:
        kv_len[int(rng.integers(count))] = int(rng.integers(1000, 4000))  # one long among short
    group, num_kv_heads = pick(rng, (1, 2, 4, 4, 5, 8, 16)), pick(rng, (1, 1, 2, 3))
    while np.dot(qo_len, kv_len) * num_kv_heads * group * sum(problem.dims) > _MAX_MULTIPLIES:
        if num_kv_heads > 1:
            num_kv_heads -= 1
        elif form == "uniform":
            kv_len[int(np.argmax(kv_len))] //= 2
        else:
            worst = int(np.argmax(np.multiply(qo_len, kv_len)))
            qo_len[worst], kv_len[worst] = max(1, qo_len[worst] // 2), kv_len[worst] * 2 // 3
    is_ragged = entry == ENTRIES[5] and bool(rng.random() < 0.5)
    takes_pair_only = is_cudnn or entry == "xqa"
    return Case(
        seed=seed,
        entry=entry,
        problem=problem,
        qo_len=tuple(qo_len),
        kv_len=tuple(kv_len),
        page_size=0 if is_ragged else pick(rng, (1, 2, 3, 8, 16, 16, 16, 32, 64, 100)),
        num_kv_heads=num_kv_heads,
        group=group,
        form=form,
        kv_layout="HND" if is_cudnn else pick(rng, ("NHD", "HND")),
        causal=is_decode or bool(rng.random() < 0.7),
        window_left=-1 if is_cudnn else pick(rng, (-1, -1, -1, 0, 3, 60, 200)),
        has_sinks=not is_cudnn and bool(rng.random() < 0.25),
        v_scale=pick(rng, ("none", "number", "array")) if entry != ENTRIES[4] else "none",
        cache="pair" if takes_pair_only else pick(rng, ("one", "pair", "pair", "same")),
        units=pick(rng, ("elements", "tokens")),
        index_dtype=pick(rng, ("int32", "int32", "uint32", "int64")),
        index_axes=pick(rng, (0, 1, 3)),
        spare_rows=pick(rng, (0, 0, 5)) if form != "uniform" else 0,
        is_padded=bool(rng.random() < 0.5),
        with_out=bool(rng.random() < 0.7),
        with_lse=bool(rng.random() < 0.6),
        has_workspace=bool(rng.random() < 0.9),
        tree=_tree(seed) if is_decode and not is_cudnn and form != "lens" else "",
        has_value_pages=entry.startswith("trtllm") and _has_value_pages(seed),
    )


def _has_value_pages(seed: int) -> bool:
    """Whether V has pages of its own: in few problems, since each needs another kernel."""
    return seed % len(PROBLEMS) in (0, 2, 5) and seed // len(PROBLEMS) % 2 == 0


def _tree(seed: int) -> str:
    rng = np.random.default_rng((seed, 94))
    return pick(rng, FORMS) if seed % len(PROBLEMS) < 2 and rng.random() < 0.5 else ""
