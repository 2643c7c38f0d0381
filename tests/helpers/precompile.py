"""Builds every kernel the GPU suite needs into CUPYATTN_CACHE_DIR, on a machine without a GPU.

    CUPYATTN_CACHE_DIR=... python tests/helpers/precompile.py --arch sm_90a --jobs 2

The calls are made for real, on NumPy arrays, with the reference replaced by a recorder; so what is
built is what the same calls ask for on a GPU, where arrays are aligned alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root), str(root / "tests")]

from cupyattn import _single, dtypes, jit
from cupyattn.launch import merge_splits, rotate_keys
from cupyattn.launch.instances import SHARED_BYTES, page_instances
from cupyattn.launch.packbits import CONFIG as PACKBITS_CONFIG
from cupyattn.launch.tiles import row_class, tile_config
from cupyattn.problem import AttentionProblem
from helpers import batch_cases, gpu_cases
from helpers.cases import Case
from helpers.gpu_calls import Call

Instance = tuple[str, jit.Config]


def record(case: Case, arch: str, *, is_decode: bool = False) -> list[Instance]:
    """The kernels that one case needs on a GPU of `arch`."""
    found: list[Instance] = []

    def recorder(vq: Any, vk: Any, vv: Any, vout: Any, vlse: Any, entry: Any, *_: Any) -> Any:
        entry.problem.check_supported()
        rows = (1 if is_decode else vq.shape[0]) * entry.num_qo_heads // entry.num_kv_heads
        if rows:
            tiles = tile_config(entry.problem, row_class(rows), SHARED_BYTES[arch], arch=arch)
            found.append((tiles.name, tiles.config))
            if tiles.wants_rotated_keys and case.kv_len:
                config = rotate_keys.config(vk.dtype, entry.problem.head_dim_qk)
                found.append(("rotate_keys", config))
        return (vout.owner, vlse and vlse.owner) if case.return_lse else vout.owner

    with mock.patch.object(_single, "_run_reference", recorder):
        Call.prepare(case, np).run(is_decode=is_decode)
    if case.mask_kind == "bool":
        found.append(("packbits", PACKBITS_CONFIG))
    return found


def instances(arch: str, calls: Iterable[tuple[Case, bool]] | None = None) -> list[Instance]:
    """Every kernel of the suite, once."""
    found: dict[Instance, None] = {("packbits", PACKBITS_CONFIG): None}
    for case, is_decode in calls if calls is not None else gpu_cases.all_cases():
        found |= dict.fromkeys(record(case, arch, is_decode=is_decode))
    return list(found)


def batch_instances(arch: str) -> list[Instance]:
    """Every kernel of the random batches, once: those that plans foresee, and those of the runs."""
    found: dict[Instance, None] = {}
    for case in map(batch_cases.random_case, range(batch_cases.NUM_CASES)):
        wanted = case.problem
        guess = AttentionProblem(
            dtype_q=dtypes.parse(wanted.dtype),
            dtype_kv=dtypes.parse(wanted.kv_dtype),
            dtype_o=dtypes.parse(wanted.o_dtype or wanted.dtype),
            head_dim_qk=wanted.dims[0],
            head_dim_vo=wanted.dims[1],
            pos_encoding=wanted.pos_encoding_mode,
            soft_cap=wanted.is_capped,
            custom_mask=wanted.is_masked,
            paged=case.page_size > 0,
        )
        run = replace(guess, aligned=wanted.is_aligned, scale_first=wanted.scale_first)
        for problem, rows in product((guess, run), {n * case.group for n in case.qo_len if n}):
            tiles = tile_config(
                problem, row_class(rows), SHARED_BYTES[arch], True, arch, case.page_size
            )
            found[tiles.name, tiles.config] = None
            if not tiles.merges_itself:
                found["merge_splits", merge_splits.config(problem, tiles.tile_q)] = None
    return list(found)


def _build(job: tuple[str, jit.Config, str]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # spills are the compile gates' business
        return jit.build(*job).info.cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    start = time.perf_counter()
    all_of = (*instances(args.arch), *batch_instances(args.arch), *page_instances())
    jobs = [(*instance, args.arch) for instance in all_of]
    print(f"{len(jobs)} kernels, found in {time.perf_counter() - start:.0f} s", flush=True)
    # NVRTC compiles one program at a time in a process; fork after CuPy is loaded is unsafe.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        cached = sum(pool.map(_build, jobs, chunksize=4))
    seconds = time.perf_counter() - start
    print(f"{len(jobs) - cached} compiled, {cached} were there; {seconds:.0f} s")


if __name__ == "__main__":
    main()
