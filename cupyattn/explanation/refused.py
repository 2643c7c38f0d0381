"""Which kernels do not serve a batch, and why."""

from __future__ import annotations

from collections.abc import Collection

from ..core.device import DeviceProps, overlaps_launches
from ..core.env import PORTABLE
from ..core.problem import AttentionProblem
from ..launch.tiles import sm90, wide_sm90
from ..launch.tiles.select import DECODE, LARGE, LARGE_TILES, row_class
from ..schedule.batch import BatchRequests
from .record import Refusal

_HOPPER = "sm_90a"


def refusals(
    problem: AttentionProblem,
    page_size: int,
    props: DeviceProps,
    offered: Collection[str] | None,
) -> list[Refusal]:
    """Hopper's own kernels that a problem does not have. offered: names of candidates, or None
    where none were compared."""
    own = "wide_sm90" if problem.is_wide else "prefill_sm90"
    if props.arch != _HOPPER:
        return [Refusal(own, f"it is made for {_HOPPER}, and the card is {props.arch}")]
    if PORTABLE.flag():
        return [Refusal(own, f"{PORTABLE.name} leaves out Hopper's own kernels")]
    if problem.is_wide:
        reason = wide_sm90.refusal(problem)
        return [Refusal(own, f"it does not serve {reason}")] if reason else []
    by_reason: dict[str, list[str]] = {}
    for name in LARGE_TILES:
        is_offered = offered is None or name in offered
        reason = _of_tile(problem, page_size, props, name, is_offered)
        by_reason.setdefault(reason, []).append(name)
    by_reason.pop("", None)
    return [
        Refusal(own if len(names) == len(LARGE_TILES) else f"{own} ({', '.join(names)})", reason)
        for reason, names in by_reason.items()
    ]


def _of_tile(
    problem: AttentionProblem, page_size: int, props: DeviceProps, name: str, is_offered: bool
) -> str:
    """Why a tile of prefill_sm90 is not offered; "" if it is, or serves the last row class."""
    tile = sm90.find(problem, page_size, name)
    if isinstance(tile, str):
        return tile
    if sm90.choose(problem, props.max_smem_per_block, page_size, name) is None:
        return f"it takes more shared memory than a block of {props.name} has"
    is_used = is_offered or name == LARGE
    return "" if is_used else "nobody timed it with such keys and options"


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
        requests.qo_len.size > 0 and row_class(requests.qo_range()[1] * group_size) == DECODE
    )
    if problem.is_wide or not is_decode or any(" x" in name for name in offered):
        return []
    if not overlaps_launches(props.arch):
        return [Refusal("decode in clusters", f"{props.arch} has none")]
    blocks = requests.qo_len.size * num_kv_heads
    if blocks <= props.num_sms:
        return []
    reason = f"{blocks:,} blocks are more than {props.num_sms} SMs; clusters are for fewer"
    return [Refusal("decode in clusters", reason)]
