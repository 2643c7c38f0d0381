"""Launches the attention kernels of a batch from a work list in device memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..problem import AttentionProblem
from ..schedule.batch import BatchRequests
from .attention import AttentionOptions


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a captured graph freezes: no later plan may have more requests or query rows."""

    num_requests: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """One plan, ready for launches.

    words            int32 [n]: work list, merge list and zeroed counters, to be copied to device
                     memory as they are, on a 16-byte boundary
    workspace_bytes  scratch for partial states (16-byte aligned), 0 if no keys are split
    """

    words: np.ndarray
    workspace_bytes: int


class BatchLauncher:
    """Serves every plan and run of one problem, device and geometry."""

    def __init__(
        self,
        problem: AttentionProblem,
        options: AttentionOptions,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        device_index: int,
    ) -> None:
        """page_size: tokens of a page, or 0 for ragged keys."""
        raise NotImplementedError

    def schedule(
        self,
        requests: BatchRequests,
        *,
        split_tokens: int = 0,
        may_split: bool = True,
        capacity: Capacity | None = None,
    ) -> BatchSchedule:
        """Plan on the host. split_tokens > 0: every request is split into parts of this many keys.

        With a capacity, `words` and `workspace_bytes` have the same size for every plan that fits.
        """
        raise NotImplementedError

    def launch(
        self,
        schedule: BatchSchedule,
        words: int,
        workspace: int,
        q: int,
        k: int,
        v: int,
        o: int,
        optional: bytes,
        strides: bytes,
        kv_indices: int,
        mask_bytes: int,
        output_scale: float,
        sm_scale: float,
        stream: int,
    ) -> None:
        """Enqueue one run on arrays at these addresses."""
        raise NotImplementedError
