"""What plan() leaves behind for the runs of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..array import ArrayView
from ..inputs.geometry import Geometry, Variant
from ..inputs.row_mask import NO_BITS, MaskBits
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.layout import BatchSchedule, Capacity
from .mask import Mask
from .requests import Batch


@dataclass(slots=True)
class Prepared:
    """One variant of a plan on the device: `words` is where its schedule is, `rotated` memory for
    the keys that it rotates ahead."""

    launcher: BatchLauncher
    schedule: BatchSchedule
    words: int
    owner: object
    rotated: int = 0


@dataclass(slots=True)
class Plan:
    """What a run needs of the last plan().

    split       (keys of a split or 0, whether keys may be split)
    page_ids    address of the page table on the device, 0 for ragged keys and on the CPU
    views       arrays of the caller that launches read besides those of the run
    framework   the workspace's
    is_uniform  it is torch or CuPy, and that of all views
    bits        the mask on the device
    last_run    the last run that went the short way, see _batch_repeat.py
    """

    geometry: Geometry
    batch: Batch
    split: tuple[int, bool]
    capacity: Capacity | None
    mask: Mask
    framework: str
    page_ids: int = 0
    views: tuple[ArrayView, ...] = ()
    bits: MaskBits = NO_BITS
    is_uniform: bool = False
    prepared: dict[Variant, Prepared] = field(default_factory=dict)
    last_run: Any = field(default=None, init=False)
