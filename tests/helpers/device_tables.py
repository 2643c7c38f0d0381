"""What the read_tables kernel leaves, in NumPy: for a GPU that is not there."""

from __future__ import annotations

import ctypes

import numpy as np

from cupyattn.core.problem import MAX_LENGTH
from cupyattn.launch.attention.read_tables import KEYS, LAST_PAGE, DeviceTables, Planner
from cupyattn.schedule.batch import NUM_SPLITS, BatchRequests, Splitting, plan_batch


def read(address: int, is_wide: bool, count: int) -> np.ndarray | None:
    """The numbers at an address."""
    if not address:
        return None
    kind = np.dtype(np.int64 if is_wide else np.int32)
    raw = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(raw, kind).astype(np.int64)


def land(asked: DeviceTables, planner: Planner | None) -> tuple[np.ndarray, np.ndarray]:
    """(what lands on the host, the words of the work list)."""
    tables, kind, num_requests, qo_len, page_size = asked
    page_size = page_size or 1
    qo_indptr = read(*tables[:2], num_requests + 1)
    kv_indptr = read(*tables[2:4], num_requests + 1)
    lengths = read(*tables[4:], num_requests)
    assert kv_indptr is not None
    if qo_indptr is None:
        qo_indptr = np.arange(num_requests + 1) * qo_len
    is_bad = qo_indptr[0] != 0
    for offsets in (qo_indptr, kv_indptr):
        is_bad |= (offsets < 0).any() or (offsets > MAX_LENGTH).any()
        is_bad |= (offsets[1:] < offsets[:-1]).any()
    head = np.zeros(8, np.int64)
    head[1] = is_bad
    if is_bad:
        return head, np.zeros(0, np.int32)
    rows, pages = np.diff(qo_indptr), np.diff(kv_indptr)
    keys = pages * page_size
    if kind == LAST_PAGE:
        assert lengths is not None
        is_bad |= ((lengths < 1) | (lengths > page_size))[pages > 0].any()
        keys = np.where(pages > 0, keys - page_size + lengths, 0)
    elif kind == KEYS:
        assert lengths is not None
        is_bad |= ((lengths < 0) | (lengths > keys)).any()
        keys = lengths
    head[1:4] = is_bad | (keys > MAX_LENGTH).any(), rows.min(), rows.max()
    lengths = np.zeros(num_requests, np.int64) if lengths is None else lengths
    numbers = np.concatenate([head, kv_indptr, keys, lengths, qo_indptr, rows])
    if planner is None or numbers[1]:
        return numbers, np.zeros(0, np.int32)
    launcher, shape = planner._launcher, planner._shape
    requests = BatchRequests(rows, keys, qo_indptr[:-1], kv_indptr[:-1], None, qo_len)
    sizes = launcher.group_size, launcher.num_kv_heads, shape
    made = plan_batch(requests, *sizes, launcher.masking, Splitting())
    most = made.items[:, NUM_SPLITS].max()
    numbers[4:8] = len(made.items), len(made.merges), made.num_states, most
    is_apart = most > planner.max_fused
    counters = np.zeros(len(made.merges) * launcher.num_kv_heads, np.int32)
    return numbers, np.concatenate([made.items.ravel(), made.merges if is_apart else counters])
