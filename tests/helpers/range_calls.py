"""Ranges that rows see in both directions, of three kinds, and the dense masks that they mean."""

from __future__ import annotations

import numpy as np

from . import batches


def images(b: batches.Batch, rng: np.random.Generator, largest: int = 9) -> np.ndarray:
    """Ranges as of images: a row is in none, or in its own."""
    rows = [np.zeros((0, 2), int)]
    for qo_len, kv_len in zip(b.qo_len, b.kv_len, strict=True):
        own, place = np.full((kv_len, 2), -1), 0
        while place < kv_len:
            size = int(rng.integers(1, largest))
            if rng.random() < 0.6:
                own[place : place + size] = place, min(place + size, kv_len) - 1
            place += size
        ahead = np.full((max(0, qo_len - kv_len), 2), -1)
        rows += [ahead, own[max(0, kv_len - qo_len) :]]
    return np.concatenate(rows).astype(np.int32)


def anywhere(b: batches.Batch, rng: np.random.Generator) -> np.ndarray:
    """Ranges that need not hold their row, nor keys at all."""
    return rng.integers(-3, 45, (b.q.shape[0], 2)).astype(np.int32)


def ahead(b: batches.Batch, rng: np.random.Generator) -> np.ndarray:
    """Ranges of the last keys: rows see keys in two places."""
    last = np.repeat(b.kv_len, b.qo_len)
    return np.stack([last - rng.integers(0, 4, last.size), last + 5], axis=1).astype(np.int32)


def masks(b: batches.Batch, ranges: np.ndarray, causal: int, own: int) -> list[np.ndarray]:
    found = []
    for i, (qo_len, kv_len) in enumerate(zip(b.qo_len, b.kv_len, strict=True)):
        place = (np.arange(qo_len) + kv_len - qo_len)[:, None]
        key = np.arange(kv_len)
        seen = (key <= place) & ((place - key <= causal) | (causal < 0))
        first, last = ranges[b.qo_indptr[i] : b.qo_indptr[i + 1], :, None].swapaxes(0, 1)
        in_range = (key >= first) & (key <= last)
        found.append(seen | (in_range & ((place - key < own) | (own <= 0))))
    return found
