"""The plan of a batch: a work list of (request, tile of query rows, split of the keys)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class BatchRequests:
    """The lengths of a batch's requests and where their parts begin: int64 NumPy arrays [B].

    q_start     first row of q, o and lse
    kv_start    paged: first entry of kv_indices; ragged: first row of k and v
    mask_start  first byte of the packed mask, or None without one
    """

    qo_len: np.ndarray
    kv_len: np.ndarray
    q_start: np.ndarray
    kv_start: np.ndarray
    mask_start: np.ndarray | None = None
