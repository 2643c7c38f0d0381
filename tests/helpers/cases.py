"""Seeded random attention calls over every option, their inputs and both expected answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from cupyattn.core import dtypes
from cupyattn.reference import attention as exact_attention

from . import batches, lowprec

T = TypeVar("T")

_EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
_HEAD_DIMS = ((128, 128), (64, 64), (256, 256), (96, 96), (192, 128), (128, 64), (64, 128))
_GROUPS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17)
_SCALES = {"none": 3, "float": 1, "per_head": 1}
_STRIDES = {"packed": 3, "padded": 1, "unaligned": 1, "swapped": 1}
# Bounds the time of the two CPU answers; about one draw in seven is made smaller by it.
_MAX_MULTIPLIES = 120_000_000


@dataclass(frozen=True)
class Case:
    """One call. dtypes are names of `cupyattn.dtypes`; None means the argument is not passed."""

    seed: int
    qo_len: int
    kv_len: int
    num_kv_heads: int
    group: int
    head_dim_qk: int
    head_dim_vo: int
    dtype: str = "float16"
    kv_dtype: str = "float16"
    o_dtype: str | None = None
    kv_layout: str = "NHD"
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    mask_kind: str = "none"  # none | bool | packed
    mask_pattern: str = "random"  # random | tiles | causal | sparse
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    logit_shift: float = 0.0  # of all logits, at the default sm_scale and about
    outliers: float = 1.0  # what every 61st key is multiplied by
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None
    has_sinks: bool = False
    scale_q: str = "none"  # none | float | per_head, likewise below
    scale_k: str = "none"
    scale_v: str = "none"
    strides: tuple[str, ...] = ("packed",) * 4  # of q, k, v, o; see element_strides
    return_lse: bool = True

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def out_dtype(self) -> np.dtype:
        return dtypes.parse(self.o_dtype or dtypes.parse(self.dtype).of_output.name).numpy

    @property
    def multiplies(self) -> int:
        per_logit = self.num_qo_heads * (self.head_dim_qk + self.head_dim_vo)
        return self.qo_len * self.kv_len * per_logit


def random_case(seed: int) -> Case:
    """The same case for the same seed; options are independent, lengths lean to tile edges."""
    rng = np.random.default_rng((seed, 1))
    head_dim_qk, head_dim_vo = _head_dims(rng)
    qo_len = 1 if rng.random() < 0.15 else _length(rng, 300)
    dtype = pick(rng, ("float16", "bfloat16"))
    pos_encoding_mode = _weighted(rng, {"NONE": 4, "ROPE_LLAMA": 2, "ALIBI": 1})
    if head_dim_qk % 16 and pos_encoding_mode == "ROPE_LLAMA":
        pos_encoding_mode = "NONE"
    case = Case(
        seed=seed,
        qo_len=qo_len,
        kv_len=_kv_length(rng, qo_len),
        num_kv_heads=int(rng.integers(1, 5)),
        group=pick(rng, _GROUPS),
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        dtype=dtype,
        kv_dtype=_weighted(rng, {dtype: 3, "float8_e4m3fn": 1, "float8_e5m2": 1}),
        o_dtype=_weighted(rng, {None: 5, "float16": 1, "bfloat16": 1, "float32": 1}),
        kv_layout=pick(rng, ("NHD", "HND")),
        causal=bool(rng.random() < 0.5),
        window_left=_window(rng),
        window_right=_window(np.random.default_rng((seed, 9))),
        mask_kind=_weighted(rng, {"none": 3, "bool": 1, "packed": 1}),
        mask_pattern=pick(rng, ("random", "tiles", "causal", "sparse")),
        logits_soft_cap=_weighted(rng, {None: 3, 0.0: 1, 30.0: 1, 2.5: 1}),
        sm_scale=None if rng.random() < 0.7 else float(rng.uniform(0.3, 2.0)) * head_dim_qk**-0.5,
        pos_encoding_mode=pos_encoding_mode,
        rope_scale=pick(rng, (None, 1.0, 2.0, 0.5)),
        rope_theta=pick(rng, (None, 1e4, 5e5)),
        has_sinks=bool(rng.random() < 0.25),
        scale_q=_weighted(rng, _SCALES),
        scale_k=_weighted(rng, _SCALES),
        scale_v=_weighted(rng, _SCALES),
        strides=tuple(_weighted(rng, _STRIDES) for _ in "qkvo"),
        return_lse=bool(rng.random() < 0.8),
    )
    return bounded(case, rng)


def bounded(case: Case, rng: np.random.Generator) -> Case:
    """The case, made smaller if its CPU answers would take long."""
    while case.multiplies > _MAX_MULTIPLIES:
        if case.num_kv_heads > 1:
            case = replace(case, num_kv_heads=case.num_kv_heads - 1)
        elif case.group > 4:
            case = replace(case, group=pick(rng, [g for g in _GROUPS if g < case.group]))
        else:
            case = replace(case, qo_len=pick(rng, [n for n in _EDGES if n < case.qo_len]))
    return case


def make_inputs(case: Case) -> dict[str, Any]:
    """Fresh C-contiguous arrays: q, k, v (in kv_layout), mask, packed_mask, sinks, scale_q/k/v.

    What the case does not pass is None. `mask` is bool [qo_len, kv_len] whenever there is a mask;
    `packed_mask` holds the same as little-endian bits only if mask_kind is "packed".
    """
    rng = np.random.default_rng((case.seed, 2))
    kv_shape = (case.kv_len, case.num_kv_heads)
    if case.kv_layout == "HND":
        kv_shape = kv_shape[::-1]
    kv_dtype = dtypes.parse(case.kv_dtype).numpy
    unit = batches.INT8_UNIT if case.dtype == "int8" else 1.0
    q = rng.standard_normal((case.qo_len, case.num_qo_heads, case.head_dim_qk))
    mask = _mask(case, rng) if case.mask_kind != "none" else None
    packed = None
    if mask is not None and case.mask_kind == "packed":
        packed = np.packbits(mask.reshape(-1), bitorder="little")
    k = rng.standard_normal((*kv_shape, case.head_dim_qk))
    v = rng.standard_normal((*kv_shape, case.head_dim_vo))
    if case.logit_shift:
        # The sum over head_dim of its square, times 1 / sqrt(head_dim).
        shift = (abs(case.logit_shift) / case.head_dim_qk**0.5) ** 0.5
        q, k = q + shift * np.sign(case.logit_shift), k + shift
    if case.outliers != 1.0:
        keys = k if case.kv_layout == "NHD" else k.swapaxes(0, 1)
        keys[::61] *= case.outliers
    return {
        "q": batches.stored(q, case.dtype),
        "k": batches.stored(k, batches.dtype_of_keys(case.dtype, case.kv_dtype)),
        "v": v.astype(kv_dtype),
        "mask": mask,
        "packed_mask": packed,
        "sinks": rng.normal(0, 2, case.num_qo_heads).astype(np.float32) if case.has_sinks else None,
        "scale_q": _scale(rng, case.scale_q, case.num_qo_heads, unit),
        "scale_k": _scale(rng, case.scale_k, case.num_kv_heads, unit),
        "scale_v": _scale(rng, case.scale_v, case.num_kv_heads),
    }


def reference(case: Case, inputs: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) in float64."""
    return exact_attention(**arguments(case, inputs))


