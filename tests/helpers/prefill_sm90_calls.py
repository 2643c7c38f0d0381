"""Calls of prefill_sm90's cases through the wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import cupyattn

from . import batches, calls
from .poison import upload
from .prefill_sm90_cases import Case


class Call(calls.Call):
    def __init__(self, case: Case, xp: ModuleType, workspace: Any) -> None:
        super().__init__(case, xp)
        dims, heads = case.problem.dims, (case.num_qo_heads, case.num_kv_heads)
        lengths = list(case.qo_len), list(case.kv_len)
        self.batch = b = batches.make(*lengths, case.page_size or 16, heads=heads, dims=dims)
        if case.has_large_rows:
            b.q[::5] *= b.q.dtype.type(20)
        self.q, self.answer_shape = b.q, (heads[0], dims[1], b.q.dtype)
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

    def requests(self) -> Iterator[dict[str, Any]]:
        return self.batch.requests(**self.case.options)
