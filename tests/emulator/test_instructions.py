"""The twins of ptx/ against other makers' arithmetic and the manual's fragment layouts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from . import probe

HALF, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
FORMATS = {"half": (0, HALF), "bf16": (1, BF16), "e4m3": (2, E4M3), "e5m2": (3, E5M2)}
LANES = np.arange(32)
GROUP, IN_GROUP = LANES // 4, LANES % 4


def convert(which: int, *columns: np.ndarray, arch: int = 900) -> np.ndarray:
    """Two words for each row of up to three words."""
    rows = np.zeros((len(columns[0]), 3), np.uint32)
    for i, column in enumerate(columns):
        rows[:, i] = np.ascontiguousarray(column).view(np.uint32)
    out = np.zeros((len(rows), 2), np.uint32)
    arrays = [(rows, False), (out, True)]
    probe.launch("numbers", arrays, (len(rows), which), mode="plain", arch=arch)
    return out


def codes(dtype: np.dtype) -> np.ndarray:
    return np.arange(1 << (8 * dtype.itemsize), dtype=np.uint32)


def values(dtype: np.dtype) -> np.ndarray:
    """Every value of a dtype, as float32."""
    bits = codes(dtype).astype(f"u{dtype.itemsize}")
    return bits.view(dtype).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_decodes(name: str) -> None:
    index, dtype = FORMATS[name]
    got = convert(4 + index, codes(dtype))[:, 0].view(np.float32)
    np.testing.assert_array_equal(got, values(dtype))
    finite = np.isfinite(got)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(values(dtype)[finite]))


def hard_to_round(dtype: np.dtype) -> np.ndarray:
    """Every value, every tie between neighbours, and a float32 step to either side of each."""
    exact = np.unique(values(dtype)[np.isfinite(values(dtype))]).astype(np.float64)
    ties = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
    points = np.concatenate([exact.astype(np.float32), ties])
    around = [points, np.nextafter(points, np.float32(np.inf))]
    around.append(np.nextafter(points, np.float32(-np.inf)))
    special = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -3e38])
    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    return np.concatenate([*around, special, random.view(np.float32)])


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_exact(name: str) -> None:
    index, dtype = FORMATS[name]
    x = hard_to_round(dtype)
    got = convert(index, x)[:, 0].astype(f"u{dtype.itemsize}")
    with np.errstate(all="ignore"):
        expected = x.astype(dtype)
    if dtype.itemsize == 1:
        # The device's conversions saturate; ml_dtypes' make infinities or NaN.
        largest = float(ml_dtypes.finfo(dtype).max)
        with np.errstate(invalid="ignore"):
            clipped = np.where(np.isnan(x), x, np.clip(x, -largest, largest))
            expected = clipped.astype(np.float32).astype(dtype)
    is_nan = np.isnan(x)
    assert np.isnan(got.view(dtype).astype(np.float32)[is_nan]).all()
    want = expected.view(f"u{dtype.itemsize}")
    np.testing.assert_array_equal(got[~is_nan], want[~is_nan])


@pytest.mark.parametrize(("which", "dtype"), [(8, HALF), (9, BF16)], ids=["half", "bf16"])
def test_pairs(which: int, dtype: np.dtype) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 1000)).astype(np.float32)
    packed = convert(which, x, y)[:, 0]
    expected = np.stack([x, y], 1).astype(dtype).view(np.uint32)[:, 0]
    np.testing.assert_array_equal(packed, expected)
    back = convert(which + 2, packed).view(np.float32)
    np.testing.assert_array_equal(back, np.stack([x, y], 1).astype(dtype).astype(np.float32))


@pytest.mark.parametrize(("which", "dtype"), [(12, HALF), (13, BF16)], ids=["half", "bf16"])
def test_multiply_add_rounds_once(which: int, dtype: np.dtype) -> None:
    """Against Python's fractions: the exact value, then the nearest of the dtype."""
    from fractions import Fraction

    rng = np.random.default_rng(2)
    words = rng.integers(0, 1 << 32, (3, 2000), dtype=np.uint32)
    # A product that is a tie, and an addend too small for a double to hold beside it.
    step = 2.0 ** -(10 if dtype == HALF else 7)
    for i, addend in enumerate((2.0**-24, -(2.0**-24), 2.0**-60, -(2.0**-60))):
        tie = np.array([1.5, 1.5, 1 + step, 1 + step, addend, addend], dtype)
        words[:, i] = tie.view(np.uint32)
    got = np.ascontiguousarray(convert(which, *words)[:, 0]).view(dtype).reshape(-1, 2)
    with np.errstate(invalid="ignore"):
        a, b, c = (w.view(dtype).reshape(-1, 2).astype(np.float64) for w in words)
    finite = np.unique(values(dtype)[np.isfinite(values(dtype))].astype(np.float64))
    checked = 0
    for index in np.ndindex(got.shape):
        x, y, z = a[index], b[index], c[index]
        if not np.isfinite([x, y, z]).all():
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        if abs(exact) > Fraction(finite[-1]):
            continue
        above = min(int(np.searchsorted(finite, float(exact))) + 1, len(finite) - 1)
        near = finite[max(0, above - 3) : above + 1]
        best = min(abs(Fraction(n) - exact) for n in near)
        assert abs(Fraction(float(got[index])) - exact) == best, (x, y, z, got[index])
        checked += 1
    assert checked > 1000


