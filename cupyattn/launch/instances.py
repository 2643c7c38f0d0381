"""The kernel instances worth compiling ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from .. import jit
from ..core import dtypes
from ..core.problem import AttentionProblem
from .attention import merge_levels, merge_splits, pad_lse, plan_batch, rotate_keys, scan_mask
from .ops import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens, merge_states
from .ops.packbits import CONFIG as PACKBITS_CONFIG
from .tiles.select import DECODE, LARGE, ROW_CLASSES, SMALL, VERIFY, mixed_config, tile_config

_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"pos_encoding": "ROPE_LLAMA"},
    {"pos_encoding": "ALIBI"},
    {"soft_cap": True},
    {"custom_mask": True},
)
_ROWS = {"custom_mask": True, "mask_form": "rows"}
_RUNS = {"custom_mask": True, "mask_form": "runs"}
# Row classes that meet in one launch.
_MIXES = ((LARGE, DECODE), (SMALL, DECODE), (LARGE, VERIFY))
LEVELS = ("standard", "full")

# Shared memory per block: most of a big chip's, and all that the small ones have.
SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100a": 227 * 1024,
    "sm_120a": 99 * 1024,
}


def problems(level: str) -> Iterator[AttentionProblem]:
    """The problems of a level: "standard" one option at a time on the common head dims, "full" also
    pairs of options, more head dims and unaligned rows. Masks of rows are over pages, masks of runs
    for head dim 128."""
    dims = _DIMS if level == "standard" else (*_DIMS, (80, 80), (96, 96), (112, 112), (72, 72))
    for dtype in (dtypes.bfloat16, dtypes.float16):
        for dtype_kv in (dtype, dtypes.float8_e4m3fn, dtypes.float8_e5m2):
            for dim_qk, dim_vo in dims:
                for options in (*(_OPTIONS if level == "standard" else _pairs()), _ROWS, _RUNS):
                    if options.get("pos_encoding") == "ROPE_LLAMA" and dim_qk % 16:
                        continue
                    if options is _RUNS and not dim_qk == dim_vo == 128:
                        continue
                    alignments = (True,) if level == "standard" else (True, False)
                    for aligned, paged in product(alignments, (False, True)):
                        if options is _ROWS and not paged:
                            continue
                        yield AttentionProblem(
                            dtype,
                            dtype_kv,
                            dtype,
                            dim_qk,
                            dim_vo,
                            aligned=aligned,
                            paged=paged,
                            **options,
                        )


def _pairs() -> list[dict[str, Any]]:
    singles = (*_OPTIONS, {"prescale_logits": True})
    merged = [a | b for i, a in enumerate(singles) for b in singles[i:]]
    return [dict(items) for items in sorted({tuple(sorted(m.items())) for m in merged})]


def instances(level: str, arch: str = "sm_90a") -> list[tuple[str, jit.Config]]:
    """(entry name, Config) of every kernel of a level for an architecture, without duplicates."""
    found: dict[tuple[str, jit.Config], None] = {
        ("packbits", PACKBITS_CONFIG): None,
        ("pad_lse", pad_lse.CONFIG): None,
        **dict.fromkeys(("plan_batch", config) for config in plan_batch.CONFIGS),
    }
    found |= dict.fromkeys(page_instances())
    found |= dict.fromkeys(("merge_states", config) for config in merge_states.configs())
    for problem in problems(level):
        # Which kernel serves pages depends on their size.
        kinds = product((True,), (1, 16)) if problem.paged else product((False, True), (0,))
        for rows, (is_batch, page_size) in product(ROW_CLASSES, list(kinds)):
            tiles = tile_config(problem, rows, SHARED_BYTES[arch], is_batch, arch, page_size)
            found[tiles.name, tiles.config] = None
            if not tiles.fused_merge:
                found["merge_splits", merge_splits.config(problem, tiles.tile_q)] = None
            if tiles.wants_rotated_keys:
                config = rotate_keys.config(problem.dtype_q, problem.head_dim_qk, problem.paged)
                found["rotate_keys", config] = None
            scan = scan_mask.config(tiles)
            if scan is not None:
                found["scan_mask", scan] = None
        if problem.paged:
            found |= dict.fromkeys(mixed_instances(problem, arch))
    return list(found)


def mixed_instances(problem: AttentionProblem, arch: str) -> list[tuple[str, jit.Config]]:
    """The kernels of mixed batches and of cascades over pages, without duplicates."""
    found: dict[tuple[str, jit.Config], None] = {}
    for large, small in _MIXES:
        tiles = mixed_config(problem, large, small, SHARED_BYTES[arch], arch)
        if tiles is not None:
            found[tiles.name, tiles.config] = None
    if found:
        found["merge_levels", merge_levels.config(problem)] = None
    return list(found)


def page_instances() -> list[tuple[str, jit.Config]]:
    """The kernels of page operations, the same for every level and architecture."""
    appends = [("append_paged_kv_cache", x) for x in append_paged_kv_cache.configs()]
    return [
        *appends,
        ("get_batch_indices_positions", get_batch_indices_positions.CONFIG),
        ("get_seq_lens", get_seq_lens.CONFIG),
    ]
