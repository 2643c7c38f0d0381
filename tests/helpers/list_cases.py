"""Attention by lists as kernels are asked for it: cases by seeds, their launches, and the oracle.

What no token's list names is poison: NaN in keys and values, absurd pages in tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn.core import dtypes
from cupyattn.core.dtypes import DType
from cupyattn.core.problem import OutputGate
from cupyattn.core.spec import AttentionSpec
from cupyattn.launch.attention.key_list_arrays import ListAddresses, Lists
from cupyattn.launch.attention.key_lists import ListLauncher
from cupyattn.launch.driver import params

TYPES = {
    "float16": (dtypes.float16, np.dtype(np.float16)),
    "bfloat16": (dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)),
    "float8_e4m3fn": (dtypes.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)),
}
ABSURD_PAGE = 2147480000


@dataclass(frozen=True)
class ListCase:
    """One call.

    kv_lens      keys of each request; `qo_lens`: its tokens
    groups       lists of a token: "one", "kv" or "query" heads
    page_size    0: keys in rows, those of a request behind those of the one before
    fill         how much of a list names blocks; the rest is -1, anywhere in it
    kept         how much of a token's list is the list of the token before it
    repeated     how much of a list names blocks that it names already
    bad_values   how many of the keys that lists name have values that are not finite
    is_dense     each request has one page, which has room for all its keys
    scales       of keys and values: "", or one for all, for each of the "heads", or for those of
                 each of the "requests"
    gates        of the output: "", or those of "heads" or "elements"
    spare_rows   of keys that are in no pages, behind those of all requests
    index_step   words of 32 bits from a length to the next one: 2 of int64, more with gaps
    """

    kv_lens: tuple[int, ...]
    qo_lens: tuple[int, ...]
    length: int
    granularity: int
    num_qo_heads: int = 8
    num_kv_heads: int = 2
    groups: str = "kv"
    head_dim: int = 64
    head_dim_vo: int = 0
    page_size: int = 16
    dtype: str = "float16"
    dtype_kv: str = ""
    window: int = 0
    causal: bool = True
    has_sinks: bool = False
    fill: float = 0.8
    kept: float = 0.0
    repeated: float = 0.0
    bad_values: float = 0.0
    soft_cap: float = 0.0
    is_dense: bool = False
    scales: str = ""
    gates: str = ""
    spare_rows: int = 3
    index_step: int = 1
    seed: int = 0


@dataclass
class Arrays:
    """The arrays of a call. `seen` is what each list names: [token][group] -> key positions. `wide`
    has lengths and offsets as kernels read them, in steps of ListCase.index_step words."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    entries: np.ndarray
    kv_lens: np.ndarray
    qo_offsets: np.ndarray
    table: np.ndarray
    kv_offsets: np.ndarray
    sinks: np.ndarray
    o: np.ndarray
    lse: np.ndarray
    scales_k: np.ndarray
    scales_v: np.ndarray
    gates: np.ndarray
    wide: dict[str, np.ndarray]
    seen: list[list[np.ndarray]] = field(default_factory=list)


def num_groups(case: ListCase) -> int:
    return {"one": 1, "kv": case.num_kv_heads, "query": case.num_qo_heads}[case.groups]


