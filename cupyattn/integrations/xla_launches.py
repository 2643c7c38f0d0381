"""What a call site launches, on memory that XLA allocates anew each time.

Words of params structs that follow an address of the call, and by how much, are found by comparing
what equal calls launched on different memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.recording import Recording
from ..launch.driver.enqueue import enqueue
from ..launch.driver.params import this_thread

_MAX_FAILURES = 4
_ALIGNMENT = 16  # what kernels are chosen by
_WORD = 8
_MASK = 2**64 - 1
# Offset of a word in its struct -> its value in the first recording, and the indices of the
# addresses that it may follow.
_Rules = dict[int, tuple[int, tuple[int, ...]]]


class _Launch(NamedTuple):
    """A launch of the first recording, and how its struct is written on other memory.

    params  the struct itself
    write   struct's pack_into of all that is in it, words that follow an address for themselves
    parts   what is written, in its order; calls of a site change it one after another
    follows   (which part, index of the address that it follows, how far it is from there)
    """

    launch: Any
    params: bytes
    rules: _Rules
    write: Callable[..., None]
    parts: list[Any]
    follows: list[tuple[int, int, int]]


class _State(NamedTuple):
    """What is known.

    base    the first call's addresses
    recording  of it
    moved   which of its addresses have moved since
    launches  its launches
    alike   which pairs of addresses must have moved equally far, since it is not known which of
            them a word follows
    steady  (index, address) of those that have not moved
    """

    base: tuple[int, ...]
    recording: Recording
    moved: frozenset[int]
    launches: list[_Launch]
    alike: frozenset[tuple[int, int]]
    steady: list[tuple[int, int]]


class Launches:
    """Launches of calls of one call site. Addresses are those of its buffers, in their order.

    is_hopeless   structs differ in what addresses do not explain
    """

    __slots__ = ("_failures", "_state", "is_hopeless")

    def __init__(self) -> None:
        self._state: _State | None = None  # replaced as a whole: other threads read it
        self._failures = 0
        self.is_hopeless = False

    def learn(self, addresses: tuple[int, ...], recording: Recording) -> None:
        """A call on this memory launched what is in `recording`, which is whole."""
        state = self._state
        if state is not None:
            known = _compare(state, addresses, recording)
            if known is not None:
                self._state = known
                return
            self._failures += 1
            self.is_hopeless = self._failures >= _MAX_FAILURES
        self._state = _known(
            addresses, recording, frozenset(), [_Rules() for _ in recording.launches]
        )

    def again(self, addresses: tuple[int, ...], device_index: int, stream: int) -> bool:
        """Launch it on this memory; False, and nothing is done, where that was not learnt yet."""
        state = self._state
        if state is None:
            return False
        base, _, moved, launches, alike, steady = state
        for index, address in steady:
            if addresses[index] != address:
                return False
        steps = 0
        for index in moved:
            steps |= addresses[index] - base[index]
        if steps % _ALIGNMENT:
            return False
        for index, other in alike:
            if addresses[index] - base[index] != addresses[other] - base[other]:
                return False
        arguments = this_thread.launch_buffer
        buffer, begin = arguments.buffer, arguments.offset
        for launch, _, _, write, parts, follows in launches:
            for part, index, distance in follows:
                parts[part] = addresses[index] + distance & _MASK
            write(buffer, begin, *parts)
            enqueue(launch, arguments, device_index, stream)
        return True


def _known(
    base: tuple[int, ...], recording: Recording, moved: frozenset[int], rules_of: Sequence[_Rules]
) -> _State:
    launches = []
    for (launch, params), rules in zip(recording.launches, rules_of, strict=True):
        parts: list[Any] = []
        fields, follows, end = "<", [], 0
        for offset, (word, indices) in sorted(rules.items()):
            if offset > end:
                fields += f"{offset - end}s"
                parts.append(params[end:offset])
            follows.append((len(parts), indices[0], word - base[indices[0]]))
            fields += "Q"
            parts.append(word)
            end = offset + _WORD
        fields += f"{len(params) - end}s"
        parts.append(params[end:])
        write = struct.Struct(fields).pack_into
        launches.append(_Launch(launch, params, rules, write, parts, follows))
    follows_of = [indices for rules in rules_of for _, indices in rules.values()]
    alike = frozenset((indices[0], x) for indices in follows_of for x in indices[1:])
    steady = [(index, address) for index, address in enumerate(base) if index not in moved]
    return _State(base, recording, moved, launches, alike, steady)


def _compare(state: _State, addresses: tuple[int, ...], recording: Recording) -> _State | None:
    """What is known with one more call; None if addresses do not explain in what it differs from
    the first one."""
    base, first, had_moved, known = state[:4]
    if [x for x, _ in recording.launches] != [x for x, _ in first.launches]:
        return None
    steps, owned = _steps(base, addresses), _steps(_owned(first), _owned(recording))
    if steps is None or owned is None:
        return None
    rules_of = []
    for (_, params, rules, *_), (_, other) in zip(known, recording.launches, strict=True):
        old, new = (np.frombuffer(x, "<u8", len(x) // _WORD) for x in (params, other))
        change = new - old
        changed: _Rules = {}
        for at in {*map(int, np.flatnonzero(change)), *(x // _WORD for x in rules)}:
            follows = set(map(int, np.flatnonzero(steps == change[at])))
            if at * _WORD in rules:
                follows &= set(rules[at * _WORD][1])
            else:
                follows -= had_moved
            if follows:
                changed[at * _WORD] = int(old[at]), tuple(sorted(follows))
            elif at * _WORD in rules or not (owned == change[at]).any():
                return None
        rules_of.append(changed)
    moved = had_moved | set(map(int, np.flatnonzero(steps)))
    return _known(base, first, moved, rules_of)


def _owned(recording: Recording) -> tuple[int, ...]:
    """Scratch memory of a recording, which its owners keep: the first one's serves all."""
    return tuple(getattr(x, "ptr", 0) for x in recording.kept)


def _steps(old: Sequence[int], new: Sequence[int]) -> Any:
    """How far each address went; None if there are not equally many."""
    if len(old) != len(new):
        return None
    return np.array(new, np.uint64) - np.array(old, np.uint64)
