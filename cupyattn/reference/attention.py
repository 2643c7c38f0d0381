"""Attention of one request in float64: what every kernel is measured against."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..core.problem import KV_LAYOUTS, POS_ENCODING_MODES
from ..errors import ArgumentError
from .masks import Visibility
from .positions import alibi_slopes, rope

_LOG2_E = math.log2(math.e)
_BLOCK_ROWS = 256
_BLOCK_LOGITS = 1 << 21


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window_left: int = -1,
    mask: np.ndarray | None = None,
    logits_soft_cap: float | None = 0.0,
    sm_scale: float | None = None,
    pos_encoding_mode: str = "NONE",
    rope_scale: float | None = 1.0,
    rope_theta: float | None = 1e4,
    sinks: np.ndarray | None = None,
    scale_q: float | np.ndarray | None = None,
    scale_k: float | np.ndarray | None = None,
    scale_v: float | np.ndarray | None = None,
    kv_layout: str = "NHD",
    alibi_start: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention with every option of the library, freely combined.

    q            [qo_len, num_qo_heads, head_dim_qk]; any float dtype, ml_dtypes' too.
    k, v         [kv_len, num_kv_heads, head_dim_qk | head_dim_vo] ("NHD"), or heads first ("HND");
                 num_kv_heads divides num_qo_heads.
    causal, window_left, mask   which keys a row sees; see `Visibility`.
    sm_scale     multiplies the logits; default 1/sqrt(head_dim_qk).
    scale_q, scale_k, scale_v   a float or one per q head, kv head, kv head; default 1. The first
                 two multiply the logits (before the soft cap), the last the output.
    pos_encoding_mode   "ROPE_LLAMA" rotates q row i to position i + kv_len - qo_len and key j to
                 j, see `rope`; "ALIBI" adds slope * (j - i) to the scaled logit, i counted from
                 the first row of q, which is alibi_start.
    logits_soft_cap     c > 0: logit -> c * tanh(logit / c), after scale and ALiBi, before masking.
                 sm_scale enters once, with ALiBi too. 0 or None: off.
    sinks        [num_qo_heads] natural-log logits that join the softmax's denominator and the LSE
                 with no value; not multiplied by sm_scale.

    Returns (o [qo_len, num_qo_heads, head_dim_vo], lse [qo_len, num_qo_heads]), float64; the LSE
    is base 2. A row that sees no key gives o = 0 and lse = -inf (with a sink: the sink's own LSE).
    K and V of a key affect only the rows that see it, NaN and infinities included.
    Raises ArgumentError on shapes, modes and values that do not fit.
    """
    if kv_layout not in KV_LAYOUTS:
        raise ArgumentError(f"kv_layout: got {kv_layout!r}; wanted one of {', '.join(KV_LAYOUTS)}")
    _check_ranks(q, k, v)
    if kv_layout == "HND":
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    _check_shapes(q, k, v)
    (qo_len, num_qo_heads, head_dim_qk), (kv_len, num_kv_heads, _) = q.shape, k.shape
    variant = _Variant(
        sees=Visibility(qo_len, kv_len, bool(causal), int(window_left), mask),
        scale=np.repeat(_per_head("scale_k", scale_k, num_kv_heads), num_qo_heads // num_kv_heads)
        * _per_head("scale_q", scale_q, num_qo_heads)
        * _finite("sm_scale", sm_scale, 1.0 / math.sqrt(head_dim_qk)),
        value_scale=_per_head("scale_v", scale_v, num_kv_heads),
        slopes=_slopes(pos_encoding_mode, num_qo_heads),
        alibi_start=alibi_start,
        rope_scale=_positive("rope_scale", rope_scale, 1.0),
        rope_theta=_positive("rope_theta", rope_theta, 1e4),
        is_rotated=pos_encoding_mode == "ROPE_LLAMA",
        soft_cap=_soft_cap(logits_soft_cap),
        sinks=_sink_logits(sinks, num_qo_heads),
    )
    o = np.empty((qo_len, num_qo_heads, v.shape[2]))
    lse = np.empty((qo_len, num_qo_heads))
    # NaN and infinities in the inputs are no error: they flow to the rows that see them.
    with np.errstate(all="ignore"):
        for kv_head in range(num_kv_heads):
            _attend_kv_head(kv_head, q, k, v, variant, o, lse)
    return o, lse


@dataclass(frozen=True, slots=True)
class _Variant:
    """The options of one call, made explicit: every default filled in, every scale per head."""

    sees: Visibility
    scale: np.ndarray  # [num_qo_heads], of the logits
    value_scale: np.ndarray  # [num_kv_heads]
    slopes: np.ndarray  # [num_qo_heads], 0 without ALiBi
    alibi_start: int
    rope_scale: float
    rope_theta: float
    is_rotated: bool
    soft_cap: float  # 0: off
    sinks: np.ndarray  # [num_qo_heads], -inf: none


def _attend_kv_head(
    kv_head: int,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    variant: _Variant,
    o: np.ndarray,
    lse: np.ndarray,
) -> None:
    """Fill o and lse for the query heads that share one key head, a block of rows at a time."""
    (qo_len, num_qo_heads, _), (kv_len, num_kv_heads, _) = q.shape, k.shape
    group = num_qo_heads // num_kv_heads
    heads = slice(kv_head * group, (kv_head + 1) * group)
    q_head, k_head = q[:, heads].astype(np.float64), k[:, kv_head].astype(np.float64)
    v_head = v[:, kv_head].astype(np.float64)
    if variant.is_rotated:
        turn = {"rope_scale": variant.rope_scale, "rope_theta": variant.rope_theta}
        q_head = rope(q_head, np.arange(qo_len) + (kv_len - qo_len), **turn)
        k_head = rope(k_head, np.arange(kv_len), **turn)
    q_head *= variant.scale[heads, None]
    for rows in _row_blocks(qo_len, group * kv_len):
        keys = variant.sees.key_range(rows)
        logits = _logits(q_head[rows], k_head[keys])
        if variant.slopes.any():
            distance = np.arange(keys.start, keys.stop) - np.arange(rows.start, rows.stop)[:, None]
            logits += variant.slopes[heads, None, None] * (distance - variant.alibi_start)
        if variant.soft_cap:
            logits /= variant.soft_cap
            np.tanh(logits, out=logits)
            logits *= variant.soft_cap
        seen = variant.sees.tile(rows, keys)
        block_o, block_lse = _softmax(logits, seen, v_head[keys], variant.sinks[heads])
        o[rows, heads] = block_o.swapaxes(0, 1) * variant.value_scale[kv_head]
        lse[rows, heads] = block_lse.T


def _row_blocks(qo_len: int, logits_per_row: int) -> list[slice]:
    """Blocks of query rows small enough that one head group's logits stay near the cache."""
    step = max(1, min(_BLOCK_ROWS, _BLOCK_LOGITS // max(1, logits_per_row)))
    return [slice(i, min(i + step, qo_len)) for i in range(0, qo_len, step)]


def _logits(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """[group, rows, keys] of q [rows, group, D] and k [keys, D], in one product: they share K."""
    num_rows, group, head_dim = q.shape
    packed = q.swapaxes(0, 1).reshape(group * num_rows, head_dim)
    return (packed @ k.T).reshape(group, num_rows, len(k))


def _softmax(
    logits: np.ndarray, seen: np.ndarray, v: np.ndarray, sinks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """o [group, rows, Dvo] and base-2 lse [group, rows]; overwrites logits [group, rows, keys]."""
    np.copyto(logits, -np.inf, where=~seen)
    top = np.maximum(logits.max(axis=-1, initial=-np.inf), sinks[:, None])
    top = np.where(top == -np.inf, 0.0, top)
    logits -= top[..., None]
    p = np.exp(logits, out=logits)
    total = p.sum(axis=-1) + np.exp(sinks[:, None] - top)
    o = _weighted_sum(p, seen, v) / total[..., None]
    o[total == 0] = 0.0
    return o, (top + np.log(total)) * _LOG2_E


def _weighted_sum(p: np.ndarray, seen: np.ndarray, v: np.ndarray) -> np.ndarray:
    """p [group, rows, keys] @ v [keys, Dvo]; a masked key takes no part, not even as 0 * NaN."""
    group, num_rows, num_keys = p.shape
    is_finite = np.isfinite(v).all(axis=-1)
    clean = v if is_finite.all() else np.where(is_finite[:, None], v, 0.0)
    o = (p.reshape(group * num_rows, num_keys) @ clean).reshape(group, num_rows, v.shape[1])
    for key in np.flatnonzero(~is_finite & seen.any(axis=0)):
        rows = seen[:, key]
        o[:, rows] += p[:, rows, key, None] * v[key]
    return o


def _check_ranks(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ArgumentError(f"{name}: got shape {list(x.shape)}; wanted three dimensions")


def _check_shapes(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """k and v are NHD here."""
    if k.shape[:2] != v.shape[:2]:
        raise ArgumentError(
            f"k, v: got {k.shape[0]} tokens of {k.shape[1]} heads and {v.shape[0]} tokens of "
            f"{v.shape[1]} heads; wanted the same; check kv_layout"
        )
    if q.shape[2] != k.shape[2] or q.shape[2] == 0:
        raise ArgumentError(f"k: head dim {k.shape[2]} with q of head dim {q.shape[2]}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ArgumentError(
            f"q: {q.shape[1]} heads with {k.shape[1]} key heads; wanted a positive multiple of "
            "them; check kv_layout"
        )


def _slopes(pos_encoding_mode: str, num_qo_heads: int) -> np.ndarray:
    if pos_encoding_mode not in POS_ENCODING_MODES:
        known = ", ".join(POS_ENCODING_MODES)
        raise ArgumentError(f"pos_encoding_mode: got {pos_encoding_mode!r}; wanted one of {known}")
    return alibi_slopes(num_qo_heads) if pos_encoding_mode == "ALIBI" else np.zeros(num_qo_heads)


def _soft_cap(x: float | None) -> float:
    value = _finite("logits_soft_cap", x, 0.0)
    if value < 0:
        raise ArgumentError(f"logits_soft_cap: got {value}; wanted a positive cap, or 0 for none")
    return value


def _finite(name: str, x: float | None, default: float) -> float:
    value = default if x is None else float(x)
    if not math.isfinite(value):
        raise ArgumentError(f"{name}: got {value}; wanted a finite number")
    return value


def _positive(name: str, x: float | None, default: float) -> float:
    value = _finite(name, x, default)
    if value <= 0:
        raise ArgumentError(f"{name}: got {value}; wanted a positive number")
    return value


def _per_head(name: str, x: float | np.ndarray | None, num_heads: int) -> np.ndarray:
    """float64 [num_heads], a fresh array."""
    values = np.asarray(1.0 if x is None else x, np.float64)
    if values.size != 1 and values.shape != (num_heads,):
        raise ArgumentError(
            f"{name}: got shape {list(values.shape)}; wanted a number or [{num_heads}], one a head"
        )
    if not np.isfinite(values).all():
        raise ArgumentError(f"{name}: wanted finite numbers, got {values}")
    return np.broadcast_to(values.reshape(-1), num_heads).copy()


def _sink_logits(sinks: np.ndarray | None, num_qo_heads: int) -> np.ndarray:
    """float64 [num_qo_heads]; a head without a sink has -inf, which weighs nothing."""
    if sinks is None:
        return np.full(num_qo_heads, -np.inf)
    values = np.asarray(sinks, np.float64)
    if values.shape != (num_qo_heads,):
        raise ArgumentError(
            f"sinks: got shape {list(values.shape)}; wanted [{num_qo_heads}], one per query head"
        )
    return values
