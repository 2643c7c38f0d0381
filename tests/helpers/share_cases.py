"""Seeded calls of what a rank's share of the keys is, on poisoned arrays, and answers by loops."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

import cupyattn

from . import calls, compare, poison


def owned(share: tuple[int, int, int], tokens: int) -> list[int]:
    """The rank's tokens among the first ones, in order."""
    world, rank, run = share
    return [t for t in range(tokens) if t // run % world == rank]


class Case(calls.Placed):
    """A share of random numbers, and calls of it. Tokens are below `MOST`."""

    MOST = 700

    def __init__(self, seed: int, xp: ModuleType = np, device: str = "") -> None:
        super().__init__(f"seed {seed}", xp, seed, 67, device=device)
        world = int(self.rng.integers(1, 7))
        self.share = world, int(self.rng.integers(world)), int(self.rng.choice([1, 2, 5, 16]))
        own = owned(self.share, self.MOST)
        self.places = {token: i for i, token in enumerate(own)}
        self.counts = np.searchsorted(own, np.arange(self.MOST + 1))

    def run(self) -> None:
        self._lengths()
        self._slots()
        self._lists()
        self._new_tokens()
        self.assert_intact()

    def _shape(self) -> tuple[int, ...]:
        return tuple(self.rng.integers(0, 9, int(self.rng.integers(1, 4))).tolist())

    def _integers(self, low: int, high: int, shape: Any) -> np.ndarray:
        kind = self.rng.choice([np.int32, np.int64])
        return self.rng.integers(low, high, shape).astype(kind)

    def _embed(self, name: str, x: np.ndarray) -> Any:
        """An index array, at times with gaps between its rows."""
        gap = int(self.rng.choice([0, 3])) if x.ndim > 1 else 0
        strides = [1]
        for extent in x.shape[:0:-1]:
            strides.insert(0, strides[0] * extent + (gap if len(strides) == 1 else 0))
        return self.embed(name, x, tuple(strides) if x.ndim else None)

    def _outputs(self, **shapes: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(outputs to write, as arguments; all of them as they are placed)."""
        kind = np.dtype(np.int32)
        placed = {n: self.blank(n, x, kind) for n, x in shapes.items() if self.rng.random() < 0.5}
        return {n: p.array for n, p in placed.items()}, placed

    def _check(self, name: str, got: Any, placed: Any, wanted: np.ndarray) -> None:
        found = poison.download(got)
        assert found.dtype == np.int32
        wanted = wanted.astype(np.int32)
        compare.assert_bitwise_equal(found, wanted, f"{self.case}: {name}")
        if placed is not None:
            assert got is placed.array
            compare.assert_bitwise_equal(placed.values(), wanted, f"{self.case}: {name}")

    def _lengths(self) -> None:
        whole = self._integers(-3, self.MOST, self._shape())
        named, placed = self._outputs(out=whole.shape)
        got = cupyattn.get_share_seq_lens(self._embed("seq_lens", whole), *self.share, **named)
        self._check("lengths", got, placed.get("out"), self.counts[np.maximum(whole, 0)])

    def _own(self, whole: np.ndarray) -> np.ndarray:
        flat = [self.places.get(x, -1) for x in whole.ravel().tolist()]
        return np.array(flat, np.int64).reshape(whole.shape)

    def _slots(self) -> None:
        whole = self._integers(-3, self.MOST, self._shape())
        named, placed = self._outputs(out=whole.shape)
        got = cupyattn.get_share_slots(self._embed("slots", whole), *self.share, **named)
        self._check("slots", got, placed.get("out"), self._own(whole))

    def _lists(self) -> None:
        rng = self.rng
        requests, tokens, top_k = int(rng.integers(1, 4)), int(rng.integers(1, 4)), 0
        if rng.random() < 0.9:
            top_k = int(rng.choice([1, 5, 64, 300, 600]))
        lead = (requests, tokens) if rng.random() < 0.5 else (requests * tokens,)
        whole = self._integers(-self.MOST // 3, self.MOST, (*lead, top_k))
        own, named = self._own(whole).reshape(requests * tokens, top_k), dict[str, Any]()
        if rng.random() < 0.5:
            lens = self._integers(-1, top_k + 3, lead)
            named["lens"] = self._embed("lens", lens)
            own[np.arange(top_k) >= lens.reshape(-1, 1)] = -1
        if rng.random() < 0.5:
            page, width = int(rng.choice([1, 3, 16])), int(rng.integers(0, 40))
            tables = self._integers(-2, 60, (requests, width))
            named |= {"block_tables": self._embed("tables", tables), "page_size": page}
            for row, column in np.argwhere(own >= 0):
                key, table = own[row, column], tables[row // tokens]
                is_held = key // page < width and table[key // page] >= 0
                slot = table[key // page] * page + key % page if is_held else -1
                own[row, column] = slot
        outputs, placed = self._outputs(out=whole.shape, counts=lead)
        got = cupyattn.get_share_lists(self._embed("lists", whole), *self.share, **named, **outputs)
        wanted = np.full_like(own, -1)
        for row, x in enumerate(own):
            wanted[row, : (x >= 0).sum()] = x[x >= 0]
        counts = (own >= 0).sum(axis=1).reshape(lead)
        for name, x, answer in zip(
            ("out", "counts"), (wanted.reshape(whole.shape), counts), got, strict=True
        ):
            self._check(f"lists, {name}", answer, placed.get(name), x)

    def _new_tokens(self) -> None:
        """Which request and which of the rank's keys new tokens are."""
        rng, world = self.rng, dict(zip(_NAMES, self.share, strict=True))
        new = rng.integers(0, 5, int(rng.integers(1, 9)))
        lens = new + rng.integers(0, self.MOST - 5, new.size)
        offsets, nnz = np.append(0, new.cumsum()), int(new.sum()) + int(rng.integers(3))
        batch, positions = np.full(nnz, -1), np.zeros(nnz, np.int64)
        for request, begin in enumerate(offsets[:-1]):
            for i in range(new[request]):
                own = self.places.get(int(lens[request] - new[request] + i), -1)
                if own >= 0:
                    batch[begin + i], positions[begin + i] = request, own
        given = [
            self.embed(n, x.astype(np.int32)) for n, x in (("indptr", offsets), ("lens", lens))
        ]
        outputs, placed = self._outputs(batch_indices=(nnz,), positions=(nnz,))
        got = cupyattn.get_batch_indices_positions(*given, nnz, **outputs, **world)
        for name, x, answer in zip(
            ("batch_indices", "positions"), (batch, positions), got, strict=True
        ):
            self._check(name, answer, placed.get(name), x)


_NAMES = "cp_world_size", "cp_rank", "cp_kv_cache_interleave_size"
