"""Builds every kernel the GPU suite needs into CUPYATTN_CACHE_DIR, on a machine without a GPU.

    CUPYATTN_CACHE_DIR=... python tests/helpers/precompile.py --arch sm_90a --jobs 2

The calls are made for real, on NumPy arrays, with the reference replaced by a recorder; so what is
built is what the same calls ask for on a GPU, where arrays are aligned alike.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root), str(root / "tests")]

from cupyattn import jit
from cupyattn.core import dtypes
from cupyattn.core.device import NO_GPU, overlaps_launches
from cupyattn.core.problem import AttentionProblem
from cupyattn.core.spec import AttentionSpec
from cupyattn.engine import run_single as single
from cupyattn.engine.levels import flatten, join_levels, read_levels
from cupyattn.launch.attention import (
    batch,
    kernels,
    merge_levels,
    merge_splits,
    pad_lse,
    plan_batch,
    read_tables,
    rotate_keys,
    scan_mask,
)
from cupyattn.launch.driver.enqueue import Launch
from cupyattn.launch.instances import SHARED_BYTES, Selection
from cupyattn.launch.instances import instances as selected_instances
from cupyattn.launch.ops.packbits import CONFIG as PACKBITS_CONFIG
from cupyattn.launch.tiles.config import TileConfig
from cupyattn.launch.tiles.mixed_sm80 import MixedConfig, mixed_config
from cupyattn.launch.tiles.row_classes import row_class
from cupyattn.launch.tiles.select import tile_config
from cupyattn.schedule.batch import BatchRequests
from helpers import (
    batch_cases,
    cascade_calls,
    gpu_cases,
    item_cases,
    logits_calls,
    mixed_calls,
    planless_cases,
    prefill_sm90_cases,
    shared_calls,
    verify_cases,
)
from helpers.batch_cases import Problem
from helpers.batches import offsets
from helpers.cases import Case
from helpers.single_calls import Call

Instance = tuple[str, jit.Config]


def with_scan(tiles: TileConfig | MixedConfig) -> list[Instance]:
    """A kernel, and what looks through a mask ahead of it."""
    scan = scan_mask.config(tiles) if isinstance(tiles, TileConfig) else None
    return [(tiles.name, tiles.config), *([("scan_mask", scan)] if scan is not None else [])]


def record(case: Case, arch: str, *, is_decode: bool = False) -> list[Instance]:
    """The kernels that one case needs on a GPU of `arch`."""
    found = recorded(lambda: Call(case, np, is_decode=is_decode).start(), arch)
    if case.mask_kind == "bool":
        found.append(("packbits", PACKBITS_CONFIG))
    return found


def recorded(call: Callable[[], object], arch: str) -> list[Instance]:
    """The kernels that a call of one request on NumPy arrays needs on a GPU of `arch`."""
    found: list[Instance] = []

    def recorder(call: Any, _: Any) -> Any:
        entry = call.entry
        entry.problem.check_supported()
        rows = call.qo_len * entry.spec.group_size
        if rows:
            tiles = tile_config(entry.problem, row_class(rows), SHARED_BYTES[arch], arch=arch)
            found.extend(with_scan(tiles))
            if tiles.wants_rotated_keys and call.kv_len:
                config = rotate_keys.config(call.k.dtype, entry.problem.head_dim_qk, False)
                found.append(("rotate_keys", config))
        return call.out and call.out.owner, call.lse and call.lse.owner

    with mock.patch.object(single, "_run_reference", recorder):
        call()
    return found


def logits_instances(arch: str) -> list[Instance]:
    """Every kernel of single requests with user-written logits, once."""
    calls = (logits_calls.Single(**given).run for given in logits_calls.requests().values())
    return list(dict.fromkeys(x for call in calls for x in recorded(call, arch)))


def instances(arch: str, calls: Iterable[tuple[Case, bool]] | None = None) -> list[Instance]:
    """Every kernel of the suite, once."""
    found: dict[Instance, None] = {("packbits", PACKBITS_CONFIG): None}
    for case, is_decode in calls if calls is not None else gpu_cases.all_cases():
        found |= dict.fromkeys(record(case, arch, is_decode=is_decode))
    return list(found)


class Recorder:
    """Stands in for what loads kernels for batches; keeps what would be loaded."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.found: dict[Instance, None] = {}

    def add(self, tiles: TileConfig | MixedConfig, problem: AttentionProblem) -> SimpleNamespace:
        """Also the merge of its splits, which there may be on a GPU of another size."""
        self.found |= dict.fromkeys(with_scan(tiles))
        prefill = tiles.prefill if isinstance(tiles, MixedConfig) else tiles
        if prefill.wants_rotated_keys:
            dim = problem.head_dim_qk
            self.found["rotate_keys", rotate_keys.config(problem.dtype_kv, dim, problem.paged)] = (
                None
            )
        if not prefill.fused_merge:
            merges = merge_splits.configs(problem, prefill)
            self.found |= dict.fromkeys(("merge_splits", config) for config in merges)
        return SimpleNamespace(
            function=None,
            tiles=tiles,
            num_slots=264,
            num_sms=132,
            has_clusters=tiles.name == "decode_sm80" and overlaps_launches(self.arch),
            most_clusters=lambda cluster: 120 // cluster,
        )

    def load_kernel(
        self,
        problem: AttentionProblem,
        rows: str,
        index: int,
        is_batch: bool,
        page_size: int = 0,
    ) -> SimpleNamespace:
        most = SHARED_BYTES[self.arch]
        tiles = tile_config(problem, rows, most, is_batch, self.arch, page_size)
        return self.add(tiles, problem)

    def load_mixed(
        self, problem: AttentionProblem, large: str, small: str, index: int
    ) -> SimpleNamespace | None:
        tiles = mixed_config(problem, large, small, SHARED_BYTES[self.arch], self.arch)
        return None if tiles is None else self.add(tiles, problem)

    def merge_levels(self, problem: AttentionProblem, *_: Any) -> Launch:
        self.found["merge_levels", merge_levels.config(problem)] = None
        return Launch(None, (1, 1, 1), 32, 0)

    @contextlib.contextmanager
    def plugged_in(self) -> Iterator[None]:
        """batch.py asks the recorder."""
        api, launch = SimpleNamespace(is_debugging=False), Launch(None, (1, 1, 1), 32, 0)
        props = replace(NO_GPU, arch=self.arch, max_smem_per_block=SHARED_BYTES[self.arch])
        with contextlib.ExitStack() as stack:
            for target, name, stand_in in (
                (kernels, "load_kernel", self.load_kernel),
                (kernels, "load_mixed", self.load_mixed),
                (kernels, "device_props", lambda _: props),
                (batch, "cuda", lambda: api),
                (merge_levels, "prepare", self.merge_levels),
                (merge_splits, "prepare", lambda *_: launch),
                (scan_mask, "prologue", lambda *_: launch),
            ):
                stack.enter_context(mock.patch.object(target, name, stand_in))
            yield

    def schedule(self, wanted: Problem, page_size: int, plan: Callable[..., object], case: Any,
                 **options: Any) -> None:  # fmt: skip
        """Let `plan` use launchers of the problem that plan() foresees, and of the run's."""
        has_items = getattr(case, "has_items", False)
        dtype = dtypes.parse(wanted.dtype)
        spec = AttentionSpec(
            case.num_qo_heads,
            case.num_kv_heads,
            *wanted.dims,
            dtype_q=dtype,
            dtype_kv=dtypes.parse(wanted.kv_dtype),
            dtype_o=dtypes.parse(wanted.o_dtype) if wanted.o_dtype else dtype,
            page_size=page_size,
            mask_form="runs" if has_items else "whole" if wanted.is_masked else None,
            causal=case.causal,
            window_left=case.window_left,
            window_right=getattr(case, "window_right", -1),
            pos_encoding=wanted.pos_encoding_mode,
            logits_soft_cap=float(wanted.is_capped),
        )
        plan(batch.BatchLauncher(spec, spec.problem(), 0))
        if getattr(case, "tree", ""):
            spec = spec.with_row_mask()
        problem = spec.problem(aligned=wanted.is_aligned, prescale_logits=wanted.prescale_logits)
        plan(batch.BatchLauncher(spec, problem, 0))


