"""Which kernels do not serve a batch, and why."""

from __future__ import annotations

from collections.abc import Collection

from ..core.device import DeviceProps, overlaps_launches
from ..core.problem import AttentionProblem
from ..launch.tiles import prefill_sm90, wide_sm90
from ..launch.tiles.config import Target
from ..launch.tiles.row_classes import DECODE, LARGE, LARGE_TILES, PERSISTENT, row_class_of
from ..schedule.batch import BatchRequests
from .record import Refusal


def refusals(
    problem: AttentionProblem,
    page_size: int,
    props: DeviceProps,
    offered: Collection[str] | None,
) -> list[Refusal]:
    """Hopper's own kernels that a problem does not have. offered: names of candidates, or None
    where none were compared."""
    target = Target(props.arch, props.max_smem_per_block, page_size)
    if problem.is_wide:
        reason = wide_sm90.refusal(problem, LARGE, target)
        return [Refusal("wide_sm90", reason)] if reason else []
    by_reason: dict[str, list[str]] = {}
    for name in LARGE_TILES:
        reason = prefill_sm90.refusal(problem, name, target)
        if reason is None and offered is not None and name not in (PERSISTENT, *offered):
            reason = "nobody timed it with such keys and options"
        if reason is not None:
            by_reason.setdefault(reason, []).append(name)
    own = "prefill_sm90"
    return [
        Refusal(own if len(names) == len(LARGE_TILES) else f"{own} ({', '.join(names)})", reason)
        for reason, names in by_reason.items()
    ]


def refused_clusters(
    problem: AttentionProblem,
    requests: BatchRequests,
    heads: tuple[int, int],
    props: DeviceProps,
    offered: Collection[str],
) -> list[Refusal]:
    """Why decode has no clusters, where it has none. heads: key heads, and those of a group."""
    num_kv_heads, group_size = heads
    is_decode = (
        requests.qo_len.size > 0
        and row_class_of(requests.qo_range()[1] * group_size, problem) == DECODE
    )
    if problem.is_wide or not is_decode or any(" cluster" in name for name in offered):
        return []
    if not overlaps_launches(props.arch):
        return [Refusal("decode in clusters", f"{props.arch} has none")]
    blocks = requests.qo_len.size * num_kv_heads
    if blocks <= props.num_sms:
        return []
    reason = f"{blocks:,} blocks are more than {props.num_sms} SMs; clusters are for fewer"
    return [Refusal("decode in clusters", reason)]
