"""Answers worked out plainly, row by row, from arguments in their plain form: a second oracle.

It shares no code with cupyattn.reference, so that a mistake in what the library takes a call to
mean shows. Arguments are named as the calls name them; keys are gathered before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

LOG2_E = math.log2(math.e)
Pair = tuple[np.ndarray, np.ndarray]


class Request(NamedTuple):
    """Rows of q, the keys and values [n, heads, dim] of their request, and a mask."""

    rows: slice
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None = None


class Logits(NamedTuple):
    """What happens to a logit, and which keys rows see: names of single_prefill_with_kv_cache."""

    sm_scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    logits_soft_cap: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None
    logits_transform: str | None = None  # "1": every logit is 1
    rel_logits: np.ndarray | None = None
    # flash_attn's: rows see the keys of their own chunk, and slopes of heads lower far keys.
    attention_chunk: int = 0
    alibi_slopes: np.ndarray | None = None


def sigmoid(gate: np.ndarray) -> np.ndarray:
    """What gates [rows, heads] or [rows, heads, head_dim] multiply rows by, in float64."""
    with np.errstate(over="ignore"):
        factors = 1.0 / (1.0 + np.exp(-gate.astype(np.float64)))
    return factors if gate.ndim == 3 else factors[..., None]


def _turned(x: np.ndarray, position: int, how: Logits) -> np.ndarray:
    half = x.shape[-1] // 2
    theta, scale = how.rope_theta or 1e4, how.rope_scale or 1.0
    angle = position * theta ** (-np.arange(half) / half) / scale
    pairs = x[..., :half] + 1j * x[..., half:]
    turned = pairs * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


def _slope(head: int, num_heads: int) -> float:
    power = 2 ** int(math.log2(num_heads))
    if head < power:
        return 2.0 ** (-8 * (head + 1) / power)
    return 2.0 ** (-4 * (2 * (head - power) + 1) / power)


def _near(
    how: Logits, row: int, head: int, rows: int, heads: int, distance: np.ndarray
) -> np.ndarray:
    """The biases of keys at these distances."""
    biases = how.rel_logits
    assert biases is not None and biases.flags.c_contiguous and biases.ndim == 3
    assert len(biases) >= rows and biases.shape[1] == heads and biases.shape[2] > 0
    assert not how.logits_soft_cap and how.pos_encoding_mode != "ALIBI"
    assert how.logits_transform is None
    is_near = (distance >= 0) & (distance < biases.shape[2])
    return np.where(is_near, biases[row, head, np.where(is_near, distance, 0)].astype(float), 0.0)


def _seen(how: Logits, position: int, num_keys: int) -> np.ndarray:
    """The keys that the row at a position sees."""
    key = np.arange(num_keys)
    seen = key == key
    if how.window_left >= 0:
        seen &= key >= position - how.window_left
    right = 0 if how.causal else how.window_right
    if right >= 0:
        seen &= key <= position + right
    if how.attention_chunk:
        seen &= key // how.attention_chunk == position // how.attention_chunk
    return np.flatnonzero(seen)


def attend(
    q: np.ndarray,
    requests: Iterable[Request],
    how: Logits,
    *,
    sinks: np.ndarray | None = None,
    scales: tuple[Any, Any, Any] = (None, None, None),
) -> Pair:
    """(out, LSE in base 2) in float64; rows of no request have 0 and -inf.

    scales: of q, k and v, numbers or one a head. A mask of a request replaces causality.
    """
    of_q, of_k, of_v = (1.0 if x is None else np.asarray(x, float) for x in scales)
    found: Pair | None = None
    with np.errstate(all="ignore"):
        for rows, k, v, mask in requests:
            heads, group = q.shape[1], q.shape[1] // k.shape[1]
            if found is None:
                blank = np.zeros((len(q), heads, v.shape[2])), np.full((len(q), heads), -np.inf)
                found = blank
            own = how if mask is None else how._replace(causal=False)
            for h in range(heads):
                g = h // group
                sink = None if sinks is None else float(sinks.reshape(-1)[h])
                scale = 1 / math.sqrt(q.shape[2]) if how.sm_scale is None else how.sm_scale
                scale = scale * np.broadcast_to(of_q, heads)[h]
                scale = scale * np.broadcast_to(of_k, k.shape[1])[g]
                place = len(k) - (rows.stop - rows.start)
                for i in range(rows.start, rows.stop):
                    position = i - rows.start + place
                    seen = _seen(own, position, len(k))
                    if mask is not None:
                        seen = seen[mask[i - rows.start, seen].astype(bool)]
                    logits = _logits(q[i, h], k[seen, g], seen, position, scale, how)
                    if how.pos_encoding_mode == "ALIBI":
                        logits = logits + _slope(h, heads) * (seen - position)
                    if how.logits_soft_cap:
                        logits = how.logits_soft_cap * np.tanh(logits / how.logits_soft_cap)
                    if how.alibi_slopes is not None:
                        logits = logits - how.alibi_slopes[h] * abs(position - seen)
                    if how.rel_logits is not None:
                        logits = logits + _near(how, i, h, len(q), heads, position - seen)
                    if how.logits_transform == "1":
                        logits = np.ones_like(logits)
                    o, lse = _softmax(logits, v[seen, g].astype(float), sink)
                    found[0][i, h] = o * np.broadcast_to(of_v, k.shape[1])[g]
                    found[1][i, h] = lse * LOG2_E
    assert found is not None
    return found


def dense(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    softcap: float = 0.0,
    slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> Pair:
    """One request in flash_attn's words: (out [sq, h, dv], natural LSE [h, sq])."""
    left, right = window
    how = Logits(scale, causal, left, right, softcap, attention_chunk=chunk, alibi_slopes=slopes)
    out, lse = attend(q, [Request(slice(0, len(q)), k, v)], how, sinks=sinks)
    return out, lse.T / LOG2_E


