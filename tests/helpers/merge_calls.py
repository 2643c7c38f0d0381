"""Merges of states, and what must come out."""

from __future__ import annotations

import itertools
import math
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference
from cupyattn.core import dtypes

from . import calls, compare, poison
from .merge_cases import MergeCase

FUNCTIONS: dict[str, Any] = {
    "pair": cupyattn.merge_state,
    "in place": cupyattn.merge_state_in_place,
    "states": cupyattn.merge_states,
    "segments": cupyattn.variable_length_merge_states,
}
_FLOAT32 = np.dtype(np.float32)
_LOG2_E = math.log2(math.e)
# exp2, the reciprocal and the sums of the kernel: float32 ulps of what is averaged.
_SLACK_ULPS = 8


class Call(calls.Call):
    """`v` and `s` are the states on the host, with an axis of states in pairs too."""

    def __init__(self, case: MergeCase, xp: ModuleType) -> None:
        super().__init__(case, xp, case.seed)
        self.is_repeatable = case.form != "in place"  # else its inputs are gone
        self.v, self.s, self.indptr = _values(case, self.rng)
        self.mask: np.ndarray | None = None
        arrays = {"v": self.v, "s": self.s}
        if case.form in ("pair", "in place"):
            names = ("v_a", "v_b", "s_a", "s_b")
            if case.form == "in place":
                names = ("v", "v_other", "s", "s_other")
            parts = self.v[:, 0], self.v[:, 1], self.s[:, 0], self.s[:, 1]
            arrays = dict(zip(names, parts, strict=True))
        for place, (name, x) in enumerate(arrays.items()):
            kind = "packed" if case.strides == "unaligned" and place % 2 else case.strides
            self.embed(name, x, poison.gaps(kind, x.shape, place, is_s=name.startswith("s")))
        if self.indptr is not None:
            self.embed("indptr", self.indptr)
        if case.has_mask:
            self.mask = self.rng.random(case.num_rows) < 0.6
            mask = self.mask if case.seed % 2 else self.mask * np.uint8(200)
            self.embed("mask", mask, offset=case.seed % 5)
        self.inputs = dict(self.owned)
        if case.gives_outputs and case.form != "in place":
            shape = (case.num_rows, case.num_heads, case.head_dim)
            dtype = dtypes.parse(case.out_dtype or case.dtype).numpy
            self.blank("out", shape, dtype, poison.gaps(case.strides, shape, 4))
            steps = poison.gaps(case.strides, shape[:2], 5, is_s=True)
            self.blank("lse", shape[:2], _FLOAT32, steps)

    def start(self) -> None:
        case = self.case
        arguments = {name: p.array for name, p in self.owned.items()}
        answer = FUNCTIONS[case.form](**arguments, lse_base_on_e=case.base_on_e)
        if case.form == "in place":
            assert answer is None
            answer = [self.inputs[name].array for name in "vs"]
        elif self.outputs:
            assert [x is p.array for x, p in zip(answer, self.outputs, strict=True)] == [True] * 2
        else:
            first = next(iter(self.inputs.values())).array
            assert all(type(x) is type(first) for x in answer)
        self.returned = answer

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
        for name, p in self.inputs.items():
            if case.form != "in place" or name not in "vs":
                compare.assert_bitwise_equal(p.values(), self._given(name), f"{case}: {name}")

    def expected(self) -> tuple[calls.States, calls.States]:
        unit = _LOG2_E if self.case.base_on_e else 1.0
        out_dtype = dtypes.parse(self.case.out_dtype or self.case.dtype).numpy
        if self.case.form == "in place":
            out_dtype = self.v.dtype
        ref_v, ref_s = _reference(self.v, self.s.astype(np.float64) * unit, self.indptr)
        low_v, low_s = _low_precision(self.v, self.s, self.indptr, np.float32(unit))
        with np.errstate(over="ignore", invalid="ignore"):
            low_v = low_v.astype(out_dtype)
        return [ref_v, ref_s / unit], [low_v, low_s]

    def _average(self) -> np.ndarray:
        """The largest weighted mean of |v| in each row."""
        unit = _LOG2_E if self.case.base_on_e else 1.0
        average, _ = _reference(np.abs(self.v), self.s.astype(np.float64) * unit, self.indptr)
        return np.where(np.isfinite(average), average, 0).max(axis=-1, initial=0)

    def _given(self, name: str) -> np.ndarray:
        if name in ("indptr", "mask"):
            return self.inputs[name].values()
        x = self.v if name.startswith("v") else self.s
        if self.case.form in ("pair", "in place"):
            return x[:, int(name.endswith(("_b", "_other")))]
        return x


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
        count = 2 if case.form in ("pair", "in place") else counts
        shape = (case.num_rows, count, heads, dim)
    v = rng.standard_normal(shape).astype(dtypes.parse(case.dtype).numpy)
    s = rng.normal(0, case.spread, shape[:-1]).astype(dtypes.parse(case.s_dtype).numpy)
    is_empty = rng.random(s.shape) < case.empty
    s[is_empty] = -np.inf
    v[is_empty] = np.array(np.nan if case.seed % 2 else np.inf).astype(v.dtype)
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
