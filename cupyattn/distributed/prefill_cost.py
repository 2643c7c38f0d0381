"""Which way spreads a prompt's attention over ranks soonest, by what it moves and multiplies.

A model of integers and four rates: every rank makes the same choice, and the CPU does too. It knows
no launch to the microsecond; ways that it takes to be equal are within some percent of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from ..core import parse
from ..errors import ArgumentError

_COPIES, _COLLECTIVES = 3e11, 2.4e11  # bytes a second that a rank takes from its peers
_TILE_ROWS, _SLOTS = 128, 132  # query rows of a tile, and tiles that run at a time


@dataclass(frozen=True, slots=True)
class Rates:
    """What a rank does in a second. The defaults are those of H100s and H200s of one host.

    Parameters
    ----------
    attention
        floating point operations of prefill.
    memory
        Bytes that copies read and write in the GPU's memory.
    link
        Bytes that a rank takes from the others, by the slowest link of the group; None: 3e11 by
        copies to the memory of peers, 2.4e11 by collectives of NCCL (measured on a pair of H100s
        without NVLink multicast; a network of 400 Gbit/s has 4e10).
    launch
        Seconds, not a rate: what one more launch or collective takes.
    """

    attention: float = 7.5e14
    memory: float = 2.5e12
    link: float | None = None
    launch: float = 1e-5

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name == "link" and self.link is None:
                continue
            value = parse.positive(getattr(self, field.name), f"rates.{field.name}", 0.0)
            object.__setattr__(self, field.name, value)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be attended to: all requests of all ranks.

    lengths      int64 [B]: tokens of each request
    itemsize     bytes of an element of q, k, v and the answer
    window_left  -1: none
    """

    lengths: np.ndarray
    size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    itemsize: int = 2
    causal: bool = True
    window_left: int = -1

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_pairs(self) -> float:
        """Pairs of a query token and a key in its sight."""
        n = self.lengths.astype(np.float64)
        if not self.causal:
            return float((n * n).sum())
        seen = n if self.window_left < 0 else np.minimum(n, self.window_left + 1.0)
        return float((seen * (n - seen) + seen * (seen + 1) / 2).sum())

    @property
    def key_bytes(self) -> int:
        """The bytes of one token's keys and values, of all KV heads."""
        return self.num_kv_heads * (self.head_dim_qk + self.head_dim_vo) * self.itemsize

    @property
    def num_sent(self) -> float:
        """Tokens whose keys some other rank needs, of all ranks."""
        if self.window_left < 0 or not self.causal:
            return float(self.num_tokens)
        pieces = self.lengths / (2.0 * self.size)
        return float((2 * self.size * np.minimum(pieces, self.window_left)).sum())


@dataclass(frozen=True, slots=True)
class Choice:
    """A way, and how long it takes by the model.

    method      "gather", "overlap" or "ulysses" (prefill_plan.py, ulysses.py)
    num_chunks  of keys; 1 for "ulysses"
    seconds     of one call, of which `attention` are what the kernels of attention take
    others      the other ways that were weighed
    """

    method: str
    num_chunks: int
    seconds: float
    attention: float
    others: tuple[Choice, ...] = ()

    @property
    def name(self) -> str:
        if self.method == "ulysses":
            return self.method
        return f"{self.method} in {self.num_chunks} chunk{'s' * (self.num_chunks > 1)}"

    def describe(self) -> str:
        """The choice in a sentence."""
        text = (
            f"{self.name}: {1e3 * self.seconds:.3g} ms by estimate, of which "
            f"{1e3 * (self.seconds - self.attention):.3g} ms beside attention"
        )
        others = ", ".join(f"{x.name} {1e3 * x.seconds:.3g} ms" for x in self.others)
        return f"{text} ({others})" if others else text


def choose(
    prompt: Prompt, rates: Rates, methods: tuple[str, ...], has_peer_memory: bool = False
) -> Choice:
    """The way that takes the least time, of these methods; the earlier one of two that are equal.

    has_peer_memory: keys come by copies to it. What waits for them then waits for every rank's
    launch before, so that gathering in two chunks, whose first launches differ, is left out.

    More ranks make attention shorter and leave what is exchanged as long. Gathering moves the keys
    of all tokens to every rank, all but a rank's own; it waits for them, or for half of them in two
    chunks. Overlapping hides them behind work on a rank's own keys, and reads and writes float32
    states of all rows instead. Ulysses moves a rank's share of q, k, v and the answer, each once,
    so it wins where there are many ranks, or as many KV heads as heads of q.
    """
    estimates = _estimates(prompt, rates, methods, has_peer_memory)
    choices = sorted(estimates, key=lambda choice: choice.seconds)
    if not choices:
        raise ArgumentError(f"methods: got {methods}; wanted one of gather, overlap and ulysses")
    best, *others = choices
    return Choice(best.method, best.num_chunks, best.seconds, best.attention, tuple(others))


