"""The model of attention in 8 bits: its sums, and that its figures are the committed ones."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from benchmarks.eight_bits import errors
from benchmarks.eight_bits.attention import Stored, attend, exact, rotated
from benchmarks.eight_bits.inputs import drawn
from benchmarks.eight_bits.products import add_product

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def cut(x: Fraction, power: int) -> Fraction:
    unit = Fraction(2) ** (power - 13)
    return int(x / unit) * unit


def power_of(x: float, smallest: int) -> int:
    return max(int(np.frexp(x)[1]) - 1, smallest)


def one_step(a: np.ndarray, b: np.ndarray, total: float) -> float:
    """The definition, in exact fractions."""
    terms = [
        (Fraction(float(x)) * Fraction(float(y)), power_of(x, -6) + power_of(y, -6))
        for x, y in zip(a, b, strict=True)
        if x and y
    ]
    terms += [(Fraction(total), power_of(total, -126))] if total else []
    if not terms:
        return 0.0
    largest = max(power for _, power in terms)
    found = sum((cut(value, largest) for value, _ in terms), Fraction(0))
    return float(cut(found, power_of(float(found), -126))) if found else 0.0


@pytest.mark.parametrize("start", [0.0, 3.0, -70000.0])
def test_sums_are_cut_by_the_definition(start: float) -> None:
    codes = np.random.default_rng(0).integers(0, 256, (2, 12, 64)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    codes[:, :3] &= 0x87  # subnormals
    codes[:, 3] = 0
    a, b = codes.view(E4M3).astype(np.float32)
    got = add_product(np.full((12, 12), start, np.float32), a, b)
    for row, column in np.ndindex(12, 12):
        wanted = start
        for first in (0, 32):
            wanted = one_step(a[row, first : first + 32], b[column, first : first + 32], wanted)
        assert got[row, column] == wanted


def test_a_rotation_keeps_the_logits() -> None:
    q, k, _ = drawn("outliers", 128)
    np.testing.assert_allclose(rotated(q) @ rotated(k).T, q @ k.T, atol=1e-9)


def test_blocks_have_scales_of_their_own() -> None:
    x = np.ones((256, 128))
    x[128:] = 100
    stored = Stored.of(x, "int8", 64)
    np.testing.assert_allclose(stored.numbers, 127)
    np.testing.assert_allclose(stored.scales[[0, 255]], [1 / 127, 100 / 127], rtol=1e-6)


@pytest.mark.parametrize("way", [name for name, way in errors.WAYS.items() if not way.smooths])
def test_numbers_that_8_bits_hold_give_the_answer(way: str) -> None:
    """Two kinds of keys, whose logits are far apart: what is seen has values of one kind."""
    q, k, v = np.ones((4, 128)), np.ones((256, 128)), np.full((256, 128), 448.0)
    k[:100] = -1
    v[:100] = -224
    got = attend(q, k, v, errors.WAYS[way])
    np.testing.assert_allclose(got, exact(q, k, v), rtol=2e-3)


@pytest.mark.parametrize(("name", "way"), [("outliers", "rotated"), ("mean", "never_flushed")])
def test_the_figures_are_those_of_the_code(name: str, way: str) -> None:
    written = errors.read()[name][way]["2048"]
    assert errors.error(name, 2048, errors.WAYS[way]) == pytest.approx(written, rel=0.02)


def test_what_the_document_says() -> None:
    found = errors.read()
    longest = str(errors.LENGTHS[-1])

    def of(name: str, way: str) -> float:
        return found[name][way][longest]

    assert of("outliers", "rotated") < 0.5 * of("outliers", "kernel")
    assert all(of(name, "int8_all") < 1.02 * of(name, "kernel") for name in found)
    assert of("mean", "never_flushed") > 10 * of("mean", "kernel")
    assert of("recent", "low_power") > 3 * of("recent", "kernel")
    for name in found:
        assert of(name, "kernel") < 1.05 * of(name, "exact_maximum") or name == "mean"
    assert errors.KERNEL == replace(errors.KERNEL, flush_tiles=4, top_power=8)
