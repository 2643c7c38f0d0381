"""One layer of an MLA model: absorbed queries over latent rows give what its heads give unabsorbed.

W_UK goes into the queries and W_UV behind the answer. Unabsorbed, a head has keys of 192 columns
and values of 128.
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn import mla, reference

from .batches import fill_pages, offsets
from .poison import download, upload

HEADS, NOPE, VALUE, RANK, ROPE = 16, 128, 128, 512, 64
SCALE = (NOPE + ROPE) ** -0.5
PAGE = 64
LENS, NEW = (130, 700, 64, 0), (3, 40, 64, 0)  # keys of each request, and its last tokens, the new
# Rounding of q, k and the answer to float16, several times over.
_TOLERANCE = 1e-3


class Layer:
    """float16 arrays, as a model would have them, and its answers by float64."""

    def __init__(self, xp: ModuleType, workspace: Any) -> None:
        rng = np.random.default_rng(5)
        self.xp, self.workspace = xp, workspace
        self.w_uk, self.w_uv = (rng.standard_normal((HEADS, NOPE, RANK)) / RANK**0.5 for _ in "kv")
        self.q = rng.standard_normal((sum(NEW), HEADS, NOPE + ROPE))
        self.rows = rng.standard_normal((sum(LENS), RANK + ROPE)).astype(np.float16)
        self.qo_indptr, self.kv_indptr = offsets(NEW), offsets(LENS)
        nope = np.einsum("rhn,hnl->rhl", self.q[..., :NOPE], self.w_uk)
        self.absorbed_q = np.concatenate([nope, self.q[..., NOPE:]], -1).astype(np.float16)
        self.k, self.v = self.unabsorbed(self.rows.astype(np.float64))

    def unabsorbed(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of all heads."""
        nope = np.einsum("rl,hnl->rhn", rows[:, :RANK], self.w_uk)
        rope = np.broadcast_to(rows[:, None, RANK:], (len(rows), HEADS, ROPE))
        return np.concatenate([nope, rope], -1), np.einsum("rl,hvl->rhv", rows[:, :RANK], self.w_uv)

    def keys_of(self, b: int) -> slice:
        return slice(self.kv_indptr[b], self.kv_indptr[b + 1])

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """(o, LSE) by float64."""
        parts = []
        for b, (begin, end) in enumerate(pairwise(self.qo_indptr)):
            keys = self.keys_of(b)
            pair = self.k[keys], self.v[keys]
            parts.append(reference.attention(self.q[begin:end], *pair, causal=True, sm_scale=SCALE))
        return tuple(np.concatenate(x) for x in zip(*parts, strict=True))  # type: ignore[return-value]

    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """Absorbed attention over scattered pages, in columns of values."""
        pages = [-(-n // PAGE) for n in LENS]
        indptr, rng = offsets(pages), np.random.default_rng(6)
        ids = rng.permutation(sum(pages) + 2)[: sum(pages)].astype(np.int32)
        pool = np.full((sum(pages) + 2, PAGE, RANK + ROPE), np.nan, np.float16)
        for b in range(len(LENS)):
            fill_pages(pool, ids[indptr[b] :], self.rows[self.keys_of(b)])
        wrapper = mla.BatchMLAPagedAttentionWrapper(self.workspace)
        wrapper.plan(
            self.qo_indptr, indptr, ids, np.array(LENS, np.int32), HEADS, RANK, ROPE, PAGE, True,
            SCALE, "float16", "float16",
        )  # fmt: skip
        arrays = {"query": self.absorbed_q, "kv_cache": pool}
        arrays = {name: upload(x, self.xp) for name, x in arrays.items()}
        out, lse = (np.float64(download(x)) for x in wrapper.run(**arrays, return_lse=True))
        return np.einsum("rhl,hvl->rhv", out, self.w_uv), lse

    def heads(self, keys: list[slice], causal: bool) -> tuple[Any, Any]:
        """Unabsorbed attention over these keys of each request: states on the device."""
        k, v = (np.concatenate([x[s] for s in keys]).astype(np.float16) for x in (self.k, self.v))
        wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(self.workspace)
        counts = offsets([s.stop - s.start for s in keys])
        wrapper.plan(
            self.qo_indptr, counts, HEADS, HEADS, NOPE + ROPE, head_dim_vo=VALUE, causal=causal,
            sm_scale=SCALE, q_data_type="float16",
        )  # fmt: skip
        arrays = [upload(x, self.xp) for x in (self.q.astype(np.float16), k, v)]
        return wrapper.run(*arrays, return_lse=True)

    def in_chunks(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """New tokens over themselves, merged with what chunks of the keys before them give."""
        first = self.kv_indptr[:-1]
        prefix = np.subtract(LENS, NEW)
        own = [slice(f + p, f + n) for f, p, n in zip(first, prefix, LENS, strict=True)]
        out, lse = self.heads(own, causal=True)
        for begin in range(0, max(prefix), size):
            edges = first + np.minimum(prefix, begin), first + np.minimum(prefix, begin + size)
            parts = [slice(*ends) for ends in zip(*edges, strict=True)]
            out, lse = cupyattn.merge_state(out, lse, *self.heads(parts, causal=False))
        return np.float64(download(out)), np.float64(download(lse))


def check(xp: ModuleType, workspace: Any) -> None:
    """Absorbed, unabsorbed and chunked attention are as near to float64 as float16 allows."""
    layer = Layer(xp, workspace)
    wanted, wanted_lse = layer.exact()
    for found, lse in (layer.whole(), layer.in_chunks(1000), layer.in_chunks(96)):
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert error < _TOLERANCE, error
        np.testing.assert_allclose(lse, wanted_lse, atol=5e-3)
