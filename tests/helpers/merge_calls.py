"""Seeded random merges of states, and what must come out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn import flash_attn, reference
from cupyattn.core import dtypes

from . import calls, compare, poison

FUNCTIONS: dict[str, Any] = {
    "pair": cupyattn.merge_state,
    "in place": cupyattn.merge_state_in_place,
    "states": cupyattn.merge_states,
    "segments": cupyattn.variable_length_merge_states,
    "vllm": flash_attn.merge_attn_states,
}
# What the two states of a pair are called: values, then LSE.
_NAMES = {
    "pair": ("v_a", "v_b", "s_a", "s_b"),
    "in place": ("v", "v_other", "s", "s_other"),
    "vllm": ("prefix_output", "suffix_output", "prefix_lse", "suffix_lse"),
}
_FLOAT32 = np.dtype(np.float32)
_LOG2_E = math.log2(math.e)
# exp2, the reciprocal and the sums of the kernel: float32 ulps of what is averaged.
_SLACK_ULPS = 8
FORMS = ("pair", "in place", "states", "segments")
FP8 = ("float8_e4m3fn", "float8_e5m2")
WIDE = ("bfloat16", "float16", "float32")
HEAD_DIMS = (1, 7, 8, 33, 64, 72, 80, 96, 128, 200, 256, 300, 512, 1040)


@dataclass(frozen=True)
class MergeCase:
    """`num_states` are those of a row; of each row, in "segments". `strides` is "packed", "gaps"
    (rows of whole 16 bytes), "unaligned" or "transposed" (head, then row).

    form    one of FORMS, or "vllm": vLLM's call, with LSE [heads, rows] in natural log and
            infinities of both signs for rows without keys
    scale   of an fp8 output; in an array of scale_shape unless that is None
    count   of "vllm": how many rows have a prefix; None: all
    """

    form: str = "pair"
    dtype: str = "bfloat16"
    s_dtype: str = "float32"
    out_dtype: str = ""
    num_rows: int = 5
    num_states: int | tuple[int, ...] = 3
    num_heads: int = 3
    head_dim: int = 64
    strides: str = "packed"
    base_on_e: bool = False
    gives_outputs: bool = True
    has_mask: bool = False
    spread: float = 4.0
    empty: float = 0.2
    seed: int = 0
    scale: float | None = None
    scale_shape: tuple[int, ...] | None = None
    count: int | None = None

    @property
    def narrow(self) -> np.dtype | None:
        """The fp8 type that answers are rounded to."""
        return dtypes.parse(self.out_dtype).numpy if self.out_dtype in FP8 else None

    @property
    def is_pair(self) -> bool:
        return self.form in ("pair", "in place", "vllm")


def fp8_cases(dtype: str, out_dtype: str, head_dim: int) -> Iterator[MergeCase]:
    """Merges into fp8, with scales of every kind; vLLM's call too, into float16 as well."""
    scales = (None, None), (0.05, None), (0.002, (1,)), (0.7, ())
    for seed, (scale, shape) in enumerate(scales):
        for form in ("pair", "states", "segments"):
            yield MergeCase(
                form, dtype, "float32", out_dtype, num_heads=2, head_dim=head_dim, spread=3.0,
                empty=0.0, scale=scale, scale_shape=shape, seed=2 * seed,
            )  # fmt: skip
    plain = MergeCase("vllm", "float16", num_rows=37, head_dim=48, spread=1.0, empty=0.0, seed=2)
    for count in (None, 20, 0):
        yield replace(plain, base_on_e=True, count=count)
        yield replace(
            plain, base_on_e=True, count=count, out_dtype=out_dtype, scale=0.05, scale_shape=(1,)
        )


