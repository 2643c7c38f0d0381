"""What a call site launches, on memory that XLA places anew each time.

Words of params structs that follow an address of the call, and by how much, are found by comparing
what equal calls launched on different memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.recording import Recording
from ..launch.driver.enqueue import enqueue
from ..launch.driver.params import this_thread

_MAX_FAILURES = 4
_ALIGNMENT = 16  # what kernels are chosen by
_WORD = 8
_MASK = 2**64 - 1
_write_word = struct.Struct("<Q").pack_into
# Offset of a word in its struct -> its value in the first recording, and the places of the
# addresses that it may follow.
_Rules = dict[int, tuple[int, tuple[int, ...]]]


class _State(NamedTuple):
    """What is known: the first call's addresses and recording, which of its addresses have moved
    since, its launches with the rules of their structs, and which pairs of addresses must have
    moved equally far, since it is not known which of them a word follows."""

    base: tuple[int, ...]
    made: Recording
    moved: frozenset[int]
    launches: list[tuple[Any, bytes, _Rules]]
    alike: frozenset[tuple[int, int]] = frozenset()


class Launches:
    """Launches of calls of one call site. Addresses are those of its buffers, in their order.

    is_hopeless   structs differ in what addresses do not explain
    """

    __slots__ = ("_failures", "_state", "is_hopeless")

    def __init__(self) -> None:
        self._state: _State | None = None  # replaced as a whole: other threads read it
        self._failures = 0
        self.is_hopeless = False

    def learn(self, addresses: tuple[int, ...], made: Recording) -> None:
        """A call on this memory launched what is in `made`, which is whole."""
        state = self._state
        if state is not None:
            known = _compare(state, addresses, made)
            if known is not None:
                self._state = known
                return
            self._failures += 1
            self.is_hopeless = self._failures >= _MAX_FAILURES
        launches = [(launch, params, _Rules()) for launch, params in made.launches]
        self._state = _State(addresses, made, frozenset(), launches)

    def again(self, addresses: tuple[int, ...], device_index: int, stream: int) -> bool:
        """Launch it on this memory; False, and nothing is done, where that was not learnt yet."""
        state = self._state
        if state is None:
            return False
        base, _, moved, launches, alike = state
        arguments = this_thread.launch_buffer
        if addresses == base:
            for launch, params, _ in launches:
                arguments.write(params)
                enqueue(launch, arguments, device_index, stream)
            return True
        steps = [new - old for new, old in zip(addresses, base, strict=True)]
        for place, step in enumerate(steps):
            if step and (place not in moved or step % _ALIGNMENT):
                return False
        for place, other in alike:
            if steps[place] != steps[other]:
                return False
        buffer, begin = arguments.buffer, arguments.offset
        for launch, params, rules in launches:
            arguments.write(params)
            for offset, (word, places) in rules.items():
                _write_word(buffer, begin + offset, (word + steps[places[0]]) & _MASK)
            enqueue(launch, arguments, device_index, stream)
        return True


def _compare(state: _State, addresses: tuple[int, ...], made: Recording) -> _State | None:
    """What is known with one more call; None if addresses do not explain in what it differs from
    the first one."""
    base, first, had_moved, known, _ = state
    if [x for x, _ in made.launches] != [x for x, _ in first.launches]:
        return None
    steps, owned = _steps(base, addresses), _steps(_owned(first), _owned(made))
    if steps is None or owned is None:
        return None
    launches = []
    for (launch, params, rules), (_, other) in zip(known, made.launches, strict=True):
        old, new = (np.frombuffer(x, "<u8", len(x) // _WORD) for x in (params, other))
        change = new - old
        found: _Rules = {}
        for at in {*map(int, np.flatnonzero(change)), *(x // _WORD for x in rules)}:
            follows = set(map(int, np.flatnonzero(steps == change[at])))
            if at * _WORD in rules:
                follows &= set(rules[at * _WORD][1])
            else:
                follows -= had_moved
            if follows:
                found[at * _WORD] = int(old[at]), tuple(sorted(follows))
            elif at * _WORD in rules or not (owned == change[at]).any():
                return None
        launches.append((launch, params, found))
    moved = had_moved | set(map(int, np.flatnonzero(steps)))
    follows_of = [places for _, _, rules in launches for _, places in rules.values()]
    alike = frozenset((places[0], x) for places in follows_of for x in places[1:])
    return _State(base, first, moved, launches, alike)


def _owned(made: Recording) -> tuple[int, ...]:
    """Scratch memory of a recording, which its owners keep: the first one's serves all."""
    return tuple(getattr(x, "ptr", 0) for x in made.kept)


def _steps(old: Sequence[int], new: Sequence[int]) -> Any:
    """How far each address went; None if there are not equally many."""
    if len(old) != len(new):
        return None
    return np.array(new, np.uint64) - np.array(old, np.uint64)
