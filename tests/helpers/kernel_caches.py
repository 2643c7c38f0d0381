"""What calls have been found to need, forgotten: kernels are chosen and loaded anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupyattn.engine import call_cache, geometry, prepared
from cupyattn.engine import run_single as run
from cupyattn.launch.attention import load_kernels, merge_levels, merge_splits, read_tables
from cupyattn.launch.ops import select as block_scores
from cupyattn.launch.tiles import mixed_sm80, select
from cupyattn.wrappers import shared_prefix


def forget() -> None:
    """Empty the caches of calls, plans and kernels. Wrappers that are there keep their own."""
    run._entries.clear()
    run._launchers.clear()
    call_cache.clear_all()
    geometry._geometries.clear()
    shared_prefix._padded.clear()
    caches: list[Callable[..., Any]] = [
        block_scores.launcher,
        load_kernels.load_kernel,
        load_kernels.load_mixed,
        merge_levels.config,
        merge_splits.config,
        mixed_sm80.mixed_config,
        select.tile_config,
        prepared.plan_of,
        read_tables._launch,
        read_tables.planner,
    ]
    for cached in caches:
        cached.cache_clear()  # type: ignore[attr-defined]
