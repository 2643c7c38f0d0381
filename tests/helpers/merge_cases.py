"""Random merges of poisoned states, and what must come out."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference
from cupyattn.core import dtypes

from . import compare, poison

FORMS = ("pair", "in place", "states", "segments")
WIDE = ("bfloat16", "float16", "float32")
HEAD_DIMS = (1, 7, 8, 33, 64, 72, 80, 96, 128, 200, 256, 300, 512, 1040)
_FLOAT32 = np.dtype(np.float32)
_LOG2_E = math.log2(math.e)
# exp2, the reciprocal and the sums of the kernel: float32 ulps of what is averaged.
_SLACK_ULPS = 8


@dataclass(frozen=True)
class MergeCase:
    """`num_states` are those of a row; of each row, in "segments". `strides` is "packed", "gaps"
    (rows of whole 16 bytes), "unaligned" or "transposed" (head, then row)."""

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


@dataclass
class MergeCall:
    """A prepared call. `v` and `s` are the states as NumPy arrays, with an axis of states a row in
    pairs too; `inputs` and `outputs` lie among poison."""

    case: MergeCase
    v: np.ndarray
    s: np.ndarray
    indptr: np.ndarray | None
    mask: np.ndarray | None
    inputs: dict[str, poison.Poisoned]
    outputs: list[poison.Poisoned] = field(default_factory=list)
    answers: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def prepare(cls, case: MergeCase, xp: ModuleType, device: str = "cuda") -> MergeCall:
        rng = np.random.default_rng(case.seed)
        where = {"xp": xp, "device": device}
        v, s, indptr = _values(case, rng)
        call = cls(case, v, s, indptr, None, {})
        arrays = {"v": v, "s": s}
        if case.form in ("pair", "in place"):
            names = ("v_a", "v_b", "s_a", "s_b")
            if case.form == "in place":
                names = ("v", "v_other", "s", "s_other")
            arrays = dict(zip(names, (v[:, 0], v[:, 1], s[:, 0], s[:, 1]), strict=True))
        for place, (name, x) in enumerate(arrays.items()):
            kind = "packed" if case.strides == "unaligned" and place % 2 else case.strides
            steps = _strides(kind, x.shape, place, is_s=name.startswith("s"))
            call.inputs[name] = poison.embed(x, steps, **where)
        if indptr is not None:
            call.inputs["indptr"] = poison.embed(indptr, **where)
        if case.has_mask:
            call.mask = rng.random(case.num_rows) < 0.6
            mask = call.mask if case.seed % 2 else call.mask * np.uint8(200)
            call.inputs["mask"] = poison.embed(mask, offset=case.seed % 5, **where)
        if case.gives_outputs and case.form != "in place":
            shape = (case.num_rows, case.num_heads, case.head_dim)
            dtype = dtypes.parse(case.out_dtype or case.dtype).numpy
            steps = (
                _strides(case.strides, shape, 4),
                _strides(case.strides, shape[:2], 5, is_s=True),
            )
            call.outputs = [
                poison.blank(shape, dtype, steps[0], **where),
                poison.blank(shape[:2], _FLOAT32, steps[1], **where),
            ]
        return call

    def run(self) -> None:
        """Make the call, and keep copies of what it answers."""
        case = self.case
        arguments = {name: p.array for name, p in self.inputs.items()}
        arguments |= {n: p.array for n, p in zip(("out", "lse"), self.outputs, strict=False)}
        function = {
            "pair": cupyattn.merge_state,
            "in place": cupyattn.merge_state_in_place,
            "states": cupyattn.merge_states,
            "segments": cupyattn.variable_length_merge_states,
        }[case.form]
        answer = function(**arguments, lse_base_on_e=case.base_on_e)
        if case.form == "in place":
            assert answer is None
            self.answers = [self.inputs[name].values() for name in "vs"]
        elif self.outputs:
            assert [x is p.array for x, p in zip(answer, self.outputs, strict=True)] == [True] * 2
            self.answers = [p.values() for p in self.outputs]
        else:
            from .gpu_calls import download

            first = self.inputs["v" if "v" in self.inputs else "v_a"].array
            assert all(type(x) is type(first) for x in answer)
            self.answers = [download(x) for x in answer]

    def check(self) -> None:
        """The answers are as good as float32 allows, and nothing else has changed."""
        v, s = self.answers
        case, written = self.case, self.mask
        if written is not None:
            # What the mask leaves alone stays as it was.
            for got, before in ((v, self.v[:, 0]), (s, self.s[:, 0])):
                compare.assert_bitwise_equal(got[~written], before[~written], f"{case}: left alone")
        else:
            written = np.ones(case.num_rows, np.bool_)
        ref_v, ref_s, low_v, low_s, average = self.expected()
        compare.assert_close(
            v[written],
            s[written],
            ref_v[written],
            ref_s[written],
            low_v[written],
            low_s[written],
            case,
            p_dtype=_FLOAT32,
            logit_magnitude=np.abs(self.s[np.isfinite(self.s)]).max(initial=0),
            slack=_SLACK_ULPS * compare.ulp(_FLOAT32, average[written]),
        )
        for name, p in self.inputs.items():
            p.assert_intact(f"{case}: {name}")
            if case.form != "in place" or name not in "vs":
                compare.assert_bitwise_equal(p.values(), self._given(name), f"{case}: {name}")
        for p in self.outputs:
            p.assert_intact(f"{case}: output")

    def rerun(self) -> None:
        """Call again, and fail unless every bit comes out the same."""
        first = self.answers
        if self.case.form == "in place":
            return  # its inputs are gone
        self.run()
        for a, b in zip(first, self.answers, strict=True):
            compare.assert_bitwise_equal(a, b, self.case)

    def expected(self) -> tuple[np.ndarray, ...]:
        """v and s in float64, the same in float32, and the largest weighted mean of |v| a row."""
        unit = _LOG2_E if self.case.base_on_e else 1.0
        s = self.s.astype(np.float64) * unit
        out_dtype = dtypes.parse(self.case.out_dtype or self.case.dtype).numpy
        if self.case.form == "in place":
            out_dtype = self.v.dtype
        merged = [_reference(v, s, self.indptr) for v in (self.v, np.abs(self.v))]
        (ref_v, ref_s), (average, _) = merged
        low_v, low_s = _low_precision(self.v, self.s, self.indptr, np.float32(unit))
        with np.errstate(over="ignore", invalid="ignore"):
            low_v = low_v.astype(out_dtype)
            average = np.where(np.isfinite(average), average, 0).max(axis=-1, initial=0)
        return ref_v, ref_s / unit, low_v, low_s, average

    def _given(self, name: str) -> np.ndarray:
        if name in ("indptr", "mask"):
            return self.inputs[name].values()
        x = self.v if name.startswith("v") else self.s
        if self.case.form in ("pair", "in place"):
            return x[:, int(name.endswith(("_b", "_other")))]
        return x


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


def _strides(
    kind: str, shape: tuple[int, ...], place: int, *, is_s: bool = False
) -> tuple[int, ...] | None:
    """Strides in elements, other ones for each place; `is_s`: of an array without a head dim."""
    if kind == "packed":
        return None
    gap = 1 + place if kind == "unaligned" else 16 * (1 + place)
    order = list(reversed(range(len(shape))))
    if kind == "transposed":
        order = order if is_s else order[1:]
        order = [*([] if is_s else [len(shape) - 1]), *reversed(order)]
    strides, reach = [0] * len(shape), 1
    for axis in order:
        strides[axis] = reach
        reach = reach * max(1, shape[axis]) + (gap if axis != order[-1] else 0)
    return tuple(strides)
