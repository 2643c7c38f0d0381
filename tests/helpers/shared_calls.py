"""Seeded random calls of the shared-prefix functions, and what they must answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference

from . import batches, calls, lowprec
from .cases import pick
from .poison import upload

NUM_CASES = 240
_TYPES = (("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn"))


@dataclass(frozen=True)
class Case:
    """`function` is decode, prefill or padded; padded requests have equally many keys."""

    seed: int
    function: str
    dtype: str
    kv_dtype: str
    qo_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    shared_len: int
    page_size: int
    num_kv_heads: int
    group: int
    head_dim: int
    kv_layout: str
    causal: bool
    sm_scale: float | None
    is_pair: bool
    ids_on_device: bool
    knows_page_size: bool
    window_left: int = -1

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group


def random_case(seed: int) -> Case:
    """The same case for the same seed."""
    rng = np.random.default_rng((seed, 94))
    function = ("decode", "prefill", "padded")[seed % 3]
    dtype, kv_dtype = pick(rng, _TYPES)
    count = pick(rng, (0, 1, 2, 5, 12))
    rows = rng.choice((0, 1, 3, 17, 40), count) if function == "prefill" else np.ones(count, int)
    keys = rng.choice((0, 1, 16, 33, 100, 260), count)
    if function == "padded":
        keys = np.full(count, pick(rng, (0, 1, 33, 200)))
    return Case(
        seed,
        function,
        dtype,
        kv_dtype,
        qo_len=tuple(rows.tolist()),
        kv_len=tuple(keys.tolist()),
        shared_len=pick(rng, (0, 1, 64, 300, 1000)),
        page_size=pick(rng, (1, 3, 16)),
        num_kv_heads=pick(rng, (1, 2)),
        group=pick(rng, (1, 4, 5)),
        head_dim=pick(rng, (64, 128)),
        kv_layout=pick(rng, ("NHD", "HND")),
        causal=function == "prefill" and bool(rng.random() < 0.5),
        sm_scale=pick(rng, (None, None, 0.11)),
        is_pair=bool(rng.random() < 0.5),
        ids_on_device=bool(rng.random() < 0.5),
        knows_page_size=function == "decode" or bool(rng.random() < 0.5),
    )


class Call(calls.Call):
    def __init__(self, case: Case, xp: ModuleType, workspace: Any) -> None:
        super().__init__(case, xp, case.seed, 95)
        self.workspace = workspace
        page_size = case.page_size
        if case.function == "padded" and case.kv_len:
            page_size = max(1, case.kv_len[0])
        self.batch = batches.make(
            list(case.qo_len),
            list(case.kv_len),
            page_size,
            seed=case.seed,
            dtype=case.dtype,
            kv_dtype=case.kv_dtype,
            heads=(case.num_qo_heads, case.num_kv_heads),
            dims=(case.head_dim,) * 2,
        )
        self.q = self.batch.q
        shape = 2, case.shared_len, case.num_kv_heads, case.head_dim
        self.shared = self.values(*shape, dtype=case.kv_dtype)
        given = self.shared if case.kv_layout == "NHD" else self.shared.swapaxes(1, 2)
        prefix = [self.embed(f"shared {n}", x) for n, x in zip("kv", given, strict=True)]
        self.arrays = [self.embed("q", self.q), *prefix]
        self.forward = self._padded() if case.function == "padded" else self._planned()

    def _planned(self) -> Callable[[], Any]:
        case, b = self.case, self.batch
        name = f"Batch{case.function.title()}WithSharedPrefixPagedKVCacheWrapper"
        wrapper = getattr(cupyattn, name)(self.workspace, case.kv_layout)
        indices = upload(b.indices, self.xp) if case.ids_on_device else b.indices
        sizes = [case.num_qo_heads, case.num_kv_heads, case.head_dim]
        if case.knows_page_size:
            sizes.append(case.page_size)
        options: dict[str, Any] = {"sm_scale": case.sm_scale}
        first = []
        if case.function == "prefill":
            first, options["causal"] = [b.qo_indptr], case.causal
        wrapper.begin_forward(*first, b.indptr, indices, b.last_page_len, *sizes)
        if case.is_pair:
            pages = [batches.as_layout(x, case.kv_layout) for x in b.cache]
            cache: Any = tuple(upload(x, self.xp) for x in pages)
        else:
            cache = upload(b.one_tensor(case.kv_layout), self.xp)
        return functools.partial(wrapper.forward, *self.arrays, cache, **options)

    def _padded(self) -> Callable[[], Any]:
        case = self.case
        shape = 2, len(case.kv_len), (case.kv_len or (0,))[0], case.num_kv_heads, case.head_dim
        padded = np.zeros(shape, self.shared.dtype)
        for request, pair in enumerate(self.batch.keys):
            padded[:, request] = pair
        own = [batches.as_layout(x, case.kv_layout) for x in padded]
        arrays = *self.arrays, *(self.embed(n, x) for n, x in zip("kv", own, strict=True))
        function = cupyattn.batch_decode_with_shared_prefix_padded_kv_cache
        return functools.partial(function, *arrays, case.kv_layout, sm_scale=case.sm_scale)

    def start(self) -> None:
        self.returned = self.forward(), None

    def expected(self) -> tuple[calls.States, calls.States]:
        """States are rounded, merged and rounded again, and so is the model."""
        case, b = self.case, self.batch
        shape = len(b.q), case.num_qo_heads, case.head_dim
        found = [[np.zeros(shape), np.full(shape[:2], -np.inf)] for _ in range(2)]
        models = reference.attention, functools.partial(lowprec.attention, o_dtype=b.q.dtype)
        for request, own in enumerate(b.keys):
            rows = slice(b.qo_indptr[request], b.qo_indptr[request + 1])
            for target, attend in zip(found, models, strict=True):
                a = attend(b.q[rows], *self.shared, sm_scale=case.sm_scale)
                v = attend(b.q[rows], *own, causal=case.causal, sm_scale=case.sm_scale)
                for x, part in zip(target, reference.merge_state(*a, *v), strict=True):
                    x[rows] = part
        found[1][0] = found[1][0].astype(b.q.dtype).astype(np.float64)
        return found[0], found[1]

    def check(self, out: np.ndarray, lse: np.ndarray | None, **named: Any) -> None:
        shape = len(self.q), self.case.num_qo_heads, self.case.head_dim
        assert out.shape == shape and out.dtype == self.q.dtype
        super().check(out, lse, **named)
