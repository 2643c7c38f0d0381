"""Batches for prefill_sm90 whose requests end within tiles of rows and keys, by the wrappers."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn

from . import batches, calls
from .poison import upload


@dataclass(frozen=True)
class Case:
    """page_size: 0 for ragged keys. dim_vo: of v, if it is another one than of q and k. options: of
    plan(). as_bits: causality comes as a mask. has_large_rows: every fifth token of q is so large
    that its logits pass the range of a soft cap's fast path, and those beside it do not."""

    qo_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    page_size: int = 0
    dim: int = 128
    options: dict[str, Any] = field(default_factory=dict)
    num_qo_heads: int = 8
    num_kv_heads: int = 2
    as_bits: bool = False
    dim_vo: int = 0
    has_large_rows: bool = False

    @property
    def dims(self) -> tuple[int, int]:
        return self.dim, self.dim_vo or self.dim

    def plan_options(self) -> dict[str, Any]:
        """The options as plan() is told."""
        if not self.as_bits:
            return self.options
        bits = [
            np.tri(*lengths, lengths[1] - lengths[0], dtype=bool).reshape(-1)
            for lengths in zip(self.qo_len, self.kv_len, strict=True)
        ]
        return self.options | {"causal": False, "custom_mask": np.concatenate(bits)}


SHORT = (33, 40, 129, 64, 17, 300, 18, 70)
CASES = {
    "ragged": Case(SHORT, SHORT, options={"causal": True}),
    "dim 64": Case(SHORT, SHORT, dim=64, options={"causal": True}),
    "dim 256": Case(SHORT, SHORT, dim=256, options={"causal": True}),
    # Boxes copy any rows of one KV head.
    "one KV head": Case(SHORT, SHORT, 0, 64, {"causal": True}, num_qo_heads=71, num_kv_heads=1),
    "all keys": Case((500, 20), (700, 900)),
    "window": Case((400, 90), (1200, 900), options={"causal": True, "window_left": 200}),
    "soft cap": Case((400, 90), (400, 900), options={"causal": True, "logits_soft_cap": 30.0}),
    "ALiBi": Case((400, 90), (400, 900), options={"causal": True, "pos_encoding_mode": "ALIBI"}),
    "RoPE": Case(
        (400, 90), (400, 900), options={"causal": True, "pos_encoding_mode": "ROPE_LLAMA"}
    ),
    "dim 72": Case(SHORT, SHORT, dim=72, options={"causal": True}),
    "dim 80, all keys": Case((500, 20), (700, 900), dim=80),
    "dim 112": Case((400, 90), (1200, 900), dim=112, options={"causal": True, "window_left": 200}),
    "dim 160": Case(SHORT, SHORT, dim=160, options={"causal": True}),
    "dims 256 and 128": Case(SHORT, SHORT, dim=256, dim_vo=128, options={"causal": True}),
    "dim 80, pages of 16": Case((300, 70), (3000, 1030), 16, 80, {"causal": True}),
    "dim 104, pages of 1": Case((300, 70), (1500, 1030), 1, 104, {"causal": True}),
    "soft cap, large logits": Case(
        (400, 90), (1400, 900), options={"logits_soft_cap": 30.0}, has_large_rows=True
    ),
    "soft cap, large logits, dim 64": Case(
        (3000,), (3000,), dim=64, options={"logits_soft_cap": 30.0}, has_large_rows=True
    ),
    "soft cap, large logits, pages of 16": Case(
        *((400, 90), (1400, 900), 16), options={"logits_soft_cap": 30.0}, has_large_rows=True
    ),
    "pages of 16": Case((300, 70), (3000, 1030), 16, options={"causal": True}),
    "pages of 1": Case((300, 70), (1500, 1030), 1, options={"causal": True}),
    "mask": Case((400, 90, 700), (400, 900, 700), options={"causal": True}, as_bits=True),
    "mask, dim 256": Case((400, 90), (400, 900), dim=256, options={"causal": True}, as_bits=True),
    "mask, pages of 16": Case((300, 70), (3000, 400), 16, options={"causal": True}, as_bits=True),
    "mask, pages of 1": Case((300, 70), (1500, 400), 1, options={"causal": True}, as_bits=True),
    "split": Case((20,), (20_000,), 16, options={"causal": True}),
    "beside decodes": Case((300, *(1,) * 30), (2000, *(900,) * 30), 16, options={"causal": True}),
}


class Call(calls.Call):
    def __init__(self, case: Case, xp: ModuleType, workspace: Any) -> None:
        super().__init__(case, xp)
        dims, heads = case.dims, (case.num_qo_heads, case.num_kv_heads)
        lengths = list(case.qo_len), list(case.kv_len)
        self.batch = b = batches.make(*lengths, case.page_size or 16, heads=heads, dims=dims)
        if case.has_large_rows:
            b.q[::5] *= b.q.dtype.type(20)
        self.q, self.keys, self.qo_indptr = b.q, b.keys, b.qo_indptr
        self.answer_shape = heads[0], dims[1], b.q.dtype
        self.has_coarse_cap = "logits_soft_cap" in case.options
        options = case.plan_options()
        if case.as_bits:
            options["custom_mask"] = upload(options["custom_mask"], xp)
        sizes = *heads, dims[0]
        if case.page_size:
            paged = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace)
            paged.plan(b.qo_indptr, *b.table, *sizes, case.page_size, **options)
            self.wrapper: Any = paged
            keys = [b.one_tensor()]
        else:
            ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace)
            ragged.plan(b.qo_indptr, b.kv_indptr, *sizes, dims[1], **options)
            self.wrapper, keys = ragged, list(b.ragged())
        self.arrays = [upload(x, xp) for x in (b.q, *keys)]

    def start(self) -> None:
        self.returned = self.wrapper.run(*self.arrays, return_lse=True)

    def options(self) -> dict[str, Any]:
        return self.case.options
