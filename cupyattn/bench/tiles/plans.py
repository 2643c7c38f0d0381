"""Plans of drawn batches: on the host as for an H100, or on a GPU with arrays of its own."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from ...launch.attention.batch import BatchLauncher
from ...launch.attention.layout import BatchSchedule
from ...schedule.batch import BatchRequests

_SPACE_BYTES = 1 << 30


class Drawn(Protocol):
    """What a plan takes of a case."""

    @property
    def api(self) -> str: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_qo_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim_qk(self) -> int: ...
    @property
    def head_dim_vo(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    @property
    def pos_encoding_mode(self) -> str: ...
    @property
    def logits_soft_cap(self) -> float: ...
    @property
    def window_left(self) -> int: ...
    @property
    def has_mask(self) -> bool: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def q_lens(self) -> list[int]: ...
    @property
    def kv_lens(self) -> list[int]: ...
    @property
    def q_offsets(self) -> list[int]: ...
    @property
    def kv_offsets(self) -> list[int]: ...


class Planned(NamedTuple):
    """What a wrapper has planned."""

    launcher: BatchLauncher
    schedule: BatchSchedule

    @property
    def requests(self) -> BatchRequests:
        assert self.schedule.requests is not None
        return self.schedule.requests


def plan_of(case: Drawn) -> Planned | None:
    """The launcher and schedule of a case's plan without a GPU; None where a wrapper of several
    kinds of requests has one that is not the paged wrapper's."""
    return planned(wrapper_of(case, np.zeros(_SPACE_BYTES, np.uint8)))  # never touched


def planned(wrapper: Any) -> Planned | None:
    """The same of a wrapper."""
    prepared = [*wrapper._current.prepared.values()]
    return Planned(prepared[0].launcher, prepared[0].schedule) if prepared else None


def page_counts(case: Drawn) -> np.ndarray:
    """Pages of each request."""
    return -(-np.array(case.kv_lens) // case.page_size)


def mask_bytes(case: Drawn) -> int:
    """Bytes of the packed mask, in which each request begins with one."""
    return sum(-(-q * kv // 8) for q, kv in zip(case.q_lens, case.kv_lens, strict=True))


def wrapper_of(case: Drawn, space: Any, indices: Any = None, mask: Any = None) -> Any:
    """A wrapper that has planned the case.

    space    its workspace, or the device to make one on
    indices  the numbers of the pages, on that device; None: one after another, on the host
    mask     the packed bits of a case with a mask, on that device; None: zeros on the host
    """
    import cupyattn

    q_heads, kv_heads, head_dim = case.num_qo_heads, case.num_kv_heads, case.head_dim_qk
    options: dict[str, Any] = {
        "q_data_type": case.dtype,
        "kv_data_type": case.kv_dtype,
        "window_left": case.window_left,
        "pos_encoding_mode": case.pos_encoding_mode,
    }
    if case.logits_soft_cap:
        options["logits_soft_cap"] = case.logits_soft_cap
    if case.has_mask:
        options["packed_custom_mask"] = (
            np.zeros(mask_bytes(case), np.uint8) if mask is None else mask
        )
    qo_indptr = np.array(case.q_offsets, np.int32)
    wrapper: Any
    if case.api == "ragged":
        wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(space)
        kv_indptr = np.array(case.kv_offsets, np.int32)
        options |= {"causal": case.causal, "head_dim_vo": case.head_dim_vo}
        wrapper.plan(qo_indptr, kv_indptr, q_heads, kv_heads, head_dim, **options)
        return wrapper
    counts = page_counts(case)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    last = (np.array(case.kv_lens) - (counts - 1) * case.page_size).astype(np.int32)
    if indices is None:
        indices = np.arange(indptr[-1], dtype=np.int32)
    sizes = {
        "num_qo_heads": q_heads,
        "num_kv_heads": kv_heads,
        "page_size": case.page_size,
    }
    if case.api in ("decode", "verify"):
        wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(space)
        rows = {"q_len_per_req": case.q_lens[0]} if case.api == "verify" else {}
        wrapper.plan(indptr, indices, last, head_dim=head_dim, **sizes, **options, **rows)
        return wrapper
    wrapper = cupyattn.BatchPrefillWithPagedKVCacheWrapper(space)
    options |= {"causal": case.causal, "head_dim_qk": head_dim}
    wrapper.plan(qo_indptr, indptr, indices, last, **sizes, **options)
    return wrapper