def random_case(seed: int) -> MergeCase:
    """Everything varies."""
    rng = np.random.default_rng(seed)
    form = FORMS[seed % 4]
    num_rows = int(rng.choice([1, 2, 5, 17]))
    num_states: Any = int(rng.choice([0, 1, 2, 3, 4, 5, 8, 9, 16, 33]))
    if form == "segments":
        num_states = tuple(int(x) for x in rng.integers(0, 12, num_rows))
    return MergeCase(
        form=form,
        dtype=WIDE[int(rng.integers(3))],
        s_dtype=WIDE[int(rng.integers(3))]
        if form != "in place" and rng.random() < 0.2
        else "float32",
        out_dtype=WIDE[int(rng.integers(3))] if rng.random() < 0.2 else "",
        num_rows=num_rows,
        num_states=num_states,
        num_heads=int(rng.choice([1, 2, 3, 8, 20])),
        head_dim=int(rng.choice(HEAD_DIMS)),
        strides=("packed", "gaps", "unaligned", "transposed")[int(rng.integers(4))],
        base_on_e=bool(rng.random() < 0.3),
        gives_outputs=bool(rng.random() < 0.7),
        has_mask=form == "in place" and bool(rng.random() < 0.5),
        spread=float(rng.choice([0.1, 4.0, 60.0])),
        empty=float(rng.choice([0.0, 0.2, 0.9])),
        seed=seed,
    )


