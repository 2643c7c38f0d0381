"""Seeded calls of flash_mla over lists of two caches, or of one whose rows have 584 bytes; rows
that nothing lists are NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn import reference
from cupyattn.reference.latent_rows import pack_pages, pack_rows, unpack_pages, unpack_rows

FORMS = "plain", "656 bytes", "584 bytes"


@dataclass
class Listed:
    """arguments of flash_mla_with_kvcache, and the keys of each token, float32 [keys, columns]."""

    arguments: dict[str, Any]
    keys: list[list[np.ndarray]]

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) in float64."""
        q, sinks = self.arguments["q"].astype(np.float64), self.arguments["attn_sink"]
        count, tokens, heads, columns = q.shape
        out, lse = np.zeros((count, tokens, heads, 512)), np.full((count, heads, tokens), np.inf)
        for request, own in enumerate(self.keys):
            for token, keys in enumerate(own):
                if not len(keys):
                    continue
                k = keys[:, None].astype(np.float64)
                o, base2 = reference.attention(
                    q[request, token][None], k, k[..., :512], sm_scale=columns**-0.5
                )
                natural = base2[0] * math.log(2.0)
                weight = 1.0 if sinks is None else 1.0 / (1.0 + np.exp(sinks - natural))
                out[request, token] = o[0] * np.reshape(weight, (-1, 1))
                lse[request, :, token] = natural
        return out, lse


def _pages(rng: np.random.Generator, form: str, dtype: Any, count: int, size: int) -> Any:
    """(a cache, its values as float32)."""
    columns = 512 if form == "584 bytes" else int(rng.choice((512, 576)))
    if form == "656 bytes":
        columns = 576
    values = rng.standard_normal((count, size, columns)).astype(np.float32)
    values *= np.exp2(rng.integers(-6, 3, (count, size, 1)))
    if form == "656 bytes":
        packed = pack_rows(values)
        return packed[:, :, None], unpack_rows(packed)
    if form == "584 bytes":
        packed = pack_pages(values)
        return packed[:, :, None], unpack_pages(packed)
    values = values.astype(dtype)
    return values[:, :, None], values.astype(np.float32)


def _spoil(cache: np.ndarray, form: str, listed: np.ndarray) -> np.ndarray:
    """The same, with NaN in rows that no list names."""
    count, size = cache.shape[:2]
    unlisted = np.setdiff1d(np.arange(count * size), listed)
    if form == "plain":
        cache.reshape(count * size, -1)[unlisted] = np.nan
    elif form == "656 bytes":
        cache.reshape(count * size, -1)[unlisted] = 255
    else:  # the rows of a page come first
        for slot in unlisted.tolist():
            begin = slot % size * 576
            cache[slot // size].reshape(-1)[begin : begin + 576] = 255
    return cache


def draw(seed: int, dtype: Any = ml_dtypes.bfloat16, form: str = "") -> Listed:
    """A call whose q has this dtype; the form of rows by seed unless it is given."""
    rng = np.random.default_rng((seed, 91))
    form = form or FORMS[seed % 3]
    count, tokens, heads = (int(rng.integers(1, n)) for n in (4, 4, 20))
    has_second = form != "584 bytes" or rng.random() < 0.7
    caches, columns = [], None
    while len(caches) < 1 + has_second:
        size = int(rng.choice((2, 4, 16, 64)))
        cache, values = _pages(rng, form, dtype, int(rng.integers(1, 6)), size)
        columns = columns or values.shape[-1]
        if values.shape[-1] == columns:
            caches.append((cache, values))
    arguments: dict[str, Any] = {
        "q": rng.standard_normal((count, tokens, heads, columns)).astype(dtype),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "attn_sink": None,
        "is_fp8_kvcache": form != "plain",
    }
    if rng.random() < 0.5:
        arguments["attn_sink"] = rng.standard_normal(heads).astype(np.float32)
    names = (
        ("k_cache", "indices", "topk_length"),
        ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"),
    )
    keys: list[list[list[np.ndarray]]] = [[[] for _ in range(tokens)] for _ in range(count)]
    for (cache, values), (of_cache, of_lists, of_lens) in zip(caches, names, strict=False):
        slots, length = values.shape[0] * values.shape[1], int(rng.choice((1, 7, 33, 70)))
        lists = rng.integers(-slots // 4 - 1, slots + 3, (count, tokens, length)).astype(np.int32)
        lens = np.full(count, length, np.int32)
        if rng.random() < 0.6:
            lens = rng.integers(0, length + 3, count).astype(np.int32)
            arguments[of_lens] = lens
        is_key = (lists >= 0) & (lists < slots) & (np.arange(length) < lens[:, None, None])
        for request, token in np.ndindex(count, tokens):
            own = lists[request, token][is_key[request, token]]
            keys[request][token].append(values.reshape(slots, -1)[own])
        arguments[of_cache], arguments[of_lists] = _spoil(cache, form, lists[is_key]), lists
    joined = [[np.concatenate(parts) for parts in own] for own in keys]
    return Listed(arguments, joined)
