"""Random cascades as the planners see them, and their kinds of tiles as launchers deal them out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from cupyattn.engine.levels import join_levels, read_levels
from cupyattn.schedule import Masking
from cupyattn.schedule.batch import BatchRequests, Splitting
from cupyattn.schedule.levels import MOST, Levels, Served
from cupyattn.schedule.mixed import Device, MixedPlan, plan_mixed
from cupyattn.schedule.tile_shape import TileShape

SHAPES = (
    (TileShape(128, 48, 264, 4.0), TileShape(16, 128, 264, 0.25)),
    (TileShape(64, 64, 20, 4.0), TileShape(32, 64, 20, 0.25)),
    (TileShape(64, 32, 7, 4.0), TileShape(16, 16, 7, 0.25)),
    (TileShape(16, 64, 40, 0.25),),
    (TileShape(128, 48, 3, 4.0),),
)
Kinds = list[tuple[np.ndarray, BatchRequests]]


@dataclass(frozen=True)
class Cascade:
    """levels: for each, (rows, keys) of its requests."""

    levels: tuple[tuple[tuple[int, int], ...], ...]
    group_size: int
    num_kv_heads: int
    shapes: tuple[TileShape, ...]
    masking: Masking
    most_tiles: int = 1  # of a request of the second kind

    @property
    def device(self) -> Device:
        return Device(self.shapes[0].num_slots, self.num_kv_heads)

    @property
    def tile_rows(self) -> list[int]:
        return [shape.tile_q for shape in self.shapes]

    def join(self) -> tuple[BatchRequests, Levels]:
        lists: list[list[np.ndarray]] = [[], [], [], []]
        for level in self.levels:
            rows, keys = np.array(level, np.int64).reshape(-1, 2).T
            table = offsets(rows), offsets(keys), np.zeros(keys.sum(), np.int32), np.ones_like(keys)
            for kind, x in zip(lists, table, strict=True):
                kind.append(x)
        parts = read_levels(lists, len(self.levels), 1, False)
        joined = join_levels(parts, self.masking.window_right == 0, self.masking.window_left >= 0)
        assert joined.levels is not None
        return joined.requests, joined.levels

    def assign_requests(self, requests: BatchRequests) -> Kinds:
        """As BatchLauncher does: the first kind serves what the second does not."""
        if len(self.shapes) == 1:
            return [(np.arange(len(requests.qo_len)), requests)]
        is_small = requests.qo_len * self.group_size <= self.shapes[1].tile_q * self.most_tiles
        return [
            (x, requests.select(x)) for x in (np.flatnonzero(~is_small), np.flatnonzero(is_small))
        ]

    def served(self) -> list[Served]:
        if len(self.shapes) == 1:
            return [Served(self.tile_rows[0], 0, MOST)]
        edge = self.tile_rows[1] * self.most_tiles
        return [Served(self.tile_rows[0], edge, MOST), Served(self.tile_rows[1], 0, edge)]

    def plan(self, kinds: Kinds, splitting: Splitting, leaves_states: bool) -> MixedPlan:
        return plan_mixed(
            [(x, shape) for (_, x), shape in zip(kinds, self.shapes, strict=True)],
            self.group_size,
            self.device,
            self.masking,
            splitting,
            leaves_states,
        )


def offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def maskings(most: int) -> st.SearchStrategy[Masking]:
    """No window, causality, windows to one side and to both."""
    window = st.one_of(st.just(-1), st.integers(0, most))
    return st.builds(Masking, window, st.one_of(st.just(0), window))


@st.composite
def cascades(draw: st.DrawFn, most: int = 6, longest_q: int = 30, longest_kv: int = 200) -> Cascade:
    """Levels that nest; without a window, some that do not."""
    pair = st.tuples(st.integers(0, longest_q), st.integers(0, longest_kv))
    levels = [draw(st.lists(pair, max_size=most))]
    causal, window = draw(st.booleans()), draw(st.sampled_from((-1, -1, 0, 20, 300)))
    if causal and window >= 0:
        levels[0] = [(rows, max(rows, keys)) for rows, keys in levels[0]]
    total = sum(rows for rows, _ in levels[0])
    for _ in range(draw(st.integers(0, 2))):
        edges = sorted({0, total, *offsets(np.array([n for n, _ in levels[0]], int)).tolist()})
        if window < 0 and draw(st.booleans()):
            edges = list(range(total + 1))
        cuts = sorted(draw(st.sets(st.sampled_from(edges), max_size=4)) | {0, total})
        keys = [draw(st.integers(0, longest_kv)) for _ in cuts[1:]]
        levels.insert(0, list(zip(np.diff(cuts).tolist(), keys, strict=True)))
    return Cascade(
        tuple(map(tuple, levels)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from(SHAPES)),
        Masking(window, 0 if causal else -1),
        draw(st.sampled_from((1, 1, 4))),
    )
