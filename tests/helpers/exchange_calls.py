"""Seeded exchanges of attention states among ranks, and what must come out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np

from cupyattn import reference
from cupyattn.core import dtypes
from cupyattn.distributed import Group, StateExchange

from . import poison

_LOG2_E = math.log2(math.e)
# exp2, the reciprocal and the sums of the kernel: float32 ulps of what is averaged.
_SLACK = 8 * 2.0**-23


@dataclass(frozen=True)
class ExchangeCase:
    """Exchanges of `rows`, one after the other, by one StateExchange.

    strides   "packed", "gaps" (rows on 16-byte boundaries) or "heads first"
    empty     how many of the states saw no key; their v is NaN
    absent    a rank that has no key at all
    """

    size: int = 2
    rows: tuple[int, ...] = (5,)
    own_heads: int = 3
    head_dim: int = 64
    dtype: str = "float32"
    out_dtype: str = "bfloat16"
    base_on_e: bool = False
    strides: str = "packed"
    spread: float = 4.0
    empty: float = 0.2
    absent: int | None = None
    gives_outputs: bool = False
    uses_windows: bool | None = None
    timeout: float = 60.0
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return self.size * self.own_heads

    def states(self, step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """What a rank has in an exchange: v [rows, heads, head_dim], s [rows, heads]."""
        rng = np.random.default_rng([self.seed, step, rank])
        shape = self.rows[step], self.num_heads
        v = rng.standard_normal((*shape, self.head_dim)).astype(dtypes.parse(self.dtype).numpy)
        s = rng.normal(0, self.spread, shape).astype(np.float32)
        is_empty = rng.random(shape) < (1.0 if self.absent == rank else self.empty)
        v[is_empty], s[is_empty] = np.nan, -np.inf
        return v, s

    def make(self, group: Group) -> StateExchange:
        return StateExchange(
            group,
            max(1, *self.rows),
            self.num_heads,
            self.head_dim,
            dtype=self.dtype,
            out_dtype=self.out_dtype,
            lse_base_on_e=self.base_on_e,
            timeout=self.timeout,
            uses_windows=self.uses_windows,
        )


# Each is a kernel to compile, for every number of ranks up to five.
_KINDS = (
    ("float32", "bfloat16", 128),
    ("float32", "float32", 40),
    ("float32", "float16", 512),
    ("bfloat16", "bfloat16", 192),
    ("float16", "float32", 8),
)


def random_case(seed: int, sizes: tuple[int, ...] = (1, 2, 3, 4, 5)) -> ExchangeCase:
    """Everything varies."""
    rng = np.random.default_rng(seed)
    size = sizes[seed % len(sizes)]
    dtype, out_dtype, head_dim = _KINDS[int(rng.choice(5, p=[0.4, 0.2, 0.1, 0.2, 0.1]))]
    return ExchangeCase(
        size=size,
        rows=tuple(int(x) for x in rng.choice([0, 1, 2, 3, 7, 13], int(rng.integers(1, 5)))),
        own_heads=int(rng.choice([1, 2, 3, 5])),
        head_dim=head_dim,
        dtype=dtype,
        out_dtype=out_dtype,
        base_on_e=bool(rng.random() < 0.4),
        strides=str(rng.choice(["packed", "gaps", "heads first"])),
        spread=float(rng.choice([0.1, 4.0, 60.0])),
        empty=float(rng.choice([0.0, 0.2, 0.9])),
        absent=int(rng.integers(size)) if rng.random() < 0.3 else None,
        gives_outputs=bool(rng.random() < 0.5),
        seed=seed,
    )


@dataclass
class Step:
    """One exchange of one rank: inputs and outputs among poison, and what it answered."""

    arrays: dict[str, poison.Poisoned]
    out: Any
    lse: Any

    def check_poison(self) -> None:
        for name, array in self.arrays.items():
            array.assert_intact(name)


@dataclass
class RankRun:
    """The exchanges of a case as one rank makes them."""

    case: ExchangeCase
    group: Group
    xp: ModuleType
    device: str = "cuda"
    exchange: StateExchange = field(init=False)

    def __post_init__(self) -> None:
        self.exchange = self.case.make(self.group)

    def step(self, index: int) -> Step:
        return self.launch(self.prepare(index))

    def launch(self, prepared: tuple[dict[str, poison.Poisoned], tuple[Any, ...]]) -> Step:
        arrays, given = prepared
        return Step(arrays, *self.exchange.run(*given, return_lse=True))

    def prepare(self, index: int) -> tuple[dict[str, poison.Poisoned], tuple[Any, ...]]:
        """The arrays of an exchange, and its arguments."""
        case, rank = self.case, self.group.rank
        v, s = case.states(index, rank)
        arrays = {"o": self._embed(v), "lse": self._embed(s)}
        out = lse_out = None
        if case.gives_outputs:
            shape = v.shape[0], case.own_heads, case.head_dim
            blank = np.zeros(shape, dtypes.parse(case.out_dtype).numpy)
            arrays["out"] = self._embed(blank)
            arrays["lse_out"] = self._embed(np.zeros(shape[:2], np.float32))
            out, lse_out = arrays["out"].array, arrays["lse_out"].array
        return arrays, (arrays["o"].array, arrays["lse"].array, out, lse_out)

    def _embed(self, x: np.ndarray) -> poison.Poisoned:
        strides = None
        if self.case.strides == "heads first":
            rows, _, *rest = x.shape
            columns = math.prod(rest)
            strides = (columns, rows * columns, *[1] * len(rest))
        elif self.case.strides == "gaps":
            columns = math.prod(x.shape[2:]) + (16 if x.ndim == 3 else 1)
            strides = (x.shape[1] * columns + 32, columns, *[1] * (x.ndim - 2))
        return poison.embed(x, strides, xp=self.xp, device=self.device)


def wanted(case: ExchangeCase, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The answers of a rank in float64, by exchange."""
    own = slice(rank * case.own_heads, (rank + 1) * case.own_heads)
    return [tuple(x[:, own] for x in _merged(case, index)[:2]) for index in range(len(case.rows))]


