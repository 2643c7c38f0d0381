"""FlashInfer's choices of keys by scores, drawn by seeds: a GPU's answers are the CPU's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cupyattn import msa_ops, topk
from cupyattn.core import dtypes

from . import calls
from .poison import download
from .topk_cases import KINDS, draw_scores


class GivenScores(calls.Placed):
    """One call of each function, whose lengths and tables are as they should be."""

    def __init__(self, seed: int, xp: ModuleType = np, most: int = 500) -> None:
        super().__init__(f"seed {seed}", xp, seed, 49)
        self.most = int(self.rng.integers(1, most + 1))
        self.k = int(self.rng.choice([1, 3, 16, 40, 700]))

    def _scores(self, *shape: int) -> np.ndarray:
        dtype = dtypes.parse(str(self.rng.choice(["float32", "float16", "bfloat16"]))).numpy
        return draw_scores(self.rng, str(self.rng.choice(KINDS)), *shape).astype(dtype)

    def _ints(self, low: int, high: np.ndarray | int, count: int) -> np.ndarray:
        return self.rng.integers(low, high, count).astype(np.int32)

    def expect(self) -> GivenScores:
        """Draw the calls, and answer them on the CPU."""
        self.functions = [self._slots(), self._rows(), self._blocks()]
        self.wanted = [function(**named) for function, named in self.functions]
        self.columns = np.empty_like(self.wanted[0])
        self.functions[0][0](**self.functions[0][1], out_raw_indices=self.columns)
        return self

    def _slots(self) -> tuple[Any, dict[str, Any]]:
        rng, rows = self.rng, int(self.rng.integers(1, 4))
        size, requests = int(rng.choice([1, 1, 4])), int(rng.integers(rows, 5))
        width = -(-self.most // size) + 5
        starts = self._ints(0, self.most + 1, rows)
        has_starts = bool(rng.random() < 0.5)
        named: dict[str, Any] = {
            "input": self._scores(rows, self.most),
            "src_page_table": self._ints(-1, 1000, requests * width).reshape(requests, width),
            "lengths": self._ints(0, self.most - (starts if has_starts else 0) + 1, rows),
            "k": self.k,
            "tie_break": int(rng.integers(0, 3)),
            "page_size": size,
        }
        if has_starts:
            named["row_starts"] = starts
            if size > 1:
                named["page_table_row_starts"] = self._ints(0, 5, rows)
        if rng.random() < 0.5:
            named["row_to_batch"] = self._ints(0, requests, rows)
        return topk.top_k_page_table_transform, named

    def _rows(self) -> tuple[Any, dict[str, Any]]:
        rows = int(self.rng.integers(1, 4))
        named = {
            "input": self._scores(rows, self.most),
            "offsets": self._ints(0, 10_000, rows),
            "lengths": self._ints(0, self.most + 1, rows),
            "k": self.k,
            "tie_break": int(self.rng.integers(0, 3)),
        }
        return topk.top_k_ragged_transform, named

    def _blocks(self) -> tuple[Any, dict[str, Any]]:
        rng, heads, tokens = self.rng, int(self.rng.integers(1, 3)), int(self.rng.integers(1, 4))
        blocks = self.most
        valid = (None, self._ints(0, blocks + 3, tokens), int(rng.integers(0, blocks + 1)))
        first = int(rng.integers(0, min(self.k, 2) + 1))
        named = {
            "max_score": draw_scores(rng, str(rng.choice(KINDS)), heads, blocks, tokens),
            "topk": self.k,
            "num_valid_pages": valid[int(rng.integers(3))],
            "force_begin_blocks": first,
            "force_end_blocks": int(rng.integers(0, min(self.k - first, 2) + 1)),
        }
        return msa_ops.msa_topk_select, named

    def run(self) -> None:
        """The same calls on arrays of the framework."""
        for (function, named), want in zip(self.functions, self.wanted, strict=True):
            placed = {
                name: self.embed(f"{function.__name__} {name}", x)
                if isinstance(x, np.ndarray)
                else x
                for name, x in named.items()
            }
            columns = None
            if "src_page_table" in named:
                columns = self.blank("columns", want.shape, np.int32)
                placed["out_raw_indices"] = columns.array
            got = download(function(**placed))
            np.testing.assert_array_equal(got, want, err_msg=self._told(function, named))
            if columns is not None:
                np.testing.assert_array_equal(columns.values(), self.columns)
        self.assert_intact()

    def _told(self, function: Any, named: dict[str, Any]) -> str:
        shown = {
            name: f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) and x.size > 9 else x
            for name, x in named.items()
        }
        return f"{self.case}: {function.__name__} {shown}"
