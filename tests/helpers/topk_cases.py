"""Rows of scores, drawn by seeds, of which the select_topk kernel chooses the greatest."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from cupyattn import array, reference
from cupyattn.core import dtypes
from cupyattn.core.selection import SelectProblem
from cupyattn.launch.ops import select_topk

from . import calls

TOPK = (1, 2, 7, 16, 31, 64, 200)
KINDS = ("normal", "few", "equal", "zeros", "least", "odd", "near")


def draw_scores(rng: np.random.Generator, kind: str, *shape: int) -> np.ndarray:
    """float32 scores: "few" values of each sign, all "equal", "zeros" of both signs, all -inf
    ("least"), "odd" numbers among others, or "near" one another."""
    if kind == "few":
        return rng.integers(-2, 3, shape).astype(np.float32) * np.float32(0.5)
    if kind == "equal":
        return np.full(shape, -0.0, np.float32)
    if kind == "zeros":
        return rng.choice(np.array([0.0, -0.0], np.float32), shape)
    if kind == "least":
        return np.full(shape, -np.inf, np.float32)
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "near":
        x = np.float32(3.25) + x * np.float32(1e-5)
    if kind == "odd":
        odd = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, -1e-42, np.float32(-np.nan)]
        chosen = rng.random(shape) < 0.5
        x[chosen] = rng.choice(np.array(odd, np.float32), int(chosen.sum()))
    return x


class TopkCase(calls.Placed):
    """A launch on rows of scores: tokens of requests, and a row for each of their groups."""

    def __init__(
        self, seed: int, xp: ModuleType = np, most: int = 700, topk: int = 0, kind: str = ""
    ) -> None:
        super().__init__(f"seed {seed}", xp, seed, 48)
        rng = self.rng
        self.kind = kind or str(rng.choice(KINDS))
        self.groups = int(rng.choice([1, 1, 2, 3]))
        self.ratio = int(rng.choice([1, 1, 2, 4]))
        self.block = self.ratio * int(rng.choice([1, 1, 8]))
        self.topk = topk or int(rng.choice(TOPK))
        self.first = int(rng.integers(0, min(self.topk, 3) + 1)) if rng.random() < 0.5 else 0
        self.last = int(rng.integers(0, min(self.topk - self.first, 2) + 1))
        self.has_candidates = bool(rng.random() < 0.3)
        self.tail = self.ratio > 1 and self.block == self.ratio and bool(rng.random() < 0.7)
        self.gives_values = bool(rng.random() < 0.5)
        self.causal = bool(rng.random() < 0.7)
        count = int(rng.integers(1, 4))
        self.kv_lens = rng.integers(0, most * self.block + 1, count).astype(np.int32)
        self.has_offsets = bool(rng.random() < 0.5)
        steps = (
            rng.integers(0, 4, count) if self.has_offsets else np.full(count, rng.integers(1, 3))
        )
        self.offsets = np.cumsum([0, *steps]).astype(np.int32)
        spare = int(rng.integers(0, 3)) if self.has_offsets else 0
        self.num_tokens = int(self.offsets[-1]) + spare
        self.max_blocks = most + int(rng.integers(0, 100))
        self.row_stride = -(-self.max_blocks // 4) * 4 + 4 * int(rng.integers(0, 3))

    @property
    def problem(self) -> SelectProblem:
        return SelectProblem(
            dtype_q=dtypes.bfloat16,
            dtype_k=dtypes.bfloat16,
            head_dim=128,
            num_heads=self.groups,
            num_groups=self.groups,
            block=self.block,
            ratio=self.ratio,
            topk=self.topk,
            first=self.first,
            last=self.last,
            tail=self.tail,
            candidate_block=self.block if self.has_candidates else 0,
            gives_values=self.gives_values,
        )

    def _seen(self, token: int) -> int:
        """Keys that a token sees."""
        request = int(np.searchsorted(self.offsets, token, "right")) - 1
        if request >= len(self.kv_lens):
            return 0
        later = int(self.offsets[request + 1]) - 1 - token if self.causal else 0
        return max(int(self.kv_lens[request]) - later, 0)

    def _blocks(self, token: int) -> int:
        return -(-(self._seen(token) // self.ratio) // (self.block // self.ratio))

    def expect(self) -> TopkCase:
        """Draw the scores, and choose from them."""
        scores = []
        for row in range(self.num_tokens * self.groups):
            drawn = draw_scores(self.rng, self.kind, self._blocks(row // self.groups))
            if self.has_candidates:
                drawn[np.isnan(drawn)] = -np.inf
                drawn[self.rng.random(drawn.size) > self.rng.choice([0.1, 0.9])] = np.nan
            scores.append(drawn)
        self.choose(scores)
        return self

    def choose(self, scores: Sequence[np.ndarray]) -> None:
        """The lists of rows of at least as many scores as they have blocks."""
        self.lists = np.full((self.num_tokens, self.groups, self.topk + self.tail), -1, np.int32)
        self.values = np.full(self.lists.shape, -np.inf, np.float32)
        self.scores = []
        for row, given in enumerate(scores):
            token, group = divmod(row, self.groups)
            own = given[: self._blocks(token)]
            self.scores.append(own)
            allowed = ~np.isnan(own) if self.has_candidates else None
            chosen = reference.choose_blocks(
                own, self.topk, first=self.first, last=self.last, allowed=allowed
            )
            values = own[chosen]
            self.lists[token, group, : chosen.size] = chosen
            self.values[token, group, : chosen.size] = np.where(np.isnan(values), -np.inf, values)
            if self.tail and self._seen(token) % self.ratio:
                self.lists[token, group, chosen.size] = own.size

    def place(self) -> None:
        """The arrays, with scores behind those of a row that nothing may choose."""
        rows = np.full((len(self.scores), self.row_stride), np.inf, np.float32)
        for row, scores in enumerate(self.scores):
            rows[row, : scores.size] = scores
        length = self.lists.shape[2]
        strides = (self.groups * (length + 5) + 3, length + 5, 1)
        if self.rng.random() < 0.5:
            strides = (length + 2, self.num_tokens * (length + 2), 1)
        self.placed = {
            "scores": self.embed("scores", rows),
            "kv_lens": self.embed("kv_lens", self.kv_lens),
            "offsets": self.embed("offsets", self.offsets),
            "out": self.blank("out", self.lists.shape, np.int32, strides).array,
            "values": self.blank("values", self.lists.shape, np.float32, strides).array,
        }
        self.strides_of_lists = strides[:2]

    def launch(self) -> None:
        views = {name: array.view(x, name) for name, x in self.placed.items()}
        tokens = select_topk.TOKENS.pack(
            views["kv_lens"].ptr,
            views["offsets"].ptr if self.has_offsets else 0,
            len(self.kv_lens),
            0 if self.has_offsets else int(self.offsets[1]),
            self.max_blocks * self.block,
            self.causal,
            0,
            self.ratio.bit_length() - 1,
            (self.block // self.ratio).bit_length() - 1,
            0,
        )
        v = views["scores"]
        select_topk.launch(
            self.problem,
            v.ptr,
            self.row_stride,
            self.max_blocks,
            tokens,
            self.num_tokens,
            views["out"].ptr,
            self.strides_of_lists,
            views["values"].ptr if self.gives_values else 0,
            self.strides_of_lists,
            v.device.index,
            array.current_stream(v),
        )

    def run(self) -> None:
        """Launch twice: the same answer, and nothing else touched."""
        self.place()
        for _ in range(2):
            self.launch()
            self.check()

    def check(self) -> None:
        got = self.owned["out"].values()
        np.testing.assert_array_equal(got, self.lists, err_msg=self.told())
        if self.gives_values:
            values = self.owned["values"].values()
            np.testing.assert_array_equal(values, self.values, err_msg=self.told())
        self.assert_intact()

    def told(self) -> str:
        shown = "kind groups ratio block topk first last has_candidates tail kv_lens offsets"
        return f"{self.case}: " + ", ".join(f"{x} {getattr(self, x)}" for x in shown.split())
