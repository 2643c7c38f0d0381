"""CUPYATTN_LOG: which lines are asked for, and the loggers that they go by."""

from __future__ import annotations

import logging

from ..errors import ArgumentError
from . import env

CHOICES = "choices"
# What is said of public calls: their names; their arguments and kernels; statistics of arrays.
NAMES, ARGUMENTS, STATISTICS = 1, 3, 5
_OFF = "0"


def words() -> list[str]:
    """What CUPYATTN_LOG holds, but for words that ask for nothing."""
    return [word for word in env.LOG.get().replace(",", " ").split() if word != _OFF]


def level() -> int:
    """NAMES, ARGUMENTS or STATISTICS, or 0 where nobody asks about calls.

    Raises ArgumentError for a word that asks for nothing that there is.
    """
    result = 0
    for word in words():
        if word == CHOICES:
            continue
        if word not in "12345":
            raise ArgumentError(
                f"{env.LOG.name}: got {word!r}; wanted 1, 3 or 5 for lines about calls, {CHOICES} "
                "for kernels that are chosen, or both with a comma between them"
            )
        result = max(result, int(word))
    return result


def logger(name: str) -> logging.Logger:
    """The logger of this name, at level INFO, which writes to stderr if the program has no handlers
    of its own."""
    result = logging.getLogger(name)
    result.setLevel(logging.INFO)
    if not result.hasHandlers():
        result.addHandler(logging.StreamHandler())
    return result