def low_precision(
    case: Case, inputs: Mapping[str, Any], **order: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) in the kernels' precision; `order` is kv_tile, is_reversed of lowprec.attention."""
    return lowprec.attention(**arguments(case, inputs), o_dtype=case.out_dtype, **order)


def logit_magnitude(case: Case) -> float:
    """The largest base-2 magnitude, besides its own, that a logit of the case passes through."""
    largest = case.logits_soft_cap or 0.0
    if case.pos_encoding_mode == "ALIBI":
        steepest = float(lowprec.alibi_slopes(case.num_qo_heads).max())
        largest = max(largest, steepest * max(case.qo_len, case.kv_len))
    return largest * math.log2(math.e)


def has_coarse_cap(case: Case) -> bool:
    """Whether prefill_sm90, where it serves the case, takes coarse polynomials for the soft cap."""
    has_one_scale = "per_head" not in (case.scale_q, case.scale_k)
    return (
        bool(case.logits_soft_cap)
        and case.dtype == case.kv_dtype == "bfloat16"
        and case.pos_encoding_mode != "ALIBI"
        and has_one_scale
    )


def element_strides(kind: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a [A, B, D] array whose last dimension is contiguous.

    padded: rows start on multiples of 16 elements, with gaps; unaligned: rows start anywhere;
    swapped: B is the outer dimension in memory.
    """
    outer, inner, dim = shape
    if kind == "swapped":
        return dim, max(outer, 1) * dim, 1
    pitch = {"packed": dim, "padded": (dim + 31) // 16 * 16, "unaligned": dim + 3}[kind]
    gap = {"packed": 0, "padded": 48, "unaligned": 5}[kind]
    return max(inner, 1) * pitch + gap, pitch, 1


def arguments(case: Case, inputs: Mapping[str, Any]) -> dict[str, Any]:
    given = ("q", "k", "v", "mask", "sinks", "scale_q", "scale_k", "scale_v")
    named = (
        "causal",
        "window_left",
        "window_right",
        "logits_soft_cap",
        "sm_scale",
        "pos_encoding_mode",
        "rope_scale",
        "rope_theta",
        "kv_layout",
    )
    return {n: inputs[n] for n in given} | {n: getattr(case, n) for n in named}


def _head_dims(rng: np.random.Generator) -> tuple[int, int]:
    if rng.random() < 0.6:
        return pick(rng, _HEAD_DIMS)
    dim = 8 * int(rng.integers(1, 33))
    return dim, dim if rng.random() < 0.7 else 8 * int(rng.integers(1, 33))


def _length(rng: np.random.Generator, longest: int) -> int:
    draw = rng.random()
    if draw < 0.03:
        return 0
    return pick(rng, _EDGES) if draw < 0.6 else int(rng.integers(1, longest + 1))


def _kv_length(rng: np.random.Generator, qo_len: int) -> int:
    draw = rng.random()
    if draw < 0.2:
        return qo_len
    if draw < 0.35:
        return int(rng.integers(0, qo_len + 1))
    if draw < 0.5:
        return min(600, qo_len + _length(rng, 300))
    return _length(rng, 600)


def _window(rng: np.random.Generator) -> int:
    if rng.random() < 0.6:
        return -1
    return pick(rng, (0, 1, int(rng.integers(2, 40)), 63, 64, 128, 255, 10_000))


def _mask(case: Case, rng: np.random.Generator) -> np.ndarray:
    shape = (case.qo_len, case.kv_len)
    if case.mask_pattern == "causal":
        return np.tri(*shape, case.kv_len - case.qo_len, dtype=bool)
    if case.mask_pattern == "tiles":
        tiles = rng.random((case.qo_len // 16 + 1, case.kv_len // 32 + 1)) < 0.5
        return np.kron(tiles, np.ones((16, 32), bool))[: shape[0], : shape[1]].copy()
    return rng.random(shape) < (0.5 if case.mask_pattern == "random" else 0.02)


def _scale(
    rng: np.random.Generator, kind: str, num_heads: int, unit: float = 1.0
) -> float | np.ndarray | None:
    if kind == "none":
        return None
    values = (unit * rng.uniform(0.5, 1.5, num_heads)).astype(np.float32)
    return values if kind == "per_head" else float(values[0])


def pick(rng: np.random.Generator, choices: Sequence[T]) -> T:
    return choices[int(rng.integers(len(choices)))]


def _weighted(rng: np.random.Generator, weights: Mapping[T, int]) -> T:
    return pick(rng, [choice for choice, weight in weights.items() for _ in range(weight)])