def _logits(
    q: np.ndarray, k: np.ndarray, seen: np.ndarray, position: int, scale: float, how: Logits
) -> np.ndarray:
    q, k = q.astype(float), k.astype(float)
    if how.pos_encoding_mode == "ROPE_LLAMA":
        q = _turned(q, position, how)
        k = np.array([_turned(x, j, how) for x, j in zip(k, seen, strict=True)]).reshape(k.shape)
    found: np.ndarray = k @ q * scale
    return found


def _softmax(logits: np.ndarray, v: np.ndarray, sink: float | None) -> tuple[np.ndarray, float]:
    """(out, LSE in base e)."""
    every = logits if sink is None else np.append(logits, sink)
    if not every.size or (every == -np.inf).all():
        return np.zeros(v.shape[1]), -math.inf
    most = every.max()
    weights = np.exp(logits - most)
    total = np.exp(every - most).sum()
    return weights @ v / total, float(most + np.log(total))


# --- keys, and what they are kept in ---


def tokens_first(x: np.ndarray, kv_layout: str) -> np.ndarray:
    return x.swapaxes(-3, -2) if kv_layout == "HND" else x


def halves(cache: Any, kv_layout: str) -> Pair:
    """K and V [pages, page_size, heads, dim] of one tensor, or of a pair."""
    k, v = cache if isinstance(cache, (tuple, list)) else (cache[:, 0], cache[:, 1])
    if k.ndim == 3:
        k, v = (np.expand_dims(x, 1 if kv_layout == "NHD" else 2) for x in (k, v))
    return tokens_first(k, kv_layout), tokens_first(v, kv_layout)


def gather(pages: np.ndarray, ids: Iterable[int], length: int) -> np.ndarray:
    """The first `length` tokens of these pages."""
    ids = list(ids)
    assert all(0 <= page < len(pages) for page in ids)
    found = [pages[page] for page in ids] or [pages[:0].reshape(0, *pages.shape[2:])]
    tokens = np.concatenate(found)
    assert length <= len(tokens)
    return tokens[:length]


def paged(cache: Any, kv_layout: str, indptr: Any, ids: Any, lengths: Iterable[int]) -> list[Pair]:
    """(k, v) of each request."""
    k, v = halves(cache, kv_layout)
    found = []
    for begin, end, length in zip(indptr[:-1], indptr[1:], lengths, strict=True):
        found.append((gather(k, ids[begin:end], length), gather(v, ids[begin:end], length)))
    return found


def lengths_of(indptr: np.ndarray, last: np.ndarray, page_size: int) -> list[int]:
    found = []
    for begin, end, n in zip(indptr[:-1], indptr[1:], last, strict=True):
        assert end == begin or 1 <= n <= page_size
        found.append(int((end - begin - 1) * page_size + n) if end > begin else 0)
    return found


def by_offsets(indptr: np.ndarray, keys: list[Pair], masks: Any = None) -> list[Request]:
    """Requests of rows indptr[b] to indptr[b + 1]."""
    rows = [slice(a, b) for a, b in pairwise(indptr.tolist())]
    masks = [None] * len(rows) if masks is None else masks
    return [Request(r, *pair, m) for r, pair, m in zip(rows, keys, masks, strict=True)]


def flat_masks(bools: Any, bits: Any, indptr: np.ndarray, keys: list[Pair]) -> Any:
    """The mask of each request from bools one after another, or bits from a byte on each."""
    if bools is None and bits is None:
        return None
    shapes = [(int(b - a), len(k)) for a, b, (k, _) in zip(indptr, indptr[1:], keys, strict=False)]
    sizes = [m * n for m, n in shapes]
    if bits is not None:
        ends = np.cumsum([-(-n // 8) for n in sizes])
        parts = [
            np.unpackbits(bits[end - -(-n // 8) : end], bitorder="little")[:n].astype(bool)
            for end, n in zip(ends, sizes, strict=True)
        ]
    else:
        assert sum(sizes) == bools.size
        parts = np.split(bools.reshape(-1), np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def row_masks(mask: Any, count: int, q_len: int, lengths: Iterable[int]) -> Any:
    """The mask of each request from which of its q_len own tokens a row sees."""
    if mask is None:
        return None
    if mask.dtype == bool:
        own = mask.reshape(count, q_len, q_len)
    else:
        words = np.ascontiguousarray(mask).reshape(count * q_len, -1).view(np.uint8)
        bits = np.unpackbits(words, axis=1, bitorder="little")[:, :q_len]
        own = bits.astype(bool).reshape(count, q_len, q_len)
    found = []
    for rows, length in zip(own, lengths, strict=True):
        seen = np.ones((q_len, length), bool)
        shown = min(q_len, length)
        seen[:, length - shown :] = rows[:, q_len - shown :]
        found.append(seen)
    return found


def merged(v: np.ndarray, s: np.ndarray, base: float) -> Pair:
    """One state [heads, dim], [heads] of states [m, heads, dim], [m, heads]."""
    weights = np.where(s == -np.inf, 0.0, base ** np.where(s == -np.inf, 0.0, s))
    total = weights.sum(0)
    parts = np.where(weights[..., None] == 0, 0.0, weights[..., None] * v)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total[..., None] == 0, 0.0, parts.sum(0) / total[..., None])
        return out, np.log(total) / math.log(base)
