"""Attention in the precision of the GPU kernels, to learn how much error is honest.

Apart from the reference on purpose: its own mask, rotation and slopes, all heads at once, an online
base-2 softmax over tiles of keys. Each rounding the kernels make is made here in the same place:

  rotated q and k            float32, then rounded to q's dtype
  logits, softmax, row sum   float32
  probabilities              rounded to q's dtype before P @ V; under 8-bit queries to e4m3
  P @ V                      float32 accumulation
  output                     rounded once, after division by the row sum and scale_v

fp8 keys and values convert to either 16-bit type without rounding, so they enter as they are.
Products of e4m3 queries and keys are summed as Hopper sums them; int8 ones are exact.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.eight_bits.products import STEP, add_product

_E4M3, _BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
# Probabilities under 8-bit queries are stored times this.
_STORED = np.float32(256)
_LOG2_E = np.float32(1.4426950408889634)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    mask: np.ndarray | None = None,
    logits_soft_cap: float = 0.0,
    sm_scale: float | None = None,
    pos_encoding_mode: str = "NONE",
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    sinks: np.ndarray | None = None,
    scale_q: float | np.ndarray | None = None,
    scale_k: float | np.ndarray | None = None,
    scale_v: float | np.ndarray | None = None,
    kv_layout: str = "NHD",
    rope_start: int = 0,
    o_dtype: np.dtype | None = None,
    kv_tile: int = 64,
    is_reversed: bool = False,
    state_type: type[_State] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Arguments and shapes of `cupyattn.reference.attention`.

    Returns (o [Lq, Hq, Dvo] of `o_dtype`, default q's, of 8-bit queries bfloat16; lse float32
    [Lq, Hq], base 2). `kv_tile` and `is_reversed` choose other, equally honest, orders of the keys;
    `rope_start`, the position of the first key, another rounding of what is rotated.
    """
    is_8bit = q.dtype.itemsize == 1
    if kv_layout == "NHD":
        k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    (qo_len, num_heads, head_dim), (num_kv_heads, kv_len, _) = q.shape, k.shape
    group = num_heads // num_kv_heads
    seen = _seen(qo_len, kv_len, causal, (window_left, window_right), mask)
    with np.errstate(all="ignore"):
        q32 = q.astype(np.float32).transpose(1, 0, 2)
        k32, v32 = k.astype(np.float32), v.astype(np.float32)
        if pos_encoding_mode == "ROPE_LLAMA":
            turn = (np.float32(rope_scale or 1.0), np.float32(rope_theta or 1e4), q.dtype)
            q32 = _rotate(q32, rope_start + np.arange(qo_len) + kv_len - qo_len, *turn)
            k32 = _rotate(k32, rope_start + np.arange(kv_len), *turn)
        scale = np.float32(head_dim**-0.5 if sm_scale is None else sm_scale)
        scale = scale * _heads(scale_q, num_heads) * np.repeat(_heads(scale_k, num_kv_heads), group)
        slopes = alibi_slopes(num_heads) if pos_encoding_mode == "ALIBI" else None
        shape = (num_kv_heads, group * qo_len, head_dim)
        tiles = range(0, kv_len, kv_tile)
        state = (state_type or _State)(num_heads, qo_len, v.shape[2])
        for begin in reversed(tiles) if is_reversed else tiles:
            keys = slice(begin, min(begin + kv_tile, kv_len))
            if not seen[:, keys].any():
                continue
            if q.dtype == _E4M3:
                s = _cut_products(q32.reshape(shape), k32[:, keys])
            else:
                s = q32.reshape(shape) @ k32[:, keys].swapaxes(1, 2)
            s = s.reshape(num_heads, qo_len, -1) * scale[:, None, None]
            if slopes is not None:
                position = np.arange(qo_len)[:, None] + kv_len - qo_len
                distance = np.arange(keys.start, keys.stop) - position
                s = s + slopes[:, None, None] * distance.astype(np.float32)
            if logits_soft_cap:
                cap = np.float32(logits_soft_cap)
                s = np.tanh(s / cap) * cap
            state.update(s * _LOG2_E, seen[:, keys], v32[:, keys], _E4M3 if is_8bit else q.dtype)
        o, lse = state.finish(sinks)
        o = o * np.repeat(_heads(scale_v, num_kv_heads), group)[:, None, None]
        kind = o_dtype or (_BF16 if is_8bit else q.dtype)
        return o.transpose(1, 0, 2).astype(kind), lse.T.copy()


def slack_of_8_bits(**arguments: Any) -> np.ndarray:
    """[Lq, Hq]: how far honest answers to 8-bit queries may be from each other, in float64.

    `arguments` are those of `attention`. A probability is rounded by up to 2^-4 of itself, by
    another draw under each maximum that a kernel may have taken: 4 deviations of the sum of that.
    Sums of products are cut, until 512 keys or fewer have come: 2^-7 of the sum of magnitudes.
    """
    options = {"kv_tile": 1 << 30, "o_dtype": np.dtype(np.float64), "state_type": _Spread}
    both, _ = attention(**arguments, **options)
    magnitudes, deviations = np.split(np.abs(both), 2, axis=-1)
    return (4 * deviations + 2.0**-7 * magnitudes).max(-1, initial=0.0)