class Call(calls.Call):
    """`v` and `s` are the states on the host, with an axis of states in pairs too."""

    def __init__(self, case: MergeCase, xp: ModuleType) -> None:
        super().__init__(case, xp, case.seed)
        self.is_repeatable = case.form != "in place"  # else its inputs are gone
        self.v, self.s, self.indptr = _values(case, self.rng)
        self.mask: np.ndarray | None = None
        arrays = {"v": self.v, "s": self.s}
        if case.is_pair:
            of_s = self.s if case.form != "vllm" else self.s.transpose(2, 1, 0)
            parts = self.v[:, 0], self.v[:, 1], of_s[:, 0], of_s[:, 1]
            arrays = dict(zip(_NAMES[case.form], parts, strict=True))
        for place, (name, x) in enumerate(arrays.items()):
            kind = "packed" if case.strides == "unaligned" and place % 2 else case.strides
            self.embed(
                name,
                x,
                poison.gaps(kind, x.shape, place, is_s=x.ndim == self.s.ndim - case.is_pair),
            )
        if self.indptr is not None:
            self.embed("indptr", self.indptr)
        if case.has_mask:
            self.mask = self.rng.random(case.num_rows) < 0.6
            mask = self.mask if case.seed % 2 else self.mask * np.uint8(200)
            self.embed("mask", mask, offset=case.seed % 5)
        self.inputs = dict(self.owned)
        if case.scale_shape is not None:
            self.embed("output_scale", np.full(case.scale_shape, case.scale, np.float32))
        self.before = {name: p.values() for name, p in self.owned.items()}
        if case.form == "vllm":
            self.blank("output", self.v[:, 0].shape, self.out_dtype)
            self.blank("output_lse", arrays["prefix_lse"].shape, _FLOAT32)
        elif case.gives_outputs and case.form != "in place":
            shape = (case.num_rows, case.num_heads, case.head_dim)
            self.blank("out", shape, self.out_dtype, poison.gaps(case.strides, shape, 4))
            steps = poison.gaps(case.strides, shape[:2], 5, is_s=True)
            self.blank("lse", shape[:2], _FLOAT32, steps)

    @property
    def out_dtype(self) -> np.dtype:
        if self.case.form == "in place":
            return self.v.dtype
        return dtypes.parse(self.case.out_dtype or self.case.dtype).numpy

    def start(self) -> None:
        case = self.case
        arguments = {name: p.array for name, p in self.owned.items()}
        if case.scale is not None and case.scale_shape is None:
            arguments["output_scale"] = case.scale
        if case.form == "vllm":
            arguments["prefill_tokens_with_context"] = case.count
        else:
            arguments["lse_base_on_e"] = case.base_on_e
        answer = FUNCTIONS[case.form](**arguments)
        if case.form == "in place":
            assert answer is None
            answer = [self.inputs[name].array for name in "vs"]
        elif case.form == "vllm":
            assert answer is None
            answer = [p.array for p in self.outputs]
        elif self.outputs:
            assert [x is p.array for x, p in zip(answer, self.outputs, strict=True)] == [True] * 2
        else:
            first = next(iter(self.inputs.values())).array
            assert all(type(x) is type(first) for x in answer)
        self.returned = answer

    def answers(self) -> calls.Answer:
        v, s = super().answers()
        return v, s.T if s is not None and self.case.form == "vllm" else s

    def check(self, v: np.ndarray, s: np.ndarray, **_: Any) -> None:  # type: ignore[override]
        """The answers are as good as float32 allows, and nothing else has changed."""
        case, written = self.case, self.mask
        if written is not None:
            # What the mask leaves alone stays as it was.
            for got, before in ((v, self.v[:, 0]), (s, self.s[:, 0])):
                compare.assert_bitwise_equal(got[~written], before[~written], f"{case}: left alone")
        else:
            written = np.ones(case.num_rows, np.bool_)
        ref, low = self.expected()
        if case.narrow is not None:
            _check_rounded(v, ref[0] / (case.scale or 1.0), case)
            np.testing.assert_allclose(s, ref[1], rtol=1e-5, atol=1e-5, err_msg=str(case))
        else:
            compare.assert_close(
                v[written],
                s[written],
                *(x[written] for x in (*ref, *low)),
                case,
                p_dtype=_FLOAT32,
                logit_magnitude=np.abs(self.s[np.isfinite(self.s)]).max(initial=0),
                slack=_SLACK_ULPS * compare.ulp(_FLOAT32, self._average()[written]),
            )
        self.assert_intact()
        for name, before in self.before.items():
            if case.form != "in place" or name not in "vs":
                compare.assert_bitwise_equal(self.owned[name].values(), before, f"{case}: {name}")

    def _states(self) -> tuple[np.ndarray, np.ndarray]:
        """v and s of states that are there."""
        s = self.s.astype(np.float64)
        return self.v, np.where(np.isposinf(s), -np.inf, s) if self.case.form == "vllm" else s

    def expected(self) -> tuple[calls.States, calls.States]:
        unit = _LOG2_E if self.case.base_on_e else 1.0
        v, s = self._states()
        ref_v, ref_s = _reference(v, s * unit, self.indptr)
        low_v, low_s = _low_precision(v, s, self.indptr, np.float32(unit))
        with np.errstate(over="ignore", invalid="ignore"):
            low_v = low_v.astype(self.out_dtype)
        ref, low = [ref_v, ref_s / unit], [low_v, low_s]
        if self.case.count is not None:  # rows without a prefix have the other state as it is
            for found in (ref, low):
                for x, given in zip(found, (self.v, self.s), strict=True):
                    x[self.case.count :] = given[self.case.count :, 1]
        return ref, low

    def _average(self) -> np.ndarray:
        """The largest weighted mean of |v| in each row."""
        unit = _LOG2_E if self.case.base_on_e else 1.0
        v, s = self._states()
        average, _ = _reference(np.abs(v), s * unit, self.indptr)
        return np.where(np.isfinite(average), average, 0).max(axis=-1, initial=0)


def _check_rounded(got: np.ndarray, wanted: np.ndarray, case: MergeCase) -> None:
    """Rounded to fp8 once, saturated; a step apart where float32 sums differ."""
    exact = reference.to_fp8(wanted, 1.0, got.dtype).astype(np.float64)
    x = got.astype(np.float64)
    assert np.isfinite(x).all(), case
    step = np.maximum(np.abs(exact) * (0.126 if case.out_dtype == FP8[0] else 0.26), 2.0**-9)
    assert (np.abs(x - exact) <= step).all(), case
    assert (x == exact).mean() > 0.97, case


