"""Seeded random batches over every wrapper and option.

Problems come from a short list, so that few kernels are compiled; all else is drawn at random.
Shapes are small: what counts is how requests, pages, tiles and splits meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cases import pick

NUM_CASES = 2400

_BF16, _HALF, _E4M3, _E5M2 = "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
_QO_LENS = (0, 1, 1, 2, 3, 5, 8, 16, 17, 33, 64, 70, 130)
_KV_LENS = (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 200, 300, 513)
_PAGE_SIZES = (1, 2, 3, 5, 8, 16, 16, 16, 32, 64, 100)
_MAX_MULTIPLIES = 8_000_000


@dataclass(frozen=True)
class Problem:
    """What a kernel is compiled for."""

    dtype: str
    kv_dtype: str
    dims: tuple[int, int]
    o_dtype: str | None = None
    pos_encoding_mode: str = "NONE"
    is_capped: bool = False
    is_masked: bool = False
    prescale_logits: bool = False
    is_aligned: bool = True

    @property
    def has_coarse_cap(self) -> bool:
        """As cases.has_coarse_cap."""
        has_other_forms = self.prescale_logits or self.pos_encoding_mode == "ALIBI"
        return self.is_capped and self.dtype == _BF16 and not has_other_forms


_PLAIN = ((_BF16, _BF16), (_HALF, _HALF), (_BF16, _E4M3), (_HALF, _E5M2))
PROBLEMS = (
    *(Problem(q, kv, (128, 128)) for q, kv in _PLAIN),
    *(Problem(q, kv, (64, 64)) for q, kv in _PLAIN[:3]),
    Problem(_BF16, _BF16, (256, 256)),
    Problem(_HALF, _HALF, (192, 128)),
    Problem(_HALF, _HALF, (72, 40)),
    Problem(_BF16, _BF16, (128, 128), o_dtype="float32"),
    Problem(_BF16, _BF16, (128, 128), pos_encoding_mode="ROPE_LLAMA"),
    Problem(_HALF, _E4M3, (64, 64), pos_encoding_mode="ROPE_LLAMA"),
    Problem(_BF16, _BF16, (64, 64), pos_encoding_mode="ALIBI", is_capped=True),
    Problem(_HALF, _HALF, (128, 128), is_masked=True),
    Problem(_BF16, _E4M3, (128, 128), is_masked=True, is_capped=True),
    Problem(_BF16, _BF16, (128, 128), prescale_logits=True),
    Problem(_HALF, _E4M3, (64, 64), prescale_logits=True, is_masked=True),
    Problem(_BF16, _BF16, (128, 128), is_aligned=False),
    Problem(_HALF, _E5M2, (128, 128), is_aligned=False),
    Problem(_BF16, _BF16, (128, 128), is_capped=True),
    Problem(_HALF, _HALF, (256, 256), is_capped=True),
)


@dataclass(frozen=True)
class Case:
    """One batch. `wrapper` is decode, paged or ragged; page_size is 0 for ragged keys."""

    seed: int
    wrapper: str
    problem: Problem
    qo_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    page_size: int
    num_kv_heads: int
    group: int
    kv_layout: str
    causal: bool
    window_left: int
    sm_scale: float | None
    has_sinks: bool
    scale_v: str  # none | float | per_head
    is_pair: bool
    is_packed: bool  # the mask
    ids_on_device: bool
    table_dtype: str
    split: tuple[int | None, bool]  # fixed_split_size, disable_split_kv
    is_padded: bool
    with_out: bool
    tree: str = ""  # the form of the run's mask, see verify_cases.py
    has_items: bool = False  # multi-item scoring, see item_cases.py
    window_right: int = -1

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group


def random_case(seed: int) -> Case:
    """The same case for the same seed."""
    rng = np.random.default_rng((seed, 77))
    problem = PROBLEMS[seed % len(PROBLEMS)]
    wrapper = pick(rng, ("decode", "paged", "paged", "ragged"))
    if wrapper == "decode" and (problem.is_masked or problem.dims[0] != problem.dims[1]):
        wrapper = "paged"
    if problem.o_dtype and wrapper == "ragged":
        wrapper = "paged"
    count = pick(rng, (0, 1, 1, 2, 3, 4, 5, 7, 12, 20)) if seed % 40 else 0
    if wrapper == "decode":
        q_len = pick(rng, (1, 1, 1, 1, 2, 4, 7))
        qo_len = [q_len] * count
    else:
        qo_len = [pick(rng, _QO_LENS) for _ in range(count)]
    kv_len = [pick(rng, _KV_LENS) for _ in range(count)]
    if count and rng.random() < 0.2:
        kv_len[int(rng.integers(count))] = int(rng.integers(1000, 4000))  # one long among short
    if count and rng.random() < 0.05:
        kv_len = [0] * count
    group = pick(rng, (1, 2, 4, 4, 5, 8, 16))
    num_kv_heads = pick(rng, (1, 1, 2, 3))
    # What bounds the time of the two CPU answers.
    while np.dot(qo_len, kv_len) * num_kv_heads * group * sum(problem.dims) > _MAX_MULTIPLIES:
        if num_kv_heads > 1:
            num_kv_heads -= 1
        elif wrapper == "decode" or max(qo_len) == 1:
            kv_len[int(np.argmax(kv_len))] //= 2
        else:
            worst = int(np.argmax(np.multiply(qo_len, kv_len)))
            qo_len[worst] = max(1, qo_len[worst] // 2)
            if qo_len[worst] == 1:
                kv_len[worst] //= 2
    page_size = 0 if wrapper == "ragged" else pick(rng, _PAGE_SIZES)
    fixed = pick(rng, (64, 100, 256)) if wrapper == "ragged" else pick(rng, (1, 4, 16))
    window_right = pick(np.random.default_rng((seed, 78)), (-1, -1, 0, 2, 17, 150))
    return Case(
        seed=seed,
        wrapper=wrapper,
        problem=problem,
        qo_len=tuple(qo_len),
        kv_len=tuple(kv_len),
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        group=group,
        kv_layout=pick(rng, ("NHD", "HND")),
        causal=window_right < 1 if wrapper == "decode" else bool(rng.random() < 0.6),
        window_left=pick(rng, (-1, -1, -1, 0, 3, 60, 200)),
        sm_scale=pick(rng, (None, None, 0.11)),
        has_sinks=bool(rng.random() < 0.2),
        scale_v=pick(rng, ("none", "none", "float", "per_head")),
        is_pair=bool(rng.random() < 0.5) or problem.dims[0] != problem.dims[1],
        is_packed=bool(rng.random() < 0.5),
        ids_on_device=bool(rng.random() < 0.5),
        table_dtype=pick(rng, ("int32", "int32", "int64")),
        split=pick(rng, ((None, False), (None, False), (None, True), (fixed, False))),
        is_padded=bool(rng.random() < 0.5),
        with_out=bool(rng.random() < 0.7),
        window_right=window_right,
    )
