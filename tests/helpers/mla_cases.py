"""Seeded random calls of latent attention, over every way to call it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from . import batch_cases, cases, planless_cases
from .batch_cases import Problem
from .cases import pick
from .gpu_cases import ProblemClass

NUM_CASES = 1600
_BF16, _HALF, _E4M3 = "bfloat16", "float16", "float8_e4m3fn"
_KV_LENS = (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129, 200)
_PAGE_SIZES = (1, 1, 2, 5, 16, 64, 64, 100)
_MOST_MULTIPLIES = 5_000_000
# What is called, and how many rows a request has: any, equally many, or one.
WAYS = {
    "wrapper": "any",
    "metadata": "any",
    "trtllm": "same",
    "trtllm ragged": "any",
    "xqa batch": "one",
    "xqa": "one",
    "flash_mla": "same",
    "forward": "one",
    "list": "one",
    "list of tokens": "same",
    "flat list": "one",
}
PROBLEMS = (
    Problem(_BF16, _BF16, (512, 64)),
    Problem(_HALF, _HALF, (512, 64)),
    Problem(_BF16, _E4M3, (512, 64)),
    Problem(_HALF, _E4M3, (512, 64)),
    Problem(_HALF, _HALF, (512, 0)),
    Problem(_BF16, _BF16, (256, 64)),
    Problem(_HALF, _HALF, (512, 64), is_aligned=False),
)
# Head dims beyond 256 of ordinary attention.
WIDE = (
    Problem(_BF16, _BF16, (512, 512)),
    Problem(_HALF, _HALF, (256, 512)),
    Problem(_BF16, _E4M3, (512, 512)),
    Problem(_HALF, _HALF, (512, 256)),
    Problem(_HALF, _HALF, (64, 512)),
    Problem(_BF16, _BF16, (448, 256)),
    Problem(_BF16, _E4M3, (320, 512)),
    Problem(_HALF, _HALF, (512, 512), pos_encoding_mode="ROPE_LLAMA"),
    Problem(_BF16, _BF16, (256, 512), pos_encoding_mode="ROPE_LLAMA"),
    Problem(_HALF, _HALF, (512, 512), pos_encoding_mode="ALIBI", is_capped=True),
    Problem(_BF16, _BF16, (512, 512), is_masked=True),
    Problem(_HALF, _HALF, (512, 512), prescale_logits=True),
    Problem(_BF16, _BF16, (512, 512), is_aligned=False),
)


@dataclass(frozen=True)
class Case:
    """One call.

    problem      dims are the columns of the two parts
    scales       of the latent and the rope part of a cache of fp8
    absent       of a list: the share of its entries that name no key
    has_lengths  of a list: only so many of its entries count
    split        fixed_split_size in pages, or None
    form         of a cache of fp8: "" for scales of the whole, "tokens" for one of each token,
                 "rows" for FlashMLA's rows of 656 bytes
    """

    seed: int
    way: str
    problem: Problem
    qo_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    heads: int
    page_size: int
    causal: bool = True
    is_split: bool = False
    is_padded: bool = False
    has_sinks: bool = False
    scales: tuple[float, float] = (1.0, 1.0)
    absent: float = 0.0
    has_lengths: bool = False
    split: int | None = None
    is_natural: bool = False
    with_out: bool = False
    sm_scale: float = 192**-0.5
    form: str = ""

    @property
    def is_list(self) -> bool:
        return "list" in self.way


def random_case(seed: int, ways: tuple[str, ...] = tuple(WAYS)) -> Case:
    """The same case for the same seed."""
    rng = np.random.default_rng((seed, 93))
    problem, way = PROBLEMS[seed % len(PROBLEMS)], ways[seed % len(ways)]
    if way in ("xqa", "forward") and problem.dims != (512, 64):
        problem = PROBLEMS[seed % 2]
    count = pick(rng, (1, 1, 2, 3, 5))
    q_len = pick(rng, (1, 2, 3, 5)) if WAYS[way] == "same" else 1
    qo_len = [q_len] * count
    if WAYS[way] == "any":
        qo_len = [pick(rng, (0, 1, 1, 1, 2, 3, 9)) for _ in range(count)]
    kv_len = [pick(rng, _KV_LENS) for _ in range(count)]
    if rng.random() < 0.1:
        kv_len[0] = int(rng.integers(300, 900))
    heads = pick(rng, (1, 2, 3, 8, 16, 16, 17, 32, 64, 128))
    while np.dot(qo_len, kv_len) * heads * 1088 > _MOST_MULTIPLIES:
        if heads > 16:
            heads //= 2
        else:
            kv_len[int(np.argmax(kv_len))] //= 2
    is_fp8 = problem.kv_dtype == _E4M3
    scales = (1.0, 1.0)
    if is_fp8 and way in ("wrapper", "metadata"):
        scales = pick(rng, ((1.0, 1.0), (0.5, 0.5), (0.75, 1.5)))
    form = _form(seed, way, problem)
    if form == "tokens":
        scales = (1.0, pick(rng, (1.0, 0.5)))  # products of q with it are exact
    return Case(
        form=form,
        seed=seed,
        way=way,
        problem=problem,
        qo_len=tuple(qo_len),
        kv_len=tuple(kv_len),
        heads=heads,
        page_size=1 if way == "flat list" else pick(rng, _PAGE_SIZES),
        causal=bool(rng.random() < 0.7),
        is_split=bool(rng.random() < 0.5) and problem.dims[1] > 0,
        is_padded=bool(rng.random() < 0.5),
        has_sinks=bool(rng.random() < 0.25) and way not in ("xqa", "forward"),
        scales=scales,
        absent=pick(rng, (0.0, 0.3, 1.0)) if rng.random() < 0.7 else 0.1,
        has_lengths=bool(rng.random() < 0.5),
        split=pick(rng, (None, None, 1, 4)) if way == "wrapper" else None,
        is_natural=bool(rng.random() < 0.3),
        with_out=bool(rng.random() < 0.5),
        sm_scale=pick(rng, (192**-0.5, 0.11)) if way != "forward" else 192**-0.5,
    )


def _form(seed: int, way: str, problem: Problem) -> str:
    """The form of fp8 keys, "" for plain ones; most calls that may have another form do."""
    rng = np.random.default_rng((seed, 95))
    if problem.kv_dtype != _E4M3 or rng.random() < 0.3:
        return ""
    if way in ("wrapper", "metadata"):
        return "tokens"
    # Rows have columns of bfloat16, which no float16 holds.
    has_rows = way in ("flash_mla", "list of tokens") and problem.dtype == _BF16
    return "rows" if has_rows else ""


def portable(case: Case) -> Case:
    """The same call with scales of the whole cache: portable kernels read no others."""
    return replace(case, form="")


def wide_single(index: int, seed: int) -> cases.Case:
    """A random call of one request with head dims beyond 256."""
    problem, case = WIDE[index], cases.random_case(40_000 + seed)
    made = ProblemClass(
        problem.dtype, problem.kv_dtype, problem.dims, problem.pos_encoding_mode,
        problem.is_capped, problem.is_masked, problem.prescale_logits, problem.is_aligned,
    )  # fmt: skip
    few = replace(case, kv_len=min(case.kv_len, 300), num_kv_heads=1, group=min(case.group, 4))
    return made.apply(few)


def wide_planless(seed: int) -> planless_cases.Case:
    """A random call without a plan, of FlashInfer's functions, with head dims of 512."""
    entries = planless_cases.ENTRIES[:3]
    case = planless_cases.random_case(seed)
    while case.entry not in entries or case.has_value_pages:
        seed += 100_003
        case = planless_cases.random_case(seed)
    dtype, kv_dtype = ((_BF16, _BF16), (_HALF, _HALF), (_BF16, _E4M3))[seed % 3]
    problem = planless_cases.Problem(dtype, kv_dtype, (512, 512))
    lens = {"kv_len": tuple(min(n, 300) for n in case.kv_len)}
    return replace(case, problem=problem, num_kv_heads=1, group=min(case.group, 4), **lens)  # type: ignore[arg-type]


