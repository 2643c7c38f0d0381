"""Attention of one request in float64: what every kernel is measured against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core import parse
from ..core.logits import LogitsExpression
from ..errors import ArgumentError
from .expression import evaluate

_LOG2_E = math.log2(math.e)
_BLOCK_ROWS = 256
_BLOCK_LOGITS = 1 << 21


@dataclass(frozen=True, slots=True)
class Visibility:
    """Row i sees key j if every rule that is on allows it.

    Parameters
    ----------
    causal
        Bottom-right aligned: j <= i + kv_len - qo_len. Ignored when `mask` is given.
    window_left
        W >= 0: j >= i + kv_len - qo_len - W, so W + 1 keys with causality; -1: off.
    window_right
        The same to the right: j <= i + kv_len - qo_len + W; -1: off.
    mask
        bool [qo_len, kv_len], True = visible; ANDed with the windows.
    attention_chunk
        C > 0: key j is in the chunk of C keys that holds i + kv_len - qo_len; 0: off.
    key_positions
        int64 [kv_len], rising: where these keys lie in a sequence of whole_len keys. All rules but
        the mask's then hold of positions in that, j of a key and i + whole_len - qo_len of a row.
    """

    qo_len: int
    kv_len: int
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    mask: np.ndarray | None = None
    attention_chunk: int = 0
    key_positions: np.ndarray | None = None
    whole_len: int = -1

    def __post_init__(self) -> None:
        for side, window in (("left", self.window_left), ("right", self.window_right)):
            if window < -1:
                raise ArgumentError(
                    f"window_{side}: got {window}; wanted the number of keys visible to the "
                    f"{side} of the diagonal, or -1 for no window"
                )
        shape = (self.qo_len, self.kv_len)
        if self.mask is not None and (self.mask.dtype != np.bool_ or self.mask.shape != shape):
            raise ArgumentError(
                f"mask: got {self.mask.dtype} {list(self.mask.shape)}; wanted bool {list(shape)}, "
                "[qo_len, kv_len]; unpack packed masks with unpack_mask"
            )
        positions = self.key_positions
        if positions is not None and (positions.shape != (self.kv_len,) or self.whole_len < 0):
            raise ArgumentError(
                f"key_positions: got shape {list(positions.shape)} with whole_len="
                f"{self.whole_len}; wanted [{self.kv_len}], that of each key, with the length of "
                "the sequence"
            )

    @property
    def first_position(self) -> int:
        """The position of row 0."""
        length = self.kv_len if self.key_positions is None else self.whole_len
        return length - self.qo_len

    def positions(self, keys: slice) -> np.ndarray:
        """Those of keys."""
        if self.key_positions is None:
            return np.arange(keys.start, keys.stop)
        return self.key_positions[keys]

    def _index(self, position: int) -> int:
        """How many keys lie before a position."""
        if self.key_positions is None:
            return position
        return int(np.searchsorted(self.key_positions, position))

    @property
    def _right_limit(self) -> int:
        return 0 if self.causal and self.mask is None else self.window_right

    def key_range(self, rows: slice) -> slice:
        """The keys that any of `rows` can see by causality and windows; may be empty."""
        diagonal = self.first_position
        first, end = 0, self.kv_len if self.key_positions is None else self.whole_len
        if self._right_limit >= 0:
            end = min(end, max(0, rows.stop + diagonal + self._right_limit))
        if self.window_left >= 0:
            first = max(0, rows.start + diagonal - self.window_left)
        if self.attention_chunk:
            first = max(first, self._chunk_start(rows.start + diagonal))
            end = min(
                end, max(0, self._chunk_start(rows.stop - 1 + diagonal + self.attention_chunk))
            )
        return slice(self._index(first), self._index(end))

    def _chunk_start(self, position: Any) -> Any:
        return position // self.attention_chunk * self.attention_chunk

    def tile(self, rows: slice, keys: slice) -> np.ndarray:
        """bool [rows, keys]: True where the row sees the key."""
        query_pos = np.arange(rows.start, rows.stop)[:, None] + self.first_position
        key_pos = self.positions(keys)[None, :]
        if self.mask is not None:
            seen = self.mask[rows, keys].copy()
        else:
            seen = np.ones((query_pos.size, key_pos.size), np.bool_)
        if self._right_limit >= 0:
            seen &= key_pos <= query_pos + self._right_limit
        if self.window_left >= 0:
            seen &= key_pos >= query_pos - self.window_left
        if self.attention_chunk:
            seen &= self._chunk_start(key_pos) == self._chunk_start(query_pos)
        return seen

    def dense(self) -> np.ndarray:
        """bool [qo_len, kv_len]: the whole pattern."""
        return self.tile(slice(0, self.qo_len), slice(0, self.kv_len))


def rope(
    x: np.ndarray, positions: np.ndarray, *, rope_scale: float = 1.0, rope_theta: float = 1e4
) -> np.ndarray:
    """Rotate x [L, ..., D] to `positions` [L] (may be negative); the result is float64.

    Half-split (NeoX) pairing: element i turns with element i + D/2, by the angle position *
    rope_theta**(-2i/D) / rope_scale; a larger rope_scale turns more slowly.

    Raises
    ------
    CupyAttnError
        ArgumentError if D is odd.
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ArgumentError(f"rope: head dim {head_dim} is odd; wanted an even one to form pairs")
    half = head_dim // 2
    frequencies = rope_theta ** (-2.0 * np.arange(half) / head_dim) / rope_scale
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    angles = angles.reshape(angles.shape[0], *(1,) * (x.ndim - 2), half)
    cos, sin = np.cos(angles), np.sin(angles)
    low, high = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """float64 [num_heads]: 2**(-8(h+1)/n) for the first n heads, n the largest power of two.

    The heads beyond n take every other slope of the sequence for 2n heads.
    """
    n = 1 << (num_heads.bit_length() - 1)
    head = np.arange(num_heads)
    return np.where(
        head < n, 2.0 ** (-8.0 * (head + 1) / n), 2.0 ** (-4.0 * (2 * (head - n) + 1) / n)
    )