def test_permute_bytes() -> None:
    rng = np.random.default_rng(3)
    a, b, selector = rng.integers(0, 1 << 32, (3, 500), dtype=np.uint32)
    pool = np.stack([a, b], 1).view(np.uint8)
    nibbles = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 15
    picked = np.take_along_axis(pool, (nibbles & 7).astype(np.int64), 1)
    picked = np.where(nibbles & 8, np.where(picked >= 128, 255, 0), picked).astype(np.uint8)
    got = convert(14, a, b, selector)[:, 0]
    np.testing.assert_array_equal(got, np.ascontiguousarray(picked).view(np.uint32)[:, 0])


@pytest.mark.parametrize("arch", [800, 900], ids=["by shifts", "by instruction"])
@pytest.mark.parametrize(
    ("which", "dtype", "bytes_"),
    [(15, E4M3, (0, 1, 1, 3)), (16, E5M2, (0, 1, 2, 0))],
    ids=["e4m3", "e5m2"],
)
def test_fp8_becomes_f16_exactly(which: int, dtype: np.dtype, bytes_: tuple, arch: int) -> None:
    first = codes(dtype)
    words = first | first[::-1] << 8 | (first ^ 0x55) << 16 | ((first + 77) & 255) << 24
    got = convert(which, words, arch=arch).view(np.uint16).reshape(-1, 4)
    raw = words.view(np.uint8).reshape(-1, 4)
    expected = raw.view(dtype).astype(np.float16)[:, list(bytes_)]
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(got.view(np.float16)[~is_nan], expected[~is_nan])
    assert np.isnan(got.view(np.float16)[is_nan]).all()


def test_flushed_functions() -> None:
    x = np.float32([0.0, 1.0, -3.5, -130.0, -127.5, 1e-40, np.inf, -np.inf])
    got = convert(18, x)[:, 0].view(np.float32)
    expected = np.float32([1, 2, 2**-3.5, 0, 0, 1, np.inf, 0])
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    got = convert(19, np.float32([4.0, -0.0, 1e-40, 3e38, np.inf]))[:, 0].view(np.float32)
    np.testing.assert_array_equal(got, np.float32([0.25, -np.inf, np.inf, 0, 0]))


def test_funnel_shift() -> None:
    low, high, shift = np.uint32([[0x89ABCDEF] * 4, [0x01234567] * 4, [0, 4, 31, 36]])
    got = convert(20, low, high, shift)[:, 0]
    both = (0x01234567 << 32) | 0x89ABCDEF
    assert got.tolist() == [(both >> (s % 32)) & 0xFFFFFFFF for s in (0, 4, 31, 36)]


