"""Seeded calls of sparse.attend over blocks of latent rows; rows that nothing lists are NaN."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupyattn import reference


class Case:
    """Arguments of the call, and the cache slots of each token's keys, in any order."""

    def __init__(self, seed: int, dtype: Any = ml_dtypes.bfloat16) -> None:
        rng = np.random.default_rng((seed, 93))
        requests, page = int(rng.integers(1, 4)), int(rng.choice((1, 4, 16)))
        self.granularity, rope = int(rng.choice((1, 1, 4, 16))), int(rng.choice((0, 64)))
        each = rng.integers(0, 4, requests)
        is_ragged = bool(rng.random() < 0.5)
        if not is_ragged:
            each[:] = int(rng.integers(1, 4))
        lengths = rng.integers(0, 90, requests)
        width = -(-90 // page)
        table = rng.permutation(requests * width).reshape(requests, width)
        pool = rng.standard_normal((requests * width, page, 512 + rope))
        tokens = int(each.sum()) + (2 if is_ragged else 0)
        entries = int(rng.integers(1, 20))
        top = -(-90 // self.granularity)
        lists = rng.integers(-2, top + 3, (tokens, entries)).astype(np.int32)
        window = int(rng.choice((0, 0, 5)))
        is_causal = bool(rng.random() < 0.7)
        self.slots: list[list[int]] = [[] for _ in range(tokens)]
        ends = np.cumsum(each)
        for token in range(int(each.sum())):
            request = int(np.searchsorted(ends, token, side="right"))
            seen = int(lengths[request])
            if is_causal:
                seen = max(seen - int(ends[request] - 1 - token), 0)
            keys = [
                int(block) * self.granularity + i
                for block in lists[token]
                for i in range(self.granularity)
                if block >= 0
            ]
            begin = max(seen - window, 0)
            keys = [key for key in keys if key < begin] + [*range(begin, seen)]
            self.slots[token] = [
                int(table[request, key // page]) * page + key % page for key in keys
            ]
        read = np.unique([slot for own in self.slots for slot in own]).astype(np.int64)
        flat = pool.reshape(-1, 512 + rope)
        flat[np.setdiff1d(np.arange(len(flat)), read)] = np.nan
        heads = int(rng.integers(1, 18))
        self.arguments: dict[str, Any] = {
            "q": rng.standard_normal((tokens, heads, 512 + rope)).astype(dtype),
            "cache": pool.astype(dtype)[:, :, None] if seed % 2 else pool.astype(dtype),
            "lists": lists[:, None] if seed % 3 else lists,
            "table": table.astype(np.int32),
            "lengths": lengths.astype(np.int32),
            "granularity": self.granularity,
            "head_dim_v": 512,
            "window": window,
            "causal": is_causal,
            "return_lse": True,
        }
        if is_ragged:
            self.arguments["indptr"] = np.append(0, ends).astype(np.int32)
        if rng.random() < 0.4:
            self.arguments["sinks"] = rng.standard_normal(heads).astype(np.float32)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) in float64, base 2."""
        q, cache = (self.arguments[name].astype(np.float64) for name in ("q", "cache"))
        rows, sinks = cache.reshape(-1, q.shape[2]), self.arguments.get("sinks")
        out, lse = np.zeros((*q.shape[:2], 512)), np.full(q.shape[:2], -np.inf)
        for token, slots in enumerate(self.slots):
            k = rows[np.array(slots, np.int64)][:, None]
            out[token], lse[token] = (
                x[0] for x in reference.attention(q[token][None], k, k[..., :512], sinks=sinks)
            )
        return out, lse
