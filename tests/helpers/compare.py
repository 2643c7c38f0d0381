"""Tolerances that are earned: as far from float64 as honest low precision is, times two."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

# The GPU's exp2, log2 and division are approximations good to one or two float32 ulps, and its
# matrix units truncate where NumPy rounds. The LSE sums one of each, at the size of the logits:
# not of the finished ones only, but of every float32 a logit passes through, for there it is
# rounded too. A soft cap makes it cap * log2(e) * (1 - 2 / (1 + e^2x)), good to an ulp of the cap
# however small the result, or a polynomial, good to 1.5e-6 of the result; ALiBi adds slope * (the
# tile's first key - row) and slope * (key - first key), which cancel where the bias is small.
#
# prefill_sm90 takes a coarser one under bfloat16: within 1.25e-4 of each logit, and as much again
# of a row's sum, for keys past its range.
_COARSE_CAP = 2.5e-4 * math.log2(math.e)
# A flushed weight times a value of ordinary size, and a few of them.
_LARGEST_FLUSHED = 16 * float(np.finfo(np.float32).tiny)
# Matrix units cut the bits of a sum below those of its largest term, half an ulp a product of 16
# columns on average; heads of up to 256 columns have 16 of them.
_LSE_FLOOR_ULPS, _PLAIN_HEAD_DIM = 8, 256


def ulp(dtype: np.dtype, magnitude: np.ndarray) -> np.ndarray:
    """Spacing of `dtype` at each magnitude (>= 0), float64; 0 at magnitude 0."""
    info = ml_dtypes.finfo(dtype)
    magnitude = np.asarray(magnitude, np.float64)
    binade = np.floor(np.log2(np.where(magnitude > 0, magnitude, 1.0)))
    spacing = np.maximum(2.0**binade * float(info.eps), float(info.smallest_subnormal))
    return np.where(magnitude > 0, spacing, 0.0)


def assert_close(
    out: np.ndarray,
    lse: np.ndarray | None,
    ref_o: np.ndarray,
    ref_lse: np.ndarray,
    low_o: np.ndarray,
    low_lse: np.ndarray,
    what: object,
    *,
    p_dtype: np.dtype | None = None,
    logit_magnitude: float = 0.0,
    slack: np.ndarray | float = 0.0,
    has_coarse_cap: bool = False,
    head_dim_qk: int = _PLAIN_HEAD_DIM,
) -> None:
    """Fail unless out [Lq, Hq, D] and lse [Lq, Hq] are as good as the low-precision model.

    ref_*: the float64 answer; low_*: `lowprec.attention` on the same inputs; `what` names the case
    in the failure. lse None is not checked. p_dtype: dtype of the probabilities (q's); default
    out's. logit_magnitude: `cases.logit_magnitude` of the case. NaN, -inf and +inf must stand
    exactly where the reference has them.

    Output, row by row: max |out - ref| <= 2 max |low - ref| + floor, all three over the row's D
    elements. Rows, not the whole array: a row that averages 500 keys is 20 times smaller than one
    that sees a single key, and would pass with anything. The floor is one ulp, at the row's largest
    magnitude, of the coarser of out's dtype and p_dtype: two correct results may round to
    neighbours, and each probability carries half an ulp of its own dtype that, with few keys, the
    model may by luck not show. Kernels flush float32 denormals, so rows that a sink has pressed to
    almost nothing may come out as 0: the smallest normal float32 is allowed on top.
    `slack` [Lq, Hq] is allowed on top as well: what approximate weights cost a float32 answer.

    LSE, over the whole array: the same with a floor of 8 float32 ulps at max(1, |lse|,
    logit_magnitude), more in proportion for a head_dim_qk past 256, and, `has_coarse_cap`, what
    prefill_sm90's polynomials may err by.
    """
    magnitude = _largest(ref_o, axis=-1)
    floor = np.maximum(ulp(out.dtype, magnitude), ulp(p_dtype or out.dtype, magnitude))
    floor += _LARGEST_FLUSHED * np.maximum(1.0, _largest(ref_o)) + slack
    tolerance = 2 * _largest(_error(low_o, ref_o, f"{what}: model of o"), axis=-1) + floor
    _check(out, ref_o, low_o, tolerance[..., None], f"{what}: o")
    if lse is not None:
        magnitude = np.maximum(max(1.0, logit_magnitude), _largest(ref_lse))
        ulps = _LSE_FLOOR_ULPS * max(1.0, head_dim_qk / _PLAIN_HEAD_DIM)
        floor = ulps * ulp(np.dtype(np.float32), magnitude)
        tolerance = 2 * _largest(_error(low_lse, ref_lse, f"{what}: model of lse")) + floor
        tolerance += _COARSE_CAP * has_coarse_cap
        _check(lse, ref_lse, low_lse, tolerance, f"{what}: lse")


def assert_bitwise_equal(
    a: np.ndarray, b: np.ndarray, what: object, *, near: tuple[float, float] | None = None
) -> None:
    """Fail at the first element whose bits differ; for repeated runs, and for what is copied.

    near: (rtol, atol) of elements that are rounded on the way; NaN is NaN then.
    """
    kinds = (a.dtype, a.shape), (b.dtype, b.shape)
    assert kinds[0] == kinds[1], f"{what}: {kinds[0]} against {kinds[1]}"
    bits = np.dtype(f"u{a.dtype.itemsize}")
    differs = np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
    if near is not None:
        with np.errstate(invalid="ignore"):
            x, y = a.astype(np.float64), b.astype(np.float64)
        differs &= ~(np.isnan(x) & np.isnan(y))
        if any(near):
            differs &= ~np.isclose(x, y, *near)
    if differs.any():
        first = _first(differs)
        pair = f"{a[first]} against {b[first]}"
        raise AssertionError(f"{what}: {differs.sum()} differ, first at {first}: {pair}")


def _check(
    got: np.ndarray, ref: np.ndarray, low: np.ndarray, tolerance: np.ndarray, what: str
) -> None:
    error = _error(got, ref, what)
    wrong = error > tolerance
    if not wrong.any():
        return
    allowed = np.broadcast_to(tolerance, error.shape)
    worst = np.unravel_index(np.argmax(error - allowed), error.shape)
    lines = [f"{what}: {100 * (1 - wrong.mean()):.2f}% of {wrong.size} pass"]
    for label, at in (("first wrong", _first(wrong)), ("worst", tuple(map(int, worst)))):
        lines.append(
            f"  {label} at {at}: got {float(got[at]):.7g}, reference {ref[at]:.7g}, low precision "
            f"{float(low[at]):.7g}, error {error[at]:.3g}, allowed {allowed[at]:.3g}"
        )
    raise AssertionError("\n".join(lines))


def _error(got: np.ndarray, ref: np.ndarray, what: str) -> np.ndarray:
    """|got - ref|, 0 where both are the same NaN or infinity; fails where only one is."""
    assert got.shape == ref.shape, f"{what}: got shape {got.shape}, reference {ref.shape}"
    value = got.astype(np.float64)
    same = (value == ref) | (np.isnan(value) & np.isnan(ref))
    is_special = ~np.isfinite(value) | ~np.isfinite(ref)
    wrong = is_special & ~same
    if wrong.any():
        first = _first(wrong)
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} NaN or infinities misplaced, first at {first}: "
            f"got {value[first]}, reference {ref[first]}"
        )
    with np.errstate(invalid="ignore"):
        return np.where(is_special, 0.0, np.abs(value - ref))


def _largest(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Largest finite magnitude; 0 of nothing."""
    return np.where(np.isfinite(x), np.abs(x), 0.0).max(axis=axis, initial=0.0)


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])
