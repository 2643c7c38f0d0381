"""Calls of trtllm_fmha_v2_prefill with chunks of keys, or with pages of K and V apart, and what
they should answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

import cupyattn

from .batches import fill_pages, offsets
from .plain_answers import LOG2_E, dense

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
Put = Callable[[np.ndarray], Any]
LAYOUTS = ("CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND", "own pages")


class Chunked:
    """A random batch, called on arrays that `put` makes."""

    def __init__(
        self, seed: int, layout: str, chunk: int, put: Callable[[np.ndarray], Any] = np.asarray
    ) -> None:
        rng = np.random.default_rng(seed)
        self.layout, self.chunk = layout, chunk
        kv_len = rng.integers(1, 200, 4)
        qo_len = np.minimum(rng.integers(1, 90, 4), kv_len)
        kv_len[0], qo_len[0] = kv_len[0] + 60, 60  # of more rows than the portable kernels are for
        self.lens, self.put = (qo_len, kv_len), put
        self.q = rng.normal(0, 1, (qo_len.sum(), HEADS, DIM)).astype(np.float16)
        self.keys = rng.normal(0, 1, (2, kv_len.sum(), KV_HEADS, DIM)).astype(np.float16)
        self.rng = rng

    def _rows(self, which: int) -> list[slice]:
        """The rows of q, or the keys, of each request."""
        return [slice(*ends) for ends in pairwise(offsets(self.lens[which]))]

    def qkv(self) -> tuple[Any, dict[str, Any]]:
        k, v = self.keys
        if self.layout == "CONTIGUOUS_Q_KV":
            return (self.put(self.q), self.put(np.stack([k, v], axis=1))), {}
        if self.layout == "SEPARATE_Q_K_V":
            return tuple(map(self.put, (self.q, k, v))), {}
        kv_len = self.lens[1]
        width = -(-int(kv_len.max()) // PAGE)
        count = width * len(kv_len)
        tables = np.stack([self.rng.permutation(count).reshape(-1, width) for _ in range(2)], 1)
        pools = np.full((2, count, PAGE, KV_HEADS, DIM), np.nan, np.float16)
        if self.layout != "own pages":
            tables[:, 1] = tables[:, 0]
        for which in range(2):
            for own, keys in zip(tables[:, which], self._rows(1), strict=True):
                fill_pages(pools[which], own, self.keys[which, keys])
        if self.layout == "own pages":
            tables[:, 1] += count
            held = self.put(pools)
            return (self.put(self.q), (held[0], held[1])), {
                "block_tables": self.put(tables.astype(np.int32))
            }
        pages = pools.swapaxes(0, 1)
        if self.layout.endswith("HND"):
            pages = pages.swapaxes(2, 3)
        table = {"block_tables": self.put(np.ascontiguousarray(tables[:, 0]).astype(np.int32))}
        return (self.put(self.q), self.put(np.ascontiguousarray(pages))), table

    def arguments(self, workspace: Any) -> dict[str, Any]:
        qkv, table = self.qkv()
        qo_len, kv_len = self.lens
        named = {"mask_mode": "chunked", "chunked_attention_size": self.chunk} if self.chunk else {}
        return {
            "qkv": qkv,
            "input_layout": "Q_PAGED_KV_NHD" if self.layout == "own pages" else self.layout,
            "workspace_buffer": workspace,
            "seq_lens": self.put(kv_len.astype(np.int32)),
            "max_q_len": int(qo_len.max()),
            "max_kv_len": int(kv_len.max()),
            "bmm1_scale": DIM**-0.5,
            "bmm2_scale": 0.5,
            "batch_size": len(kv_len),
            "cum_seq_lens_q": self.put(offsets(qo_len).astype(np.int32)),
            "cum_seq_lens_kv": self.put(offsets(kv_len).astype(np.int32)),
            **table,
            **named,
        }

    def __call__(self, workspace: Any, **options: Any) -> Any:
        return cupyattn.trtllm_fmha_v2_prefill(**self.arguments(workspace), **options)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse in base 2)."""
        rows, keys = self._rows(0), self._rows(1)
        named = {"scale": DIM**-0.5, "causal": True, "chunk": self.chunk}
        parts = [
            dense(self.q[r], *self.keys[:, k], **named) for r, k in zip(rows, keys, strict=True)
        ]
        o = np.concatenate([out for out, _ in parts])
        return 0.5 * o, np.concatenate([lse for _, lse in parts], axis=1).T * LOG2_E
