"""What plan() leaves behind for runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..array import ArrayView
from ..inputs.geometry import Geometry, Variant
from ..inputs.row_mask import NO_BITS, MaskBits
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.layout import BatchSchedule, Capacity
from ..launch.driver import params
from .mask import NO_MASK, Mask
from .requests import Batch


@dataclass(slots=True)
class Prepared:
    """One variant of a plan on the device: the addresses of its schedule (`words`) and of the keys
    that are rotated before the run (`rotated`, 0 for none). `owner` keeps that memory. On the CPU,
    which schedules to refuse what a GPU refuses, there is none."""

    launcher: BatchLauncher
    schedule: BatchSchedule
    words: int = 0
    owner: object = None
    rotated: int = 0


@dataclass(slots=True)
class Plan:
    """What a run needs of the last plan().

    split       (keys of a split or 0, whether keys may be split)
    page_ids    address of the page table on the device, 0 for ragged keys and on the CPU
    views       arrays of the caller that launches read besides those of the run
    framework   of the workspace
    is_uniform  whether the workspace and all views are of one framework, torch or CuPy
    owner       of the thread that planned, see threads.py
    bits        the mask on the device
    logits      what the expressions of the plan read; `packed_logits` for launches
    bound       launches of the last run that was in the call cache, see run.py
    bounds      by (cached call, workspace, lengths)
    by_q_len    the plan for other numbers of query rows, of which a run of decode may have any
    """

    geometry: Geometry
    batch: Batch
    split: tuple[int, bool]
    framework: str
    capacity: Capacity | None = None
    mask: Mask = NO_MASK
    page_ids: int = 0
    views: tuple[ArrayView, ...] = ()
    bits: MaskBits = NO_BITS
    logits: tuple[ArrayView, ...] = ()
    packed_logits: bytes = params.NO_LOGITS_ARRAYS
    is_uniform: bool = False
    owner: object = None
    prepared: dict[Variant, Prepared] = field(default_factory=dict)
    bound: Any = field(default=None, init=False)
    bounds: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False)
    by_q_len: dict[int, Plan] = field(default_factory=dict, init=False)
