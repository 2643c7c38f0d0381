"""Queries, keys and values by which ways of 8 bits are told apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .attention import Array

HEAD_DIM, NUM_ROWS = 128, 16
Inputs = tuple[Array, Array, Array]


def normal(n: int, rng: np.random.Generator) -> Inputs:
    """All of them standard normal."""
    q, k, v = (rng.standard_normal((rows, HEAD_DIM)) for rows in (NUM_ROWS, n, n))
    return q, k, v


def outliers(n: int, rng: np.random.Generator) -> Inputs:
    """FlashAttention-3's: a thousandth of the elements has ten times the deviation added."""
    with_outliers = [
        x + 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.001)
        for x in normal(n, rng)
    ]
    return with_outliers[0], with_outliers[1], with_outliers[2]


def channels(n: int, rng: np.random.Generator) -> Inputs:
    """Four channels of the keys lie far from zero, as biases make them."""
    q, k, v = normal(n, rng)
    chosen = rng.choice(HEAD_DIM, 4, replace=False)
    k[:, chosen] += rng.choice([-1, 1], 4) * rng.uniform(8, 16, 4)
    return q, k, v


def _with_a_peak(n: int, rng: np.random.Generator, key: int, length: float) -> Inputs:
    q, k, v = normal(n, rng)
    direction = rng.standard_normal(HEAD_DIM)
    direction /= np.linalg.norm(direction)
    q += 4 * direction
    k[key] = length * direction
    return q, k, v


def sink(n: int, rng: np.random.Generator) -> Inputs:
    """The first key draws a logit of about 10, and has small values."""
    q, k, v = _with_a_peak(n, rng, 0, 28.0)
    v[0] *= 0.05
    return q, k, v


def recent(n: int, rng: np.random.Generator) -> Inputs:
    """The last key draws a logit of about 12; values have a mean of two deviations."""
    q, k, v = _with_a_peak(n, rng, -1, 34.0)
    return q, k, 1 + 0.5 * v


def mean(n: int, rng: np.random.Generator) -> Inputs:
    """Values have a mean of two deviations."""
    q, k, v = normal(n, rng)
    return q, k, 1 + 0.5 * v


def constant(n: int, rng: np.random.Generator) -> Inputs:
    """All keys are alike; values are 1 and a little."""
    q, k, v = normal(n, rng)
    return q, np.repeat(k[:1], n, 0), 1 + 0.1 * v


INPUTS: dict[str, Callable[[int, np.random.Generator], Inputs]] = {
    f.__name__: f for f in (normal, outliers, channels, sink, recent, mean, constant)
}


def drawn(name: str, n: int, seed: int = 0) -> Inputs:
    """The inputs of a name: 16 rows of q over n keys of head dim 128."""
    return INPUTS[name](n, np.random.default_rng([seed, list(INPUTS).index(name)]))
