"""Calls of cupyattn.sparse.select, drawn by seeds, and a second oracle of what they choose.

Queries and index rows hold small integers in half of the cases, so that scores tie. Index rows that
no token sees are poison: NaN, and absurd pages in tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn.core import dtypes

ABSURD_PAGE = 2147480000
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass
class SelectCase:
    """One call.

    rows, scales  [request]: index rows in float64, and the scale of each
    tokens        of each token: its request, and the keys that it sees
    """

    arguments: dict[str, Any]
    form: str
    seed: int
    rows: list[np.ndarray] = field(default_factory=list)
    scales: list[np.ndarray] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)

    def __str__(self) -> str:
        shown = {
            name: f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else x
            for name, x in self.arguments.items()
        }
        return f"seed {self.seed}, {self.form}: {shown}"


def draw(seed: int, on_gpu: bool = False) -> SelectCase:
    """A small call; `on_gpu`: one that kernels serve."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 4))
    form = str(rng.choice(["pages", "pages", "head", "fused", "rows", "dense"]))
    ratio = int(rng.choice([1, 1, 1, 2, 4]))
    block = ratio * int(rng.choice([1, 2, 8, 64]))
    score = str(rng.choice(["max", "relu_sum", "softmax"]))
    heads = int(rng.choice([1, 2, 4, 16 if on_gpu else 6]))
    qo = (
        np.full(count, rng.integers(1, 4)) if rng.random() < 0.5 else rng.integers(0, 4, size=count)
    )
    kv = rng.integers(0, int(rng.choice([9, 60, 400])), size=count)
    causal = bool(rng.random() < 0.8)
    dim = int(rng.choice([64, 128] if on_gpu else [4, 16]))
    has_offsets = len(set(qo.tolist())) > 1 or rng.random() < 0.3
    spare = int(rng.integers(0, 3)) if has_offsets else 0
    known = ["float16", "bfloat16", "bfloat16" if on_gpu else "float32"]
    dtype = dtypes.parse(str(rng.choice(known))).numpy
    is_fp8 = form == "fused" or rng.random() < 0.3
    if is_fp8 and rng.random() < 0.5:
        dtype = E4M3
    exact = rng.random() < 0.5
    topk = int(rng.choice([1, 2, 5, 16]))
    case = SelectCase({}, form, seed)
    tokens = int(qo.sum())
    q = _numbers(rng, (tokens + spare, heads, dim), exact).astype(dtype)
    q[tokens:] = np.nan
    divisors = [x for x in range(1, heads + 1) if heads % x == 0]
    first = int(rng.integers(0, topk + 1))
    case.arguments = {
        "q_index": q,
        "topk": topk,
        "block": block,
        "score": score,
        "first": first if rng.random() < 0.5 else 0,
        "last": int(rng.integers(0, topk - first + 1)),
        "ratio": ratio,
        "causal": causal,
        "return_values": True,
    }
    if rng.random() < 0.5:
        case.arguments["groups"] = int(rng.choice(divisors))
    if ratio > 1 and block == ratio:
        case.arguments["tail"] = bool(rng.random() < 0.7)
    if has_offsets:
        case.arguments["indptr"] = np.append(0, np.cumsum(qo)).astype(np.int32)
    for request in range(count):
        for i in range(qo[request]):
            later = int(qo[request]) - 1 - i if causal else 0
            case.tokens.append((request, max(int(kv[request]) - later, 0)))
    _add_rows(case, rng, kv, ratio, (dim, exact, is_fp8, np.dtype(dtype)))
    _add_options(case, rng, on_gpu)
    return case


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], exact: bool) -> np.ndarray:
    return rng.integers(-1, 2, size=shape).astype(float) if exact else rng.standard_normal(shape)


