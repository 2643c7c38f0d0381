"""Attention of one head in 8 bits, key tile after key tile, as a kernel computes it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .products import Floats, add_product

TILE = 128  # keys
LARGEST = {"e4m3": 448.0, "int8": 127.0}
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Way:
    """How a call stores its inputs and sums its products."""

    qk: Literal["e4m3", "int8"] = "e4m3"
    block: int = 0  # rows of q and k that share a scale; 0: all
    smooths: bool = False  # k less its mean
    rotates: bool = False  # a Hadamard rotation of q and k
    top_power: int = 8  # P of a lone maximum is 2^8
    is_exact: bool = False  # every row takes the maximum of every tile
    sums_rounded: bool = False  # the denominator's P is as rounded as the numerator's
    flush_tiles: int = 4  # after so many tiles O goes to float32; 0: at the end alone


@dataclass(frozen=True)
class Stored:
    """Numbers as 8 bits hold them, and the scale of each row."""

    numbers: Floats
    scales: Floats

    @classmethod
    def of(cls, x: Array, kind: str, block: int = 0) -> Stored:
        """Scaled by the largest magnitude of each block of rows; rounded to nearest."""
        size = block or len(x)
        largest = [np.abs(x[i : i + size]).max() for i in range(0, len(x), size)]
        scales = np.repeat(np.maximum(largest, 1e-12) / LARGEST[kind], size)[: len(x)]
        y = (x / scales[:, None]).astype(np.float32)
        stored = rounded(y) if kind == "e4m3" else np.rint(y)
        return cls(stored, scales.astype(np.float32))


def rounded(x: Floats) -> Floats:
    """The nearest e4m3 numbers, saturated."""
    return np.clip(x, -448.0, 448.0).astype(_E4M3).astype(np.float32)


def rotated(x: Array) -> Array:
    """Rows times the Hadamard matrix of their length, a power of two, over its root."""
    matrix = np.ones((1, 1))
    while len(matrix) < x.shape[-1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return x @ (matrix / np.sqrt(len(matrix)))


@dataclass
class Rows:
    """Maxima, sums and O of a tile's query rows. P of a logit s is 2^(s - reference)."""

    way: Way
    num_rows: int
    head_dim: int

    def __post_init__(self) -> None:
        self.reference = np.full(self.num_rows, -np.inf, np.float32)
        self.sums = np.zeros(self.num_rows, np.float32)
        self.master = np.zeros((self.num_rows, self.head_dim), np.float32)
        self.part = np.zeros_like(self.master)

    @cached_property
    def threads(self) -> NDArray[np.int_]:
        """Which of a quad's four threads has each key of a tile."""
        return np.arange(TILE) % 8 // 2

    def raise_references(self, logits: Floats) -> None:
        """Takes the references that a tile asks for, and scales what there is to match."""
        new = np.maximum(self.reference, self._wanted(logits))
        if not self.way.is_exact:
            new = np.where(self._asks(logits), new, self.reference)
        factors = np.exp2(np.where(np.isneginf(self.reference), 0, self.reference - new))
        self.reference = new
        if (factors == 1).all():
            return
        if self.way.flush_tiles:
            self.flush()
        for sums in (self.sums, self.master.T, self.part.T):
            sums *= factors

    def _asks(self, logits: Floats) -> NDArray[np.bool_]:
        """Where a thread's sum of the tile exceeds what e4m3 holds, or a row has seen no key."""
        p = np.exp2(np.minimum(logits - self.reference[:, None], 30))
        of_threads = [p[:, self.threads == t].sum(1) for t in range(4)]
        return np.maximum.reduce(of_threads) > LARGEST["e4m3"]

    def _wanted(self, logits: Floats) -> Floats:
        """References for the tile: a flat row gets room to grow, a lone maximum all bits."""
        largest = logits.max(1)
        if self.way.is_exact:
            return largest - self.way.top_power
        ratio = np.exp2(logits - largest[:, None]).sum(1)
        return largest - (self.way.top_power - np.floor(np.log2(ratio)))

    def add(self, logits: Floats, values: Floats) -> None:
        """P of a tile to the sums, and P V to O."""
        p = np.exp2(logits - self.reference[:, None])
        stored = rounded(p)
        self.sums += (stored if self.way.sums_rounded else p).sum(1)
        self.part = add_product(self.part, stored, np.ascontiguousarray(values.T))

    def flush(self) -> None:
        """Empties the tensor cores' sums into float32."""
        self.master += self.part
        self.part[:] = 0


def attend(q: Array, k: Array, v: Array, way: Way) -> Array:
    """Attention of q [m, d] over k [n, d] and v [n, d]; n is a multiple of 128. Last tile first."""
    if way.smooths:
        k = k - k.mean(0)
    if way.rotates:
        q, k = rotated(q), rotated(k)
    queries, keys = Stored.of(q, way.qk, way.block), Stored.of(k, way.qk, way.block)
    values = Stored.of(v, "e4m3")
    factors = queries.scales * np.float32(np.log2(np.e) / np.sqrt(q.shape[1]))
    rows = Rows(way, len(q), v.shape[1])
    for index, first in enumerate(reversed(range(0, len(k), TILE))):
        tile = slice(first, first + TILE)
        if way.qk == "int8":
            products = queries.numbers @ keys.numbers[tile].T  # exact
        else:
            zeros = np.zeros((len(q), TILE), np.float32)
            products = add_product(zeros, queries.numbers, keys.numbers[tile])
        logits = products * factors[:, None] * keys.scales[tile]
        rows.raise_references(logits)
        rows.add(logits, values.numbers[tile])
        if way.flush_tiles and index % way.flush_tiles == way.flush_tiles - 1:
            rows.flush()
    rows.flush()
    return (rows.master * values.scales[0] / rows.sums[:, None]).astype(np.float64)


def exact(q: Array, k: Array, v: Array) -> Array:
    """The same attention in float64."""
    logits = q @ k.T / np.sqrt(q.shape[1])
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p @ v / p.sum(1, keepdims=True)
