"""What a wrapper is planned for, in words for people: its repr()."""

from __future__ import annotations

from typing import Any

from ..launch.attention.words import batch_words, problem_words


def wrapper_words(name: str, wrapper: Any) -> str:
    """Example: "<BatchDecodeWithPagedKVCacheWrapper: bfloat16, 8 query heads over 2 key heads, head
    dim 64, pages of 16 tokens; 64 x 1 row over 4,096 keys; decode_sm80 (decode), on cuda:0>"."""
    plan = getattr(wrapper, "_current", None)
    if plan is None:
        return f"<{name}: nothing is planned>"
    geometry = plan.geometry
    # What the last run needed, or else what was planned.
    prepared = [*plan.prepared.values()]
    parts = [problem_words(geometry.spec, geometry.spec.problem())]
    if prepared:
        launcher = prepared[0].launcher
        parts = [problem_words(launcher.spec, launcher.problem)]
    parts.append(batch_words(plan.batch.requests))
    device = geometry.options.device
    if device.kind == "cpu":
        parts.append("the reference, on the CPU")
    elif prepared:
        parts.append(f"{_kernels(prepared[0])}, on {device}")
    if getattr(wrapper, "_is_graph", False):
        parts.append("for CUDA graphs")
    return f"<{name}: {'; '.join(parts)}>"


def _kernels(prepared: Any) -> str:
    """The kernels of a schedule, with the row classes or tiles that they serve."""
    result = []
    for part in prepared.schedule.parts:
        if part.launches:
            names = (
                part.row_class if isinstance(part.row_class, str) else " + ".join(part.row_class)
            )
            kernel = prepared.launcher.kernel(part.row_class).loaded.tiles.name
            result.append(f"{kernel} ({names})")
    return " and ".join(result) or "no launch"