def check_bad_offsets(xp: ModuleType) -> None:
    """Rows whose offsets fall, or lead outside the states, are NaN; the others are merged."""
    v, s = np.ones((6, 2, 24), np.float32), np.zeros((6, 2), np.float32)
    indptr = np.array([0, 7, 3, -1, 2, 6, 6, -(2**31), 2**31 - 1, 2], np.int32)
    given = (poison.upload(x, xp) for x in (v, s, indptr))
    got_v, got_s = map(poison.download, cupyattn.variable_length_merge_states(*given))
    bad = np.array([1, 1, 1, 1, 0, 0, 1, 1, 1], bool)
    assert (np.isnan(got_v).all((1, 2)) == bad).all() and (np.isnan(got_s).all(1) == bad).all()
    assert (got_v[4] == 1).all() and (got_s[4] == 2).all()
    assert (got_v[5] == 0).all() and (got_s[5] == -np.inf).all()


def _values(
    case: MergeCase, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    heads, dim = case.num_heads, case.head_dim
    counts = case.num_states
    indptr = None
    if case.form == "segments":
        counts = (counts,) * case.num_rows if isinstance(counts, int) else counts
        # States before the first row's, and after the last one's, are nobody's.
        indptr = np.cumsum([case.seed % 3, *counts]).astype(np.int32)
        shape: tuple[int, ...] = (int(indptr[-1]) + case.seed % 2, heads, dim)
    else:
        assert isinstance(counts, int)
        count = 2 if case.is_pair else counts
        shape = (case.num_rows, count, heads, dim)
    v = rng.standard_normal(shape).astype(dtypes.parse(case.dtype).numpy)
    s = rng.normal(0, case.spread, shape[:-1]).astype(dtypes.parse(case.s_dtype).numpy)
    is_empty = rng.random(s.shape) < case.empty
    s[is_empty] = -np.inf
    v[is_empty] = np.array(np.nan if case.seed % 2 else np.inf).astype(v.dtype)
    if case.form == "vllm":
        s[::5, 0], s[1::7, 1] = np.inf, -np.inf
        s[-1, 1] = np.inf  # where this row has no prefix, its v counts all the same
    return v, s, indptr


def _reference(
    v: np.ndarray, s: np.ndarray, indptr: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    if indptr is None:
        return reference.merge_states(v, s)
    return reference.variable_length_merge_states(v, s, indptr)


def _low_precision(
    v: np.ndarray, s: np.ndarray, indptr: np.ndarray | None, unit: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Merged one after another in float32: another order than the kernel's."""
    if indptr is not None:
        parts = [
            _low_precision(v[None, a:b], s[None, a:b], None, unit)
            for a, b in itertools.pairwise(indptr)
        ]
        blank = np.zeros((0, *v.shape[1:]), np.float32)
        joined = zip((blank, blank[..., 0]), *parts, strict=True)
        merged, lse = (np.concatenate(x) for x in joined)
        return merged, lse
    zero = np.float32(0)
    with np.errstate(all="ignore"):
        top = np.full((v.shape[0], *s.shape[2:]), -np.inf, np.float32)
        total, merged = np.zeros_like(top), np.zeros((*top.shape, v.shape[-1]), np.float32)
        for i in range(v.shape[1]):
            s_i, v_i = s[:, i].astype(np.float32), v[:, i].astype(np.float32)
            new = np.maximum(top, s_i)
            keep = np.where(top == -np.inf, zero, np.exp2((top - new) * unit))
            weight = np.where(s_i == -np.inf, zero, np.exp2((s_i - new) * unit))
            v_i = np.where(s_i[..., None] == -np.inf, zero, v_i)
            merged = merged * keep[..., None] + v_i * weight[..., None]
            total, top = total * keep + weight, new
        merged = np.where(total[..., None] == 0, zero, merged / total[..., None])
        lse = np.where(total == 0, -np.inf, top + np.log2(total) / unit)
    return merged, lse.astype(np.float32)
