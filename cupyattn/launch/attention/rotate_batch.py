"""The keys of a batch, rotated ahead of its launches: room for them, and the launch that does it.

One pass over the keys is far cheaper than to rotate them again for each tile of query rows.
"""

from __future__ import annotations

from ...errors import PlanError
from ...schedule.batch import BatchRequests
from ..driver import params
from .layout import BatchSchedule, Capacity, LaunchPart
from .rotate_keys import NO_PAGES, Keys, Rotation, Where, step


def reserve_rotated(
    schedule: BatchSchedule, requests: BatchRequests, keys: Keys, capacity: Capacity | None
) -> BatchSchedule:
    """The schedule, told what its rotated keys take; PlanError if a capacity has no room."""
    if not keys.rope_table:
        return schedule
    if not any(part.tiles and part.tiles.wants_rotated_keys for part in schedule.parts):
        return schedule
    tokens = keys.page_size or 1
    ends = requests.kv_start - (-requests.kv_len // tokens)
    size = int(ends.max(initial=0))
    if capacity is not None:
        room = -(-capacity.num_tokens // tokens)
        if size > room:
            raise PlanError(
                f"kv_indptr: {size * tokens} keys, but the first plan of this wrapper had "
                f"{room * tokens}, and a captured graph has room for no more that are rotated; "
                "plan the largest batch first"
            )
        size = room
    schedule.rotated, schedule.rotated_bytes = size, size * tokens * keys.row_bytes
    return schedule


def of_part(
    part: LaunchPart,
    words: int,
    keys: Keys,
    strides: bytes,
    kv_indices: int,
    group_size: int,
    to: Where,
) -> Rotation:
    """The rotation of the keys of all requests of a part.

    strides: params.STRIDES, packed. words, kv_indices: the addresses of the schedule's words and of
    the page table, in whose order pages are written.
    """
    assert part.tiles is not None
    ((launch, _),) = part.launches
    _, _, k_row, k_head, *_, k_page, _ = params.STRIDES.unpack(strides)
    page = (keys.page_size, *params.divisor(keys.page_size)) if keys.page_size else NO_PAGES
    rows = part.tiles.used_rows(group_size, keys.num_kv_heads)
    packed = params.ROTATION.pack(
        words + part.items,
        kv_indices,
        to.address,
        k_row,
        k_head,
        k_page,
        0,
        keys.num_kv_heads,
        group_size,
        rows,
        *page,
        0,
        keys.rope_table,
    )
    return Rotation(step(keys, launch.num_items), packed, to)
