"""Needles among keys: what one key alone says, asked for by rows that know it.

A row's needle draws a logit of about 18 among standard normal ones, of which 128k keys have a sum
of e^12.3: it has more than 0.99 of the weight, and its value is a code of signs. Beside it lie keys
that draw half of that, and say the opposite. An answer that mixes keys up, or loses one to
rounding, has other signs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn.core import dtypes

from .poison import download, upload

E4M3 = dtypes.float8_e4m3fn.numpy
HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 2, 128, 64
_LOGIT, _DECOYS = 18.0, 3


@dataclass
class Haystack:
    """q [rows, HEADS, HEAD_DIM], k and v [keys, KV_HEADS, HEAD_DIM] of e4m3; codes of +-1 are the
    signs of the answer's elements, like q. scales: of q, k and v, float32 by head."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    codes: np.ndarray
    scales: tuple[np.ndarray, np.ndarray, np.ndarray]

    def found(self, out: np.ndarray) -> float:
        """The share of rows whose answer is their needle's code in all elements."""
        signs = np.sign(out.astype(np.float32))
        return float((signs == self.codes).all(-1).mean())


def haystack(rows: int, keys: int, seed: int = 0) -> Haystack:
    """Needles from the first key to the last one, each row of each head with one of its own."""
    rng = np.random.default_rng((seed, keys))
    q = rng.standard_normal((rows, HEADS, HEAD_DIM), np.float32)
    k = rng.standard_normal((keys, KV_HEADS, HEAD_DIM), np.float32)
    v = rng.standard_normal((keys, KV_HEADS, HEAD_DIM), np.float32)
    codes = rng.choice([-1.0, 1.0], q.shape).astype(np.float32)
    group = HEADS // KV_HEADS
    count = rows * group * (1 + _DECOYS)
    for kv_head in range(KV_HEADS):
        places = rng.choice(keys, count, replace=False).reshape(rows * group, -1)
        # The first row's needle is the first key, the last row's the last.
        for row, place in ((0, 0), (-1, keys - 1)):
            places[places == place] = places[row, 0]
            places[row, 0] = place
        heads = slice(kv_head * group, (kv_head + 1) * group)
        asked = q[:, heads].reshape(-1, HEAD_DIM)
        said = codes[:, heads].reshape(-1, HEAD_DIM)
        # The scale of logits is 1 / sqrt(HEAD_DIM).
        needles = asked * (_LOGIT * HEAD_DIM**0.5 / np.square(asked).sum(-1, keepdims=True))
        for place, share, sign in zip(
            places.T, (1.0, *[0.5] * _DECOYS), (2.0, *[-2.0] * _DECOYS), strict=True
        ):
            k[place, kv_head] = share * needles
            v[place, kv_head] = sign * said
    scales = tuple(rng.uniform(0.5, 2.0, x.shape[1]).astype(np.float32) for x in (q, k, v))
    stored = [(x / s[:, None]).astype(E4M3) for x, s in zip((q, k, v), scales, strict=True)]
    return Haystack(*stored, codes, (scales[0], scales[1], scales[2]))


def shares_found(stack: Haystack, xp: ModuleType = np) -> dict[str, float]:
    """What a prompt over rows of keys, an append over pages and decode of the last row find; arrays
    of xp, NumPy's on the CPU."""
    q, k, v = (upload(x, xp) for x in (stack.q, stack.k, stack.v))
    scales = tuple(upload(x, xp) for x in stack.scales)
    rows, keys = stack.q.shape[0], stack.k.shape[0]
    out = cupyattn.single_prefill_with_kv_cache(q, k, v, *scales)
    found = {"prompt": stack.found(_floats(out))}
    count = -(-keys // PAGE)
    order = np.random.default_rng(1).permutation(count).astype(np.int32)
    pages = tuple(upload(_paged(x, order), xp) for x in (stack.k, stack.v))
    indptr, last = np.array([0, count], np.int32), np.array([(keys - 1) % PAGE + 1], np.int32)
    heads = HEADS, KV_HEADS, HEAD_DIM, PAGE
    options = {"q_data_type": "float8_e4m3fn", "kv_data_type": "float8_e4m3fn"}
    space = upload(np.zeros(32 << 20, np.uint8), xp)
    append = cupyattn.BatchPrefillWithPagedKVCacheWrapper(space)
    append.plan(np.array([0, rows], np.int32), indptr, order, last, *heads, **options)
    found["append"] = stack.found(_floats(append.run(q, pages, *scales)))
    decode = cupyattn.BatchDecodeWithPagedKVCacheWrapper(space)
    decode.plan(indptr, order, last, *heads, **options)
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    one = upload(stack.q[-1:].copy(), xp)
    last_row = replace(stack, codes=stack.codes[-1:])
    return found | {"decode": last_row.found(_floats(decode.run(one, pages, **named)))}


def _paged(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Pages [pages, PAGE, heads, head_dim] of which `order` are the request's."""
    pages = np.zeros((order.size, PAGE, *x.shape[1:]), x.dtype)
    padded = np.zeros((order.size * PAGE, *x.shape[1:]), x.dtype)
    padded[: len(x)] = x
    pages[order] = padded.reshape(pages.shape)
    return pages


def _floats(out: Any) -> np.ndarray:
    return download(out).astype(np.float32)
