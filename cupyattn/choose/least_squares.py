"""Parameters that fit measurements, by Levenberg-Marquardt over logarithms: all stay positive."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_STEP = 1e-3  # of a logarithm, for derivatives
_MAX_STEPS = 25
_MIN_GAIN = 1e-4
# An error beyond this, a logarithm, counts linearly: one odd sample does not bend all others.
_FAR = 0.15
# How strongly a parameter is held where it starts, as if so many samples had said so.
_HELD = 0.05


def fit(told: Callable[[np.ndarray], np.ndarray], start: np.ndarray, us: np.ndarray) -> np.ndarray:
    """Parameters like `start` by which `told` is as near to the measured times as can be.

    told: the times by parameters, in the order of `us`.
    """
    log_start, log_us = np.log(start), np.log(us)

    def errors(x: np.ndarray) -> np.ndarray:
        error = np.log(told(np.exp(x))) - log_us
        size = np.abs(error)
        far = size > _FAR
        error[far] = np.sign(error[far]) * np.sqrt(_FAR * (2 * size[far] - _FAR))
        return np.concatenate((error, _HELD * np.sqrt(us.size / 10) * (x - log_start)))

    x, damping = log_start.copy(), 1e-2
    now = errors(x)
    for _ in range(_MAX_STEPS):
        slopes = np.stack([(errors(x + step) - now) / _STEP for step in np.eye(x.size) * _STEP], 1)
        square = slopes.T @ slopes
        while True:
            damped = square + damping * np.diag(np.diag(square) + 1e-9)
            step = np.clip(np.linalg.solve(damped, -slopes.T @ now), -0.7, 0.7)
            then = errors(x + step)
            if then @ then < now @ now:
                break
            damping *= 4
            if damping > 1e6:
                return np.exp(x)
        gain = 1 - (then @ then) / (now @ now)
        x, now, damping = x + step, then, damping / 4
        if gain < _MIN_GAIN:
            break
    return np.exp(x)