_standard_slopes = alibi_slopes  # an argument hides the name


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
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
    attention_chunk: int = 0,
    alibi_slopes: np.ndarray | None = None,
    logits: LogitsExpression | None = None,
    logits_arrays: Sequence[np.ndarray] = (),
    batch: int = 0,
    first_row: int = 0,
    output_gate: np.ndarray | None = None,
    key_positions: np.ndarray | None = None,
    whole_len: int = -1,
    q_block_scales: np.ndarray | None = None,
    k_block_scales: np.ndarray | None = None,
    v_block_scales: np.ndarray | None = None,
    k_mean: np.ndarray | None = None,
    block_size: int = 64,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention with every option of the library, freely combined.

    Parameters
    ----------
    q
        [qo_len, num_qo_heads, head_dim_qk]; any float dtype, ml_dtypes' too.
    k, v
        [kv_len, num_kv_heads, head_dim_qk | head_dim_vo] ("NHD"), or heads first ("HND");
        num_kv_heads divides num_qo_heads.
    causal, window_left, window_right, mask, attention_chunk
        Which keys a row sees; see `Visibility`.
    sm_scale
        Multiplies the logits; default 1/sqrt(head_dim_qk).
    scale_q, scale_k, scale_v
        A float or one per q head, kv head, kv head; default 1. The first two multiply the logits
        (before the soft cap), the last the output.
    pos_encoding_mode
        "ROPE_LLAMA" rotates q row i to position i + kv_len - qo_len and key j to j, see `rope`;
        "ALIBI" adds slope * (j - position of the row) to the scaled logit.
    logits_soft_cap
        c > 0: logit -> c * tanh(logit / c), after scale and ALiBi, before masking. sm_scale enters
        once, with ALiBi too. 0 or None: off.
    alibi_slopes
        [num_qo_heads]: adds -slope * abs(position of the row - j) after the soft cap, as flash_attn
        does.
    sinks
        [num_qo_heads] natural-log logits that join the softmax's denominator and the LSE with no
        value; not multiplied by sm_scale. -inf: none; +inf: o = 0 and lse = +inf.
    logits
        Expressions of the caller's (core.logits.make), their array parameters in `logits_arrays`:
        the transform takes the place of each logit after all of the above, the mask hides keys
        besides. `batch` is what they read by that name, and `first_row` the row of all requests' at
        which `q_token` begins.
    output_gate
        [qo_len, num_qo_heads] or [qo_len, num_qo_heads, head_dim_vo]: the output is multiplied by
        its sigmoid; the LSE stays.
    key_positions, whole_len
        k and v are some keys of a sequence of whole_len, those at these places [kv_len], which
        rise: rows, windows, rotations and biases go by them. A mask is of these keys alone.
    q_block_scales, k_block_scales, v_block_scales
        [ceil(tokens / block_size), heads]: what each block of tokens is multiplied by, besides the
        scales above.
    k_mean
        [num_kv_heads, head_dim_qk]: was subtracted from the keys that k stands for, with all
        scales, and is added to them again.

    Returns
    -------
    tuple of arrays
        (o [qo_len, num_qo_heads, head_dim_vo], lse [qo_len, num_qo_heads]), float64; the LSE is
        base 2. A row that sees no key gives o = 0 and lse = -inf (with a sink: the sink's own LSE).
        K and V of a key affect only the rows that see it, NaN and infinities included.

    Raises
    ------
    CupyAttnError
        ArgumentError on shapes, modes and values that do not fit.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ArgumentError(f"{name}: got shape {list(x.shape)}; wanted three dimensions")
    if parse.kv_layout(kv_layout) == "HND":
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    _check_shapes(q, k, v)
    q = scaled_blocks(q, q_block_scales, block_size, "q_block_scales")
    k = scaled_blocks(k, k_block_scales, block_size, "k_block_scales")
    v = scaled_blocks(v, v_block_scales, block_size, "v_block_scales")
    if k_mean is not None:
        of_heads = _per_head("scale_k", scale_k, k.shape[1])[:, None]
        k, scale_k = k.astype(np.float64) * of_heads + k_mean, None
    (qo_len, num_qo_heads, head_dim_qk), (kv_len, num_kv_heads, _) = q.shape, k.shape
    mode = parse.pos_encoding_mode(pos_encoding_mode)
    variant = _Variant(
        sees=Visibility(
            qo_len,
            kv_len,
            causal=bool(causal),
            window_left=int(window_left),
            window_right=int(window_right),
            mask=mask,
            attention_chunk=int(attention_chunk),
            key_positions=key_positions,
            whole_len=int(whole_len),
        ),
        scale=np.repeat(_per_head("scale_k", scale_k, num_kv_heads), num_qo_heads // num_kv_heads)
        * _per_head("scale_q", scale_q, num_qo_heads)
        * parse.finite(sm_scale, "sm_scale", 1.0 / math.sqrt(head_dim_qk)),
        value_scale=_per_head("scale_v", scale_v, num_kv_heads),
        slopes=_standard_slopes(num_qo_heads) if mode == "ALIBI" else np.zeros(num_qo_heads),
        distance_slopes=_head_values("alibi_slopes", alibi_slopes, num_qo_heads, 0.0),
        rope_scale=parse.positive(rope_scale, "rope_scale", 1.0),
        rope_theta=parse.positive(rope_theta, "rope_theta", 1e4),
        is_rotated=mode == "ROPE_LLAMA",
        soft_cap=parse.soft_cap(logits_soft_cap),
        sinks=_head_values("sinks", sinks, num_qo_heads, -np.inf),
        logits=logits,
        logits_arrays=logits_arrays,
        batch=batch,
        first_row=first_row,
    )
    o = np.empty((qo_len, num_qo_heads, v.shape[2]))
    lse = np.empty((qo_len, num_qo_heads))
    # NaN and infinities in the inputs are no error: they flow to the rows that see them.
    with np.errstate(all="ignore"):
        for kv_head in range(num_kv_heads):
            _attend_kv_head(kv_head, q, k, v, variant, o, lse)
        if output_gate is not None:
            o *= _gate_factors(output_gate, o.shape)
    return o, lse


def scaled_blocks(
    x: np.ndarray, scales: np.ndarray | None, block_size: int, name: str
) -> np.ndarray:
    """x [tokens, heads, head_dim] times the scales [ceil(tokens / block_size), heads] of blocks."""
    if scales is None:
        return x
    shape = -(-len(x) // block_size), x.shape[1]
    if scales.shape != shape:
        raise ArgumentError(f"{name}: got shape {list(scales.shape)}; wanted {list(shape)}")
    factors = np.repeat(scales.astype(np.float64), block_size, axis=0)[: len(x)]
    return x.astype(np.float64) * factors[..., None]


def _gate_factors(gate: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sigmoids that broadcast to an output of this shape [qo_len, num_qo_heads, head_dim_vo]."""
    if gate.shape not in (shape, shape[:-1]):
        raise ArgumentError(
            f"output_gate: got shape {list(gate.shape)}; wanted {list(shape[:-1])} or {list(shape)}"
        )
    factors = 1.0 / (1.0 + np.exp(-gate.astype(np.float64)))
    return factors if gate.ndim == 3 else factors[..., None]


@dataclass(frozen=True, slots=True)
class _Variant:
    """The options of one call, made explicit: every default filled in, every scale per head."""

    sees: Visibility
    scale: np.ndarray  # [num_qo_heads], of the logits
    value_scale: np.ndarray  # [num_kv_heads]
    slopes: np.ndarray  # [num_qo_heads], 0 without ALiBi
    distance_slopes: np.ndarray  # [num_qo_heads], of the distance and behind the soft cap; 0: off
    rope_scale: float
    rope_theta: float
    is_rotated: bool
    soft_cap: float  # 0: off
    sinks: np.ndarray  # [num_qo_heads], -inf: none
    logits: LogitsExpression | None
    logits_arrays: Sequence[np.ndarray]
    batch: int
    first_row: int


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
        q_head = rope(q_head, np.arange(qo_len) + variant.sees.first_position, **turn)
        k_head = rope(k_head, variant.sees.positions(slice(0, kv_len)), **turn)
    q_head *= variant.scale[heads, None]
    for rows in _row_blocks(qo_len, group * kv_len):
        keys = variant.sees.key_range(rows)
        logits = _logits(q_head[rows], k_head[keys])
        position = np.arange(rows.start, rows.stop)[:, None] + variant.sees.first_position
        offset = variant.sees.positions(keys) - position
        if variant.slopes.any():
            logits += variant.slopes[heads, None, None] * offset
        if variant.soft_cap:
            logits /= variant.soft_cap
            np.tanh(logits, out=logits)
            logits *= variant.soft_cap
        if variant.distance_slopes.any():
            logits -= variant.distance_slopes[heads, None, None] * np.abs(offset)
        seen = variant.sees.tile(rows, keys)
        if variant.logits is not None:
            logits, seen = _express(variant, logits, seen, rows, keys, heads, kv_head)
        block_o, block_lse = _softmax(logits, seen, v_head[keys], variant.sinks[heads])
        o[rows, heads] = block_o.swapaxes(0, 1) * variant.value_scale[kv_head]
        lse[rows, heads] = block_lse.T


def _express(
    variant: _Variant,
    logits: np.ndarray,
    seen: np.ndarray,
    rows: slice,
    keys: slice,
    heads: slice,
    kv_head: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The caller's logits [group, rows, keys], and what rows see: alike for a group, or by head."""
    expression, qo_len, sees = variant.logits, variant.sees.qo_len, variant.sees
    assert expression is not None
    token = np.arange(rows.start, rows.stop)[:, None]
    variables = {
        "logit": logits,
        "q_row": token,
        "q_token": token + variant.first_row,
        "q_idx": token + sees.first_position,
        "kv_idx": sees.positions(keys),
        "head": np.arange(heads.start, heads.stop)[:, None, None],
        "kv_head": kv_head,
        "batch": variant.batch,
        "q_len": qo_len,
        "kv_len": sees.first_position + qo_len,
    }
    arrays, values = variant.logits_arrays, expression.values
    if expression.mask is not None:
        seen = seen & evaluate(expression.mask, variables, arrays, values)
    if expression.transform is not None:
        transformed = evaluate(expression.transform, variables, arrays, values)
        logits = np.broadcast_to(transformed, logits.shape).astype(np.float64)
    return logits, seen


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
    if seen.ndim == 3:  # heads of a group see different keys
        parts = [
            _softmax(logits[i : i + 1], seen[i], v, sinks[i : i + 1]) for i in range(len(seen))
        ]
        return np.concatenate([o for o, _ in parts]), np.concatenate([lse for _, lse in parts])
    np.copyto(logits, -np.inf, where=~seen)
    top = np.maximum(logits.max(axis=-1, initial=-np.inf), sinks[:, None])
    top = np.where(top == -np.inf, 0.0, top)
    logits -= top[..., None]
    p = np.exp(logits, out=logits)
    # A sink of +inf leaves nothing but itself.
    total = p.sum(axis=-1) + np.where(sinks[:, None] == top, 1.0, np.exp(sinks[:, None] - top))
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


def _head_values(name: str, x: np.ndarray | None, num_qo_heads: int, default: float) -> np.ndarray:
    """float64 [num_qo_heads]. A head without a sink has -inf, which weighs nothing."""
    if x is None:
        return np.full(num_qo_heads, default)
    values = np.asarray(x, np.float64)
    if values.shape != (num_qo_heads,):
        raise ArgumentError(
            f"{name}: got shape {list(values.shape)}; wanted [{num_qo_heads}], one per query head"
        )
    return values