def _add_rows(
    case: SelectCase,
    rng: np.random.Generator,
    kv: np.ndarray,
    ratio: int,
    facts: tuple[int, bool, bool, np.dtype],
) -> None:
    """The index, and what says where its rows lie."""
    dim, exact, is_fp8, dtype = facts
    counts, arguments, form = kv // ratio, case.arguments, case.form
    dtype_k = E4M3 if is_fp8 else dtype
    drawn = [_numbers(rng, (n, dim), exact).astype(dtype_k) for n in counts]
    has_scales = form == "fused" or (is_fp8 and rng.random() < 0.6)
    scales = [
        (2.0 ** rng.integers(-2, 3, size=n) if exact else rng.uniform(0.5, 2, size=n)).astype("f4")
        if has_scales
        else np.ones(n, np.float32)
        for n in counts
    ]
    case.rows, case.scales = [x.astype(np.float64) for x in drawn], scales
    if form == "rows":
        begin = np.append(0, np.cumsum(counts)).astype(np.int32)
        index = np.full((int(begin[-1]) + 2, dim), np.nan, dtype_k)
        places: list[Any] = [slice(begin[r], begin[r + 1]) for r in range(len(kv))]
        arguments["kv_indptr"] = begin
        if rng.random() < 0.5 or ratio > 1:
            arguments["lengths"] = kv.astype(np.int32)
    elif form == "dense":
        index = np.full((len(kv), max(1, int(counts.max())), dim), np.nan, dtype_k)
        places = [(r, slice(counts[r])) for r in range(len(kv))]
        arguments["lengths"] = kv.astype(np.int32)
    else:
        size = int(rng.choice([4, 16, 20] if dim >= 64 and form == "fused" else [1, 3, 16]))
        width = max(1, -(-int(counts.max()) // size)) + 1
        index = np.full((len(kv) * width, size, dim), np.nan, dtype_k)
        table = np.full((len(kv), width), ABSURD_PAGE, np.int32)
        pages, places = rng.permutation(len(index)), []
        for r, n in enumerate(counts):
            used = -(-int(n) // size)
            table[r, :used] = pages[r * width : r * width + used]
            places.append((table[r][np.arange(n) // size], np.arange(n) % size))
        arguments["table"], arguments["lengths"] = table, kv.astype(np.int32)
    behind = np.full(index.shape[:-1], np.nan, np.float32)
    for place, x, own in zip(places, drawn, scales, strict=True):
        index[place], behind[place] = x, own
    if form == "fused":
        flat = [x.reshape(len(x), -1).view(np.uint8) for x in (index, behind)]
        index = np.concatenate(flat, axis=1).reshape(len(index), index.shape[1], 1, dim + 4)
    elif has_scales:
        arguments["k_scales"] = behind
    arguments["index_cache"] = index[:, :, None] if form == "head" else index


def _add_options(case: SelectCase, rng: np.random.Generator, on_gpu: bool) -> None:
    arguments, q = case.arguments, case.arguments["q_index"]
    if arguments["score"] != "max" and rng.random() < 0.7:
        weights = rng.integers(-2, 4, size=q.shape[:2]).astype(np.float32)
        arguments["weights"] = weights.astype(q.dtype) if q.dtype.itemsize == 2 else weights
    if rng.random() < 0.3:
        arguments["sm_scale"] = float(rng.choice([0.5, -1.0, 2.0]))
    if rng.random() < 0.3:
        arguments["k_scale"] = float(rng.choice([0.5, 2.0]))
    if rng.random() < 0.3:
        each = arguments["block"] * int(rng.choice([1, 2]))
        groups = num_groups(case) if rng.random() < 0.5 else 1
        shape = len(q), groups, int(rng.integers(1, 6))
        candidates = np.full(shape, -1, np.int32)
        for place in np.ndindex(*shape[:2]):
            own = rng.permutation(8)[: int(rng.integers(0, shape[2] + 1))]
            candidates[place][: own.size] = own
        arguments["candidates"] = candidates[:, 0] if groups == 1 else candidates
        arguments["candidate_block"] = each


def num_groups(case: SelectCase) -> int:
    arguments = case.arguments
    heads = arguments["q_index"].shape[1]
    return int(arguments.get("groups", heads if arguments["score"] == "max" else 1))


def scores_of(case: SelectCase, token: int, group: int) -> list[float]:
    """The score of each block that a token sees, by one number after the other."""
    arguments = case.arguments
    request, seen = case.tokens[token]
    q = arguments["q_index"][token].astype(np.float64)
    count, score = seen // arguments["ratio"], arguments["score"]
    size = arguments["block"] // arguments["ratio"]
    share = len(q) // num_groups(case)
    heads = range(group * share, (group + 1) * share)
    scale = arguments.get("sm_scale", q.shape[1] ** -0.5 if score == "softmax" else 1.0)
    scale *= arguments.get("k_scale", 1.0)
    weights = arguments.get("weights", np.ones((len(case.tokens), len(q))))[token].astype(float)
    rows, scales = case.rows[request][:count], case.scales[request][:count].astype(float)
    products = {h: [scale * float(q[h] @ row) for row in rows] for h in heads}
    result: list[float] = []
    for begin in range(0, count, size):
        own = range(begin, min(begin + size, count))
        if score == "max":
            result.append(max(products[h][j] * scales[j] for h in heads for j in own))
        elif score == "relu_sum":
            sums = [
                scales[j] * sum(weights[h] * max(products[h][j], 0.0) for h in heads) for j in own
            ]
            result.append(max(sums))
        else:
            total = 0.0
            for h in heads:
                logits = np.array(products[h]) * scales
                shares = np.exp(logits - logits.max())
                total += weights[h] * float(shares[list(own)].sum() / shares.sum())
            result.append(total)
    return result


def magnitude(case: SelectCase, token: int, group: int) -> float:
    """The largest sum of magnitudes of products that a score has, which bounds its rounding."""
    arguments = case.arguments
    request, seen = case.tokens[token]
    count, share = seen // arguments["ratio"], len(arguments["q_index"][token]) // num_groups(case)
    heads = slice(group * share, (group + 1) * share)
    if not count:
        return 0.0
    q = np.abs(arguments["q_index"][token, heads].astype(np.float64))
    sums = q @ np.abs(case.rows[request][:count].T) * case.scales[request][:count]
    default = q.shape[1] ** -0.5 if arguments["score"] == "softmax" else 1.0
    sums *= abs(arguments.get("sm_scale", default) * arguments.get("k_scale", 1.0))
    if arguments["score"] == "max":
        return float(sums.max())
    weights = arguments.get("weights")
    by_head = np.ones(share) if weights is None else np.abs(weights[token, heads].astype(float))
    if arguments["score"] == "softmax":
        # Errors of logits are those of probabilities, of which none is above 1.
        return float(by_head @ (1.0 + sums.max(1)))
    return float((by_head @ sums).max())


def competing(case: SelectCase, token: int, group: int, num_blocks: int) -> list[int]:
    """The blocks that may be listed."""
    candidates = case.arguments.get("candidates")
    if candidates is None:
        return list(range(num_blocks))
    own = candidates[token] if candidates.ndim == 2 else candidates[token, group]
    each = case.arguments["candidate_block"] // case.arguments["block"]
    return [b for b in range(num_blocks) if b // each in own.tolist()]


def check(case: SelectCase, lists: np.ndarray, values: np.ndarray, slack: float) -> None:
    """Fail unless lists are as they must be, but for blocks whose scores differ by less than
    `slack` of the largest."""
    arguments, topk = case.arguments, case.arguments["topk"]
    for token, (_, seen) in enumerate(case.tokens):
        for group in range(num_groups(case)):
            what = f"{case}: token {token}, group {group}"
            scores = scores_of(case, token, group)
            blocks = competing(case, token, group, len(scores))
            entries = lists[token, group].tolist()
            own = [b for b in entries if b >= 0]
            assert entries == sorted(own) + [-1] * (len(entries) - len(own)), what
            if arguments.get("tail") and seen % arguments["ratio"]:
                assert own and own.pop() == len(scores), what
            assert len(own) == len(set(own)) == min(topk, len(blocks)), what
            assert set(own) <= set(blocks), what
            forced = {
                b for b in blocks if b < arguments["first"] or b >= len(scores) - arguments["last"]
            }
            assert forced <= set(own) or len(forced) > topk, what
            near = slack * magnitude(case, token, group)
            for b in set(blocks) - set(own):
                for chosen in set(own) - forced:
                    assert scores[chosen] >= scores[b] - near, what
                    if scores[chosen] == scores[b] and not slack:
                        assert chosen < b, what
            found = values[token, group]
            atol, want = 1e-6 + near, [scores[b] for b in own]
            np.testing.assert_allclose(found[: len(own)], want, 1e-5, atol, err_msg=what)
            assert np.isneginf(found[len(own) :]).all(), what
    assert (lists[len(case.tokens) :] == -1).all()
    assert np.isneginf(values[len(case.tokens) :]).all()
