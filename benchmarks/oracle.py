"""The check before the clock: float64 attention of sampled query rows, on the inputs' device.

Written apart from every kernel, in a few torch operations; a unit test holds it to
`cupyattn.reference`. A sampled row takes all the keys it sees.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from .case import Case
from .inputs import Inputs, take

# ‖error‖ / ‖reference‖ over the sampled rows. A bfloat16 answer from float32 accumulation is near
# 2e-3; fp8 KV is compared with attention over the same fp8 values, so it has the same bound.
TOLERANCE = 4e-3
# The same where queries have 8 bits: probabilities are rounded to e4m3, half a unit of 3 bits of
# mantissa, which is 2.6 % of an answer over many keys; outputs in e4m3 are rounded once more.
TOLERANCE_8BIT = 5e-2
ROWS_A_CASE = 16


@dataclass(frozen=True)
class Expected:
    """float64 answer [rows, Hq, Dvo] of query rows `rows` of request `request`."""

    request: int
    rows: list[int]
    answer: Any


@dataclass(frozen=True)
class Verdict:
    """How far an answer is from the float64 one over the sampled rows."""

    relative: float
    max_abs: float
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        return self.relative <= self.tolerance  # False for NaN


def sample_rows(q_len: int, count: int, seed: int = 0) -> list[int]:
    """Up to `count` rows: the first, the last and random ones between, ascending."""
    if q_len <= count:
        return list(range(q_len))
    between = random.Random(seed).sample(range(1, q_len - 1), max(0, count - 2))
    return sorted({0, q_len - 1, *between})


def expect(case: Case, inputs: Inputs) -> list[Expected]:
    """The float64 answers of sampled rows of every request."""
    count = max(2, ROWS_A_CASE // case.batch)
    return [
        Expected(b, rows, attend_rows(case, inputs, b, rows))
        for b in range(case.batch)
        for rows in [sample_rows(case.q_len, count, seed=b)]
    ]


def judge(expected: list[Expected], output: Any, tolerance: float = TOLERANCE) -> Verdict:
    """Compare an answer [B, q_len, Hq, Dvo] with the expected rows."""
    import torch

    error = square = worst = 0.0
    for item in expected:
        got = output[item.request][torch.tensor(item.rows, device=output.device)].double()
        difference = got - item.answer
        error += float((difference * difference).sum())
        square += float((item.answer * item.answer).sum())
        peak = float(difference.abs().max())
        worst = peak if math.isnan(peak) else max(worst, peak)
    return Verdict(math.sqrt(error / square), worst, tolerance)


def attend_rows(case: Case, inputs: Inputs, request: int, rows: list[int]) -> Any:
    """float64 [rows, Hq, Dvo]: attention of the given query rows of one request."""
    import torch

    device = inputs.q.device
    row = torch.tensor(rows, device=device)
    key = torch.arange(case.kv_len, device=device)
    position = row + (case.kv_len - case.q_len)

    q = take(inputs.q[request], row).double()
    k = inputs.k[request].float().double()
    v = inputs.v[request].float().double()
    if case.pos_encoding_mode == "ROPE_LLAMA":
        q, k = _rotate(q, position), _rotate(k, key)

    # q heads of a group share a KV head: [rows, Hkv, group, D] against [keys, Hkv, D].
    q = q.reshape(len(rows), case.num_kv_heads, -1, case.head_dim_qk)
    logits = torch.einsum("rhgd,nhd->rhgn", q, k) / math.sqrt(case.head_dim_qk)
    if case.pos_encoding_mode == "ALIBI":
        slopes = torch.tensor(alibi_slopes(case.num_qo_heads), dtype=torch.float64, device=device)
        distance = (key[None, :] - position[:, None]).double()
        logits += slopes.view(1, case.num_kv_heads, -1, 1) * distance[:, None, None, :]
    if case.logits_soft_cap > 0:
        logits = case.logits_soft_cap * torch.tanh(logits / case.logits_soft_cap)

    keep = torch.ones((len(rows), case.kv_len), dtype=torch.bool, device=device)
    if inputs.mask is not None:
        keep &= inputs.mask[request][row]
    elif case.causal:
        keep &= key[None, :] <= position[:, None]
    if case.window_left >= 0:
        keep &= key[None, :] >= position[:, None] - case.window_left
    logits = logits.masked_fill(~keep[:, None, None, :], -math.inf)
    if inputs.sinks is None:
        weights = torch.softmax(logits, dim=-1)
    else:
        sinks = inputs.sinks.double().view(1, case.num_kv_heads, -1, 1)
        lse = torch.logaddexp(torch.logsumexp(logits, dim=-1, keepdim=True), sinks)
        weights = torch.exp(logits - lse)
    answer = torch.einsum("rhgn,nhd->rhgd", weights, v)
    return answer.reshape(len(rows), case.num_qo_heads, case.head_dim_vo)


def alibi_slopes(num_heads: int) -> list[float]:
    """The ALiBi slope of each query head; heads past a power of two go between the others."""
    n = 1 << (num_heads.bit_length() - 1)
    return [
        2.0 ** (-8.0 * (h + 1) / n) if h < n else 2.0 ** (-4.0 * (2 * (h - n) + 1) / n)
        for h in range(num_heads)
    ]


def _rotate(x: Any, position: Any, theta: float = 1e4) -> Any:
    """Half-split rotary embedding of float64 x [n, heads, D] at integer positions [n]."""
    import torch

    half = x.shape[-1] // 2
    index = torch.arange(half, dtype=torch.float64, device=x.device)
    angle = (position.double()[:, None] * theta ** (-index / half))[:, None, :]
    a, b = x[..., :half], x[..., half:]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
