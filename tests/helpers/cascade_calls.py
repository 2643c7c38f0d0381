"""Seeded random cascades through the public API, on poisoned arrays, and what they must answer.

The answer is that of attention over the keys of all levels as one sequence, request by request.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference
from cupyattn.core import dtypes

from . import batches, calls, lowprec, poison
from .batch_cases import PROBLEMS, Problem
from .batches import offsets
from .cases import pick
from .poison import upload

NUM_CASES = 1200
_PROBLEMS = [x for x in PROBLEMS if not x.is_masked and x.dims[0] == x.dims[1] and not x.o_dtype]
_PAGE_SIZES = (1, 2, 4, 16, 16, 16, 64)
_CAP = 20.0


# The rows and the keys of its requests.
Level = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """levels: for each, the rows and the keys of its requests, widest level first."""

    seed: int
    problem: Problem
    levels: tuple[Level, ...]
    page_size: int
    num_kv_heads: int
    group: int
    kv_layout: str
    causal: bool
    window_left: int
    has_sinks: bool
    has_scales: bool
    is_pair: bool
    ids_on_device: bool
    with_out: bool
    table_dtype: str = "int32"

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group


def random_case(seed: int) -> Case:
    """The same case for the same seed."""
    rng = np.random.default_rng((seed, 91))
    problem = _PROBLEMS[seed % len(_PROBLEMS)]
    page_size = pick(rng, _PAGE_SIZES)
    num_requests = pick(rng, (0, 1, 2, 3, 5, 9, 20)) if seed % 30 else 0
    q_choices = pick(rng, ((1,), (1,), (1, 2, 4), (0, 1, 3, 17, 40)))
    rows = [int(rng.choice(q_choices)) for _ in range(num_requests)]
    keys = [int(rng.choice((0, 1, 7, 16, 33, 100, 260))) for _ in rows]
    causal = bool(rng.random() < 0.5)
    window_left = pick(rng, (-1, -1, 0, 30, 150))
    if causal and (window_left >= 0 or problem.pos_encoding_mode != "NONE"):
        keys = [max(k, q) for q, k in zip(rows, keys, strict=True)]
    levels = [(tuple(rows), tuple(keys))]
    is_whole = bool(rng.random() < 0.6)  # shared parts end with their pages, so a flat plan exists
    for _ in range(pick(rng, (0, 1, 1, 1, 2))):
        shared_rows, shared_keys = _group(rng, levels[0][0])
        if is_whole:
            shared_keys = [-(-n // page_size) * page_size for n in shared_keys]
        levels.insert(0, (tuple(shared_rows), tuple(shared_keys)))
    is_relative = window_left >= 0 or problem.pos_encoding_mode != "NONE"
    if len(levels) > 1 and not is_relative and rng.random() < 0.15:
        levels[0] = _shifted(rng, levels[0])
    return Case(
        seed,
        problem,
        tuple(levels),
        page_size,
        num_kv_heads=pick(rng, (1, 2, 3)),
        group=pick(rng, (1, 2, 4, 5, 8)),
        kv_layout=pick(rng, ("NHD", "HND")),
        causal=causal,
        window_left=window_left,
        has_sinks=bool(rng.random() < 0.3),
        has_scales=bool(rng.random() < 0.3),
        is_pair=bool(rng.random() < 0.5),
        ids_on_device=bool(rng.random() < 0.5),
        with_out=bool(rng.random() < 0.6),
        table_dtype=pick(rng, ("int32", "int32", "int64")),
    )


def _group(rng: np.random.Generator, rows: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Neighbouring requests that share keys: the rows and the keys of each group."""
    grouped, keys = [], []
    at = 0
    while at < len(rows):
        size = pick(rng, (1, 2, 4, 30))
        grouped.append(sum(rows[at : at + size]))
        keys.append(int(rng.choice((0, 5, 64, 65, 129, 300, 700))))
        at += size
    return grouped, keys


def _shifted(rng: np.random.Generator, level: Level) -> Level:
    """As many requests, which begin and end at any rows: inside those of the other levels too."""
    rows, keys = level
    cuts = np.sort(rng.integers(0, sum(rows) + 1, max(0, len(rows) - 1)))
    return tuple(np.diff(cuts, prepend=0, append=sum(rows)).tolist())[: len(rows)], keys


