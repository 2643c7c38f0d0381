"""Which keys of a sequence a rank holds, where several GPUs hold the keys of every request.

Tokens go round the ranks in runs of `cp_kv_cache_interleave_size`: token t lies on rank
t // interleave % world. All is integers, of Python or of NumPy; arrays give int64 arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from ..errors import ArgumentError
from . import parse
from .problem import MAX_LENGTH

NOT_HELD = -1


@dataclass(frozen=True, slots=True)
class KeyShare:
    """The keys of one of `cp_world_size` ranks.

    Raises ArgumentError for numbers that are no integers, for a rank that the world does not have,
    and for runs of no tokens.
    """

    cp_world_size: int = 1
    cp_rank: int = 0
    cp_kv_cache_interleave_size: int = 1

    def __post_init__(self) -> None:
        names = "cp_world_size", "cp_rank", "cp_kv_cache_interleave_size"
        for name, minimum in zip(names, (1, 0, 1), strict=True):
            value = parse.require_int(getattr(self, name), name, minimum, MAX_LENGTH)
            object.__setattr__(self, name, value)
        if self.cp_rank >= self.cp_world_size:
            raise ArgumentError(
                f"cp_rank: got {self.cp_rank} with cp_world_size={self.cp_world_size}; wanted 0 to "
                f"{self.cp_world_size - 1}"
            )
        if self.period > MAX_LENGTH:
            raise ArgumentError(
                f"cp_kv_cache_interleave_size: {self.cp_kv_cache_interleave_size} tokens on each "
                f"of {self.cp_world_size} ranks; wanted at most {MAX_LENGTH} tokens in all"
            )

    @property
    def period(self) -> int:
        """Tokens from one run of this rank's to its next."""
        return self.cp_world_size * self.cp_kv_cache_interleave_size

    @property
    def first(self) -> int:
        """The position of this rank's first key."""
        return self.cp_rank * self.cp_kv_cache_interleave_size

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all keys."""
        return self.cp_world_size == 1

    def of_rank(self, rank: int) -> KeyShare:
        """The share of another rank of this world."""
        return KeyShare(self.cp_world_size, rank, self.cp_kv_cache_interleave_size)

    def all_ranks(self) -> list[KeyShare]:
        """The shares of all ranks, in order."""
        return [self.of_rank(rank) for rank in range(self.cp_world_size)]

    @overload
    def count(self, tokens: int) -> int: ...
    @overload
    def count(self, tokens: np.ndarray) -> np.ndarray: ...
    def count(self, tokens: Any) -> Any:
        """How many of a sequence's first `tokens` tokens this rank holds; 0 for negative numbers.

        The count of a whole length is the length that this rank has.
        """
        run = self.cp_kv_cache_interleave_size
        if isinstance(tokens, np.ndarray):
            periods, rest = np.divmod(np.maximum(tokens.astype(np.int64), 0), self.period)
            return periods * run + np.clip(rest - self.first, 0, run)
        whole = max(int(tokens), 0)
        return whole // self.period * run + min(max(whole % self.period - self.first, 0), run)

    @overload
    def position(self, index: int) -> int: ...
    @overload
    def position(self, index: np.ndarray) -> np.ndarray: ...
    def position(self, index: Any) -> Any:
        """The place in the whole sequence of this rank's key `index`, counted from 0."""
        own: Any = index.astype(np.int64) if isinstance(index, np.ndarray) else int(index)
        runs = own // self.cp_kv_cache_interleave_size
        return own + runs * (self.period - self.cp_kv_cache_interleave_size) + self.first

    @overload
    def holds(self, position: int) -> bool: ...
    @overload
    def holds(self, position: np.ndarray) -> np.ndarray: ...
    def holds(self, position: Any) -> Any:
        """Whether the token at a place in the whole sequence is this rank's; none lies before 0."""
        rank = position // self.cp_kv_cache_interleave_size % self.cp_world_size
        return (rank == self.cp_rank) & (position >= 0)

    @overload
    def index(self, position: int) -> int: ...
    @overload
    def index(self, position: np.ndarray) -> np.ndarray: ...
    def index(self, position: Any) -> Any:
        """Which of this rank's keys lies at a place in the whole sequence; -1: another rank's."""
        if isinstance(position, np.ndarray):
            return np.where(self.holds(position), self.count(position), NOT_HELD)
        return self.count(position) if self.holds(position) else NOT_HELD


WHOLE = KeyShare()