def _cut_products(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """q [heads, rows, dim] times k [heads, keys, dim], in steps of 32 columns."""
    missing = -q.shape[-1] % STEP
    q, k = (np.pad(x, ((0, 0), (0, 0), (0, missing))) for x in (q, k))
    is_bad = ~(np.isfinite(q).all(-1)[:, :, None] & np.isfinite(k).all(-1)[:, None])
    q, k = np.nan_to_num(q), np.nan_to_num(k)
    zeros = np.zeros((q.shape[1], k.shape[1]), np.float32)
    products = np.stack([add_product(zeros, *pair) for pair in zip(q, k, strict=True)])
    return np.where(is_bad, np.float32(np.nan), products)


class _State:
    """The online softmax: running maximum and sum [Hq, Lq] and unnormalised output, float32."""

    def __init__(self, num_heads: int, qo_len: int, head_dim_vo: int) -> None:
        self.top = np.full((num_heads, qo_len), -np.inf, np.float32)
        self.total = np.zeros((num_heads, qo_len), np.float32)
        self.o = np.zeros((num_heads, qo_len, head_dim_vo), np.float32)

    def update(self, s: np.ndarray, seen: np.ndarray, v: np.ndarray, p_dtype: np.dtype) -> None:
        """Add a tile: base-2 logits s [Hq, Lq, keys], seen [Lq, keys], v [Hkv, keys, Dvo]."""
        s = np.where(seen, s, np.float32(-np.inf))
        shift = self._raise_top(s.max(axis=-1))
        p = np.exp2(s - shift[..., None])
        self.total += p.sum(axis=-1)
        self.add(p, seen, v, p_dtype)

    def add(self, p: np.ndarray, seen: np.ndarray, v: np.ndarray, p_dtype: np.dtype) -> None:
        """P V of a tile to the output."""
        p = _rounded(p, p_dtype)
        packed = (len(v), self.o.shape[0] // len(v) * self.o.shape[1], v.shape[1])
        hidden = ~np.isfinite(v).all(axis=(0, 2))
        self.o += (p.reshape(packed) @ np.where(hidden[:, None], 0, v)).reshape(self.o.shape)
        for key in np.flatnonzero(hidden):
            product = p[:, :, key, None] * np.repeat(v[:, key], len(p) // len(v), 0)[:, None]
            self.o += np.where(seen[:, key, None], product, np.float32(0))

    def finish(self, sinks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        if sinks is not None:
            logits = sinks.astype(np.float32)[:, None] * _LOG2_E
            top = self._raise_top(np.broadcast_to(logits, self.top.shape))
            self.total += np.where(logits == top, np.float32(1), np.exp2(logits - top))
        is_empty = self.total == 0
        o = np.where(is_empty[..., None], np.float32(0), self.o / self.total[..., None])
        return o, np.where(is_empty, np.float32(-np.inf), self.top + np.log2(self.total))

    def _raise_top(self, candidate: np.ndarray) -> np.ndarray:
        """Rescale to the new maximum; returns what to subtract from logits (never -inf)."""
        top = np.maximum(self.top, candidate)
        shift = np.where(np.isneginf(top), np.float32(0), top)
        rescale = np.exp2(self.top - shift)
        self.total *= rescale
        self.o *= rescale[..., None]
        self.top = top
        return shift


class _Spread(_State):
    """Of one tile: magnitudes of the output's terms, and beside them the deviation of their sum
    where each probability is rounded to e4m3."""

    def __init__(self, num_heads: int, qo_len: int, head_dim_vo: int) -> None:
        super().__init__(num_heads, qo_len, 2 * head_dim_vo)

    def add(self, p: np.ndarray, seen: np.ndarray, v: np.ndarray, p_dtype: np.dtype) -> None:
        packed = (len(v), self.o.shape[0] // len(v) * self.o.shape[1], v.shape[1])
        finite = np.where(np.isfinite(v), np.abs(v), 0)
        magnitudes = p.reshape(packed) @ finite
        squares = (p * p).reshape(packed) @ (finite * finite)
        deviations = np.float32(2.0**-4 / 3**0.5) * np.sqrt(squares)
        self.o += np.concatenate([magnitudes, deviations], -1).reshape(self.o.shape)


def _rounded(p: np.ndarray, dtype: np.dtype) -> np.ndarray:
    scale = _STORED if dtype == _E4M3 else np.float32(1)
    return (p * scale).astype(dtype).astype(np.float32) / scale


def _seen(
    qo_len: int, kv_len: int, causal: bool, window: tuple[int, int], mask: np.ndarray | None
) -> np.ndarray:
    i, j = np.ogrid[:qo_len, :kv_len]
    seen = np.ones((qo_len, kv_len), bool) if mask is None else mask
    if causal and mask is None:
        seen = seen & (j + qo_len <= i + kv_len)
    if window[0] >= 0:
        seen = seen & (j + qo_len + window[0] >= i + kv_len)
    if window[1] >= 0:
        seen = seen & (j + qo_len <= i + kv_len + window[1])
    return seen


def _rotate(
    x: np.ndarray, positions: np.ndarray, scale: np.float32, theta: np.float32, dtype: np.dtype
) -> np.ndarray:
    """x [H, L, D] float32 turned in float32, then rounded to `dtype`."""
    half = x.shape[-1] // 2
    exponent = np.arange(half, dtype=np.float32) * np.float32(-2.0 / x.shape[-1])
    angle = positions.astype(np.float32)[:, None] * (theta**exponent / scale)
    cos, sin = np.cos(angle), np.sin(angle)
    low, high = x[..., :half], x[..., half:]
    turned = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.astype(dtype).astype(np.float32)


def alibi_slopes(num_heads: int) -> np.ndarray:
    power = 1
    while power * 2 <= num_heads:
        power *= 2
    regular = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    extra = [2.0 ** (-4.0 * (2 * h + 1) / power) for h in range(num_heads - power)]
    return np.array(regular + extra, np.float32)


def _heads(scale: float | np.ndarray | None, num_heads: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(1.0 if scale is None else scale, np.float32), num_heads)