def _merged(case: ExchangeCase, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Out and LSE of all heads, what is averaged without its signs, and the largest LSE."""
    unit = _LOG2_E if case.base_on_e else 1.0
    states = [case.states(index, rank) for rank in range(case.size)]
    v, s = (np.stack(x, axis=1) for x in zip(*states, strict=True))
    out, lse = reference.merge_states(v, s.astype(np.float64) * unit)
    magnitude = reference.merge_states(np.abs(v), s.astype(np.float64) * unit)[0]
    return out, lse / unit, magnitude, float(np.abs(s[np.isfinite(s)]).max(initial=1.0))


def check(case: ExchangeCase, runs: list[list[tuple[np.ndarray, np.ndarray]]]) -> None:
    """runs: by rank and exchange, (out, lse) on the host."""
    epsilon = 2.0 ** -{"float32": 24, "float16": 11, "bfloat16": 8}[case.out_dtype]
    for index, rows in enumerate(case.rows):
        wanted_out, wanted_lse, magnitude, scale = _merged(case, index)
        slack = _SLACK * (1 + scale)
        for rank in range(case.size):
            own = slice(rank * case.own_heads, (rank + 1) * case.own_heads)
            out, lse = (x.astype(np.float64) for x in runs[rank][index])
            assert out.shape == (rows, case.own_heads, case.head_dim)
            bound = epsilon * np.abs(wanted_out[:, own]) + slack * magnitude[:, own]
            # The least numbers of float16 are coarse.
            assert (np.abs(out - wanted_out[:, own]) <= bound + 2.0**-25).all(), (rank, index)
            is_empty = np.isneginf(wanted_lse[:, own])
            assert (np.isneginf(lse) == is_empty).all()
            error = np.abs(lse[~is_empty] - wanted_lse[:, own][~is_empty])
            assert (error <= slack).all(), (rank, index)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


def run_and_check(case: ExchangeCase, group: Group, xp: ModuleType = np) -> list[tuple[Any, Any]]:
    """A rank's part of a case, each exchange twice: what it answered, on the host, for `check`."""
    run = RankRun(case, group, xp)
    answers = []
    for index in range(len(case.rows)):
        # To make arrays may wait for a GPU, on which another rank of the process may wait for us.
        prepared = run.prepare(index), run.prepare(index)
        group.share_bytes(b"")
        first, again = (run.launch(x) for x in prepared)
        group.share_bytes(b"")
        hosts = [[np.asarray(to_host(x)) for x in (step.out, step.lse)] for step in (first, again)]
        for step in (first, again):
            step.check_poison()
        for a, b in zip(*hosts, strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))
        answers.append((hosts[0][0], hosts[0][1]))
    return answers


def to_host(x: Any) -> np.ndarray:
    return poison.download(x) if hasattr(x, "get") else np.ascontiguousarray(x)


SMALL = ExchangeCase(rows=(5, 1, 4, 4, 5), own_heads=2, head_dim=40)
LATE = replace(SMALL, rows=(2, 2, 2, 2), timeout=2.0, empty=0.0)
