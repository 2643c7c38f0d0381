"""Seeded random batches through BatchAttention, on poisoned arrays."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn

from . import batch_calls
from .batch_cases import PROBLEMS, Case
from .batch_cases import random_case as random_batch
from .batches import offsets
from .cases import pick
from .poison import upload

NUM_CASES = 600
_PROBLEMS = [
    x
    for x in PROBLEMS
    if not x.is_masked and not x.o_dtype and not x.prescale_logits and x.pos_encoding_mode == "NONE"
]
_CAPPED = [replace(_PROBLEMS[0], is_capped=True), replace(_PROBLEMS[2], is_capped=True)]


def random_case(seed: int) -> Case:
    """The same case for the same seed: some requests of many rows among some of few."""
    rng = np.random.default_rng((seed, 93))
    problems = [*_PROBLEMS, *_CAPPED]
    case = replace(random_batch(seed), problem=problems[seed % len(problems)])
    count = pick(rng, (1, 2, 4, 9, 25)) if seed % 30 else 0
    rows = rng.choice((0, 1, 1, 1, 1, 2, 7, 20, 60, 130), count)
    keys = rng.choice((0, 1, 16, 33, 100, 129, 300, 700), count)
    if count and rng.random() < 0.2:
        keys[0] = 2500
    return replace(
        case,
        wrapper="paged",
        qo_len=tuple(rows.tolist()),
        kv_len=tuple(np.where(rows > 20, np.minimum(keys, 300), keys).tolist()),
        page_size=case.page_size or 16,
        num_kv_heads=min(case.num_kv_heads, 2),
        group=min(case.group, 8),
        causal=bool(rng.random() < 0.7),
        window_left=-1,
        window_right=-1,
        split=(None, False),
        is_pair=case.is_pair or case.problem.dims[0] != case.problem.dims[1],
    )


class Call(batch_calls.Call):
    """A case whose requests may have pages beyond their keys, which are nobody's."""

    def __init__(self, case: Case, xp: ModuleType) -> None:
        super().__init__(case, xp, upload(np.zeros(16, np.uint8), xp))
        self.wrapper = cupyattn.BatchAttention(case.kv_layout, "cuda")
        self.extras.pop("q_scale", None)
        self.scales.pop("q_scale", None)

    def plan(self, **changes: Any) -> None:
        case, problem = self.case, self.case.problem
        spare = self.rng.integers(0, 3, len(case.kv_len)) * bool(self.rng.random() < 0.5)
        counts = np.diff(self.kv_indptr) + spare
        ids = np.full(int(counts.sum()) + 3, np.iinfo(np.int32).max, np.int64)
        indptr = offsets(counts)
        unused = np.setdiff1d(np.arange(len(self.table)), self.table)[0]
        for i, begin in enumerate(indptr[:-1]):
            own = self.table[self.kv_indptr[i] : self.kv_indptr[i + 1]]
            ids[begin : begin + len(own)] = own
            ids[begin + len(own) : indptr[i + 1]] = unused
        kind = np.dtype(case.table_dtype)
        ids = ids.astype(kind)
        self.wrapper.plan(
            self.qo_indptr.astype(kind),
            indptr.astype(kind),
            upload(ids, self.xp) if case.ids_on_device else ids,
            np.array(case.kv_len, kind),
            *(case.num_qo_heads, case.num_kv_heads, *problem.dims, case.page_size),
            causal=case.causal,
            sm_scale=case.sm_scale,
            logits_soft_cap=20.0 if problem.is_capped else None,
            q_data_type=problem.dtype,
            kv_data_type=problem.kv_dtype,
        )

    def start(self) -> None:
        self.run_wrapper(self.wrapper, self.device_q, self.cache, **self.extras)


def planned(seed: int, xp: ModuleType) -> Call:
    """The random case of this seed, whose wrapper has its plan."""
    call = Call(random_case(seed), xp)
    call.plan()
    return call