def _estimates(
    prompt: Prompt, rates: Rates, methods: tuple[str, ...], has_peer_memory: bool
) -> Iterator[Choice]:
    work = 2.0 * prompt.num_qo_heads * (prompt.head_dim_qk + prompt.head_dim_vo)
    attention = prompt.num_pairs * work / rates.attention / prompt.size
    of_keys = rates
    if rates.link is None:
        of_keys = replace(rates, link=_COPIES if has_peer_memory else _COLLECTIVES)
        rates = replace(rates, link=_COLLECTIVES)
    if "gather" in methods:
        for num_chunks in (1, 2) if prompt.causal and not has_peer_memory else (1,):
            seconds = _gather(prompt, of_keys, attention, num_chunks)
            yield Choice("gather", num_chunks, seconds, attention)
    if "overlap" in methods:
        for num_chunks in (1, 2, 4):
            seconds = _overlap(prompt, of_keys, attention, num_chunks)
            yield Choice("overlap", num_chunks, seconds, attention)
    if "ulysses" in methods:
        yield Choice("ulysses", 1, _ulysses(prompt, rates) + attention, attention)


def _last_wave(prompt: Prompt, attention: float, rows: float) -> float:
    """What blocks wait for each other at the end of a launch over so many rows of a rank."""
    tiles = max(1.0, rows * prompt.num_qo_heads / _TILE_ROWS)
    return 0.5 * attention * min(1.0, _SLOTS / tiles)


def _exchange(prompt: Prompt, rates: Rates) -> tuple[float, float, float]:
    """What keys take: to be packed, to come, and to be put in their places."""
    assert rates.link is not None
    others = (prompt.size - 1) / prompt.size
    packed = 2 * prompt.num_tokens / prompt.size * prompt.key_bytes / rates.memory
    come = others * prompt.num_sent * prompt.key_bytes / rates.link
    return packed, come, 2 * prompt.num_sent * prompt.key_bytes / rates.memory


def _gather(prompt: Prompt, rates: Rates, attention: float, num_chunks: int) -> float:
    packed, come, placed = _exchange(prompt, rates)
    rows = prompt.num_tokens / prompt.size
    if num_chunks == 1:
        return packed + come + placed + attention + 4 * rates.launch
    # Rank 0 waits longest: its early piece has the least to do while the late pieces are on their
    # way.
    early = attention / (4 * prompt.size)
    waits = come / 2 + max(early, come / 2) - early
    waves = _last_wave(prompt, attention / 2, rows / 2)
    return packed + waits + placed + attention + waves + 7 * rates.launch


def _overlap(prompt: Prompt, rates: Rates, attention: float, num_chunks: int) -> float:
    packed, come, placed = _exchange(prompt, rates)
    rows = prompt.num_tokens / prompt.size
    state = 4 * rows * prompt.num_qo_heads * prompt.head_dim_vo / rates.memory
    own = attention / prompt.size
    part = (attention - own) / num_chunks
    now = packed + own + state
    for chunk in range(1, num_chunks + 1):
        now = max(now, packed + come * chunk / num_chunks) + placed / num_chunks
        now += part + state + _last_wave(prompt, part, rows)
    merged = (num_chunks + 1) * state + state * prompt.itemsize / 4
    return now + merged + (4 + 3 * num_chunks) * rates.launch


def _ulysses(prompt: Prompt, rates: Rates) -> float:
    """All but attention."""
    assert rates.link is not None
    rows = prompt.num_tokens / prompt.size
    queries = prompt.num_qo_heads * (prompt.head_dim_qk + prompt.head_dim_vo) * prompt.itemsize
    keys = prompt.key_bytes * max(1.0, prompt.size / prompt.num_kv_heads)
    moved = rows * (queries + keys)
    # Each is packed and put in its place.
    copied = 4 * moved / rates.memory
    come = (prompt.size - 1) / prompt.size * moved / rates.link
    return copied + come + 6 * rates.launch