class Call(calls.Call):
    def __init__(self, case: Case, xp: ModuleType) -> None:
        super().__init__(case, xp, case.seed, 92)
        problem, dim = case.problem, case.problem.dims[0]
        rows = sum(case.levels[-1][0]), case.num_qo_heads
        self.q = self.values(*rows, dim, dtype=problem.dtype)
        self.keys = [
            [
                [self.values(n, case.num_kv_heads, dim, dtype=problem.kv_dtype) for _ in "kv"]
                for n in keys
            ]
            for _, keys in case.levels
        ]
        self.extras: dict[str, Any] = {}
        if case.has_sinks:
            self.extras["sinks"] = self.rng.normal(0, 2, case.num_qo_heads).astype(np.float32)
        if problem.prescale_logits:
            scales = self.rng.uniform(0.3, 1.5, case.num_kv_heads).astype(np.float32)
            self.extras["k_scale"] = -0.6 if case.num_kv_heads == 1 else scales
        if case.has_scales:
            self.extras["v_scale"] = 0.7
        self._place_keys()
        strides = poison.strides(self.q.shape, problem.is_aligned, is_padded=True)
        self.device_q = self.embed("q", self.q, strides)
        self.out = self.blank("out", self.q.shape, self.q.dtype, strides)
        self.lse = self.blank("lse", rows, np.float32)
        self.has_coarse_cap = problem.has_coarse_cap
        slopes_of = case.num_qo_heads * (problem.pos_encoding_mode == "ALIBI")
        self.logit_magnitude = calls.logit_magnitude(_CAP * problem.is_capped, slopes_of, 2048)
        self.given = {
            name: upload(x, xp) if isinstance(x, np.ndarray) else x
            for name, x in self.extras.items()
        }

    def _place_keys(self) -> None:
        case, size = self.case, self.case.page_size
        counts = [[-(-n // size) for n in keys] for _, keys in case.levels]
        total = sum(map(sum, counts)) + 3
        order = self.rng.permutation(total)
        self.tables, at = [], 0
        for (_, keys), pages in zip(case.levels, counts, strict=True):
            ids = np.append(order[at : at + sum(pages)], [2**31 - 1, -(2**31)]).astype(np.int32)
            at += sum(pages)
            table = offsets(pages), ids, batches.last_page_len(keys, size, of_none=-9)
            self.tables.append([x.astype(case.table_dtype) for x in table])
        kind, dims = dtypes.parse(case.problem.kv_dtype).numpy, case.problem.dims
        pairs = [pair for level in self.keys for pair in level]
        pools = batches.make_pools(
            pairs, (order, order), size, case.num_kv_heads, dims, kind, case.kv_layout
        )
        if case.is_pair:
            self.cache: Any = tuple(upload(x, self.xp) for x in pools)
        else:
            self.cache = upload(np.stack(pools, axis=1), self.xp)

    def plan_arguments(self) -> tuple[list[Any], dict[str, Any]]:
        case = self.case
        problem = case.problem
        indptr, ids, last = (list(x) for x in zip(*self.tables, strict=True))
        if case.ids_on_device:
            ids = [upload(x, self.xp) for x in ids]
        rows = [offsets(rows).astype(case.table_dtype) for rows, _ in case.levels]
        sizes = [case.num_qo_heads, case.num_kv_heads, problem.dims[0], case.page_size]
        options = {
            "causal": case.causal,
            "window_left": case.window_left,
            "pos_encoding_mode": problem.pos_encoding_mode,
            "logits_soft_cap": _CAP if problem.is_capped else None,
            "q_data_type": problem.dtype,
            "kv_data_type": problem.kv_dtype,
        }
        return [rows, indptr, ids, last, *sizes], options

    def flat_table(self) -> list[np.ndarray] | None:
        """qo_indptr, page indptr, ids, last_page_len and kv_len of the requests of the last level
        over the pages of all levels; None if pages do not say that."""
        case = self.case
        indptrs = [offsets(rows) for rows, _ in case.levels]
        ids: list[np.ndarray] = []
        lengths, pages = [], []
        for request, (begin, end) in enumerate(pairwise(indptrs[-1].tolist())):
            places = [int(np.searchsorted(x, begin, side="right")) - 1 for x in indptrs[:-1]]
            chain = [*enumerate(places), (len(places), request)] if begin < end else []
            counts = [case.levels[level][1][place] for level, place in chain]
            is_nested = all(indptrs[level][place + 1] >= end for level, place in chain)
            is_cut = any(n % case.page_size for n in counts[:-1])
            if is_cut or not is_nested or (case.causal and chain and counts[-1] < end - begin):
                return None
            own = [self.tables[i][1][slice(*self.tables[i][0][n : n + 2])] for i, n in chain]
            ids += own
            pages.append(sum(map(len, own)))
            lengths.append(sum(counts))
        last = batches.last_page_len(lengths, case.page_size)
        table = [indptrs[-1], offsets(pages), np.concatenate([*ids, [2**31 - 1]]), last]
        return [x.astype(np.int32) for x in (*table, np.array(lengths))]

    def plan(self, workspace: Any, **made: Any) -> Any:
        """A wrapper of the case, with its plan; `made` are options of the constructor."""
        cls = cupyattn.MultiLevelCascadeAttentionWrapper
        self.wrapper = cls(len(self.case.levels), workspace, self.case.kv_layout, **made)
        arguments, options = self.plan_arguments()
        self.wrapper.plan(*arguments, **options)
        return self.wrapper

    def start(self) -> None:
        is_mixed = isinstance(self.wrapper, cupyattn.BatchAttention)
        options = self.given if is_mixed else self.given | {"return_lse": True}
        self.run_wrapper(self.wrapper, self.device_q, self.cache, **options)

    def run_on(self, wrapper: Any) -> calls.Answer:
        """What a wrapper with a plan for the same rows and keys answers."""
        self.wrapper = wrapper
        return self.run()

    def expected(self) -> tuple[calls.States, calls.States]:
        case, problem = self.case, self.case.problem
        heads, dim = case.num_qo_heads, problem.dims[1]
        found = [
            [np.zeros((len(self.q), heads, dim)), np.zeros((len(self.q), heads))] for _ in range(2)
        ]
        indptrs = [offsets(rows) for rows, _ in case.levels]
        cuts = np.unique(np.concatenate(indptrs)).tolist()
        for begin, end in pairwise(cuts):
            places = [int(np.searchsorted(x, begin, side="right")) - 1 for x in indptrs]
            first, qo_len = int(indptrs[-1][places[-1]]), case.levels[-1][0][places[-1]]
            rows, own_rows = slice(first, first + qo_len), slice(begin - first, end - first)
            pairs = [self.keys[i][n] for i, n in enumerate(places)]
            k, v = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
            own, mask = len(pairs[-1][0]), None
            if case.causal and own < qo_len:
                shown = np.maximum(np.arange(qo_len) + own - qo_len, -1) + len(k) - own
                mask = np.arange(len(k)) <= shown[:, None]
            arguments: dict[str, Any] = {
                "q": self.q[rows],
                "k": k,
                "v": v,
                "causal": case.causal,
                "window_left": case.window_left,
                "mask": mask,
                "logits_soft_cap": _CAP if problem.is_capped else 0.0,
                "pos_encoding_mode": problem.pos_encoding_mode,
                "sinks": self.extras.get("sinks"),
                **{f"scale_{n}": self.extras.get(f"{n}_scale") for n in "kv"},
            }
            ref = reference.attention(**arguments)
            arguments["o_dtype"] = self.q.dtype
            low = lowprec.attention(**arguments)
            if problem.pos_encoding_mode == "ROPE_LLAMA":
                # Each level counts positions from its own first key, and so rounds otherwise.
                moved = lowprec.attention(**arguments, rope_start=own - len(k))
                low = [_worse(*three) for three in zip(ref, low, moved, strict=True)]
            answers = ref, low
            for arrays, answer in zip(found, answers, strict=True):
                for target, x in zip(arrays, answer, strict=True):
                    target[begin:end] = x[own_rows]
        return found[0], found[1]


def _worse(ref: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of each pair of elements the one that is further from the reference."""
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(b - ref) > np.abs(a - ref), b, a)


def planned(case: Case, xp: ModuleType, workspace: Any) -> Call:
    """A call whose wrapper has its plan."""
    call = Call(case, xp)
    call.plan(workspace)
    return call
