"""The plans of drawn cases, made on the host as for an H100 or H200: no GPU is needed."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from ..batch.case import BatchCase

_SPACE_BYTES = 1 << 30


def plan_of(case: BatchCase) -> tuple[Any, Any] | None:
    """(BatchLauncher, BatchSchedule) of a case's plan; None where a wrapper of several kinds of
    requests has one that is not the paged wrapper's."""
    wrapper = _wrapper(case)
    prepared = [*wrapper._current.prepared.values()]
    return (prepared[0].launcher, prepared[0].schedule) if prepared else None


def instances(cases: Iterable[BatchCase]) -> list[tuple[str, Any]]:
    """(entry name, Config) of the kernels that our runs of these cases launch, once each."""
    from cupyattn.launch.attention import merge_splits

    found: dict[tuple[str, Any], None] = {}
    for case in cases:
        planned = plan_of(case)
        if planned is None:
            continue
        launcher, _ = planned
        for kernel in launcher.kernels():
            tiles = kernel.loaded.tiles
            found[tiles.name, tiles.config] = None
            if not launcher.problem.is_wide:
                merges = merge_splits.configs(launcher.problem, kernel.kinds[0])
                found |= dict.fromkeys(("merge_splits", config) for config in merges)
    return list(found)


def compile_ahead(cases: Iterable[BatchCase], jobs: int) -> float:
    """Compile these kernels in so many processes, those in the cache aside; returns the seconds.

    A kernel that is refused is left to the run that needs it, whose row then says so.
    """
    start = time.perf_counter()
    compile_instances(instances(cases), jobs)
    return time.perf_counter() - start


def compile_instances(found: Sequence[tuple[str, Any]], jobs: int) -> None:
    """Compile kernels, those in the cache aside."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, *zip(*found, strict=True)))


def _compile(name: str, config: Any) -> bool:
    from cupyattn import jit
    from cupyattn.core.device import device_props
    from cupyattn.errors import CupyAttnError

    try:
        jit.build(name, config, device_props(0).arch)
    except CupyAttnError:
        return False
    return True


def _wrapper(case: BatchCase) -> Any:
    """A wrapper on the CPU that has planned the case as one on a GPU would."""
    import cupyattn

    space = np.zeros(_SPACE_BYTES, np.uint8)  # never touched
    heads = case.num_qo_heads, case.num_kv_heads, case.head_dim_qk
    options: dict[str, Any] = {
        "q_data_type": case.dtype,
        "kv_data_type": case.kv_dtype,
        "window_left": case.window_left,
        "pos_encoding_mode": case.pos_encoding_mode,
    }
    if case.logits_soft_cap:
        options["logits_soft_cap"] = case.logits_soft_cap
    qo_indptr = np.array(case.q_offsets, np.int32)
    wrapper: Any
    if case.api == "ragged":
        wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(space)
        kv_indptr = np.array(case.kv_offsets, np.int32)
        options |= {"causal": case.causal, "head_dim_vo": case.head_dim_vo}
        wrapper.plan(qo_indptr, kv_indptr, *heads, **options)
        return wrapper
    lengths = np.array(case.kv_lens)
    counts = -(-lengths // case.page_size)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    last = (lengths - (counts - 1) * case.page_size).astype(np.int32)
    table = indptr, np.arange(indptr[-1], dtype=np.int32), last
    if case.api in ("decode", "verify"):
        wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(space)
        rows = {"q_len_per_req": case.q_lens[0]} if case.api == "verify" else {}
        wrapper.plan(*table, *heads, case.page_size, **options, **rows)
        return wrapper
    wrapper = cupyattn.BatchPrefillWithPagedKVCacheWrapper(space)
    wrapper.plan(qo_indptr, *table, *heads, case.page_size, causal=case.causal, **options)
    return wrapper
