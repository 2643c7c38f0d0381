"""Rows in eight bits with scales, and what is done to rows before: norm, rotation, smoothing.

In float32, in the order of the kernel, so that equal inputs give equal bits. The norm is of float64
inside, and angles that no table gives are float64's: there the last bit of a float32 may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from .pages import FP8_NAN

_SMALLEST_SCALE = np.float32(2.0**-126)
_ONE = np.float32(1)


def largest_of(dtype: np.dtype) -> np.float32:
    """The largest magnitude that is stored."""
    if dtype == np.int8:
        return np.float32(127)
    return np.float32(ml_dtypes.finfo(dtype).max)


def stored(x: np.ndarray, scale: np.ndarray | np.floating | float, dtype: np.dtype) -> np.ndarray:
    """x times 1 / scale, both rounded to float32, in eight bits: to nearest, ties to even.

    Beyond the largest value it is that value with its sign. A NaN is 0x7f, 0 in int8. Of 16 bits
    there is no scale.
    """
    if dtype.itemsize > 1:
        return x.astype(dtype)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        product = x * (_ONE / np.asarray(scale, np.float32))
        largest = largest_of(dtype)
        clipped = np.clip(product, -largest, largest)
        if dtype == np.int8:
            return np.rint(np.where(np.isnan(clipped), 0, clipped)).astype(np.int8)
        rounded = clipped.astype(dtype)
    rounded.view(np.uint8)[np.isnan(product)] = FP8_NAN
    return rounded


def scale_for(x: np.ndarray, dtype: np.dtype) -> np.float32:
    """The scale of values that have one: of their largest finite magnitude; 1 for zeros."""
    amax = np.abs(x, where=np.isfinite(x), out=np.zeros_like(x)).max(initial=np.float32(0))
    return _scale_of(amax, dtype)


def _scale_of(amax: np.float32, dtype: np.dtype) -> np.float32:
    return _ONE if amax == 0 else max(np.float32(amax) / largest_of(dtype), _SMALLEST_SCALE)


class Rotation(NamedTuple):
    """Where rows are rotated to, by cosines and sines [n, rotary_dim / 2] of float32."""

    cosines: np.ndarray
    sines: np.ndarray
    is_interleaved: bool

    @classmethod
    def of_table(cls, table: np.ndarray, positions: np.ndarray, is_interleaved: bool) -> Rotation:
        """By a table [num_positions, rotary_dim]; NaN for positions that it does not have."""
        known = (positions >= 0) & (positions < table.shape[0])
        rows = table[np.where(known, positions, 0)].astype(np.float32)
        rows[~known] = np.nan
        half = table.shape[1] // 2
        return cls(rows[:, :half], rows[:, half:], is_interleaved)

    @classmethod
    def of_theta(
        cls,
        positions: np.ndarray,
        rotary_dim: int,
        scale: float,
        theta: float,
        is_interleaved: bool,
    ) -> Rotation:
        """By angles position / scale * theta^(-2 i / rotary_dim)."""
        steps = theta ** (-2.0 * np.arange(rotary_dim // 2) / rotary_dim) / scale
        angles = positions[:, None].astype(np.float64) * steps
        return cls(
            np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), is_interleaved
        )

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """x float32 [n, heads, head_dim], its first elements rotated."""
        turned, half = 2 * self.cosines.shape[1], self.cosines.shape[1]
        if self.is_interleaved:
            low, high = slice(0, turned, 2), slice(1, turned, 2)
        else:
            low, high = slice(0, half), slice(half, turned)
        c, s = self.cosines[:, None], self.sines[:, None]
        out = x.copy()
        out[..., low] = _multiply_add(x[..., low], c, -(x[..., high] * s))
        out[..., high] = _multiply_add(x[..., high], c, x[..., low] * s)
        return out


def _multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded once: the product of two float32 is exact in float64."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def normalise(x: np.ndarray, weight: np.ndarray, epsilon: float, bias: float) -> np.ndarray:
    """The RMS norm of x float32 [n, heads, head_dim], times weight + bias."""
    wide = x.astype(np.float64)
    mean = np.square(wide).mean(axis=-1, keepdims=True)
    weights = weight.astype(np.float32) + np.float32(bias)
    return (wide / np.sqrt(mean + epsilon) * weights).astype(np.float32)


def hadamard(x: np.ndarray) -> np.ndarray:
    """x float32 [..., d] times the Hadamard matrix of Sylvester over sqrt(d); d a power of two."""
    d = x.shape[-1]
    out, step = x, 1
    while step < d:
        pairs = out.reshape(*x.shape[:-1], d // (2 * step), 2, step)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        with np.errstate(invalid="ignore"):
            out = np.stack([low + high, low - high], axis=-2).reshape(x.shape)
        step *= 2
    return out * np.float32(1.0 / np.sqrt(d))


def means_of(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The means of requests' rows x float32 [n, heads, head_dim], in float64; zeros of no rows."""
    ends = np.cumsum(lengths)
    means = np.zeros((lengths.size, *x.shape[1:]), np.float32)
    for request, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        if length:
            means[request] = x[end - length : end].astype(np.float64).sum(axis=0) / length
    return means