def make(case: ListCase) -> Arrays:
    """The arrays of a case."""
    rng = np.random.default_rng(case.seed)
    tokens, count = sum(case.qo_lens), len(case.kv_lens)
    dim, dim_vo = case.head_dim, case.head_dim_vo or case.head_dim
    dtype, dtype_kv = TYPES[case.dtype][1], TYPES[case.dtype_kv or case.dtype][1]
    kv_lens = np.array(case.kv_lens, np.int32)
    qo_offsets = np.concatenate([[0], np.cumsum(case.qo_lens)]).astype(np.int32)
    kv_offsets = np.concatenate([[0], np.cumsum(kv_lens)]).astype(np.int32)
    size = case.page_size
    if size:
        width = 1 if case.is_dense else max(-(-int(kv_lens.max()) // size), 1) + 2
        num_pages = count * width + 3
        pages = rng.permutation(num_pages)
        table = np.full((count, width), ABSURD_PAGE, np.int32)
        for r in range(count):
            used = -(-int(kv_lens[r]) // size)
            table[r, :used] = pages[r * width : r * width + used]
        shape = num_pages, size, case.num_kv_heads
    else:
        table = np.zeros((0, 0), np.int32)
        shape = int(kv_offsets[-1]) + case.spare_rows, case.num_kv_heads
    entries, seen = _draw_lists(case, rng, qo_offsets)
    k = np.full((*shape, dim), np.nan, dtype_kv)
    v = np.full((*shape, dim_vo), np.nan, dtype_kv)
    built = Arrays(
        q=rng.standard_normal((tokens, case.num_qo_heads, dim)).astype(dtype),
        k=k,
        v=v,
        entries=entries,
        kv_lens=kv_lens,
        qo_offsets=qo_offsets,
        table=table,
        kv_offsets=kv_offsets[:-1].copy(),
        sinks=rng.standard_normal(case.num_qo_heads).astype(np.float32),
        o=np.full((tokens, case.num_qo_heads, dim_vo), np.nan, dtype),
        lse=np.full((tokens, case.num_qo_heads), np.nan, np.float32),
        scales_k=_draw_scales(case, rng),
        scales_v=_draw_scales(case, rng),
        gates=_draw_gates(case, rng, tokens),
        wide={
            "kv_lens": _spread(kv_lens, case.index_step),
            "qo_offsets": _spread(qo_offsets, case.index_step),
            "kv_offsets": _spread(kv_offsets[:-1], case.index_step),
        },
        seen=seen,
    )
    _fill_rows(case, built, rng)
    return built


def _draw_scales(case: ListCase, rng: np.random.Generator) -> np.ndarray:
    """[requests, KV heads], with an extent of 1 where all share."""
    shape = {
        "": (1, 1),
        "one": (1, 1),
        "heads": (1, case.num_kv_heads),
        "requests": (len(case.kv_lens), case.num_kv_heads),
    }[case.scales]
    drawn = rng.uniform(0.5, 1.5, shape) if case.scales else np.ones(shape)
    return drawn.astype(np.float32)


def _draw_gates(case: ListCase, rng: np.random.Generator, tokens: int) -> np.ndarray:
    """[tokens, heads, columns], with an extent of 1 where columns share; none without gates."""
    columns = (case.head_dim_vo or case.head_dim) if case.gates == "elements" else 1
    shape = (tokens, case.num_qo_heads, columns) if case.gates else (0, 0, 0)
    return rng.standard_normal(shape).astype(TYPES[case.dtype][1])


def _spread(x: np.ndarray, step: int) -> np.ndarray:
    """The same numbers, and others between them."""
    spread = np.full((max(len(x), 1), step), -7, np.int32)
    spread[: len(x), 0] = x
    return spread


def _draw_lists(
    case: ListCase, rng: np.random.Generator, qo_offsets: np.ndarray
) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    tokens, groups, g = sum(case.qo_lens), num_groups(case), case.granularity
    entries = np.full((tokens, groups, case.length), -1, np.int32)
    seen: list[list[np.ndarray]] = []
    for t in range(tokens):
        request, end = _end_of(case, t, qo_offsets)
        blocks = -(-case.kv_lens[request] // g)
        seen.append([])
        for group in range(groups):
            wanted = min(blocks, round(case.fill * case.length))
            chosen = rng.permutation(blocks)[:wanted]
            if t > qo_offsets[request] and case.kept:
                before = entries[t - 1, group]
                before = before[before >= 0]
                kept = rng.permutation(before)[: int(case.kept * wanted)]
                chosen = np.array([*kept, *[x for x in chosen if x not in kept]], int)[:wanted]
            if case.repeated and len(chosen):
                again = rng.random(len(chosen)) < case.repeated
                chosen = np.where(again, rng.choice(chosen, len(chosen)), chosen)
            places = rng.permutation(case.length)[: len(chosen)]
            entries[t, group, places] = chosen
            if len(chosen) < case.length and rng.random() < 0.5:  # a block that there is not
                free = next(i for i in range(case.length) if i not in places)
                # The second is block 0 where 32 bits overflow.
                wrapped = 2**32 // g if g > 2 else 2**31 - 1
                entries[t, group, free] = rng.choice([blocks, wrapped, wrapped, -(2**31)])
            last = max(end - case.window, 0)
            keys = [i * g + j for i in chosen for j in range(g) if i * g + j < last]
            keys += range(last, end)
            seen[-1].append(np.array(keys, int))
    return entries, seen


def _end_of(case: ListCase, token: int, qo_offsets: np.ndarray) -> tuple[int, int]:
    """The request of a token, and how many keys the token sees."""
    request = int(np.searchsorted(qo_offsets, token, "right")) - 1
    rest = int(qo_offsets[request + 1]) - token
    end = case.kv_lens[request] - (rest - 1 if case.causal else 0)
    return request, max(end, 0)


def _rows(case: ListCase, arrays: Arrays, request: int, keys: np.ndarray) -> tuple[Any, ...]:
    """Where keys of a request lie in k and v."""
    if case.page_size:
        return arrays.table[request][keys // case.page_size], keys % case.page_size
    return (arrays.kv_offsets[request] + keys,)


def _fill_rows(case: ListCase, arrays: Arrays, rng: np.random.Generator) -> None:
    """Numbers for the keys that lists name, of the heads whose lists do."""
    share = case.num_kv_heads / num_groups(case)
    for t, lists in enumerate(arrays.seen):
        request, _ = _end_of(case, t, arrays.qo_offsets)
        for group, keys in enumerate(lists):
            heads = {int(group * share)} if share <= 1 else range(case.num_kv_heads)
            for head in heads:
                at = (*_rows(case, arrays, request, keys), head)
                for x in (arrays.k, arrays.v):
                    x[at] = rng.standard_normal((len(keys), x.shape[-1])).astype(x.dtype)
    if case.bad_values:
        is_bad = rng.random(arrays.v.shape[:-1]) < case.bad_values
        column = rng.integers(arrays.v.shape[-1])
        arrays.v[is_bad, column] = rng.choice([np.nan, np.inf], int(is_bad.sum()))


def expected(case: ListCase, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Output and natural LSE in float64."""
    o = np.zeros(arrays.o.shape)
    lse = np.full(arrays.lse.shape, -np.inf)
    group = case.num_qo_heads // case.num_kv_heads
    of_head = num_groups(case) / case.num_qo_heads
    scale = case.head_dim**-0.5
    for t, lists in enumerate(arrays.seen):
        request, _ = _end_of(case, t, arrays.qo_offsets)
        for head in range(case.num_qo_heads):
            keys = lists[int(head * of_head)]
            at = (*_rows(case, arrays, request, keys), head // group)
            at_scale = request, head // group
            k, v = arrays.k[at].astype(np.float64), arrays.v[at].astype(np.float64)
            of_k, of_v = (
                float(np.broadcast_to(x, (len(case.kv_lens), case.num_kv_heads))[at_scale])
                for x in (arrays.scales_k, arrays.scales_v)
            )
            logits = of_k * scale * (k @ arrays.q[t, head].astype(np.float64))
            if case.soft_cap:
                logits = case.soft_cap * np.tanh(logits / case.soft_cap)
            sink = [float(arrays.sinks[head])] if case.has_sinks else []
            every = np.concatenate([logits, sink])
            if not every.size:
                continue
            top = every.max()
            total = np.exp(every - top).sum()
            lse[t, head] = top + np.log(total)
            o[t, head] = of_v * (np.exp(logits - top) @ v / total)
    if case.gates:
        o /= 1 + np.exp(-arrays.gates.astype(np.float64))
    return o, lse


def arrays_of(arrays: Arrays) -> list[np.ndarray]:
    """All that kernels may be given the addresses of."""
    every = [*vars(arrays).values(), *arrays.wide.values()]
    return [x for x in every if isinstance(x, np.ndarray)]


def launcher(case: ListCase, device_index: int = 0) -> ListLauncher:
    """What launches a case."""
    kv: DType = TYPES[case.dtype_kv or case.dtype][0]
    q = TYPES[case.dtype][0]
    spec = AttentionSpec(
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        case.head_dim_vo or case.head_dim,
        q,
        kv,
        q,
        page_size=case.page_size,
        sm_scale=case.head_dim**-0.5,
        logits_soft_cap=case.soft_cap,
        sparse=True,
    )
    gate = OutputGate(q, case.gates == "elements") if case.gates else None
    problem = replace(spec.problem(prescale_logits=bool(case.scales)), output_gate=gate)
    return ListLauncher(spec, device_index, case.groups == "query", problem)


def launch(
    case: ListCase,
    arrays: Any,
    address_of: Callable[[Any], int],
    run: ListLauncher,
    stream: int,
    allocate: Callable[[int], tuple[int, object]],
    num_tokens: int = 0,
) -> None:
    """Enqueue a case whose arrays lie where `address_of` says. num_tokens: with those of nobody."""
    heads, groups, size = case.num_kv_heads, num_groups(case), case.page_size
    dims = case.head_dim, case.head_dim_vo or case.head_dim
    read = params.NO_LOGITS_ARRAYS
    if case.gates:
        of_token = case.num_qo_heads * arrays.gates.shape[2]
        gate_strides = of_token, arrays.gates.shape[2]
        read = params.with_output_gate(read, address_of(arrays.gates), gate_strides)
    by_request = arrays.scales_k.shape[1] if arrays.scales_k.shape[0] > 1 else 0
    by_head = int(arrays.scales_k.shape[1] > 1)
    optional = params.OPTIONAL.pack(
        address_of(arrays.lse),
        0,
        address_of(arrays.sinks) if case.has_sinks else 0,
        0,
        address_of(arrays.scales_k) if case.scales else 0,
        0,
        0,
        params.STEPS.pack(0, 0, by_request, 0),
        read,
    )
    of_q = [case.num_qo_heads * dims[0], dims[0]]
    of_o = [case.num_qo_heads * dims[1], dims[1]]
    of_keys = [x for dim in dims for x in (heads * dim, dim)]
    of_pages = [(size or 1) * heads * dim for dim in dims]
    strides = params.STRIDES.pack(*of_q, *of_keys, *of_o, case.num_qo_heads, 1, *of_pages)
    is_uniform = len(set(case.qo_lens)) == 1
    width = arrays.table.shape[1]
    lists = Lists(
        length=case.length,
        granularity=case.granularity,
        stride_n=groups * case.length,
        stride_group=case.length if groups > 1 else 0,
        num_requests=len(case.kv_lens),
        max_kv_len=size * width if size else max(case.kv_lens),
        window=case.window,
        request_tokens=case.qo_lens[0] if is_uniform else 0,
        kv_step=width,
        is_causal=case.causal,
        num_pages=len(arrays.k),
        steps=(case.index_step,) * 3,
        k_scale_step=by_head,
        v_scale_step=by_head,
        k_scale_request_step=by_request,
        v_scale_request_step=by_request,
    )
    at = ListAddresses(
        q=address_of(arrays.q),
        k=address_of(arrays.k),
        v=address_of(arrays.v),
        o=address_of(arrays.o),
        entries=address_of(arrays.entries),
        kv_lens=address_of(arrays.wide["kv_lens"]),
        table=address_of(arrays.table) if size else 0,
        qo_offsets=0 if is_uniform else address_of(arrays.wide["qo_offsets"]),
        kv_offsets=0 if size else address_of(arrays.wide["kv_offsets"]),
        key_scales=address_of(arrays.scales_k) if case.scales else 0,
        value_scales=address_of(arrays.scales_v) if case.scales else 0,
    )
    run.launch(at, lists, optional, strides, num_tokens or sum(case.qo_lens), stream, allocate)


def draw(seed: int) -> ListCase:
    """A small case."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5))
    granularity = int(rng.choice([1, 4, 8, 64, 128]))
    kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 5, 8, 16, 20, 40]))
    longest = int(rng.choice([40, 300, 900]))
    is_uniform = rng.random() < 0.5
    qo = rng.integers(1, 4, size=count) if is_uniform else rng.integers(0, 4, size=count)
    if is_uniform or not qo.sum():
        qo[:] = qo[0] or 1
    dtype = str(rng.choice(["float16", "bfloat16"]))
    dim = int(rng.choice([64, 128, 256, 80, 192]))
    return ListCase(
        kv_lens=tuple(int(x) for x in rng.integers(0, longest, size=count)),
        qo_lens=tuple(int(x) for x in qo),
        length=int(rng.integers(1, max(2, 600 // granularity))),
        granularity=granularity,
        num_qo_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        groups=str(rng.choice(["one", "kv", "query"])),
        head_dim=dim,
        head_dim_vo=int(rng.choice([0, 0, 64, 128])) if dim > 64 else 0,
        page_size=int(rng.choice([0, 1, 3, 16, 64, 128])),
        dtype=dtype,
        dtype_kv="float8_e4m3fn" if rng.random() < 0.3 else "",
        window=int(rng.choice([0, 0, 1, 7, 100])),
        causal=bool(rng.random() < 0.8),
        has_sinks=bool(rng.random() < 0.4),
        fill=float(rng.choice([0.0, 0.3, 0.9, 1.0])),
        kept=float(rng.choice([0.0, 0.8])),
        soft_cap=float(rng.choice([0.0, 0.0, 5.0])),
        scales=str(rng.choice(["", "", "one", "heads", "requests"])),
        gates=str(rng.choice(["", "", "", "heads", "elements"])),
        index_step=int(rng.choice([1, 1, 2, 3])),
        seed=seed,
    )


def draw_unions(seed: int) -> ListCase:
    """A small case of many tokens, whose neighbours share the keys of their lists."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5))
    kv_heads, group = int(rng.choice([1, 2, 4])), int(rng.choice([4, 5, 8, 12, 16, 16, 20, 64]))
    is_uniform = rng.random() < 0.5
    qo = rng.integers(1, 40, size=count)
    if is_uniform:
        qo[:] = qo[0]
    granularity = int(rng.choice([64, 128]))
    dim, dim_vo = ((64, 0), (128, 0), (128, 0), (96, 64))[rng.integers(4)]
    case = ListCase(
        kv_lens=tuple(int(x) for x in rng.integers(0, rng.choice([200, 900, 3000]), size=count)),
        qo_lens=tuple(int(x) for x in qo),
        length=int(rng.integers(1, 17)),
        granularity=granularity,
        num_qo_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        groups=str(rng.choice(["one", "kv"])),
        head_dim=dim,
        head_dim_vo=dim_vo,
        page_size=int(rng.choice([8, 16, 64, 128, 256])),
        dtype=str(rng.choice(["float16", "bfloat16"])),
        causal=bool(rng.random() < 0.8),
        has_sinks=bool(rng.random() < 0.4),
        fill=float(rng.choice([0.0, 0.3, 0.9, 1.0])),
        kept=float(rng.choice([0.0, 0.8, 0.95])),
        repeated=float(rng.choice([0.0, 0.0, 0.3])),
        bad_values=float(rng.choice([0.0, 0.0, 0.002])),
        seed=seed,
    )
    if rng.random() < 0.4:
        return case
    kv_lens, size = case.kv_lens, case.page_size
    is_dense = rng.random() < 0.2
    if is_dense:
        size = max(kv_lens) + int(rng.choice([0, 1, 8, 64, 128 - max(kv_lens) % 128]))
    elif rng.random() < 0.4:
        size = 0
    return replace(
        case,
        page_size=max(size, 1) if is_dense else size,
        is_dense=is_dense,
        window=int(rng.choice([0, 0, 1, 7, 64, 100, 200])),
        gates=str(rng.choice(["", "", "heads", "elements"])),
        spare_rows=int(rng.choice([0, 0, 3])),
        index_step=int(rng.choice([1, 1, 2, 3])),
        dtype_kv="float8_e4m3fn" if size and not is_dense and rng.random() < 0.4 else "",
    )


def draw_small_unions(seed: int) -> ListCase:
    """A small case of many tokens whose lists name small blocks in pages."""
    rng = np.random.default_rng(seed)
    case = draw_unions(seed)
    granularity = int(rng.choice([4, 4, 4, 8, 16, 32]))
    heads = case.num_kv_heads
    dim, dim_vo = ((64, 0), (128, 0), (256, 0), (256, 0), (96, 64))[rng.integers(5)]
    return replace(
        case,
        granularity=granularity,
        length=int(rng.integers(1, 1200 // granularity)),
        num_qo_heads=heads * int(rng.choice([4, 8, 12, 16, 20])),
        head_dim=dim,
        head_dim_vo=dim_vo,
        page_size=int(rng.choice([4, 16, 64])),
        is_dense=False,
        window=0,
        dtype_kv="",
    )
