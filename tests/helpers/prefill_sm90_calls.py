"""Calls of prefill_sm90's cases on a GPU, and what their answers must be.

Run by itself, it makes those of a few cases in a process of its own: variables that choose kernels
are read once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import cupyattn
from cupyattn.jit import module

from . import batches, compare, lowprec
from .gpu_calls import download, upload
from .on_gpu import workspace
from .prefill_sm90_cases import CASES, Case


def batch_of(case: Case) -> batches.Batch:
    lengths = list(case.qo_len), list(case.kv_len)
    heads = case.num_qo_heads, case.num_kv_heads
    return batches.make(*lengths, case.page_size or 16, heads=heads, dims=case.problem.dims)


def bind(case: Case, b: batches.Batch) -> Callable[[], tuple[Any, Any]]:
    """run() of a planned batch, with torch's tensors."""
    import torch

    heads = case.num_qo_heads, case.num_kv_heads, case.dim
    q = upload(b.q, torch)
    options = case.plan_options()
    if case.as_bits:
        options["custom_mask"] = torch.from_numpy(options["custom_mask"]).cuda()
    if case.page_size:
        paged = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(torch))
        paged.plan(b.qo_indptr, *b.table, *heads, case.page_size, **options)
        cache = upload(b.one_tensor(), torch)
        return lambda: paged.run(q, cache, return_lse=True)
    ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace(torch))
    ragged.plan(b.qo_indptr, b.kv_indptr, *heads, **options)
    k, v = (upload(x, torch) for x in b.ragged())
    return lambda: ragged.run(q, k, v, return_lse=True)


def check(got: tuple[Any, Any], b: batches.Batch, options: dict[str, Any]) -> None:
    low = [
        lowprec.attention(b.q[begin:end], k, v, **options)
        for (k, v), begin, end in zip(b.keys, b.qo_indptr[:-1], b.qo_indptr[1:], strict=True)
    ]
    low_o, low_lse = (np.concatenate(x) for x in zip(*low, strict=True))
    ref = b.expected(**options)
    is_capped = "logits_soft_cap" in options
    compare.assert_close(
        *map(download, got), *ref, low_o, low_lse, options, has_coarse_cap=is_capped
    )


def main(names: list[str]) -> None:
    """Check these cases; print which of prefill_sm90's instances took every maximum."""
    for name in names:
        b = batch_of(CASES[name])
        check(bind(CASES[name], b)(), b, CASES[name].options)
    used = [key[1] for key in module._kernels if key[0] == "prefill_sm90"]
    print(*(config["kTakesMaxima"] for config in used))


if __name__ == "__main__":
    main(sys.argv[1:])