def one_warp(which: int, words: np.ndarray, seed: int = 0) -> np.ndarray:
    rows = np.zeros((32, 12), np.uint32)
    rows[:, : words.shape[1]] = words
    out = np.zeros((32, 4), np.uint32)
    arrays = [(rows, False), (out, True)]
    probe.launch("warps", arrays, (which,), shared_bytes=1024, seed=seed)
    return out


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=["half", "bf16"])
def test_mma_has_the_manuals_fragments(dtype: np.dtype, is_first: bool, seed: int) -> None:
    """PTX manual, "Matrix Fragments for mma.m16n8k16 with floating point type"."""
    rng = np.random.default_rng(4)
    # Small integers: every order of summation is exact.
    a, b, c = (rng.integers(-8, 9, s).astype(np.float32) for s in ((16, 16), (16, 8), (16, 8)))
    words = np.zeros((32, 10), np.uint32)
    elements = np.zeros((32, 8), dtype)
    for i in range(8):
        row = GROUP + (0 if i < 2 or 4 <= i < 6 else 8)
        elements[:, i] = a[row, IN_GROUP * 2 + (i & 1) + (0 if i < 4 else 8)]
    words[:, :4] = elements.view(np.uint32)
    elements = np.zeros((32, 4), dtype)
    for i in range(4):
        elements[:, i] = b[IN_GROUP * 2 + (i & 1) + (0 if i < 2 else 8), GROUP]
    words[:, 4:6] = elements.view(np.uint32)
    where = [(GROUP + (0 if i < 2 else 8), IN_GROUP * 2 + (i & 1)) for i in range(4)]
    for i, place in enumerate(where):
        words[:, 6 + i] = c[place].view(np.uint32)
    got = one_warp((dtype == BF16) + 2 * is_first, words, seed).view(np.float32)
    expected = a @ b + (0 if is_first else c)
    for i, place in enumerate(where):
        np.testing.assert_array_equal(got[:, i], expected[place])


@pytest.mark.parametrize("is_transposed", [False, True])
def test_ldmatrix(is_transposed: bool) -> None:
    rng = np.random.default_rng(5)
    matrices = rng.integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16)
    words = np.zeros((32, 5), np.uint32)
    words[:, :4] = matrices.reshape(32, 8).view(np.uint32)
    words[:, 4] = rng.permutation(64)[:32]  # rows lie anywhere
    got = one_warp(4 + is_transposed, words)
    seen = matrices.swapaxes(1, 2) if is_transposed else matrices
    expected = np.ascontiguousarray(seen).reshape(4, 32, 2).view(np.uint32)[..., 0].T
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_stmatrix(is_transposed: bool) -> None:
    rng = np.random.default_rng(7)
    matrices = rng.integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16)
    held = matrices.swapaxes(1, 2) if is_transposed else matrices
    words = np.zeros((32, 5), np.uint32)
    words[:, :4] = np.ascontiguousarray(held).reshape(4, 32, 2).view(np.uint32)[..., 0].T
    words[:, 4] = rng.permutation(64)[:32]
    rows = one_warp(7 + is_transposed, words)  # of the matrices, one a lane
    np.testing.assert_array_equal(rows, matrices.reshape(32, 8).view(np.uint32))


@pytest.mark.parametrize("seed", [0, 3])
def test_exchanges(seed: int) -> None:
    rng = np.random.default_rng(6)
    words = np.zeros((32, 5), np.uint32)
    x = rng.standard_normal(32).astype(np.float32)
    words[:, 0] = x.view(np.uint32)
    words[:, 1] = rng.integers(0, 32, 32)
    words[:, 2] = rng.integers(0, 1000, 32)
    words[17, 3] = 1
    got = one_warp(6, words, seed)
    np.testing.assert_array_equal(got[:, 0].view(np.float32), x[words[:, 1]])
    np.testing.assert_array_equal(got[:, 1].view(np.float32), x[LANES ^ 5])
    np.testing.assert_array_equal(got[:, 2], words[:, 2].max() + words[0, 1])
    np.testing.assert_array_equal(got[:, 3], 1)
