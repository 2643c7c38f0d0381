"""CUPYATTN_LOG=choices: a line for each new choice of kernels."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...choose.candidates import BY_ROW_CLASS
from ...core import log
from ...core.problem import AttentionProblem
from ...core.selection import SelectProblem
from ...core.spec import AttentionSpec
from ...schedule.batch import BatchRequests
from ..driver.enqueue import Launch
from .key_list_arrays import Lists
from .words import batch_words, problem_words

if TYPE_CHECKING:
    from .batch import BatchLauncher
    from .layout import BatchSchedule


@functools.cache
def _logger() -> logging.Logger | None:
    """Where lines go; None where nobody has asked for them."""
    return log.logger("cupyattn.choices") if log.CHOICES in log.words() else None


def log_of(spec: AttentionSpec, problem: AttentionProblem) -> ChoiceLog | None:
    """The log of a launcher; None where nobody has asked for one."""
    logger = _logger()
    return None if logger is None else ChoiceLog(logger, problem_words(spec, problem))


@functools.lru_cache(maxsize=256)
def log_of_selection(problem: SelectProblem, device_index: int) -> ChoiceLog | None:
    """The log of a device's selections of a problem; None where nobody has asked for one."""
    logger = _logger()
    return None if logger is None else ChoiceLog(logger, selection_words(problem))


def selection_words(problem: SelectProblem) -> str:
    """What is selected: `16 blocks of 128 keys by max of 4 index heads in 4 groups, ...`."""
    groups = "1 group" if problem.num_groups == 1 else f"{problem.num_groups} groups"
    rows = f"{problem.dtype_k} rows of {problem.head_dim}"
    return (
        f"{problem.topk:,} blocks of {problem.block} keys by {problem.score} of "
        f"{problem.num_heads} index heads in {groups}, {problem.dtype_q} over {rows}"
    )


class ChoiceLog:
    """Says each choice of one launcher once."""

    def __init__(self, logger: logging.Logger, problem: str) -> None:
        self._logger, self._problem = logger, problem
        self._said: set[tuple[object, ...]] = set()

    def single(self, lengths: tuple[int, int], tiles: str, kernel: str, num_blocks: int) -> None:
        """Say what serves one request of so many rows and keys."""
        if self._is_new((tiles, kernel)):
            rows, keys = lengths
            about = f"one request of {rows:,} x {keys:,}"
            self._say(about, tiles, f"{kernel}, {num_blocks:,} blocks")

    def any_lengths(self, row_class: str, kernel: str) -> None:
        """Say what serves requests whose lengths stay on the device."""
        if self._is_new((row_class, kernel)):
            self._say("lengths on the device", row_class, kernel)

    def lists(self, lists: Lists, num_tokens: int, choice: str, launches: Sequence[Launch]) -> None:
        """Say what serves tokens that have lists of keys; `launches` in their order."""
        blocks = [math.prod(launch.grid) for launch in launches]
        if self._is_new((choice, lists.granularity, lists.length, *blocks)):
            about = f"{num_tokens:,} tokens with {lists.length:,} blocks of {lists.granularity}"
            about += f" and the last {lists.window:,} keys" if lists.window else ""
            self._say(about, choice, ", then ".join(f"{n:,} blocks" for n in blocks))

    def selection(self, num_tokens: int, choice: str, launches: Sequence[Launch]) -> None:
        """Say what serves a selection; `launches` in their order."""
        blocks = [math.prod(launch.grid) for launch in launches]
        if self._is_new((choice, *blocks)):
            self._say(
                f"{num_tokens:,} tokens", choice, ", then ".join(f"{n:,} blocks" for n in blocks)
            )

    def _is_new(self, choice: tuple[object, ...]) -> bool:
        is_new = choice not in self._said
        self._said.add(choice)
        return is_new

    def _say(self, batch: str, choice: str, launches: str) -> None:
        text = "cupyattn: %s; %s -> %s: %s"
        self._logger.info(text, self._problem, batch, choice, launches)

    def batch(
        self, launcher: BatchLauncher, schedule: BatchSchedule, requests: BatchRequests
    ) -> None:
        """Say what serves a batch, or the levels of a cascade."""
        kernels = tuple(part.row_class for part in schedule.parts)
        if not kernels or not self._is_new((schedule.candidate, *kernels)):
            return
        launches = []
        for part in schedule.parts:
            blocks = sum(math.prod(launch.grid) for launch, _ in part.launches)
            tiles = launcher.kernel(part.row_class).loaded.tiles
            rows = part.row_class if isinstance(part.row_class, str) else " + ".join(part.row_class)
            launches.append(f"{tiles.name} ({rows}), {blocks:,} blocks")
            launches += ["a merge"] if part.merge is not None else []
        name, time = schedule.candidate, math.inf
        if name:
            result = (x.time for x in launcher.candidates(requests) if x.name == name)
            time = next(result, math.inf)
        else:
            name = BY_ROW_CLASS
        about = f"{name}, {time:,.1f} us estimated" if time < math.inf else name
        self._say(batch_words(requests), about, "; ".join(launches))