def batches() -> Iterator[Any]:
    """Every random batch of the suite, and those that prefill_sm90 runs many times."""
    for cases in (batch_cases, verify_cases, item_cases, mixed_calls):
        yield from map(cases.random_case, range(cases.NUM_CASES))
    yield from prefill_sm90_cases.CASES.values()


def batch_instances(arch: str, cases: Iterable[Any] | None = None) -> list[Instance]:
    """Every kernel of the batches, once: those that plans foresee, and those of the runs."""
    recorder = Recorder(arch)
    with recorder.plugged_in():
        for case in batches() if cases is None else cases:
            lengths = [np.array(x, np.int64) for x in (case.qo_len, case.kv_len)]
            starts = (np.cumsum(x) - x for x in lengths)
            requests = BatchRequests(*lengths, *starts)
            recorder.schedule(
                case.problem, case.page_size, lambda to, x=requests: to.schedule(x), case
            )
    return list(recorder.found)


def cascade_instances(arch: str) -> list[Instance]:
    """Every kernel of the random cascades, once, by levels and without them."""
    recorder = Recorder(arch)
    with recorder.plugged_in():
        for case in map(cascade_calls.random_case, range(cascade_calls.NUM_CASES)):
            lists: list[list[np.ndarray]] = [[], [], [], []]
            for rows, keys in case.levels:
                counts = -(-np.array(keys, np.int64) // case.page_size)
                ids, last = np.zeros(counts.sum(), np.int32), np.full(len(counts), case.page_size)
                for kind, x in zip(lists, (offsets(rows), offsets(counts), ids, last), strict=True):
                    kind.append(x)
            parts = read_levels(lists, len(case.levels), case.page_size, False)
            is_relative = case.window_left >= 0 or case.problem.pos_encoding_mode != "NONE"
            joined = join_levels(parts, case.causal, is_relative)
            if not joined.num_rows or joined.levels is None:
                continue
            flat = flatten(parts, case.page_size, case.causal)
            arguments = joined.requests, joined.levels
            recorder.schedule(
                case.problem, case.page_size, lambda to, x=arguments: to.schedule_levels(*x), case
            )
            if flat is not None:
                recorder.schedule(
                    case.problem, case.page_size, lambda to, x=flat[0]: to.schedule(x), case
                )
    return list(recorder.found)


def shared_instances(arch: str) -> list[Instance]:
    """Every kernel of the random calls with a shared prefix but its merge, once."""
    recorder = Recorder(arch)
    with recorder.plugged_in():
        for case in map(shared_calls.random_case, range(shared_calls.NUM_CASES)):
            lengths = [np.array(x, np.int64) for x in (case.qo_len, case.kv_len)]
            requests = BatchRequests(*lengths, *(np.cumsum(x) - x for x in lengths))
            wanted = Problem(case.dtype, case.kv_dtype, (case.head_dim,) * 2)
            recorder.schedule(wanted, case.page_size, lambda to, x=requests: to.schedule(x), case)
            q = dtypes.parse(case.dtype)
            alone = AttentionProblem(q, dtypes.parse(case.kv_dtype), q, *wanted.dims)
            rows = row_class(sum(case.qo_len) * case.group)
            recorder.add(tile_config(alone, rows, SHARED_BYTES[arch], arch=arch), alone)
    return list(recorder.found)


def planless_instances(arch: str) -> list[Instance]:
    """Every kernel of the random calls without a plan, once."""
    found: dict[Instance, None] = {
        ("pad_lse", pad_lse.CONFIG): None,
        **dict.fromkeys(("plan_batch", config) for config in plan_batch.CONFIGS),
        ("read_tables", read_tables.CONFIG): None,
    }
    for case in map(planless_cases.random_case, range(planless_cases.NUM_CASES)):
        wanted = case.problem
        problem = AttentionProblem(
            dtype_q=dtypes.parse(wanted.dtype),
            dtype_kv=dtypes.parse(wanted.kv_dtype),
            dtype_o=dtypes.parse(wanted.dtype),
            head_dim_qk=wanted.dims[0],
            head_dim_vo=wanted.dims[1],
            paged=case.page_size > 0,
            aligned=wanted.is_aligned,
            prescale_logits=case.has_array_logit_scale,
            custom_mask=bool(case.tree),
            mask_form="rows" if case.tree else "whole",
        )
        rows = row_class(max((1, *case.qo_len)) * case.group)
        tiles = tile_config(problem, rows, SHARED_BYTES[arch], True, arch, case.page_size)
        found |= dict.fromkeys(with_scan(tiles))
        if not tiles.fused_merge:
            merges = merge_splits.configs(problem, tiles)
            found |= dict.fromkeys(("merge_splits", config) for config in merges)
    return list(found)


def page_instances() -> list[Instance]:
    """Every kernel of page operations, the same for all architectures."""
    wide = dtypes.float16, dtypes.bfloat16, dtypes.float32
    kinds = [(q, kv) for q in wide for kv in (q, dtypes.float8_e4m3fn, dtypes.float8_e5m2)]
    chosen = Selection(("append", "page"), tuple(kinds), alignments=(True, False))
    return selected_instances([chosen], "sm_90a")


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
    kinds = (
        instances,
        logits_instances,
        batch_instances,
        cascade_instances,
        shared_instances,
        planless_instances,
    )
    found = dict.fromkeys(instance for kind in kinds for instance in kind(args.arch))
    found |= dict.fromkeys(page_instances())
    jobs = [(*instance, args.arch) for instance in found]
    print(f"{len(jobs)} kernels, found in {time.perf_counter() - start:.0f} s", flush=True)
    # NVRTC compiles one program at a time in a process; fork after CuPy is loaded is unsafe.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        cached = sum(pool.map(_build, jobs, chunksize=4))
    seconds = time.perf_counter() - start
    print(f"{len(jobs) - cached} compiled, {cached} were there; {seconds:.0f} s")


if __name__ == "__main__":
    main()
