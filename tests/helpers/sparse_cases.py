"""Calls of cupyattn.sparse.attend, drawn by seeds, and a second oracle of what they mean.

What no list names is poison: NaN in keys and values, absurd pages in tables. Lists are drawn with
entries that are no block anywhere in them, blocks listed twice, blocks that the last key cuts,
fewer blocks than entries, and none at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn.core import dtypes

ABSURD_PAGE = 2147480000
NO_BLOCKS = (-1, -7, -(2**31))


@dataclass
class AttendCase:
    """One call: its arguments by name, and the facts that the oracle needs.

    seen      [token][group]: the keys that a list names, in its order
    requests  of each token
    places    [request]: where its keys lie in `keys`, K and V with tokens ahead of heads
    """

    arguments: dict[str, Any]
    form: str
    seed: int
    seen: list[list[np.ndarray]] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    places: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    keys: tuple[np.ndarray, ...] = ()

    def __str__(self) -> str:
        shown = {
            name: f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else x
            for name, x in self.arguments.items()
            if name != "cache"
        }
        return f"seed {self.seed}, {self.form}: {shown}"


def of_dtype(name: str) -> np.dtype:
    return np.dtype(dtypes.parse(name).numpy)


def draw(seed: int) -> AttendCase:
    """A small call."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 4))
    granularity = int(rng.choice([1, 2, 4, 8, 64, 128, 256]))
    kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 4]))
    form = str(rng.choice(["pages", "pages", "pages", "HND", "one", "rows", "dense", "single"]))
    if form == "single":
        count = 1
    is_uniform = form == "single" or rng.random() < 0.5
    qo = np.full(count, rng.integers(1, 4)) if is_uniform else rng.integers(0, 4, size=count)
    kv = rng.integers(0, int(rng.choice([12, 90, 300])), size=count)
    has_offsets = not is_uniform or rng.random() < 0.3
    dim = int(rng.choice([8, 16, 64]))
    dim_vo = dim if form == "one" else int(rng.choice([dim, 24]))
    dtype = str(rng.choice(["float16", "bfloat16", "float32"]))
    dtype_kv = str(rng.choice([dtype, dtype, "float8_e4m3fn", "float8_e5m2"]))
    window = int(rng.choice([0, 0, 1, 5, 1000]))
    causal = bool(rng.random() < 0.8)
    spare = int(rng.integers(0, 3)) if has_offsets else 0
    tokens = int(qo.sum())
    groups = int(rng.choice([1, kv_heads, kv_heads * group]))
    entries = int(rng.integers(1, max(2, 40 // granularity + 3)))
    fill = float(rng.choice([0.0, 0.4, 1.0]))
    lists = rng.choice(NO_BLOCKS, size=(tokens + spare, groups, entries)).astype(np.int32)
    case = AttendCase({}, form, seed)
    token = 0
    for request in range(count):
        for i in range(qo[request]):
            end = max(int(kv[request]) - (int(qo[request]) - 1 - i if causal else 0), 0)
            case.requests.append(request)
            case.seen.append([])
            for g in range(groups):
                own = _draw_list(rng, int(kv[request]), granularity, entries, fill)
                lists[token, g] = own
                begin = max(end - window, 0)
                keys = [
                    j
                    for block in own.tolist()
                    for j in range(block * granularity, (block + 1) * granularity)
                    if block >= 0 and j < begin
                ]
                case.seen[-1].append(np.array([*keys, *range(begin, end)], int))
            token += 1
    q = rng.standard_normal((tokens + spare, kv_heads * group, dim)).astype(of_dtype(dtype))
    q[tokens:] = np.nan
    case.arguments = {
        "q": q,
        "lists": lists[:, 0] if groups == 1 and rng.random() < 0.5 else lists,
        "granularity": granularity,
        "causal": causal,
        "window": window,
        "return_lse": True,
    }
    if has_offsets:
        case.arguments["indptr"] = np.append(0, np.cumsum(qo)).astype(np.int32)
    _add_cache(case, rng, kv, (kv_heads, dim, dim_vo), of_dtype(dtype_kv))
    _add_options(case, rng, kv_heads * group, dim_vo)
    return case


def _draw_list(
    rng: np.random.Generator, kv_len: int, granularity: int, entries: int, fill: float
) -> np.ndarray:
    """A list: blocks of a request anywhere in it, some twice, some that there are not."""
    blocks = -(-kv_len // granularity)
    own = rng.choice(NO_BLOCKS, size=entries)
    wanted = min(round(fill * entries), blocks)
    places = rng.permutation(entries)
    own[places[:wanted]] = rng.permutation(blocks)[:wanted]
    rest = places[wanted:]
    if rest.size and rng.random() < 0.4:
        own[rest[0]] = int(rng.choice([blocks, blocks + 3, 2**31 - 1]))
    if wanted and rest.size > 1 and rng.random() < 0.4:
        own[rest[1]] = own[places[0]]
    return own


def _add_cache(
    case: AttendCase,
    rng: np.random.Generator,
    kv: np.ndarray,
    extents: tuple[int, int, int],
    dtype: np.dtype,
) -> None:
    """The keys and what says where they lie; what no list names is poison."""
    heads, dim, dim_vo = extents
    count, form, arguments = len(kv), case.form, case.arguments
    if form in ("pages", "HND", "one"):
        size = int(rng.choice([1, 3, 16, 32]))
        width = max(1, -(-int(kv.max(initial=0)) // size)) + int(rng.integers(0, 2))
        table = np.full((count, width + 1), ABSURD_PAGE, np.int32)[:, :width]
        pages = rng.permutation(count * width + 2)
        shares = count > 1 and rng.random() < 0.3  # a page of two requests
        for r in range(count):
            used = -(-int(kv[r]) // size)
            table[r, :used] = pages[r * width : r * width + used]
            if shares and r and used and kv[r - 1] > 0:
                table[r, 0] = table[r - 1, 0]
        shape = (count * width + 2, size, heads)
        places = [
            (table[r][np.arange(kv[r]) // size], np.arange(kv[r]) % size) for r in range(count)
        ]
        arguments["table"], arguments["lengths"] = table, kv.astype(np.int32)
    elif form == "rows":
        begin = np.append(0, np.cumsum(kv)).astype(np.int32)
        shape = (int(begin[-1]) + 2, heads)
        places = [(begin[r] + np.arange(kv[r]),) for r in range(count)]
        arguments["kv_indptr"] = begin
        if rng.random() < 0.3:
            arguments["lengths"] = kv.astype(np.int32)
    else:
        room = max(1, int(kv.max()))
        shape = (count, room, heads)
        places = [(np.full(kv[r], r), np.arange(kv[r])) for r in range(count)]
        arguments["lengths"] = kv.astype(np.int32)
    k = np.full((*shape, dim), np.nan, dtype)
    v = np.full((*shape, dim_vo), np.nan, dtype)
    for request, lists in zip(case.requests, case.seen, strict=True):
        for g, keys in enumerate(lists):
            share = heads / len(lists)
            own = range(heads) if len(lists) == 1 else {int(g * share)}
            for head in own:
                at = (*(x[keys] for x in places[request]), head)
                for x in (k, v):
                    x[at] = rng.standard_normal((len(keys), x.shape[-1])).astype(dtype)
    case.places = places
    case.keys = k, v
    if form == "HND":
        arguments["kv_layout"] = "HND"
        arguments["cache"] = tuple(np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v))
    elif form == "one":
        arguments["cache"] = np.stack([k, v], axis=1)
    elif form == "single":
        arguments["cache"] = k[0], v[0]
    else:
        arguments["cache"] = k, v


def _add_options(
    case: AttendCase, rng: np.random.Generator, num_qo_heads: int, dim_vo: int
) -> None:
    arguments = case.arguments
    q, k = arguments["q"], case.keys[0]
    if rng.random() < 0.4:
        arguments["sinks"] = rng.standard_normal(num_qo_heads).astype(np.float32)
    if rng.random() < 0.4:
        shape = q.shape[:2] if rng.random() < 0.5 else (*q.shape[:2], dim_vo)
        dtype = q.dtype if rng.random() < 0.5 else np.float32
        arguments["output_gate"] = rng.standard_normal(shape).astype(dtype)
    if rng.random() < 0.3:
        arguments["sm_scale"] = float(rng.uniform(-1, 1))
    if rng.random() < 0.3:
        arguments["logits_soft_cap"] = float(rng.uniform(0.5, 5))
    if k.dtype.itemsize == 1:
        for name in ("k_scale", "v_scale"):
            heads = k.shape[-2]
            shape = [(), (1,), (heads,), (len(case.places), heads)][rng.integers(4)]
            scale = rng.uniform(0.5, 2, size=shape).astype(np.float32)
            arguments[name] = scale if shape else float(scale)


def expected(case: AttendCase) -> tuple[np.ndarray, np.ndarray]:
    """Output and base-2 LSE in float64; rows of nobody are NaN."""
    arguments = case.arguments
    q = arguments["q"].astype(np.float64)
    k, v = (x.astype(np.float64) for x in case.keys)
    num_heads, kv_heads = q.shape[1], k.shape[-2]
    o = np.full((*q.shape[:2], v.shape[-1]), np.nan)
    lse = np.full(q.shape[:2], np.nan)
    scale = arguments.get("sm_scale", q.shape[-1] ** -0.5)
    for token, lists in enumerate(case.seen):
        request = case.requests[token]
        for head in range(num_heads):
            kv_head = head * kv_heads // num_heads
            keys = lists[head * len(lists) // num_heads]
            at = (*(x[keys] for x in case.places[request]), kv_head)
            of_k, of_v = (
                _scale_of(arguments.get(name), request, kv_head) for name in ("k_scale", "v_scale")
            )
            logits = k[at] @ q[token, head] * scale * of_k
            cap = arguments.get("logits_soft_cap")
            if cap:
                logits = cap * np.tanh(logits / cap)
            every = logits
            if "sinks" in arguments:
                every = np.append(logits, float(arguments["sinks"][head]))
            o[token, head], lse[token, head] = 0.0, -np.inf
            if every.size:
                weights = np.exp(logits - every.max())
                total = np.exp(every - every.max()).sum()
                o[token, head] = weights @ v[at] * of_v / total
                lse[token, head] = (every.max() + np.log(total)) / np.log(2.0)
    gate = arguments.get("output_gate")
    if gate is not None:
        gate = gate.astype(np.float64)
        o *= 1 / (1 + np.exp(-(gate if gate.ndim == 3 else gate[..., None])))
    return o, lse


def _scale_of(scale: Any, request: int, kv_head: int) -> float:
    if scale is None or np.ndim(scale) == 0:
        return 1.0 if scale is None else float(scale)
    own = scale[request] if np.ndim(scale) == 2 else scale
    return float(own[kv_head if own.size > 1 else 0])


def tolerance(dtype: np.dtype) -> float:
    """Half an ulp of an output of this dtype, relative, and what float32 numbers cost."""
    return float(ml_dtypes.finfo(dtype).eps) * 0.51 + 1e-7