def blocks_of(lengths: np.ndarray, block_size: int) -> Iterator[tuple[int, int, int, int]]:
    """(row of scales, request, first row, end) of each block of ragged requests."""
    start = 0
    for request, length in enumerate(lengths):
        for block in range(-(-int(length) // block_size)):
            first = start + block * block_size
            end = min(first + block_size, start + int(length))
            yield start // block_size + request + block, request, first, end
        start += int(length)


def quantize_blocks(
    x: np.ndarray, out: np.ndarray, scales: np.ndarray, lengths: np.ndarray, block_size: int
) -> None:
    """Write x float32 [n, heads, head_dim] to `out` by a scale for each block of tokens and head.

    scales [ceil(n / block_size) + requests, heads] are written; rows of no block are 1.
    """
    scales[...] = 1
    for row, _, first, end in blocks_of(lengths, block_size):
        for head in range(x.shape[1]):
            part = x[first:end, head]
            scales[row, head] = scale_for(part, out.dtype)
            out[first:end, head] = stored(part, scales[row, head], out.dtype)


class PageRun(NamedTuple):
    """Neighbouring rows whose slots are of one block of a page."""

    rows: np.ndarray
    page: int
    offsets: np.ndarray


def runs_of(
    rows: np.ndarray, pages: np.ndarray, offsets: np.ndarray, block_size: int
) -> Iterator[PageRun]:
    """The runs of rows with slots, which are in order."""
    start = 0
    for i in range(1, rows.size + 1):
        ends = (
            i == rows.size
            or i - start == block_size
            or rows[i] != rows[i - 1] + 1
            or pages[i] != pages[start]
            or offsets[i] // block_size != offsets[start] // block_size
        )
        if ends:
            yield PageRun(rows[start:i], int(pages[start]), offsets[start:i])
            start = i


def quantize_to_pages(
    x: np.ndarray,
    cache: np.ndarray,
    scales: np.ndarray,
    slots: tuple[np.ndarray, np.ndarray, np.ndarray],
    block_size: int,
) -> None:
    """Write x float32 [n, heads, head_dim] to slots (rows, pages, offsets) of pages [num_pages,
    page_size, heads, head_dim], with scales [num_pages, page_size / block_size, heads].

    A block that is written from its first slot on has a new scale. One that has tokens ahead keeps
    its own, or as large a power of two times it as the new ones need; what it has is divided by it.
    """
    rows, pages, offsets = slots
    for run in runs_of(rows, pages, offsets, block_size):
        block = int(run.offsets[0]) // block_size
        begin = block * block_size
        before = slice(begin, int(run.offsets[0]))
        for head in range(x.shape[1]):
            new = x[run.rows, head]
            needed = scale_for(new, cache.dtype)
            old = scales[run.page, block, head]
            scale = needed
            if before.stop > begin and 0 < old < np.inf:
                factor = _growth(old, needed) if needed > old and new.any() else _ONE
                scale = old * factor
                if factor != 1:
                    kept = cache[run.page, before, head].astype(np.float32)
                    cache[run.page, before, head] = stored(kept, factor, cache.dtype)
            scales[run.page, block, head] = scale
            cache[run.page, run.offsets, head] = stored(new, scale, cache.dtype)


def _growth(scale: np.float32, needed: np.float32) -> np.float32:
    mantissa, exponent = np.frexp(np.float32(needed / scale))
    return np.float32(np.ldexp(1.0, int(exponent) - (mantissa == 0.5)))