def few_wide_rows(index: int, tokens: int, kv_len: tuple[int, ...]) -> batch_cases.Case:
    """A causal batch with head dims beyond 256, of four query heads a KV head."""
    lengths = {"qo_len": (tokens,) * len(kv_len), "kv_len": kv_len}
    case = replace(wide_case(index, 0), wrapper="paged", group=4, num_kv_heads=2, **lengths)  # type: ignore[arg-type]
    plain = {"causal": True, "window_left": -1, "split": (None, False), "scale_v": "none"}
    return replace(case, page_size=16, **plain)  # type: ignore[arg-type]


def wide_case(index: int, seed: int) -> batch_cases.Case:
    """A random batch with head dims beyond 256, of fewer keys."""
    problem = WIDE[index]
    case = batch_cases.random_case(seed)
    wrapper = case.wrapper
    if wrapper == "decode" and (problem.is_masked or problem.dims[0] != problem.dims[1]):
        wrapper = "paged"
    lengths = {"qo_len": case.qo_len[:3], "kv_len": tuple(min(n, 150) for n in case.kv_len[:3])}
    tree = {"tree": "", "has_items": False}
    changed = replace(case, problem=problem, wrapper=wrapper, num_kv_heads=1, **lengths, **tree)  # type: ignore[arg-type]
    is_pair = changed.is_pair or problem.dims[0] != problem.dims[1]
    return replace(changed, is_pair=is_pair, group=min(case.group, 4))
